"""Dense access to the pools of one attention layer, for code that runs layers by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_paged import ops


def write_dense(cache: Any, keys: mx.array, values: mx.array, slot_mapping: mx.array) -> None:
    """Writes ``[batch, num_kv_heads, length, head_dim]`` keys and values of a layer.

    Args:
        cache: The layer's `KVPools`.
        slot_mapping: ``[batch * length]`` int32.

    Raises:
        ValueError: The number of heads or the head dim does not match the layer.
    """
    spec = cache.spec
    dims = (spec.key_dim, spec.value_dim)
    if spec.latent:
        dims = (spec.value_dim, spec.key_dim - spec.value_dim)
    for name, array, dim in zip(("keys", "values"), (keys, values), dims):
        if (array.shape[1], array.shape[3]) != (spec.num_kv_heads, dim):
            raise ValueError(
                f"[paged prompt cache] {name} must be of {spec.num_kv_heads} heads of {dim} "
                f"but got {array.shape[1]} of {array.shape[3]}: this cache belongs to another "
                "model"
            )
    if spec.latent:  # mlx-lm keeps two arrays, the pool has them concatenated
        keys, values = mx.concatenate([keys, values], axis=-1), values[..., :0]
    cache.key_pool, cache.value_pool = ops.write_kv(
        cache.key_pool,
        cache.value_pool,
        _to_rows(keys, spec.dtype, spec.pool_dims[0]),
        _to_rows(values, spec.dtype, spec.pool_dims[1]),
        slot_mapping,
    )


def read_dense(
    cache: Any, tables: Sequence[Sequence[int]], start: int, end: int, block_size: int
) -> tuple[mx.array, mx.array]:
    """Dense ``[batch, num_kv_heads, end - start, head_dim]`` keys and values of a layer.

    Args:
        cache: The layer's `KVPools`.
        tables: Blocks of each sequence.
    """
    spec = cache.spec
    first, start = divmod(start, block_size)
    end -= first * block_size
    tables = [table[first:] for table in tables]
    width = max(map(len, tables))
    padded = [[*table, *[0] * (width - len(table))] for table in tables]
    keys, values = ops.gather_kv(
        cache.key_pool,
        cache.value_pool,
        mx.array(padded, dtype=mx.int32),
        mx.array([end] * len(tables), dtype=mx.int32),
        end,
        dtype=None if spec.kv_format is None else spec.dtype,
    )
    _write_after(cache, [keys, values])
    if spec.latent:
        keys, values = keys[..., : spec.value_dim], keys[..., spec.value_dim : spec.key_dim]
    else:
        keys, values = keys[..., : spec.key_dim], values[..., : spec.value_dim]
    return (keys[:, :, start:], values[:, :, start:]) if start else (keys, values)


def order_reads(cache: Any) -> None:
    """Makes every write depend on the reads before it, in any order of evaluation.

    Writes are in place, and mlx-lm's callers may trim a cache and continue before they evaluate
    logits. The engine evaluates every step, so it does not need this.
    """
    method = "attend" if hasattr(cache, "attend") else "update_and_fetch"
    read = getattr(type(cache), method)

    def read_in_order(*args: Any, **kwargs: Any) -> Any:
        out = read(cache, *args, **kwargs)
        _write_after(cache, out)
        return out

    setattr(cache, method, read_in_order)


def _write_after(cache: Any, reads: Any) -> None:
    reads = list(reads) if isinstance(reads, tuple) else reads
    cache.key_pool, cache.value_pool = mx.depends([cache.key_pool, cache.value_pool], reads)


def _to_rows(x: mx.array, dtype: mx.Dtype, pool_dim: int) -> mx.array:
    """``[batch, heads, length, dim]`` -> ``[batch * length, heads, pool_dim]``."""
    batch, heads, length, dim = x.shape
    rows = x.transpose(0, 2, 1, 3).reshape(batch * length, heads, dim).astype(dtype)
    missing = pool_dim - dim
    return mx.pad(rows, [(0, 0), (0, 0), (0, missing)]) if missing else rows
