"""Quantized pools in float64 NumPy, written only from their description in `mlx_paged.ops`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList

from mlx_paged import ops
from support import reference
from support.reference import PagedBatch, make_batch, to_numpy

# Valid pairs of key and value formats, by the name of --kv-cache-dtype.
FORMATS = {
    "int8": (mx.int8, mx.int8),
    "int8_k_int4_v": (mx.int8, mx.uint32),
    "int4": (mx.uint32, mx.uint32),
    "fp8": (mx.uint8, mx.uint8),
}
GROUP = 32


def groups(head_dim: int) -> int:
    return -(-head_dim // GROUP)


def row_bytes(dtype: mx.Dtype, head_dim: int) -> tuple[int, int]:
    """Bytes of the codes and of the scales per token and head."""
    return {
        mx.int8: (head_dim, 2),
        mx.uint32: (head_dim // 2, 4 * groups(head_dim)),
        mx.uint8: (head_dim, 0),
    }[dtype]


def raw(pool: mx.array) -> np.ndarray:
    """``[num_blocks, bytes of a block]`` uint8, a copy."""
    return np.array(mx.contiguous(pool)).view(np.uint8).reshape(pool.shape[0], -1).copy()


def parts(pool: mx.array, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """``[num_blocks, block_size, num_kv_heads, *]`` uint8 codes and scales."""
    num_blocks, block_size, heads, _ = pool.shape
    code, tail = row_bytes(pool.dtype, head_dim)
    data = raw(pool)
    assert data.shape[1] == block_size * heads * (code + tail)
    split = block_size * heads * code
    codes = data[:, :split].reshape(num_blocks, block_size, heads, code)
    scales = data[:, split:].reshape(num_blocks, heads, block_size, tail)
    return codes, scales.swapaxes(1, 2)


def e4m3(codes: np.ndarray) -> np.ndarray:
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    value = np.where(
        exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7)
    )
    return sign * np.where((codes & 0x7F) == 0x7F, np.nan, value)


def steps(pool: mx.array, head_dim: int) -> np.ndarray:
    """``[num_blocks, block_size, num_kv_heads, head_dim]``: distance between adjacent int8 or int4
    codes."""
    scales = np.ascontiguousarray(parts(pool, head_dim)[1]).view(np.float16).astype(np.float64)
    if pool.dtype == mx.int8:
        return np.broadcast_to(scales, (*scales.shape[:3], head_dim))
    return np.repeat(scales[..., ::2], GROUP, axis=-1)[..., :head_dim]


def decoded(pool: mx.array, head_dim: int) -> np.ndarray:
    """``[num_blocks, block_size, num_kv_heads, head_dim]`` float64: the dequantized values."""
    codes, tails = parts(pool, head_dim)
    if pool.dtype == mx.uint8:
        return e4m3(codes)
    scales = np.ascontiguousarray(tails).view(np.float16).astype(np.float64)
    if pool.dtype == mx.int8:
        return codes.view(np.int8) * scales
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:3], head_dim)
    step, least = (np.repeat(scales[..., i::2], GROUP, axis=-1)[..., :head_dim] for i in range(2))
    return nibbles * step + least


def rotation(dtype: mx.Dtype, head_dim: int) -> np.ndarray:
    """``[head_dim, head_dim]``: the rotation of keys before quantization."""
    if dtype == mx.uint8:
        return np.eye(head_dim)
    run = head_dim & -head_dim
    hadamard = np.ones((1, 1))
    while len(hadamard) < run:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    matrix = np.kron(np.eye(head_dim // run), hadamard / np.sqrt(run))
    signs = []
    for dim in range(head_dim):
        x = ((dim + 1) * 0x9E3779B1) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x85EBCA77) & 0xFFFFFFFF
        signs.append(-1.0 if (x ^ (x >> 13)) >> 31 else 1.0)
    return matrix * np.array(signs)


def keys_of(pool: mx.array, head_dim: int) -> np.ndarray:
    """`decoded` keys, rotated back."""
    return decoded(pool, head_dim) @ rotation(pool.dtype, head_dim)


@dataclass(frozen=True)
class QuantizedBatch:
    """A batch with quantized pools, and the dense batch they were made from."""

    plain: PagedBatch
    key_pool: mx.array
    value_pool: mx.array

    @property
    def dims(self) -> tuple[int, int]:
        return self.plain.key_pool.shape[-1], self.plain.value_pool.shape[-1]

    def attend(self, plan: ops.AttentionPlan | None = None, **options: object) -> mx.array:
        plan = plan or self.plain.plan()
        return ops.paged_attention(
            self.plain.queries, self.key_pool, self.value_pool, plan, **options
        )

    def expected(self, **options: mx.array | float | None) -> np.ndarray:
        """The oracle on the dequantized values."""
        plain = self.plain
        return reference.paged_attention(
            to_numpy(plain.queries),
            keys_of(self.key_pool, self.dims[0]),
            decoded(self.value_pool, self.dims[1]),
            plain.tables,
            plain.context_lens,
            plain.query_lens,
            bounds=plain.bounds,
            **reference.exact(options),
        )


def empty_pools(batch: PagedBatch, name: str) -> list[mx.array]:
    """Pools of the batch's shape, with every byte 0xff: scales and e4m3 are NaN."""
    pools = []
    for plain, dtype in zip((batch.key_pool, batch.value_pool), FORMATS[name]):
        num_blocks, block_size, heads, dim = plain.shape
        last = sum(row_bytes(dtype, dim)) // dtype.size
        shape = (num_blocks, block_size, heads, last)
        pools.append(
            mx.full((int(np.prod(shape)) * dtype.size,), 255, mx.uint8).view(dtype).reshape(shape)
        )
    return pools


def quantized(batch: PagedBatch, name: str, chunks: Sequence[int] = ()) -> QuantizedBatch:
    """Writes each sequence's non-NaN tokens, `chunks` tokens at a time."""
    pools = empty_pools(batch, name)
    block_size = batch.key_pool.shape[1]
    for table, context_len in zip(batch.tables, batch.context_lens):
        slots = np.array(
            [table[p // block_size] * block_size + p % block_size for p in range(context_len)],
            np.int32,
        )
        rows = [
            pool.reshape(-1, *pool.shape[2:])[mx.array(slots)] if len(slots) else pool[:0, 0]
            for pool in (batch.key_pool, batch.value_pool)
        ]
        held = ~np.isnan(to_numpy(rows[0])).any(axis=(1, 2))
        slots = np.where(held, slots, -1).astype(np.int32)
        at = 0
        sizes = iter(chunks)
        while at < len(slots):
            end = min(len(slots), at + next(sizes, len(slots)))
            pools = ops.write_kv(*pools, rows[0][at:end], rows[1][at:end], mx.array(slots[at:end]))
            at = end
    mx.eval(*pools)
    return QuantizedBatch(batch, *pools)


def make_quantized(
    rng: np.random.Generator, *args: object, name: str, **options: object
) -> QuantizedBatch:
    """`make_batch` with quantized pools."""
    return quantized(make_batch(rng, *args, **options), name)


# --- mlx-lm's dense caches with the values of a quantized pool ------------------------------------


def _fp16_above(x: mx.array) -> mx.array:
    """The smallest float16 that is not below x >= 0, as float32."""
    half = x.astype(mx.float16)
    above = (half.view(mx.uint16) + 1).view(mx.float16)
    return mx.where(half.astype(mx.float32) < x, above, half).astype(mx.float32)


def _fp16_below(x: mx.array) -> mx.array:
    half = x.astype(mx.float16)
    bits = half.view(mx.uint16)
    below = mx.where(bits >= 0x8000, bits + 1, mx.where(bits == 0, 0x8001, bits - 1))
    below = below.astype(mx.uint16).view(mx.float16)
    return mx.where(half.astype(mx.float32) > x, below, half).astype(mx.float32)


def _divided(x: mx.array, step: mx.array) -> mx.array:
    return mx.where(step > 0, x / mx.where(step > 0, step, 1.0), 0.0)


def kept(x: mx.array, dtype: mx.Dtype, *, keys: bool) -> mx.array:
    """``[..., head_dim]`` numbers after a round trip through a pool of `dtype`."""
    dim = x.shape[-1]
    rotated = mx.array(rotation(dtype, dim) if keys else np.eye(dim)).astype(mx.float32)
    y = x.astype(mx.float32) @ rotated.T
    if dtype == mx.int8:
        step = _fp16_above(mx.abs(y).max(axis=-1, keepdims=True) / 127)
        y = mx.round(_divided(y, step)) * step
    elif dtype == mx.uint8:
        y = mx.from_fp8(mx.to_fp8(y), mx.float32)
    else:
        groups = []
        for begin in range(0, dim, GROUP):
            group = y[..., begin : begin + GROUP]
            least = _fp16_below(group.min(axis=-1, keepdims=True))
            step = _fp16_above((group.max(axis=-1, keepdims=True) - least) / 15)
            groups.append(mx.round(_divided(group - least, step)) * step + least)
        y = mx.concatenate(groups, axis=-1)
    return (y @ rotated).astype(x.dtype)


Keep = Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]


def keeping(caches: Sequence[Any], keeps: Iterator[Keep | None]) -> list[Any]:
    """mlx-lm's own caches; attention layer i stores keeps[i] of its keys and values
    ``[1, num_kv_heads, num_tokens, head_dim]``; None stores them unchanged."""

    def replace(cache: Any) -> None:
        kind = type(cache)
        if isinstance(cache, CacheList):
            for part in cache.caches:
                replace(part)
        elif hasattr(kind, "update_and_fetch"):
            keep = next(keeps)
            if keep is None:
                return

            def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
                return kind.update_and_fetch(self, *keep(keys, values))

            cache.__class__ = type(kind.__name__, (kind,), {"update_and_fetch": update_and_fetch})

    for cache in caches:
        replace(cache)
    return list(caches)


def quantizing(caches: Sequence[Any], name: str, skip: Sequence[int] = ()) -> list[Any]:
    """mlx-lm's own caches, whose attention layers store the dequantized values."""
    key_dtype, value_dtype = FORMATS[name]

    def keep(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return kept(keys, key_dtype, keys=True), kept(values, value_dtype, keys=False)

    return keeping(caches, (None if i in skip else keep for i in count()))


def half_steps(x: np.ndarray, pool: mx.array, slots: np.ndarray, *, keys: bool) -> np.ndarray:
    """Errors of the codes at those slots against the original ``[num_tokens, num_kv_heads,
    head_dim]`` numbers, in half code distances: at most 1 if every code is the nearest."""
    dim = x.shape[-1]
    held = decoded(pool, dim).reshape(-1, *x.shape[1:])[slots]
    wanted = x @ rotation(pool.dtype, dim).T if keys else x
    if pool.dtype == mx.uint8:
        half = np.maximum(2.0 ** (np.floor(np.log2(np.abs(wanted) + 1e-30)) - 4), 2.0**-10)
    else:
        half = steps(pool, dim).reshape(-1, *x.shape[1:])[slots] / 2
    return np.abs(held - wanted) / np.maximum(half, 1e-12)


def holding(caches: Sequence[Any], pools: Sequence[Any], slots: np.ndarray) -> list[Any]:
    """mlx-lm's own caches with the values that pools hold at the slots of a sequence's tokens.

    Checks that these values are the nearest to the given ones.

    Args:
        pools: One for each attention layer, with `key_pool` and `value_pool`.
    """

    def keep_of(layer: Any) -> Keep:
        begin = 0

        def keep(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            nonlocal begin
            here = slots[begin : begin + keys.shape[2]]
            begin += keys.shape[2]
            kept = []
            for given, pool, is_keys in (
                (keys, layer.key_pool, True),
                (values, layer.value_pool, False),
            ):
                x = to_numpy(given)[0].swapaxes(0, 1)
                assert half_steps(x, pool, here, keys=is_keys).max() < 1.01
                known = (keys_of if is_keys else decoded)(pool, x.shape[-1])
                rows = known.reshape(-1, *x.shape[1:])[here].swapaxes(0, 1)[None]
                kept.append(mx.array(rows.astype(np.float32)))
            return kept[0], kept[1]

        return keep

    return keeping(caches, map(keep_of, pools))
