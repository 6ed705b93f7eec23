"""The attention kernels of metal/, executed by the simulator, against the float64 oracle.

Every slot that nothing may read is NaN, what a launch writes is poisoned first, and the simulator
reports races, divergence, and accesses out of bounds or out of line.
"""

from __future__ import annotations

import re
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support.reference import (
    DTYPES,
    PagedBatch,
    alibi_slopes,
    assert_close,
    bits,
    make_batch,
    noncontiguous,
    to_numpy,
)
from support.simulated import launches, needs_simulator, simulated

from mlx_paged import ops
from mlx_paged.ops import AttentionPlan

pytestmark = needs_simulator

HEAD_DIMS = [
    *((d, d) for d in (32, 64, 80, 96, 112, 128, 192, 256, 512)),
    *((192, 128), (576, 512)),
]


def attend(batch: PagedBatch, plan: AttentionPlan | None = None, **options) -> mx.array:
    options.setdefault("scale", 0.125)
    plan = plan or batch.plan()
    with simulated():
        out = ops.paged_attention(batch.queries, batch.key_pool, batch.value_pool, plan, **options)
        mx.eval(out)
    return out


def check(batch: PagedBatch, limits: dict[str, int] | None = None, **options) -> list[str]:
    """Compares with the oracle and returns the names of the kernels that ran."""
    options.setdefault("scale", 0.125)
    out = attend(batch, batch.plan(**(limits or {})), **options)
    assert_close(out, batch.expected(**options))
    return [launch["kernel"] for launch in launches()]


# --- Every instantiation is one of these, with other numbers --------------------------------------


# float16 and bfloat16 load alike, so each head dim meets one of them. (Every combination is
# compiled in test_metal_language.py, and runs on a GPU in test_gpu.py.)
DTYPES_AND_DIMS = [
    (dtype, dims)
    for i, dims in enumerate(HEAD_DIMS)
    for dtype in (mx.float32, (mx.float16, mx.bfloat16)[i % 2])
]


@pytest.mark.one_in(10)
@pytest.mark.parametrize(("dtype", "dims"), DTYPES_AND_DIMS, ids=str)
def test_every_dtype_and_head_dim(rng, dtype, dims) -> None:
    key_dim, value_dim = dims
    # Group sizes go round, so that all of them meet some dtype and head dim.
    turn = DTYPES.index(dtype) + HEAD_DIMS.index((key_dim, value_dim))
    vector_group = 1 + turn % 3 if key_dim <= 256 else 1
    for kernel, group in (("paged_decode", vector_group), ("paged_decode_matrix", 4 + turn % 13)):
        batch = make_batch(
            *(rng, [70, 17, 1], [1, 1, 1]),
            num_q_heads=2 * group,
            num_kv_heads=2,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=dtype,
        )
        (ran,) = check(batch, scale=float(np.float32(key_dim**-0.5)))
        assert ran.startswith(f"{kernel}_{str(dtype).split('.')[-1]}_{key_dim}_{value_dim}_")


@pytest.mark.one_in(16)
@pytest.mark.parametrize("group", range(1, 17))
def test_every_group_size(rng, group) -> None:
    batch = make_batch(
        *(rng, [90, 17], [1, 1]),
        num_q_heads=2 * group,
        num_kv_heads=2,
        key_dim=64,
        dtype=mx.bfloat16,
    )
    check(batch)


@pytest.mark.one_in(72)
@pytest.mark.parametrize("rows", range(2, 9))
@pytest.mark.parametrize("group", [1, 2, 6])
def test_drafts_share_each_key(rng, rows, group) -> None:
    batch = make_batch(
        *(rng, [90, 33], [rows, 1]), num_q_heads=2 * group, key_dim=64, dtype=mx.bfloat16
    )
    check(batch)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)], ids=str)
def test_prefill_chunks(rng, dims) -> None:
    batch = make_batch(
        *(rng, [90, 33], [44, 12]),
        num_q_heads=6,
        key_dim=dims[0],
        value_dim=dims[1],
        dtype=mx.bfloat16,
    )
    names = check(batch, window=30)
    kernel = "paged_prefill" if dims[0] <= 128 else "paged_decode_matrix"
    assert all(name.startswith(kernel) for name in names)


def test_prefill_of_wide_heads(rng) -> None:
    batch = make_batch(rng, [50], [12], num_q_heads=6, key_dim=576, value_dim=512)
    (name,) = check(batch)
    assert name.startswith("paged_decode_matrix")


def test_a_mixed_step_sends_each_row_to_its_own_kernel(rng) -> None:
    batch = make_batch(rng, [90, 40, 70, 0], [1, 32, 5, 0], num_q_heads=6, key_dim=64)
    assert check(batch) == [
        "paged_decode_float32_64_64_q3",
        "paged_decode_matrix_float32_64_64_m16",
        "paged_prefill_float32_64_64_m32",
    ]


# --- Options, for each kernel ---------------------------------------------------------------------

# Query rows and query heads (of 2 KV heads) that bring an item to each kernel.
KERNELS = {
    "paged_decode": ([1, 1], 6),
    "paged_decode_matrix": ([3, 5], 8),
    "paged_prefill": ([9, 20], 6),
}


@pytest.fixture(params=list(KERNELS))
def kernel(request) -> str:
    return request.param


def batch_for(kernel: str, rng, context_lens=(90, 40), **options) -> PagedBatch:
    rows, heads = KERNELS[kernel]
    options = {"key_dim": 64, "num_q_heads": heads, **options}
    return make_batch(rng, list(context_lens), rows, **options)


def check_for(kernel: str, batch: PagedBatch, limits=None, **options) -> None:
    names = check(batch, limits, **options)
    ran = {re.split("_b?float", name)[0] for name in names}
    assert ran <= {kernel, "paged_merge"}


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_block_sizes(rng, kernel, block_size) -> None:
    check_for(kernel, batch_for(kernel, rng, block_size=block_size))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 64, 10**9, 2**31 - 1])
def test_windows(rng, kernel, window) -> None:
    batch = batch_for(kernel, rng, (130, 60), window=window)
    check_for(kernel, batch, window=window)
    check_for(kernel, batch, {"split_tokens": 16}, window=window)


@pytest.mark.parametrize("softcap", [0.1, 50.0])
def test_softcap(rng, kernel, softcap) -> None:
    check_for(kernel, batch_for(kernel, rng), softcap=softcap, scale=1.0)


def test_sinks(rng, kernel) -> None:
    batch = batch_for(kernel, rng)
    sinks = mx.array(np.linspace(-3, 9, batch.queries.shape[1]).astype(np.float32))
    check_for(kernel, batch, sinks=sinks)
    check_for(kernel, batch, {"split_tokens": 16}, sinks=sinks)  # counted once, not once a split
    check_for(kernel, batch, sinks=mx.full(sinks.shape, -np.inf))


def test_alibi(rng, kernel) -> None:
    batch = batch_for(kernel, rng, (130, 60))
    heads = batch.queries.shape[1]
    check_for(kernel, batch, alibi_slopes=alibi_slopes(heads))
    sinks = mx.array(np.linspace(-3, 9, heads).astype(np.float32))
    options = {"sinks": sinks, "alibi_slopes": alibi_slopes(heads)}
    check_for(kernel, batch, {"split_tokens": 16}, **options)


def test_all_options_at_once(rng, kernel) -> None:
    batch = batch_for(kernel, rng, (130, 40), window=33)
    heads = batch.queries.shape[1]
    sinks = mx.array(np.linspace(-3, 9, heads).astype(np.float32))
    options = {"window": 33, "softcap": 2.0, "sinks": sinks, "alibi_slopes": alibi_slopes(heads)}
    check_for(kernel, batch, {"split_tokens": 16}, **options)


@pytest.mark.parametrize("split_tokens", [1, 17, 100])
def test_splits(rng, kernel, split_tokens) -> None:
    batch = batch_for(kernel, rng, (300, 90))
    check_for(kernel, batch, {"split_tokens": split_tokens, "rows_per_item": 20})


def test_more_splits_than_lanes(rng) -> None:
    check(make_batch(rng, [700], [1], num_q_heads=10, key_dim=64), {"split_tokens": 16})


def test_nan_in_a_query_row_stays_in_that_row(rng, kernel) -> None:
    batch = batch_for(kernel, rng)
    poisoned = mx.array(batch.queries)
    poisoned[1, 2, 5] = float("nan")
    for split_tokens in (16, 4096):
        plan = batch.plan(split_tokens=split_tokens)
        clean = to_numpy(attend(batch, plan))
        out = to_numpy(attend(replace(batch, queries=poisoned), plan))
        assert np.isnan(out[1, 2]).all(), "a NaN must not turn into a plausible number"
        out[1, 2] = clean[1, 2]
        np.testing.assert_array_equal(out, clean)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_logits_do_not_overflow(rng, kernel, dtype) -> None:
    batch = batch_for(kernel, rng, dtype=dtype)
    queries = mx.zeros_like(batch.queries)
    queries[..., 0] = 6e4
    keys = mx.zeros_like(batch.key_pool)
    keys[..., 0] = 6e4 * mx.array(np.linspace(-1, 1, 16), dtype)[None, :, None]
    extreme = replace(batch, queries=queries, key_pool=keys)
    check_for(kernel, extreme, scale=1.0)
    check_for(kernel, extreme, scale=1.0, softcap=50.0)
    check_for(kernel, extreme, scale=1.0, sinks=mx.full((batch.queries.shape[1],), 100.0))


def test_rows_without_a_work_item_are_zero(rng, kernel) -> None:
    batch = batch_for(kernel, rng)
    plan = batch.plan()
    _, begin, end, *_ = plan.work_items[0].tolist()
    expected = batch.expected(scale=0.125)
    expected[begin:end] = 0
    assert_close(attend(batch, replace(plan, work_items=plan.work_items[1:])), expected)


def test_same_bits_in_any_company(rng) -> None:
    batch = make_batch(rng, [90, 40, 70], [1, 1, 1], key_dim=64)
    together = bits(attend(batch))
    for i in range(3):
        alone = PagedBatch(
            *(batch.queries[i : i + 1], batch.key_pool, batch.value_pool),
            *([batch.tables[i]], [batch.context_lens[i]], [1]),
        )
        np.testing.assert_array_equal(bits(attend(alone))[0], together[i])


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
def test_noncontiguous_queries(rng, layout) -> None:
    batch = make_batch(rng, [70, 20], [1, 1], key_dim=64)
    check(replace(batch, queries=noncontiguous(batch.queries)[layout]))


def test_a_head_dim_without_a_kernel_is_refused_by_name(rng) -> None:
    batch = make_batch(rng, [70], [1], key_dim=40)
    with pytest.raises(ValueError, match=r"head_dim .* must be one of 32, 64, .* but got 40/40"):
        attend(batch)
