"""Launches every kind of kernel at least once, for tools such as compute-sanitizer.

PYTHONPATH=tests python tests/support/exercise_kernels.py [--dtype bfloat16] [--only linear]

With --fault it reads far outside a pool instead, which the tool must report.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np

from mlx_paged import executables, ops, plain_ops
from support.mixtures import Experts, chosen_by, exact, logits_apart
from support.quantized import FORMATS, make_quantized
from support.reference import GPU_HEAD_DIMS, alibi_slopes, assert_close, make_batch, spans_of


def attention(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    for key_dim, value_dim in GPU_HEAD_DIMS:
        for group in (1, 3, 4, 12):
            batch = make_batch(
                rng, [70, 33, 41, 40], [1, 4, 20, 40], num_q_heads=2 * group, num_kv_heads=2,
                key_dim=key_dim, value_dim=value_dim, dtype=dtype,
            )  # fmt: skip
            plan = batch.plan(split_tokens=32, rows_per_item=32)
            pools = (batch.key_pool, batch.value_pool)
            sinks = mx.zeros(2 * group)
            out = ops.paged_attention(batch.queries, *pools, plan, scale=0.125, sinks=sinks)
            assert_close(out, batch.expected(scale=0.125, sinks=sinks))
            options = {"scale": 0.125, "sinks": sinks, "alibi_slopes": alibi_slopes(2 * group)}
            out = ops.paged_attention(batch.queries, *pools, plan, **options)
            assert_close(out, batch.expected(**options))


def windows(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """All head dims that our CUDA kernels support, with every block size."""
    for dim in (64, 128, 256):
        for block_size in (16, 32, 64):
            batch = make_batch(
                rng, [70, 33, 41], [1, 2, 1], num_q_heads=8, key_dim=dim, dtype=dtype,
                block_size=block_size, window=37,
            )  # fmt: skip
            pools = (batch.key_pool, batch.value_pool)
            for limits in ({}, {"split_tokens": 16}):
                plan = batch.plan(**limits)
                options = {"scale": 0.125, "window": 37, "softcap": 2.0}
                out = ops.paged_attention(batch.queries, *pools, plan, **options)
                assert_close(out, batch.expected(**options))


def bounds(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """Images in prefill chunks and drafts, next to a decode, with and without a window."""
    lens, rows = [70, 33, 41, 90], [1, 4, 20, 70]
    spans = spans_of(lens, rows, [[], [(30, 32)], [(22, 40)], [(25, 60), (61, 88)]])
    for key_dim, value_dim in GPU_HEAD_DIMS:
        for heads, window in ((2, None), (8, 17)):
            batch = make_batch(
                rng, lens, rows, num_q_heads=heads, key_dim=key_dim, value_dim=value_dim,
                dtype=dtype, window=window, bounds=spans,
            )  # fmt: skip
            pools = (batch.key_pool, batch.value_pool)
            plan = batch.plan(split_tokens=32, rows_per_item=32)
            for slopes in (None, alibi_slopes(heads)):
                options = {"scale": 0.125, "window": window, "alibi_slopes": slopes}
                out = ops.paged_attention(batch.queries, *pools, plan, **options)
                assert_close(out, batch.expected(**options))


def movement(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    batch = make_batch(rng, [70, 20], [3, 2], key_dim=64, value_dim=80, dtype=dtype)
    plan = batch.plan()
    pools = [batch.key_pool, batch.value_pool]
    mx.eval(ops.gather_kv(*pools, plan.block_tables, plan.context_lens, 70))
    rows = [mx.ones((5, *pool.shape[2:]), dtype) for pool in pools]
    pools = list(ops.write_kv(*pools, *rows, plan.slot_mapping))
    mx.eval(ops.copy_blocks(pools, mx.array([[1, 2], [3, 4]], mx.int32)))
    strided = mx.repeat(rows[0], 2, axis=-1)[..., ::2]
    mx.eval(strided)
    mx.eval(ops.write_kv(*pools, strided, rows[1], plan.slot_mapping))


def bitmask(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """Vocabularies that fill whole words and ones that do not, copied and in place."""
    for vocab_size in (33, 32_000, 151_936):
        logits = mx.array(rng.standard_normal((5, vocab_size))).astype(dtype)
        words = rng.integers(-(2**31), 2**31, (3, -(-vocab_size // 32))).astype(np.int32)
        for source in (logits, logits + 0):
            out = ops.apply_token_bitmask(source, mx.array(words), mx.array([3, 0, 4], mx.int32))
            del source
            forbidden = np.isneginf(np.array(out.astype(mx.float32)))
            allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
            assert (forbidden[[3, 0, 4]] == (allowed[:, :vocab_size] == 0)).all()
            assert not forbidden[[1, 2]].any()


def draws(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """Vocabularies that are read in chunks and ones that are not, for a few rows and for many."""
    for num_rows, size in ((3, 50), (3, 37), (2, 128_256), (300, 1024)):
        logits = mx.array(rng.standard_normal((num_rows, size)) * 3).astype(dtype)
        tokens, largest, _ = ops.greedy_tokens(logits)
        keys = mx.array(rng.integers(0, 1 << 31, (num_rows, 2)).astype(np.uint32))
        temperature = mx.array(np.resize(np.float32([1.0, 0.0, 0.5]), num_rows))
        settings = (logits, tokens, largest, temperature, keys, -4 * mx.ones(num_rows))
        found, expected = ops.draw_tokens(*settings), plain_ops.draw_tokens(*settings)
        assert mx.array_equal(found, expected)


def prefill(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """Prefill chunks for every number of warps of our CUDA kernel, unsplit and split."""
    for dim in (64, 128):
        for group in (1, 2, 3, 4, 12):
            batch = make_batch(
                rng, [150, 33, 90], [32, 9, 70], num_q_heads=2 * group, num_kv_heads=2,
                key_dim=dim, dtype=dtype, block_size=32,
            )  # fmt: skip
            pools = (batch.key_pool, batch.value_pool)
            expected = batch.expected(scale=0.125)
            for limits in ({}, {"split_tokens": 32}):
                plan = batch.plan(**limits)
                assert_close(
                    ops.paged_attention(batch.queries, *pools, plan, scale=0.125), expected
                )


def linear(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """Every kernel of a linear layer, with full tiles and with partial rows of x and the weight."""
    for rows in (1, 8, 9, 16, 17, 32, 33, 64):
        for n, k in ((48, 96), (144, 1088)):
            x, weight, bias = (
                mx.array(rng.standard_normal(shape)).astype(dtype)
                for shape in ((rows, k), (n, k), (n,))
            )
            mx.eval(x, weight, bias)
            for b in (None, bias):
                out = np.array(ops.linear(x, weight, b).astype(mx.float32))
                exact = [np.array(a.astype(mx.float32), np.float64) for a in (x, weight, bias)]
                product = exact[0] @ exact[1].T + (0 if b is None else exact[2])
                assert np.abs(out - product).max() < 0.05 * np.sqrt(k)


def quantized(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """Products with weights of several formats, with partial row and column tiles."""
    if dtype == mx.float32:  # runs MLX's own kernels
        return
    for bits, group in ((4, 64), (3, 128), (8, 32)):
        for n, k in ((40, 128), (144, 1152), (144, 3072)):
            weight = mx.quantize(
                mx.array(rng.standard_normal((n, k))).astype(dtype), group_size=group, bits=bits
            )
            form = {"group_size": group, "bits": bits}
            for rows in (1, 8, 9, 17, 33):
                x = mx.array(rng.standard_normal((rows, k))).astype(dtype)
                mx.eval(x, weight)
                out = np.array(ops.quantized_linear(x, *weight, **form).astype(mx.float32))
                dense = np.array(mx.dequantize(*weight, **form).astype(mx.float32), np.float64)
                product = np.array(x.astype(mx.float32), np.float64) @ dense.T
                assert np.abs(out - product).max() < 0.05 * np.sqrt(k)


def pools(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """Quantized pools of every format: writes, and attention of decodes, a draft and a chunk."""
    tolerance = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}[dtype]
    for name in FORMATS:
        for dim, group, block_size in ((64, 12, 16), (128, 4, 32), (128, 1, 64), (256, 2, 16)):
            for query_lens in ([1, 1, 2], [1, 20, 1]):
                batch = make_quantized(
                    rng, [70, 33, 41], query_lens, num_q_heads=2 * group, num_kv_heads=2,
                    key_dim=dim, dtype=dtype, block_size=block_size, name=name,
                )  # fmt: skip
                for limits in ({}, {"split_tokens": 32}):
                    for slopes in (None, alibi_slopes(2 * group)):
                        options = {"scale": 0.125, "alibi_slopes": slopes}
                        out = batch.attend(batch.plain.plan(**limits), **options)
                        assert_close(out, batch.expected(**options), tolerance)


def program_of(rows: int, weights: list[mx.array], scale: mx.array, inputs: list[mx.array]) -> Any:
    """The operations of a layer, and greedy tokens from logits."""

    def build(x, index, tables, items, merges, keys, values) -> list[mx.array]:
        plan = ops.AttentionPlan(index, index, tables, index, index, items, merges)
        normed = ops.rms_norm(x, scale, 1e-5)
        q, k, v = (
            ops.linear(normed, w).reshape(rows, 1, -1, keys.shape[3]).transpose(0, 2, 1, 3)
            for w in weights[:3]
        )
        rotations = ops.rope_rotations(index, mx.ones(keys.shape[3] // 2), scale=1.0)
        q, k = (ops.rope(a, rotations) for a in (q, k))
        keys, values = ops.write_kv(keys, values, k[:, :, 0], v[:, :, 0], index)
        out = ops.paged_attention(q.squeeze(2), keys, values, plan, scale=0.1)
        x = x + ops.linear(out.reshape(rows, -1), weights[3])
        normed = ops.rms_norm(x, scale, 1e-5)
        x = x + ops.linear(
            ops.silu_mul(ops.linear(normed, weights[4]), ops.linear(normed, weights[5])), weights[6]
        )
        return [ops.linear(ops.rms_norm(x[index], scale, 1e-5), weights[4]), keys, values]

    unknown = executables.placeholders(inputs)
    return executables.GpuExecutable(unknown, build(*unknown))


def programs(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """The kernels of a step program, twice, because the second run is a replay."""
    if dtype == mx.float32:  # products need 16 bits
        return
    width, heads, kv_heads, dim = 128, 4, 2, 64
    for rows in (1, 9, 17, 40):
        sizes = [(heads * dim, width), (kv_heads * dim, width), (kv_heads * dim, width),
                 (width, heads * dim), (192, width), (192, width), (width, 192)]  # fmt: skip
        x, scale, *weights = (
            mx.array(0.1 * rng.standard_normal(size)).astype(dtype)
            for size in ((rows, width), (width,), *sizes)
        )
        pools = [mx.zeros((rows + 1, 16, kv_heads, dim), dtype) for _ in range(2)]
        index = mx.arange(rows, dtype=mx.int32)
        items = mx.array([[i, i, i + 1, 0, rows // 16 + 1, -1] for i in range(rows)], mx.int32)
        tables = mx.array([list(range(rows // 16 + 1))] * rows, mx.int32)
        merges = mx.zeros((0, 4), dtype=mx.int32)
        inputs = [x, index, tables, items, merges, *pools]
        mx.eval(inputs, scale, weights)
        program = program_of(rows, weights, scale, inputs)
        for _ in range(2):
            out, *pools = program([*inputs[:5], *pools])
            assert np.isfinite(np.array(out.astype(mx.float32))).all()


def mixtures(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """16-bit experts, and quantized ones whose scales are copied in spans and all at once."""
    if dtype == mx.float32:  # products need 16 bits
        return
    for form, intermediate in ((None, 96), (("affine", 4, 64), 512), (("affine", 4, 64), 768)):
        experts = Experts(rng, 6, 512, intermediate, dtype, form=form)
        for rows in (1, 9, 40):
            x = mx.array(rng.standard_normal((rows, 1, 512))).astype(dtype)
            logits = logits_apart(rng, rows, 6, dtype)
            inputs = [x, logits]
            mx.eval(inputs)
            unknown = executables.placeholders(inputs)
            program = executables.GpuExecutable(unknown, [experts.build(*unknown, "normalized", 3)])
            chosen, shares = chosen_by("normalized", exact(logits)[:, 0], 3)
            expected = experts.expected(x, chosen, shares)
            for _ in range(2):
                error = np.linalg.norm(exact(program(inputs)[0]) - expected, axis=-1)
                assert (error <= 0.05 * np.linalg.norm(expected, axis=-1)).all()


def transfers(rng: np.random.Generator) -> None:
    """Copies arrays to the device and back: empty ones, single numbers and several pages."""
    for n in (0, 1, 3000):
        host = rng.integers(0, 99, n).astype(np.int32)
        for _ in range(3):  # reuses staging buffers
            a, b = ops.upload(host, host[:1].astype(np.float32))
            back = ops.to_host(a + 1)
            mx.eval(back, b)
            assert (np.array(back) == host + 1).all()


def fault() -> None:
    pools = [mx.zeros((4, 16, 2, 64)) for _ in range(2)]
    tables = mx.array([[1 << 22]], dtype=mx.int32)
    try:
        mx.eval(ops.gather_kv(*pools, tables, mx.array([16], dtype=mx.int32), 16))
    finally:
        os._exit(3)  # MLX's cleanup hangs after a device fault


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", action="store_true")
    parser.add_argument("--dtype", nargs="+", default=["float32", "float16", "bfloat16"])
    parts = {
        f.__name__: f
        for f in (
            attention,
            windows,
            bounds,
            prefill,
            pools,
            movement,
            bitmask,
            draws,
            linear,
            quantized,
        )
    }
    parser.add_argument("--only", nargs="+", default=list(parts), choices=parts)
    options = parser.parse_args()
    mx.set_default_device(mx.gpu)
    if options.fault:
        return fault()
    rng = np.random.default_rng(0)
    for name in options.dtype:
        for part in options.only:
            parts[part](rng, getattr(mx, name))
    if ops.has_cuda():
        transfers(rng)
        for name in options.dtype:
            programs(rng, getattr(mx, name))
            mixtures(rng, getattr(mx, name))
    print("exercised")


if __name__ == "__main__":
    main()
