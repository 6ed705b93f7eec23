"""Compares a model on paged caches with the same model on mlx-lm's dense caches."""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import unwrap

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.plan import StateSlots, StepInputs

# RMS of the logits' difference over that of the logits themselves, by the pools' dtype.
_TOLERANCE = {mx.float32: 5e-3, mx.float16: 2e-2, mx.bfloat16: 1e-1}
# Tokens past the longest window or chunk, so that the end of both is tested.
_BEYOND = 16


@dataclass
class _Sequence:
    chunks: list[list[int]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    slot: int = 0

    @property
    def length(self) -> int:
        return sum(map(len, self.chunks))


def difference_from_dense(paged: PagedModel, vocab_size: int) -> float:
    """Runs a chunked prompt, decodes and a prefill together, and the same with the dense cache.

    It allocates new pools; the contents of the old ones are lost.

    Args:
        vocab_size: Token ids are below this.

    Returns:
        The largest RMS difference of a sequence's logits, relative to the RMS of the logits.
    """
    length = _length(paged)
    rng = np.random.default_rng(0)

    def new(count: int) -> list[int]:
        return rng.integers(0, vocab_size, count).tolist()

    run = _Run(paged, 2 * length + 64)
    run.step({"chunked": new(length - 9), "decoding": new(7)})
    run.step({"decoding": new(1)})
    logits = run.step({"decoding": new(1), "chunked": new(9), "prefilled": new(length // 2)})
    return max(
        _relative(got, _dense(paged.model, run.sequences[name].chunks))
        for name, got in logits.items()
    )


def difference_where_cut(paged: PagedModel, vocab_size: int) -> float:
    """Runs one prompt with the dense cache: whole, in two chunks, and with its end as a decode.

    All must agree: where chunks end depends on the rest of a step, so otherwise the family has no
    right answer.

    Returns:
        The largest RMS difference from the logits of the whole, relative to their RMS.
    """
    prompt = np.random.default_rng(1).integers(0, vocab_size, _length(paged)).tolist()
    whole = _dense(paged.model, [prompt])
    cuts = (len(prompt) // 2, len(prompt) - 1)
    return max(_relative(_dense(paged.model, [prompt[:c], prompt[c:]]), whole) for c in cuts)


def _length(paged: PagedModel) -> int:
    """Returns tokens of a prompt long enough to pass the end of every window and chunk."""
    group_specs = [r.window or r.chunk or 0 for r in paged.layout.group_specs]
    return max([*group_specs, _BEYOND]) + _BEYOND


def tolerance_of(paged: PagedModel) -> float:
    """Returns the maximum allowed difference."""
    return max((_TOLERANCE[spec.dtype] for spec in paged.layout.attention), default=5e-3)


class _Run:
    """A few sequences on their own pools."""

    def __init__(self, paged: PagedModel, num_tokens: int) -> None:
        self._paged = paged
        self._next_block = self._next_slot = 1
        self.sequences: dict[str, _Sequence] = {}
        num_blocks = num_tokens // paged.block_size + 8
        paged.allocate(num_blocks, 16 if paged.layout.has_states else 0)

    def step(self, work: dict[str, list[int]]) -> dict[str, np.ndarray]:
        size = self._paged.block_size
        sequences = [self.sequences.setdefault(name, _Sequence()) for name in work]
        reads = [seq.slot for seq in sequences]
        for seq, tokens in zip(sequences, work.values()):
            seq.chunks.append(tokens)
            while len(seq.blocks) * size < seq.length:
                seq.blocks.append(self._next_block)
                self._next_block += 1
            seq.slot = self._next_slot
            self._next_slot += 1
        lens = np.array([len(tokens) for tokens in work.values()])
        inputs = StepInputs(
            context_lens=np.array([seq.length for seq in sequences]),
            query_lens=lens,
            tables=[seq.blocks for seq in sequences],
            logit_rows=np.cumsum(lens) - 1,
            state_slots=StateSlots(reads, [seq.slot for seq in sequences])
            if self._paged.layout.has_states
            else None,
        )
        flat = mx.array([token for tokens in work.values() for token in tokens], dtype=mx.int32)
        logits = self._paged.forward(flat, inputs)
        mx.eval(logits, *self._paged.pools())
        return dict(zip(work, np.array(logits.astype(mx.float32), dtype=np.float64)))


def _dense(model: nn.Module, chunks: list[list[int]]) -> np.ndarray:
    cache = unwrap(make_prompt_cache)(model)  # not the drop-in's caches
    for chunk in chunks:
        logits = model(mx.array([chunk]), cache=cache)
        mx.eval(logits)
    return np.array(logits[0, -1].astype(mx.float32), dtype=np.float64)


def _relative(got: np.ndarray, expected: np.ndarray) -> float:
    if got.shape != expected.shape:
        return float("inf")
    ruled_out = np.isneginf(expected)
    if not np.array_equal(np.isneginf(got), ruled_out):
        return float("inf")
    seen = ~ruled_out
    return float(
        np.sqrt(np.mean(np.square(got[seen] - expected[seen])))
        / max(np.sqrt(np.mean(np.square(expected[seen]))), 1e-30)
    )
