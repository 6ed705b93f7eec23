"""Quantized pools: what is stored, and attention against the oracle on what is stored."""

from __future__ import annotations

import os

import mlx.core as mx
import numpy as np
import pytest
from support import reference
from support.quantized import (
    FORMATS,
    decoded,
    empty_pools,
    keys_of,
    make_quantized,
    quantized,
    raw,
    rotation,
    steps,
)
from support.reference import DTYPES, ON_GPU, assert_close, make_batch, spans_of, to_numpy
from support.simd_processes import run_in_process_of

from mlx_paged import ops

NAMES = tuple(FORMATS)
# For the softmax and the products; queries and results are also rounded to their dtype.
TOLERANCE = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}


def int32(values: object) -> mx.array:
    return mx.array(np.array(values, np.int32))


# --- What is stored -------------------------------------------------------------------------------


def stored(name: str, rows: np.ndarray, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    """Pools of one block whose first slots hold ``[num_tokens, num_kv_heads, dim]`` rows."""
    tokens, heads, dim = rows.shape
    pools = [ops.allocate_pool(1, 64, heads, dim, d) for d in FORMATS[name]]
    pools = [mx.zeros(p.shape, p.dtype) for p in pools]
    x = mx.array(rows.astype(np.float32)).astype(dtype)
    return list(ops.write_kv(*pools, x, x, int32(range(tokens))))


@pytest.mark.parametrize("dim", [8, 24, 40, 64, 80, 128, 192, 256, 576])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_code_is_the_nearest(rng, name, dim) -> None:
    rows = rng.standard_normal((20, 3, dim)) * 10.0 ** rng.uniform(-4, 3, (20, 3, 1))
    rows = rows.astype(np.float32)
    key_pool, value_pool = stored(name, rows)
    turned = rows.astype(np.float64) @ rotation(key_pool.dtype, dim).T
    for pool, wanted in ((key_pool, turned), (value_pool, rows)):
        step = steps(pool, dim)[0, :20]
        error = np.abs(decoded(pool, dim)[0, :20] - wanted)
        noise = 1e-6 * np.abs(wanted).max(axis=-1, keepdims=True)
        assert (error <= 0.5001 * step + noise).all()
        if name == "int8":
            finest = np.abs(wanted).max(axis=-1, keepdims=True) / 127
        else:
            padded = np.pad(wanted, [(0, 0)] * 2 + [(0, -dim % 32)], mode="edge")
            grouped = padded.reshape(20, 3, -1, 32)
            finest = np.repeat((grouped.max(-1) - grouped.min(-1)) / 15, 32, -1)[..., :dim]
        # Rounded up to fp16: a part in 2^10 (or a step of its subnormals), and the minimum as well.
        rounding = 2.0**-9 * np.abs(wanted).max(axis=-1, keepdims=True) / 15 + 2.0**-23
        assert (step >= 0.999999 * finest).all()
        assert (step <= finest * (1 + 2.0**-9) + (rounding if name == "int4" else 2.0**-23)).all()


def test_e4m3_is_the_nearest(rng) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 256)
    every = mx.array(codes).astype(mx.uint8)
    pools = stored("fp8", np.zeros((1, 1, 256)))
    known = decoded(mx.broadcast_to(every[None], (1, 64, 1, 256)), 256)[0, 0, 0]
    finite = np.sort(np.unique(known[np.isfinite(known)]))
    between = (finite[1:] + finite[:-1]) / 2
    x = np.concatenate([finite, between, np.nextafter(between, np.inf), rng.normal(size=400)])
    x = np.concatenate([x, [500.0, -1e6, 1e-9, -0.0]]).astype(np.float32)
    x = np.resize(x, (-(-len(x) // 256), 1, 256))
    pools = stored("fp8", x)
    for pool in pools:
        got = decoded(pool, 256)[0, : len(x)].reshape(-1, 1)
        least = np.abs(finite[None] - x.reshape(-1, 1).astype(np.float64)).min(axis=1)
        assert np.abs(got[:, 0] - x.reshape(-1)) == pytest.approx(least, abs=0)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_slots_written_change(rng, name) -> None:
    batch = make_batch(rng, [40], [1], key_dim=80, value_dim=64)
    dims = batch.key_pool.shape[-1], batch.value_pool.shape[-1]  # (GPUs have kernels for some)
    pools = empty_pools(batch, name)
    before = [raw(pool) for pool in pools]
    rows = [mx.array(rng.standard_normal((3, 2, d)).astype(np.float32)) for d in dims]
    pools = ops.write_kv(*pools, *rows, int32([17, -1, 30]))
    for pool, old, dim in zip(pools, before, dims):
        changed = raw(pool) != old
        assert not changed[[0, *range(2, len(old))]].any()
        # Nothing of the other 14 tokens of the block, in the codes or in the tail.
        held = decoded(pool, dim)[1]
        fresh = decoded(mx.array(old).reshape(-1).view(pool.dtype).reshape(pool.shape), dim)[1]
        others = [i for i in range(16) if i not in (1, 14)]
        np.testing.assert_array_equal(held[others], fresh[others])
        assert np.isfinite(held[[1, 14]]).all()


@pytest.mark.parametrize("name", NAMES)
def test_chunks_do_not_matter(rng, name) -> None:
    batch = make_batch(rng, [70, 33], [1, 1], dtype=mx.bfloat16)
    whole = quantized(batch, name)
    for chunks in ([1] * 70, [16, 16, 5], [31, 2, 30]):
        parts = quantized(batch, name, chunks)
        np.testing.assert_array_equal(raw(whole.key_pool), raw(parts.key_pool))
        np.testing.assert_array_equal(raw(whole.value_pool), raw(parts.value_pool))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden(rng, name, bad) -> None:
    rows = rng.standard_normal((2, 1, 64))
    rows[1, 0, 40] = bad
    for pool in stored(name, rows):
        held = decoded(pool, 64)[0]
        assert np.isfinite(held[0]).all()
        assert np.isnan(held[1, 0, 40])


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_the_smallest_numbers(name) -> None:
    rows = np.zeros((4, 1, 64))
    rows[1] = 1e-30
    rows[2, 0, 5] = 3e-7
    rows[3] = -7.0
    key_pool, value_pool = stored(name, rows)
    assert not decoded(value_pool, 64)[0, 0].any()
    np.testing.assert_allclose(decoded(value_pool, 64)[0, 1:4], rows[1:], rtol=2e-3, atol=1e-6)
    assert np.linalg.norm(keys_of(key_pool, 64)[0, 3] - rows[3]) < 0.1 * np.linalg.norm(rows[3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gathered_as_it_was_before_the_rotation(rng, name, dtype) -> None:
    batch = make_quantized(
        rng, [70, 0, 20], [1, 0, 1], key_dim=80, value_dim=64, dtype=dtype, name=name
    )
    plan = batch.plain.plan()
    dense = ops.gather_kv(
        batch.key_pool, batch.value_pool, plan.block_tables, int32([70, 0, 20]), 75, dtype=dtype
    )
    dims = batch.dims
    held = keys_of(batch.key_pool, dims[0]), decoded(batch.value_pool, dims[1])
    for got, pool in zip(dense, held):
        wanted = reference.gather_kv(pool, batch.plain.tables, [70, 0, 20], 75)
        np.testing.assert_allclose(to_numpy(got), wanted, atol=2e-2 if dtype.size == 2 else 1e-6)


# --- Attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [3, 2, 20], [70, 1, 8]], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_attention(rng, name, query_lens, dtype) -> None:
    batch = make_quantized(rng, [70, 50, 40], query_lens, dtype=dtype, name=name)
    assert_close(batch.attend(scale=0.2), batch.expected(scale=0.2), TOLERANCE[dtype])


@pytest.mark.parametrize(
    "dims", [(8, 8), (24, 40), (64, 64), (80, 96), (128, 128), (192, 128), (256, 256)]
)
@pytest.mark.parametrize("query_lens", [[1, 1], [9, 30]], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_head_dims(rng, name, query_lens, dims) -> None:
    batch = make_quantized(rng, [70, 50], query_lens, key_dim=dims[0], value_dim=dims[1], name=name)
    assert_close(batch.attend(scale=0.1), batch.expected(scale=0.1), TOLERANCE[mx.float32])


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"window": 9},
        {"sinks": [1.0, -2.0, 3.0, 0.0]},
        {"alibi_slopes": [0.5, -0.1, 0.0, 2.0]},
    ],
    ids=str,
)
@pytest.mark.parametrize("split_tokens", [16, 4096])
@pytest.mark.parametrize("name", NAMES)
def test_options_and_splits(rng, name, split_tokens, options) -> None:
    options = {k: mx.array(v) if isinstance(v, list) else v for k, v in options.items()}
    for query_lens in ([1, 1], [3, 20]):
        batch = make_quantized(rng, [70, 50], query_lens, window=options.get("window"), name=name)
        plan = batch.plain.plan(split_tokens=split_tokens)
        out = batch.attend(plan, scale=0.2, **options)
        assert_close(out, batch.expected(scale=0.2, **options), TOLERANCE[mx.float32])


@pytest.mark.parametrize("name", NAMES)
def test_bounds(rng, name) -> None:
    bounds = spans_of([70, 50], [40, 1], [[(35, 45)], []])
    batch = make_quantized(rng, [70, 50], [40, 1], bounds=bounds, window=8, name=name)
    out = batch.attend(scale=0.2, window=8)
    assert_close(out, batch.expected(scale=0.2, window=8), TOLERANCE[mx.float32])


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 1), (40, 2)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_heads_and_block_sizes(rng, name, heads, block_size) -> None:
    batch = make_quantized(
        rng, [150, 65], [1, 2], num_q_heads=heads[0], num_kv_heads=heads[1], key_dim=64,
        block_size=block_size, name=name,
    )  # fmt: skip
    assert_close(batch.attend(scale=0.1), batch.expected(scale=0.1), TOLERANCE[mx.float32])


# Shapes that NVIDIA's tensor cores serve, and their neighbors.
@pytest.mark.one_in(8)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 8, 12])
@pytest.mark.parametrize("name", NAMES)
def test_groups_in_16_bits(rng, name, group, dim, dtype) -> None:
    heads = {"num_q_heads": 3 * group, "num_kv_heads": 3, "key_dim": dim, "value_dim": dim}
    for block_size, rows, options in (
        (16, [1, 1, 1], {}),
        (32, [1, 2, 1], {"window": 50}),
        (64, [1, 1, 1], {"softcap": 4.0, "sinks": mx.array(np.linspace(-2, 2, 3 * group))}),
    ):
        batch = make_quantized(
            rng, [300, 17, 130], rows, block_size=block_size, window=options.get("window"),
            dtype=dtype, name=name, **heads,
        )  # fmt: skip
        for split_tokens in (64, 4096):
            out = batch.attend(batch.plain.plan(split_tokens=split_tokens), scale=0.1, **options)
            assert_close(out, batch.expected(scale=0.1, **options), TOLERANCE[dtype])


@pytest.mark.parametrize("name", NAMES)
def test_copied_blocks_are_the_same(rng, name) -> None:
    batch = make_quantized(rng, [40], [1], name=name)
    [table] = batch.plain.tables
    spare = next(i for i in range(1, batch.key_pool.shape[0]) if i not in table)
    pools = ops.copy_blocks([batch.key_pool, batch.value_pool], int32([[table[1], spare]]))
    for pool in pools:
        data = raw(pool)
        np.testing.assert_array_equal(data[spare], data[table[1]])


@pytest.mark.parametrize("name", ["int8", "int8_k_int4_v"])
def test_outliers_of_single_dims_cost_little(rng, name) -> None:
    batch = make_batch(rng, [200], [1], key_dim=64, value_dim=64)
    scaled = np.ones(64, np.float32)
    scaled[[3, 40]] = 12
    keys = batch.key_pool * mx.array(scaled)
    queries = batch.queries / mx.array(scaled)
    outlying = reference.PagedBatch(queries, keys, batch.value_pool, batch.tables, [200], [1])
    scores = batch.expected(scale=0.2)
    kept = quantized(outlying, name).attend(scale=0.2)
    error = np.linalg.norm(to_numpy(kept) - scores) / np.linalg.norm(scores)
    assert error < {"int8": 0.02, "int8_k_int4_v": 0.08}[name]


# --- Arguments ------------------------------------------------------------------------------------


def test_formats_do_not_mix_with_plain_pools(rng) -> None:
    batch = make_quantized(rng, [40], [1], name="int8")
    plain = batch.plain
    with pytest.raises(ValueError, match="value_pool must be int8 or uint32 beside an int8"):
        ops.paged_attention(
            plain.queries, batch.key_pool, plain.value_pool, plain.plan(), scale=1.0
        )


def test_a_dtype_is_asked_of_gathered_pools(rng) -> None:
    batch = make_quantized(rng, [40], [1], name="int8")
    plan = batch.plain.plan()
    with pytest.raises(ValueError, match="dtype must be given for quantized pools"):
        ops.gather_kv(batch.key_pool, batch.value_pool, plan.block_tables, plan.context_lens, 40)
    with pytest.raises(ValueError, match="dtype must be"):
        ops.gather_kv(
            batch.plain.key_pool, batch.plain.value_pool, plan.block_tables, plan.context_lens, 40,
            dtype=mx.bfloat16,
        )  # fmt: skip


def test_pools_of_no_head_dim_are_refused(rng) -> None:
    pools = [mx.zeros((4, 16, 2, n), d) for n, d in ((33, mx.int8), (6, mx.uint32))]
    for pool in pools:
        with pytest.raises(ValueError, match="key_pool must be"):
            ops.write_kv(pool, pool, mx.zeros((1, 2, 32)), mx.zeros((1, 2, 32)), int32([0]))


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_a_pool(name) -> None:
    from mlx_paged.model.kv_formats import FORMATS as TABLE

    for dim in (8, 24, 64, 80, 128, 576):
        for dtype, fmt in zip(FORMATS[name], (TABLE[name].keys, TABLE[name].values)):
            pool = ops.allocate_pool(3, 16, 2, dim, dtype)
            assert pool.nbytes == 3 * 16 * 2 * fmt.row_bytes(dim)
            assert pool.nbytes // 3 % 16 == 0, "copies move 16 bytes"


# --- Instruction sets -----------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.skipif(ON_GPU, reason="on a GPU there is no instruction set to choose")
@pytest.mark.parametrize("simd", ["avx2", "baseline", "neon"])
def test_this_file_passes_in_a_process_of(simd) -> None:
    run_in_process_of(simd, 2, [__file__], "not this_file")


@pytest.mark.skipif("EXPECTED_SIMD" not in os.environ, reason="runs in the processes started above")
def test_the_instruction_set_asked_for_is_in_use() -> None:
    from mlx_paged.extension import build_info

    assert build_info()["simd"] == os.environ["EXPECTED_SIMD"]
