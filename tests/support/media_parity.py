"""Parity of paged steps with mlx-vlm's own generation, for prompts with pictures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np

from mlx_paged.model.media import MediaFeatures, StepMedia
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.plan import StateSlots, StepInputs
from mlx_paged.model.wrap import build_paged_model
from mlx_paged.multimodal.families import MEDIA_FAMILIES
from mlx_paged.multimodal.model import MultiModalModel
from support.media_cases import Case, Prompt, V

NUM_SLOTS = 96


def generated(case: Case, prompt: Prompt, count: int) -> tuple[list[int], np.ndarray]:
    """Greedy tokens of mlx-vlm's own generation, and ``[count, vocab]`` log-probabilities."""
    from mlx_vlm.generate import generate_step

    forget(case)
    tokens, pixels, more = case.whole(prompt)
    mask = mx.ones_like(tokens) if pixels is not None or more else None
    found, logprobs = [], []
    steps = generate_step(tokens, case.model, pixels, mask, max_tokens=count, temperature=0, **more)
    for (token, lps), _ in zip(steps, range(count)):
        found.append(int(np.array(token).reshape(-1)[0]))
        logprobs.append(np.array(lps.reshape(-1).astype(mx.float32)))
    forget(case)
    return found, np.stack(logprobs)


def forget(case: Case) -> None:
    """The state of one request that mlx-vlm keeps on modules."""
    language = case.model.language_model
    for name in ("_rope_deltas", "_position_ids"):
        if hasattr(language, name):
            setattr(language, name, None)


def paged(case: Case, *, block_size: int = 8) -> PagedModel:
    model = MultiModalModel(case.model, MEDIA_FAMILIES[case.module], case.module)
    return build_paged_model(
        model, {"model_type": case.module, "vocab_size": V}, block_size=block_size
    )


@dataclass
class Sequence:
    tokens: list[int]
    prompt: Prompt
    features: list[MediaFeatures]
    rope: np.ndarray
    delta: int
    done: int = 0
    blocks: list[int] = field(default_factory=list)
    slot: int = 0
    logprobs: list[np.ndarray] = field(default_factory=list)

    def rows_between(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """(prompt position, item, row of the item) of rows with features."""
        return [
            (offset + int(row), i, k)
            for i, (offset, item) in enumerate(self.prompt.items)
            for k, row in enumerate(item.rows)
            if begin <= offset + int(row) < end
        ]


class MediaDriver:
    """Runs steps of several sequences; pools hold NaN at first."""

    def __init__(
        self,
        model: PagedModel,
        *,
        num_blocks: int = 192,
        whole: bool = False,
        sees_pictures: bool = False,
    ) -> None:
        self.model = model
        self.sees_pictures = sees_pictures  # whether the positions of a picture do
        self.whole = whole  # whether all positions of a prompt see each other
        self.uses_rope = model.model.family.uses_rope_positions  # type: ignore[union-attr]
        model.allocate(num_blocks, NUM_SLOTS if model.layout.has_states else 0)
        for cache in model.attention_caches:
            cache.key_pool = mx.full(cache.key_pool.shape, mx.nan, cache.key_pool.dtype)
            cache.value_pool = mx.full(cache.value_pool.shape, mx.nan, cache.value_pool.dtype)
        self._free = np.random.default_rng(0).permutation(np.arange(1, num_blocks)).tolist()
        self._slots = list(range(1, NUM_SLOTS))

    def add(self, prompt: Prompt) -> Sequence:
        features = [self.model.encode(item.inputs()) for _, item in prompt.items]
        rope, delta = prompt.rope()
        return Sequence(list(prompt.token_ids), prompt, features, rope, delta)

    def step(self, work: list[tuple[Sequence, int]]) -> None:
        """Computes the next tokens of each; keeps the log-probabilities after their last row."""
        size = self.model.block_size
        tokens: list[int] = []
        rows: list[int] = []
        parts: list[MediaFeatures] = []
        rope: list[np.ndarray] = []
        bounds: list[np.ndarray] = []
        reads = [seq.slot for seq, _ in work]
        for seq, count in work:
            end = seq.done + count
            for position, item, row in seq.rows_between(seq.done, end):
                rows.append(len(tokens) + position - seq.done)
                parts.append(seq.features[item].take(mx.array([row])))
            known = seq.rope[:, seq.done : end]
            later = np.arange(max(seq.done, seq.rope.shape[1]), end) + seq.delta
            rope.append(np.concatenate([known, np.broadcast_to(later, (3, len(later)))], axis=1))
            own = np.tile(np.arange(seq.done, end), (2, 1))
            spans = [(0, len(seq.prompt.token_ids))] if self.whole else []
            if self.sees_pictures:
                spans = [run for o, item in seq.prompt.items for run in runs_of(o + item.rows)]
            for begin, stop in spans:
                inside = (own[0] >= begin) & (own[0] < stop)
                own[:, inside] = [[begin], [stop - 1]]
            bounds.append(own)
            tokens += seq.tokens[seq.done : end]
            seq.done = end
            while len(seq.blocks) * size < seq.done:
                seq.blocks.append(self._free.pop())
            seq.slot = self._slots.pop(0)
        lens = np.array([count for _, count in work])
        media = None
        bounded = self.whole or self.sees_pictures
        positions = np.concatenate(rope, axis=1).astype(np.int32) if self.uses_rope else None
        if rows or any(seq.delta for seq, _ in work):
            media = StepMedia(
                np.array(rows, dtype=np.int32),
                MediaFeatures.concatenate(parts) if parts else None,
                positions,
                np.concatenate(bounds, axis=1).astype(np.int32) if bounded else None,
            )
        inputs = StepInputs(
            context_lens=np.array([seq.done for seq, _ in work]),
            query_lens=lens,
            tables=[seq.blocks for seq, _ in work],
            logit_rows=np.cumsum(lens) - 1,
            state_slots=StateSlots(reads, [seq.slot for seq, _ in work])
            if self.model.layout.has_states
            else None,
            media=media,
        )
        # (Rows of Phi 3 have negative ids.)
        given = mx.maximum(mx.array(tokens, dtype=mx.int32), 0)
        logits = self.model.forward(given, inputs)
        mx.eval(logits, *self.model.pools())
        self._slots += [slot for slot in reads if slot]
        for (seq, _), found in zip(work, np.array(logits.astype(mx.float32), dtype=np.float64)):
            seq.logprobs.append(found - found.max() - np.log(np.exp(found - found.max()).sum()))

    def decode(self, work: list[tuple[Sequence, int]], given: dict[int, int]) -> None:
        """`step`, where some sequences (by id) get a token first."""
        for seq, _ in work:
            if id(seq) in given:
                seq.tokens.append(given[id(seq)])
        self.step(work)


def runs_of(rows: np.ndarray) -> list[tuple[int, int]]:
    """First position, and the one after the last, of adjacent rows."""
    runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    return [(int(run[0]), int(run[-1]) + 1) for run in runs]


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    return float(
        np.sqrt(np.mean(np.square(got - expected))) / np.sqrt(np.mean(np.square(expected)))
    )


def differences(case: Case, *, count: int = 5, chunk: int = 7) -> dict[str, float]:
    """RMS differences of log-probabilities, relative to mlx-vlm's, one for each kind of prompt.

    A text decodes while prompts with one and two pictures are computed beside it, in chunks that
    end inside pictures; then all of them decode together.
    """
    prompts = {
        "text": Prompt([list(range(11, 24))]),
        "picture": case.prompt(1),
        "two pictures": case.prompt(2, 3),
        "other picture": case.prompt(5),
    }
    if case.most_pictures < 2:
        del prompts["two pictures"]
    if case.only_pictures:
        del prompts["text"]
    if case.sound is not None:
        prompts |= {"sound": case.sounds(1), "picture and sound": case.sounds(2, picture=3)}
    longest = max(len(prompt.token_ids) for prompt in prompts.values())
    # (A tower may make hundreds of rows; prompts that see each other are not cut.)
    chunk = longest if case.only_pictures or case.sees_pictures else max(chunk, longest // 12)
    expected = {name: generated(case, prompt, count) for name, prompt in prompts.items()}
    rows = sum(len(prompt.token_ids) + count for prompt in prompts.values())
    driver = MediaDriver(
        paged(case),
        num_blocks=rows // 8 + 16,
        whole=case.only_pictures,
        sees_pictures=case.sees_pictures,
    )
    sequences = {name: driver.add(prompt) for name, prompt in prompts.items()}
    got: dict[str, list[np.ndarray]] = {name: [] for name in prompts}
    while any(len(found) < count for found in got.values()):
        work: list[tuple[Sequence, int]] = []
        for i, (name, seq) in enumerate(sequences.items()):
            if len(got[name]) == count:
                continue
            if seq.done == len(seq.tokens):
                # (The tokens of mlx-vlm: a difference must not grow into another text.)
                seq.tokens.append(expected[name][0][len(got[name]) - 1])
            work.append((seq, min(chunk + i, len(seq.tokens) - seq.done)))
        driver.step(work)
        for seq, _ in work:
            if seq.done >= len(seq.prompt.token_ids):
                name = next(n for n, s in sequences.items() if s is seq)
                got[name].append(seq.logprobs[-1])
    return {name: difference(np.stack(got[name]), expected[name][1]) for name in prompts}


def exercise(make: Any) -> dict[str, float]:
    from support.media_cases import vary

    case = make()
    vary(case.model)
    return differences(case)
