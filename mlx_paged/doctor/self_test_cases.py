"""The cases of the self-test: a primitive each."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.doctor.self_test import DTYPES, Case, WrongResult
from mlx_paged.doctor.self_test_data import BLOCK_SIZE, HEAD_DIM, KV_HEADS, Data, exact
from mlx_paged.model.plan import build_plan

_TABLES, _LENS, _BLOCKS = [[3, 7, 1, 5], [2, 6, 4]], [59, 37], 9
_SCALE = 0.125


def _allocate_pool(data: Data) -> None:
    pool = ops.allocate_pool(4, BLOCK_SIZE, KV_HEADS, HEAD_DIM, data.dtype)
    expected = (4, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    if tuple(pool.shape) != expected or pool.dtype != data.dtype:
        raise WrongResult(f"expected {expected} of {data.dtype} but got {pool.shape}, {pool.dtype}")


def _pools(data: Data) -> tuple[mx.array, mx.array]:
    keys, values = (data.pool(_TABLES, _LENS, _BLOCKS) for _ in range(2))
    return keys, values


def _write_kv(data: Data) -> None:
    key_pool, value_pool = _pools(data)
    before = exact(key_pool), exact(value_pool)
    keys, values = (data.normal(3, KV_HEADS, HEAD_DIM) for _ in range(2))
    slots = mx.array([130, -1, 17], mx.int32)
    written = ops.write_kv(key_pool, value_pool, keys, values, slots)
    for name, out, expected, rows in zip(("keys", "values"), written, before, (keys, values)):
        flat = expected.reshape(-1, KV_HEADS, HEAD_DIM)
        flat[130], flat[17] = exact(rows)[0], exact(rows)[2]
        data.same(out, expected, name)


def _copy_blocks(data: Data) -> None:
    pools = _pools(data)
    expected = [exact(pool) for pool in pools]
    copied = ops.copy_blocks(pools, mx.array([[3, 8], [2, 5]], mx.int32))
    for name, out, pool in zip(("first pool", "second pool"), copied, expected):
        pool[8], pool[5] = pool[3], pool[2]
        data.same(out, pool, name)


def _gather_kv(data: Data) -> None:
    key_pool, value_pool = _pools(data)
    plan = build_plan(_TABLES, _LENS, [1, 1], block_size=BLOCK_SIZE)
    dense = ops.gather_kv(key_pool, value_pool, plan.block_tables, plan.context_lens, 60)
    for name, out, pool in zip(("keys", "values"), dense, (key_pool, value_pool)):
        expected = np.zeros((2, KV_HEADS, 60, HEAD_DIM))
        for i, length in enumerate(_LENS):
            expected[i, :, :length] = _tokens(pool, i).swapaxes(0, 1)
        data.same(out, expected, name)


def _tokens(pool: mx.array, sequence: int) -> np.ndarray:
    """``[context_len, KV_HEADS, HEAD_DIM]``"""
    rows = exact(pool)[_TABLES[sequence]].reshape(-1, KV_HEADS, HEAD_DIM)
    return rows[: _LENS[sequence]]


def _attention(
    data: Data,
    query_lens: list[int],
    *,
    group: int = 4,
    window: int | None = None,
    softcap: float | None = None,
    with_sinks: bool = False,
    split_tokens: int = 4096,
) -> None:
    key_pool, value_pool = _pools(data)
    queries = data.normal(sum(query_lens), group * KV_HEADS, HEAD_DIM)
    sinks = data.normal(group * KV_HEADS) if with_sinks else None
    plan = build_plan(
        _TABLES, _LENS, query_lens, block_size=BLOCK_SIZE, window=window, split_tokens=split_tokens
    )
    out = ops.paged_attention(
        queries,
        key_pool,
        value_pool,
        plan,
        scale=_SCALE,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    rows: list[np.ndarray] = []
    all_queries = exact(queries)
    logits = None if sinks is None else exact(sinks).reshape(KV_HEADS, group, 1)
    for i, (length, count) in enumerate(zip(_LENS, query_lens)):
        keys, values = (_tokens(pool, i) for pool in (key_pool, value_pool))
        for p in range(length - count, length):
            seen = slice(0 if window is None else max(0, p - window + 1), p + 1)
            query = all_queries[len(rows)].reshape(KV_HEADS, group, HEAD_DIM)
            scores = _SCALE * query @ keys[seen].transpose(1, 2, 0)
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            if logits is not None:
                scores = np.concatenate([scores, logits], axis=-1)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            mixed = weights[..., : len(keys[seen])] @ values[seen].swapaxes(0, 1)
            rows.append(mixed.reshape(group * KV_HEADS, HEAD_DIM))
    data.check(out, np.stack(rows))


def _rope_rotations(data: Data) -> None:
    positions, freqs = np.array([0, 5, 4095]), 10000.0 ** (-np.arange(0, 1, 1 / 16))
    out = ops.rope_rotations(
        mx.array(positions, mx.int32), mx.array(freqs.astype(np.float32)), scale=0.5
    )
    angles = 0.5 * positions[:, None] * freqs.astype(np.float32).astype(np.float64)
    # An angle of 2,000 radians keeps four digits in float32.
    difference = np.abs(exact(out) - np.stack([np.cos(angles), np.sin(angles)], axis=1)).max()
    if not difference < 1e-3:
        raise WrongResult(f"a cosine or sine is off by {difference:.1e}, expected at most 1e-03")


def _rope(data: Data) -> None:
    x = data.normal(3, 2, 1, HEAD_DIM)
    angles = np.random.default_rng(1).uniform(-3, 3, (3, HEAD_DIM // 2)).astype(np.float32)
    rotations = mx.array(np.stack([np.cos(angles), np.sin(angles)], axis=1))
    cos, sin = (exact(rotations)[:, i, None, None, :] for i in range(2))
    a, b = np.split(exact(x), 2, axis=-1)
    expected = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    data.check(ops.rope(x, rotations), expected)


def _rms_norm(data: Data) -> None:
    x, weight = data.normal(5, 96), data.normal(96)
    wide = exact(x)
    expected = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5) * exact(weight)
    data.check(ops.rms_norm(x, weight, 1e-5), expected)


def _silu_mul(data: Data) -> None:
    gate, x = data.normal(5, 96), data.normal(5, 96)
    data.check(ops.silu_mul(gate, x), exact(gate) / (1 + np.exp(-exact(gate))) * exact(x))


def _greedy_tokens(data: Data) -> None:
    logits = exact(data.normal(4, 1000))
    logits[3, 500] = np.nan
    tokens, has_nan = ops.greedy_tokens(mx.array(logits.astype(np.float32)).astype(data.dtype))
    data.same(tokens[:3], np.argmax(logits[:3], axis=-1).astype(np.float64), "tokens")
    data.same(has_nan, np.array([0.0, 0.0, 0.0, 1.0]), "NaN flags")


def _nucleus_thresholds(data: Data) -> None:
    logits = exact(data.normal(4, 200)) * 2
    logits -= logits.max(axis=-1, keepdims=True)
    logits = logits.astype(np.float32).astype(np.float64)
    top_p = np.array([0.1, 0.5, 0.9, 0.999])
    down = -np.sort(-logits, axis=-1)
    shares = np.exp(down) / np.exp(down).sum(axis=-1, keepdims=True)
    kept = (np.cumsum(shares, axis=-1) - shares < top_p[:, None]).sum(axis=-1)
    floors = mx.full((4,), -1000.0)
    out = ops.nucleus_thresholds(
        mx.array(logits.astype(np.float32)), floors, mx.array(top_p.astype(np.float32))
    )
    data.same(out, down[np.arange(4), kept - 1], "thresholds")


def _linear(data: Data) -> None:
    x, weight, bias = data.normal(7, 96), data.normal(33, 96), data.normal(33)
    data.check(ops.linear(x, weight, bias), exact(x) @ exact(weight).T + exact(bias))


def _upload(data: Data) -> None:
    sent = [np.arange(7, dtype=np.int32), exact(data.normal(3, 5)).astype(np.float32)]
    for name, out, expected in zip(("integers", "floats"), ops.upload(*sent), sent):
        data.same(out, expected.astype(np.float64), name)


def _to_host(data: Data) -> None:
    numbers = np.arange(-3, 1000, dtype=np.int32)
    data.same(ops.to_host(mx.array(numbers) + 0), numbers.astype(np.float64), "integers")


CASES: dict[str, Case] = {
    "allocate_pool": Case(_allocate_pool, gpu_dtypes=DTYPES),
    "write_kv": Case(_write_kv, gpu_dtypes=DTYPES),
    "copy_blocks": Case(_copy_blocks, gpu_dtypes=DTYPES),
    "gather_kv": Case(_gather_kv, gpu_dtypes=DTYPES),
    "paged_attention: decode": Case(lambda d: _attention(d, [1, 1], group=1), gpu_dtypes=DTYPES),
    "paged_attention: grouped decode": Case(lambda d: _attention(d, [1, 1]), gpu_dtypes=DTYPES),
    "paged_attention: prefill": Case(lambda d: _attention(d, [40, 1]), gpu_dtypes=DTYPES),
    "paged_attention: split and merged": Case(
        lambda d: _attention(d, [1, 2], split_tokens=16), gpu_dtypes=DTYPES
    ),
    "paged_attention: window": Case(lambda d: _attention(d, [20, 1], window=24), gpu_dtypes=DTYPES),
    "paged_attention: softcap and sinks": Case(
        lambda d: _attention(d, [1, 3], softcap=5.0, with_sinks=True), gpu_dtypes=DTYPES
    ),
    "rope_rotations": Case(_rope_rotations, dtypes=("float32",)),
    "rope": Case(_rope),
    "rms_norm": Case(_rms_norm),
    "silu_mul": Case(_silu_mul),
    "greedy_tokens": Case(_greedy_tokens),
    "nucleus_thresholds": Case(_nucleus_thresholds, dtypes=("float32",)),
    # In float32 it is MLX's own on a GPU, which may round to TF32.
    "linear": Case(_linear, gpu_dtypes=("float16", "bfloat16")),
    "upload": Case(_upload, dtypes=("float32",), gpu_dtypes=("float32",)),
    "to_host": Case(_to_host, dtypes=("float32",), gpu_dtypes=("float32",)),
}
