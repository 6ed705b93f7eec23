"""Numbers at the edge, with one answer for every backend: this machine's (each instruction set of
its CPU, or with MLX_PAGED_TEST_DEVICE=gpu its GPU) and the simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support.reference import (
    DTYPES,
    PagedBatch,
    assert_close,
    bits,
    make_batch,
    to_numpy,
    write_kv,
)
from support.simd_processes import run_in_process_of
from support.simulated import needs_simulator, simulated

from mlx_paged import ops
from mlx_paged.extension import build_info
from mlx_paged.ops import AttentionPlan

Attend = Callable[..., mx.array]

# Query rows of two sequences, and query heads for 2 KV heads: each brings all items to one kernel
# of a GPU, and on a CPU to a pass over few lanes, over few and many, and over many.
KERNELS = {"decode": ([1, 1], 6), "decode_matrix": ([3, 5], 8), "prefill": ([9, 20], 6)}
SPLITS = ({}, {"split_tokens": 16})


@pytest.fixture(params=["here", pytest.param("simulator", marks=needs_simulator)])
def backend(request) -> Callable:
    """A context in which `ops` run there."""
    return simulated if request.param == "simulator" else nullcontext


@pytest.fixture
def attend(backend) -> Attend:
    def run(batch: PagedBatch, plan: AttentionPlan | None = None, **options) -> mx.array:
        options.setdefault("scale", 0.125)
        pools = (batch.key_pool, batch.value_pool)
        with backend():
            out = ops.paged_attention(batch.queries, *pools, plan or batch.plan(), **options)
            mx.eval(out)
        return out

    return run


@pytest.fixture(params=list(KERNELS))
def kernel(request) -> str:
    return request.param


def batch_for(kernel: str, dtype: mx.Dtype = mx.float32) -> PagedBatch:
    rows, heads = KERNELS[kernel]
    rng = np.random.default_rng(0)
    return make_batch(rng, [60, 40], rows, num_q_heads=heads, key_dim=64, dtype=dtype)


def with_logits(batch: PagedBatch, logits: np.ndarray) -> PagedBatch:
    """With queries and keys whose products are the logits of each slot ``[num_slots]``."""
    queries, keys = mx.zeros_like(batch.queries), mx.zeros_like(batch.key_pool)
    queries[..., 0] = 1
    keys[..., 0] = mx.array(logits.reshape(*keys.shape[:2], 1)).astype(keys.dtype)
    return replace(batch, queries=queries, key_pool=keys)


# --- Logits ---------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e33])
def test_only_very_negative_logits_are_a_softmax_like_any(attend, kernel, dtype, scale) -> None:
    batch = batch_for(kernel, dtype)
    num_slots = batch.key_pool.shape[0] * batch.key_pool.shape[1]
    batch = with_logits(batch, -(1000.0 + 10 * np.arange(num_slots)))
    for limits in SPLITS:
        out = attend(batch, batch.plan(**limits), scale=scale)
        assert_close(out, batch.expected(scale=scale))


@pytest.mark.parametrize("sink", [None, 0.5, -np.inf])
def test_logits_of_minus_infinity_weigh_nothing(attend, kernel, sink) -> None:
    batch = batch_for(kernel)
    queries = mx.full(batch.queries.shape, 3e38)
    keys = mx.where(mx.isnan(batch.key_pool), batch.key_pool, mx.full((), -3e38))
    sinks = None if sink is None else mx.full((queries.shape[1],), sink)
    for limits in SPLITS:
        some = replace(batch, queries=queries, key_pool=keys)
        out = attend(some, some.plan(**limits), sinks=sinks)
        np.testing.assert_array_equal(to_numpy(out), 0)


# --- Rows without keys ----------------------------------------------------------------------------


@pytest.mark.parametrize("sink", [None, 0.5, -np.inf])
def test_a_row_without_keys_is_zero(attend, kernel, sink) -> None:
    """Also one in several pieces, which are merged: (-inf) - (-inf)."""
    batch = batch_for(kernel)
    sinks = None if sink is None else mx.full((batch.queries.shape[1],), sink)
    for limits in SPLITS:
        plan = batch.plan(**limits)
        items = np.array(plan.work_items)
        ours = items[:, 0] == 1
        items[ours, 4] = items[ours, 3]  # no blocks
        expected = batch.expected(scale=0.125, sinks=sinks)
        expected[batch.query_lens[0] :] = 0
        out = attend(batch, replace(plan, work_items=mx.array(items)), sinks=sinks)
        assert_close(out, expected)


def test_pieces_without_keys_add_nothing(attend, kernel) -> None:
    batch = batch_for(kernel)
    plan = batch.plan(split_tokens=16)
    items = np.array(plan.work_items)
    # The pieces of each sequence but the one with its last tokens.
    last = {s: items[items[:, 0] == s, 4].max() for s in (0, 1)}
    emptied = np.array([item[4] != last[item[0]] for item in items])
    items[emptied, 4] = items[emptied, 3]
    # The rest of a sequence: the tokens from its last piece's first block on.
    first = {s: items[(items[:, 0] == s) & ~emptied, 3].min() for s in (0, 1)}
    size = batch.key_pool.shape[1]
    rest = replace(
        batch,
        tables=[table[first[s] :] for s, table in enumerate(batch.tables)],
        context_lens=[n - int(first[s]) * size for s, n in enumerate(batch.context_lens)],
    )
    seen = [min(n, rows) for n, rows in zip(rest.context_lens, batch.query_lens)]
    out = to_numpy(attend(batch, replace(plan, work_items=mx.array(items))))
    begin = 0
    for s, rows in enumerate(batch.query_lens):
        # Rows whose own position lies before that piece see nothing.
        np.testing.assert_array_equal(out[begin : begin + rows - seen[s]], 0)
        begin += rows
    kept = [i for s, rows in enumerate(batch.query_lens)
            for i in range(sum(batch.query_lens[:s]) + rows - seen[s],
                           sum(batch.query_lens[:s]) + rows)]  # fmt: skip
    expected = replace(rest, queries=batch.queries[mx.array(kept)], query_lens=seen)
    assert_close(mx.array(out[kept].astype(np.float32)), expected.expected(scale=0.125))


# --- Sinks ----------------------------------------------------------------------------------------


def test_a_sink_of_minus_infinity_changes_nothing(attend, kernel) -> None:
    batch = batch_for(kernel)
    sinks = mx.full((batch.queries.shape[1],), -np.inf)
    for limits in SPLITS:
        assert_close(attend(batch, batch.plan(**limits), sinks=sinks), batch.expected(scale=0.125))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_sink_that_is_no_logit_is_nan_where_only_the_device_knows_it(attend, kernel, bad) -> None:
    batch = batch_for(kernel)
    sinks = np.zeros(batch.queries.shape[1], np.float32)
    expected = batch.expected(scale=0.125, sinks=mx.array(sinks))
    sinks[1] = bad
    for limits in SPLITS:
        lazy = mx.array(sinks) + 0
        out = to_numpy(attend(batch, batch.plan(**limits), sinks=lazy))
        assert np.isnan(out[:, 1]).all(), "a NaN must not turn into a plausible number"
        out[:, 1] = expected[:, 1]
        assert_close(mx.array(out.astype(np.float32)), expected)


@pytest.mark.skipif(
    "cuda" in build_info()["backends"], reason="reading an array would move it away from the GPU"
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bad", "named"), [(np.inf, "inf"), (np.nan, "nan")])
def test_a_sink_that_is_no_logit_is_refused_where_it_is_known(dtype, bad, named) -> None:
    batch = batch_for("decode")
    sinks = mx.array([0, 1, -np.inf, 0, bad, 0]).astype(dtype)
    mx.eval(sinks)
    assert len(sinks.tolist()) == 6  # the host has read them
    message = rf"\[paged_attention\] sinks\[4\] must be at most 2e\+38, or -inf but got {named}"
    with pytest.raises(ValueError, match=message):
        ops.paged_attention(
            batch.queries, batch.key_pool, batch.value_pool, batch.plan(), scale=1.0, sinks=sinks
        )


# --- Sums and rounding ----------------------------------------------------------------------------


def test_sums_may_exceed_float16(attend, kernel) -> None:
    """Dot products of 640,000, and values that add up to millions before they are divided."""
    batch = batch_for(kernel, mx.float16)
    keys = np.full(batch.key_pool.shape, 100.0)
    keys[:, ::2] = 100.25
    batch = replace(
        batch,
        queries=mx.full(batch.queries.shape, 100.0, mx.float16),
        key_pool=mx.array(keys).astype(mx.float16),
        value_pool=mx.full(batch.value_pool.shape, 6e4, mx.float16),
    )
    for limits in SPLITS:
        out = attend(batch, batch.plan(**limits), scale=1e-3)
        np.testing.assert_array_equal(to_numpy(out), 6e4)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_a_softmax_may_add_up_more_tokens_than_float16_counts(dtype) -> None:
    num_tokens = 66_000
    num_blocks = -(-num_tokens // 64)
    pools = [mx.zeros((num_blocks, 64, 1, 64), dtype), mx.ones((num_blocks, 64, 1, 64), dtype)]
    queries = mx.zeros((1, 2, 64), dtype)
    batch = PagedBatch(queries, *pools, [list(range(num_blocks))], [num_tokens], [1])
    for limits in ({}, {"split_tokens": 10**6}):
        out = ops.paged_attention(queries, *pools, batch.plan(**limits), scale=1.0)
        np.testing.assert_array_equal(to_numpy(out), 1)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_ties_round_to_even(attend, kernel, dtype, sign) -> None:
    """The mean of two neighbors lies halfway: below an odd number, and above one."""
    batch = batch_for(kernel, dtype)
    heads = batch.queries.shape[1]
    rows = len(batch.query_lens)
    words = {mx.float16: 0x3C00, mx.bfloat16: 0x3F80}[dtype] + np.arange(64)
    values = np.array(mx.array(words.astype(np.uint16)).view(dtype).astype(mx.float32))
    pool = np.full(batch.value_pool.shape, np.nan, np.float32)
    for table in batch.tables:
        pool[table[0], 0] = sign * values
        pool[table[0], 1] = sign * np.append(values[1:], values[-1])
    queries = mx.zeros((rows, heads, 64), dtype)
    two = replace(batch, queries=queries, value_pool=mx.array(pool).astype(dtype),
                  key_pool=mx.zeros(batch.key_pool.shape, dtype),
                  context_lens=[2] * rows, query_lens=[1] * rows)  # fmt: skip
    even = words + words % 2
    even[-1] = words[-1]
    out = bits(attend(two)).astype(np.int64) & 0x7FFF
    np.testing.assert_array_equal(out, np.broadcast_to(even, out.shape))


# --- Slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_negative_slots_write_nothing(backend, rng, dtype) -> None:
    pools = [mx.array(rng.standard_normal((4, 8, 2, d))).astype(dtype) for d in (64, 64)]
    rows = [mx.array(rng.standard_normal((6, 2, d))).astype(dtype) for d in (64, 64)]
    slots = [-1, 3, -2, -(2**31), 31, -9]
    expected = [write_kv(bits(p), bits(r), [max(s, -1) for s in slots])
                for p, r in zip(pools, rows)]  # fmt: skip
    with backend():
        written = ops.write_kv(*pools, *rows, mx.array(slots, mx.int32))
        mx.eval(written)
    for out, want in zip(written, expected):
        np.testing.assert_array_equal(bits(out), want)


# --- Instruction sets -----------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("simd", ["avx512", "avx2", "baseline", "neon"])
def test_this_file_passes_in_a_process_of(simd) -> None:
    run_in_process_of(simd, 2, [__file__], "not this_file and not simulator")
