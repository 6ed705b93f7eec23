"""The same load on mlx-lm's dense caches and on the paged engine, with measured KV memory."""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx_paged.engine.llm import LLM
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.model.loader import LoadedModel

# isort: split
import mlx.core as mx

from mlx_paged.bench.results import table
from mlx_paged.errors import UnsupportedModelError

DENSE, BATCH, PAGED, SHARED = "dense", "batch_generator", "paged", "paged_shared"
NAMES = {
    DENSE: "mlx-lm, a cache for each user",
    BATCH: "mlx-lm, BatchGenerator",
    PAGED: "paged",
    SHARED: "paged, prefix shared",
}


@dataclass(frozen=True)
class Load:
    """Users who all have an answer in progress at once.

    Attributes:
        users: Number of users.
        system_len: Tokens of the shared prompt.
        user_len: Mean tokens that each user adds; actual lengths are 0.5 to 1.5 times the mean.
        answer_len: Mean tokens of the answers, with the same spread.
    """

    users: int
    system_len: int
    user_len: int
    answer_len: int

    def requests(self, vocab_size: int, seed: int) -> list[tuple[list[int], int]]:
        """Prompt and number of answer tokens for each user."""
        rng = random.Random(seed)

        def tokens(count: int) -> list[int]:
            return [rng.randrange(vocab_size) for _ in range(count)]

        system = tokens(self.system_len)
        return [
            (system + tokens(_about(self.user_len, rng)), _about(self.answer_len, rng))
            for _ in range(self.users)
        ]


@dataclass(frozen=True)
class Held:
    """Peak KV memory.

    Attributes:
        live_bytes: Bytes of cache arrays, or of the blocks that sequences hold.
        allocated_bytes: Increase of MLX's active memory, for dense caches; for the paged engine,
            the pools' arrays in a second run whose pool has the size found by the first (None if
            it preempted something).
        blocks: Blocks that sequences hold; None for dense caches.
        answer_tokens: Number of generated tokens, which must be the same for all four.
    """

    live_bytes: int
    allocated_bytes: int | None
    blocks: int | None
    answer_tokens: int


def measure(
    model: LoadedModel, load: Load, block_size: int, seed: int, formats: Sequence[str] = ()
) -> dict[str, Held]:
    """Runs one load on all four, and paged in other formats without sharing: ``paged_<format>``.

    Raises:
        UnsupportedModelError: A layer has a sliding window or recurrent state, whose memory does
            not consist of uniform blocks.
    """
    requests = load.requests(model.vocab_size, seed)
    # The engine first, because it may refuse the model.
    held = {
        SHARED: _paged(model, requests, block_size, sharing=True),
        PAGED: _paged(model, requests, block_size, sharing=False),
        **{in_format(f): _paged(model, requests, block_size, kv_format=f) for f in formats},
        DENSE: _dense(model, requests),
        BATCH: _batch(model, requests),
    }
    expected = sum(count for _, count in requests)
    for name, found in held.items():
        if found.answer_tokens != expected:
            raise RuntimeError(f"{name} made {found.answer_tokens} tokens instead of {expected}")
    return {name: held[name] for name in (*NAMES, *map(in_format, formats))}


def in_format(kv_cache_dtype: str) -> str:
    """Returns the name of a paged run with quantized keys and values."""
    return f"{PAGED}_{kv_cache_dtype}"


def _about(mean: int, rng: random.Random) -> int:
    return rng.randint(max(1, mean // 2), max(1, mean + mean // 2))


def _baseline() -> int:
    gc.collect()
    mx.clear_cache()
    return int(mx.get_active_memory())


def _dense(model: LoadedModel, requests: list[tuple[list[int], int]]) -> Held:
    """Runs `mlx_lm.generate` with one cache per conversation; all caches exist at the end."""
    from mlx_lm.generate import generate_step  # here, because it must be unpatched first
    from mlx_lm.models.cache import make_prompt_cache

    before = _baseline()
    caches: list[Any] = []
    made = 0
    for prompt, count in requests:
        caches.append(make_prompt_cache(model.model))
        steps = generate_step(
            mx.array(prompt), model.model, max_tokens=count, prompt_cache=caches[-1]
        )
        made += sum(1 for _ in steps)
    live = sum(layer.nbytes for cache in caches for layer in cache)
    return Held(live, _baseline() - before, None, made)


def _batch(model: LoadedModel, requests: list[tuple[list[int], int]]) -> Held:
    """Runs mlx-lm's batch generator; returns the maximum over its steps."""
    from mlx_lm.generate import BatchGenerator

    before = _baseline()
    generator = BatchGenerator(model.model, completion_batch_size=len(requests))
    generator.insert([prompt for prompt, _ in requests], [count for _, count in requests])
    live = active = made = 0
    while responses := generator.next_generated():
        made += len(responses)
        live = max(live, generator.prompt_cache_nbytes)
        active = max(active, int(mx.get_active_memory()) - before)
    generator.close()
    return Held(live, active, None, made)


def _paged(
    model: LoadedModel,
    requests: list[tuple[list[int], int]],
    block_size: int,
    *,
    sharing: bool = False,
    kv_format: str = "auto",
) -> Held:
    generate = partial(_generate, model, requests, block_size, sharing, kv_format)
    num_blocks = 2 + sum(-(-(len(prompt) + count) // block_size) + 1 for prompt, count in requests)
    stats, made, pool_bytes = generate(num_blocks)
    if stats.num_preemptions:
        raise RuntimeError(f"{stats.num_preemptions} preemptions in a pool that holds everything")
    allocated = None
    # Block 0 is never allocated; a step in flight may hold one extra block per sequence.
    for spare in (1, 1 + len(requests)):
        tight, answer_tokens, size = generate(stats.max_used_blocks + spare)
        if not tight.num_preemptions and answer_tokens == made:
            allocated = size
            break
    live = stats.max_used_blocks * (pool_bytes // num_blocks)
    return Held(live, allocated, stats.max_used_blocks, made)


def _generate(
    model: LoadedModel,
    requests: list[tuple[list[int], int]],
    block_size: int,
    sharing: bool,
    kv_format: str,
    num_blocks: int,
) -> tuple[Any, int, int]:
    """Answers the requests; returns statistics, tokens of all answers, and bytes of the pools."""
    _baseline()
    llm = LLM(
        model,
        block_size=block_size,
        num_gpu_blocks_override=num_blocks,
        max_num_seqs=len(requests),
        enable_prefix_caching=sharing,
        kv_cache_dtype=kv_format,
    )
    if llm.stats().group_usage:
        kind = str(model.config.get("model_type"))
        reason = "its layers with windows or recurrent state hold memory of several kinds"
        raise UnsupportedModelError(kind, reason)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
    outputs = llm.generate([prompt for prompt, _ in requests], params)
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    return llm.stats(), made, llm.engine.pool_bytes


# --- Report ---------------------------------------------------------------------------------------


# The common claim about paged KV caches: they use this many times less memory than dense ones.
CLAIM = (2.0, 4.0)


def row(load: Mapping[str, int], held: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the results of one load, the ratio of dense to paged memory, and the number of tokens
    that each format stores in the memory of one token in the model's dtype."""
    ratios = {
        f"{dense}_over_{paged}": held[dense]["live_bytes"] / held[paged]["live_bytes"]
        for dense in ("dense", "batch_generator")
        for paged in ("paged", "paged_shared")
    }
    tokens = {
        name.removeprefix(in_format("")): held[PAGED]["live_bytes"] / found["live_bytes"]
        for name, found in held.items()
        if name not in NAMES
    }
    found = {name: dict(each) for name, each in held.items()}
    return {**load, "held": found, "ratios": ratios, "tokens_in_the_same_memory": tokens}


def verdict(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Returns how many loads are below, within and above the claim, for each comparison."""
    low, high = CLAIM
    found = {}
    for name in rows[0]["ratios"]:
        ratios = [one["ratios"][name] for one in rows]
        below, above = (sum(r < low for r in ratios), sum(r > high for r in ratios))
        found[name] = {"below": below, "within": len(rows) - below - above, "above": above}
    return found


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Prints tables: memory of all four, the claim, and tokens in other formats."""
    loads = ("users", "system_len", "user_len", "answer_len")
    header = ["users", "system", "user", "answer"]
    body = [
        [*(str(one[k]) for k in loads), *(_mib(one["held"][name]["live_bytes"]) for name in NAMES)]
        for one in rows
    ]
    parts = ["KV memory at its highest, MiB", table([*header, *NAMES.values()], body)]
    body = [
        [*(str(one[k]) for k in loads), *(f"{ratio:.2f}x" for ratio in one["ratios"].values())]
        for one in rows
    ]
    columns = [_comparison(name) for name in rows[0]["ratios"]]
    parts += ["", "Dense over paged", table([*header, *columns], body)]
    parts += ["", f"The claim: {CLAIM[0]:g} to {CLAIM[1]:g} times less memory than dense caches."]
    for name, counts in verdict(rows).items():
        ratios = [one["ratios"][name] for one in rows]
        found = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        parts.append(f"  {_comparison(name)}: {min(ratios):.2f}x to {max(ratios):.2f}x: {found} it")
    if formats := list(rows[0]["tokens_in_the_same_memory"]):
        body = []
        for one in rows:
            ratios = one["tokens_in_the_same_memory"].values()
            body.append([*(str(one[k]) for k in loads), *(f"{ratio:.2f}x" for ratio in ratios)])
        parts += ["", "Paged: tokens in the same memory, over those of the model's own dtype"]
        parts.append(table([*header, *formats], body))
    return "\n".join(parts)


def _comparison(name: str) -> str:
    dense, paged = name.split("_over_")
    return f"{dense.replace('_', ' ')} / {paged.replace('_', ' ')}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"
