"""Paged data for the oracle (`mlx_paged.reference`): slots that must not be read hold NaN."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged import reference
from mlx_paged.model.plan import build_plan
from mlx_paged.ops import AttentionPlan
from mlx_paged.reference import (  # noqa: F401  (tests take the oracle from here, with its data)
    copy_blocks,
    gather_kv,
    paged_attention,
    tokens_of,
    write_kv,
)

TOLERANCE = {getattr(mx, name): most for name, most in reference.TOLERANCE.items()}
DTYPES = tuple(TOLERANCE)

ON_GPU = os.environ.get("MLX_PAGED_TEST_DEVICE") == "gpu"
# Key and value head dims that have GPU kernels, smallest first.
GPU_HEAD_DIMS = (
    *((d, d) for d in (32, 64, 80, 96, 112, 128)),
    *((192, 128), (192, 192), (256, 256), (512, 512), (576, 512)),
)
# Head dims of the media tests' tiny models: small, but supported by the device.
HEAD_DIM = int(os.environ.get("MLX_PAGED_TEST_HEAD_DIM") or (32 if ON_GPU else 16))


def to_numpy(a: mx.array) -> np.ndarray:
    """A float64 copy; it represents every value of the three dtypes exactly."""
    return np.array(a.astype(mx.float32)).astype(np.float64)


def exact(options: dict[str, mx.array | float | None]) -> dict[str, Any]:
    """Options of `ops.paged_attention` as the oracle takes them."""
    return {k: to_numpy(v) if isinstance(v, mx.array) else v for k, v in options.items()}


def alibi_slopes(num_heads: int) -> mx.array:
    """ALiBi slopes for `num_heads` heads (Press et al. 2021). The last one is negative, so
    that tests notice swapped heads and wrong signs."""
    slopes = 2.0 ** (-8.0 * np.arange(1, num_heads + 1) / num_heads)
    slopes[-1] *= -1.0
    return mx.array(slopes.astype(np.float32))


def bits(a: mx.array) -> np.ndarray:
    """The raw words, which tell -0.0 from 0.0 and one NaN from another."""
    return np.array(mx.contiguous(a).view(mx.uint32 if a.dtype.size == 4 else mx.uint16))


def address(a: mx.array) -> int:
    """Address of an evaluated array's buffer."""
    mx.eval(a)
    words = a.view(mx.uint32 if a.dtype.size == 4 else mx.uint16)
    return int(np.array(words, copy=False).__array_interface__["data"][0])


@dataclass(frozen=True)
class PagedBatch:
    """Sequences in scattered blocks, and the query rows of one step."""

    queries: mx.array  # [num_rows, num_q_heads, key_dim]
    key_pool: mx.array  # [num_blocks, block_size, num_kv_heads, key_dim]
    value_pool: mx.array  # [num_blocks, block_size, num_kv_heads, value_dim]
    tables: list[list[int]]
    context_lens: list[int]
    query_lens: list[int]
    bounds: np.ndarray | None = None  # [2, num_rows]

    def plan(self, **limits: int) -> AttentionPlan:
        block_size = self.key_pool.shape[1]
        return build_plan(
            self.tables,
            self.context_lens,
            self.query_lens,
            block_size=block_size,
            bounds=self.bounds,
            **limits,
        )

    def expected(self, **options: mx.array | float | None) -> np.ndarray:
        return paged_attention(
            to_numpy(self.queries),
            to_numpy(self.key_pool),
            to_numpy(self.value_pool),
            self.tables,
            self.context_lens,
            self.query_lens,
            bounds=self.bounds,
            **exact(options),
        )


def make_batch(
    rng: np.random.Generator,
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    key_dim: int = 32,
    value_dim: int | None = None,
    block_size: int = 16,
    dtype: mx.Dtype = mx.float32,
    window: int | None = None,
    bounds: np.ndarray | None = None,
) -> PagedBatch:
    """Random sequences; slots outside every context, or before every window, hold NaN.

    `bounds` are the rows' bounds, see `spans_of`; tokens within a row's bounds are not NaN.

    On a GPU, a head dim without a kernel is replaced by the next larger one that has a kernel, or
    by the largest.
    """
    value_dim = value_dim or key_dim
    if ON_GPU:
        fitting = ((k, v) for k, v in GPU_HEAD_DIMS if k >= key_dim and v >= value_dim)
        key_dim, value_dim = next(fitting, GPU_HEAD_DIMS[-1])
    num_blocks = [-(-n // block_size) for n in context_lens]
    ids = 1 + rng.permutation(sum(num_blocks) + 2)  # block 0 is unused, two are spare
    tables = [part.tolist() for part in np.split(ids[:-2], np.cumsum(num_blocks)[:-1])]
    tables = tables if num_blocks else []

    def pool(head_dim: int) -> mx.array:
        data = np.full((len(ids) + 1, block_size, num_kv_heads, head_dim), np.nan, np.float32)
        row = 0
        for table, context_len, query_len in zip(tables, context_lens, query_lens):
            first = 0 if window is None else max(0, context_len - query_len - window + 1)
            if bounds is not None and query_len:
                first = min(first, int(bounds[0, row : row + query_len].min()))
            row += query_len
            for p in range(first, context_len):
                token = rng.standard_normal((num_kv_heads, head_dim))
                data[table[p // block_size], p % block_size] = token
        return mx.array(data).astype(dtype)

    queries = rng.standard_normal((sum(query_lens), num_q_heads, key_dim)).astype(np.float32)
    return PagedBatch(
        mx.array(queries).astype(dtype),
        pool(key_dim),
        pool(value_dim),
        tables,
        list(context_lens),
        list(query_lens),
        bounds,
    )


def spans_of(
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    spans: Sequence[Sequence[tuple[int, int]]],
) -> np.ndarray:
    """``[2, num_rows]`` bounds of rows that see their whole span.

    Args:
        spans: First and last position of each span, for each sequence.
    """
    positions = [np.arange(n - rows, n) for n, rows in zip(context_lens, query_lens)]
    bounds = np.stack([np.concatenate(positions)] * 2).astype(np.int32)
    row = 0
    for at, of_sequence in zip(positions, spans):
        for first, last in of_sequence:
            inside = row + np.flatnonzero((at >= first) & (at <= last))
            bounds[0, inside], bounds[1, inside] = first, last
        row += len(at)
    return bounds


def assert_close(actual: mx.array, expected: np.ndarray, tolerance: float | None = None) -> None:
    """Asserts that each row is within the dtype's tolerance, relative to the row's norm."""
    assert actual.shape == expected.shape
    errors = reference.relative_errors(to_numpy(actual), expected)
    bound = tolerance or TOLERANCE[actual.dtype]
    worst = int(np.argmax(errors)) if len(errors) else 0
    assert (errors <= bound).all(), f"row {worst}: error {errors[worst]} exceeds {bound}"


def noncontiguous(a: mx.array) -> dict[str, mx.array]:
    """Evaluated arrays equal to `a` that are not contiguous or do not start at offset 0."""
    axes = list(reversed(range(a.ndim)))
    spread = mx.repeat(a, 2, axis=-1)
    padded = mx.concatenate([a[:1], a, a[:1]])
    views = {
        "transposed": (
            mx.contiguous(a.transpose(axes)),
            lambda base: base.transpose(axes),
        ),
        "strided": (spread, lambda base: base[..., ::2]),
        "offset": (padded, lambda base: base[1:-1]),
    }
    mx.eval(*(base for base, _ in views.values()))
    made = {name: view(base) for name, (base, view) in views.items()}
    mx.eval(*made.values())
    return made
