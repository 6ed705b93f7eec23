"""`write_kv`, `copy_blocks` and `gather_kv`, whose floor is a copy of the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, cycle

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.cli.bench.kernels.cases import Case
from mlx_paged.cli.bench.kernels.data import Pools, to_words
from mlx_paged.cli.bench.kernels.timing import Variant
from mlx_paged.cli.bench.kernels.work import MOST_CHECKED, OURS, Checked, Work, require_same

Prepare = Callable[[int], Callable[[], object]]


def write_kv(case: Case, pools: Pools, past_cache: int, seed: int) -> Work:
    """Writes all tokens of all contexts, as the prefill of the whole batch would."""
    num_tokens = sum(case.lens)
    shape = (num_tokens, case.kv_heads, case.head_dim)
    keys, values = (pools.random(shape, mx.random.key(seed + i)) for i in (2, 3))
    per_set = [pools.slots_of(i) for i in range(pools.key.num_sets)]
    slots = [mx.array(s.astype(np.int32)) for s in per_set]
    mx.eval(keys, values, slots)
    turn = cycle(slots)

    def prepare(launches: int) -> Callable[[], object]:
        for _ in range(launches):
            pools.write(keys, values, next(turn))
        return lambda: mx.eval(pools.both)

    def check() -> Checked:
        tokens = _sample(num_tokens, case)
        others = _sample_of(np.concatenate([np.arange(case.block_size or 1), *per_set[1:]]), case)
        before = [to_words(_tokens(pool, others)) for pool in pools.both]
        pools.write(keys, values, slots[0])
        for pool, rows, kept in zip(pools.both, (keys, values), before):
            written = to_words(_tokens(pool, per_set[0][tokens]))
            require_same(case, "tokens that it writes", written, to_words(rows[mx.array(tokens)]))
            require_same(case, "tokens that it leaves", to_words(_tokens(pool, others)), kept)
        return Checked(0.0, len(tokens), num_tokens, {})

    return _work(2 * num_tokens * case.token_bytes, prepare, check, pools)


def copy_blocks(case: Case, pools: Pools, past_cache: int, seed: int) -> Work:
    """Copies the first half of each set's blocks over the second half."""
    all_pairs = []
    for tables in pools.tables:
        blocks = list(chain.from_iterable(tables))
        half = len(blocks) // 2
        all_pairs.append(np.array([blocks[:half], blocks[half : 2 * half]], dtype=np.int32).T)
    pairs = [mx.array(p) for p in all_pairs]
    mx.eval(pairs)
    turn = cycle(pairs)

    def prepare(launches: int) -> Callable[[], object]:
        for _ in range(launches):
            pools.copy(next(turn))
        return lambda: mx.eval(pools.both)

    def check() -> Checked:
        num_pairs = len(all_pairs[0])
        per_block = (case.block_size or 1) * case.kv_heads * case.head_dim
        chosen = all_pairs[0][_evenly(num_pairs, MOST_CHECKED // per_block)]
        before = [pools.words(pool, chosen[:, 0]) for pool in pools.both]
        pools.copy(pairs[0])
        for pool, source in zip(pools.both, before):
            copied = pools.words(pool, chosen[:, 1])
            require_same(case, "blocks that it copies", copied, source)
            kept = pools.words(pool, chosen[:, 0])
            require_same(case, "blocks that it copies from", kept, source)
        return Checked(0.0, len(chosen), num_pairs, {})

    moved = 2 * len(all_pairs[0]) * (case.block_size or 1) * case.token_bytes
    return _work(moved, prepare, check, pools)


def gather_kv(case: Case, pools: Pools, past_cache: int, seed: int) -> Work:
    """Makes dense K and V of whole contexts, padded to the longest."""
    longest = max(case.lens)
    plans = [pools.plan(i, 1, None) for i in range(pools.key.num_sets)]
    for plan in plans:
        mx.eval(plan.block_tables, plan.context_lens)
    turn = cycle(plans)

    def gather(plan: ops.AttentionPlan) -> tuple[mx.array, mx.array]:
        return ops.gather_kv(*pools.both, plan.block_tables, plan.context_lens, longest)

    def prepare(launches: int) -> Callable[[], object]:
        outs = [gather(next(turn)) for _ in range(launches)]
        return lambda: mx.eval(outs)

    def check() -> Checked:
        per_sequence = longest * case.kv_heads * case.head_dim
        chosen = _evenly(case.batch, max(1, MOST_CHECKED // per_sequence))
        for pool, dense in zip(pools.both, gather(plans[0])):
            for i in chosen:
                tokens = pools.words(pool, pools.tables[0][i])
                tokens = tokens.reshape(-1, *tokens.shape[2:])[: case.lens[i]]
                expected = np.zeros((longest, *tokens.shape[1:]), tokens.dtype)
                expected[: len(tokens)] = tokens
                actual = to_words(dense[int(i)]).swapaxes(0, 1)
                require_same(case, f"tokens of sequence {i}", actual, expected)
        return Checked(0.0, len(chosen), case.batch, {})

    written = case.batch * longest * case.token_bytes
    moved = sum(case.lens) * case.token_bytes + written
    return _work(moved, prepare, check, pools, output_bytes=written)


def _work(
    moved: int,
    prepare: Prepare,
    check: Callable[[], Checked],
    pools: Pools,
    output_bytes: int = 0,
) -> Work:
    variant = Variant(
        OURS, prepare, output_bytes, warmup=pools.key.num_sets if not output_bytes else 2
    )
    return Work(moved, 0, (variant,), check)


def _tokens(pool: mx.array, slots: np.ndarray) -> mx.array:
    return pool.reshape(-1, *pool.shape[2:])[mx.array(slots.astype(np.int32))]


def _evenly(count: int, most: int) -> np.ndarray:
    """At most `most` of ``range(count)``, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, max(1, min(count, most))).round().astype(np.int32))


def _sample(count: int, case: Case) -> np.ndarray:
    return _evenly(count, MOST_CHECKED // (case.kv_heads * case.head_dim))


def _sample_of(values: np.ndarray, case: Case) -> np.ndarray:
    return values[_sample(len(values), case)]
