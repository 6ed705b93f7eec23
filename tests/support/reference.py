"""The oracle: the four operations in float64 NumPy, written from their contract alone.

The token at position p of a sequence lives in block ``table[p // block_size]`` at offset
``p % block_size``. The query rows of a step are the last ``query_len`` tokens of each sequence, one
sequence after the other, and a row sees the tokens up to and including itself. With bounds it also
sees every token from its first bound to its last.

Below the oracle: paged data to ask it about, in which every slot that nothing may read is NaN.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_paged.model.plan import build_plan
from mlx_paged.ops import AttentionPlan

# Largest error of a row, relative to the row's norm.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}
DTYPES = tuple(TOLERANCE)

ON_GPU = os.environ.get("MLX_PAGED_TEST_DEVICE") == "gpu"
# Key and value head dims that the GPU kernels are made for, the smaller first.
GPU_HEAD_DIMS = (
    *((d, d) for d in (32, 64, 80, 96, 112, 128)),
    *((192, 128), (192, 192), (256, 256), (512, 512), (576, 512)),
)
# Of the tiny models of the tests of media: small, but one that the device takes.
HEAD_DIM = int(os.environ.get("MLX_PAGED_TEST_HEAD_DIM") or (32 if ON_GPU else 16))


def write_kv(pool: np.ndarray, rows: np.ndarray, slots: Sequence[int]) -> np.ndarray:
    """A copy of `pool` in which row i stands at slot ``slots[i]``; -1 leaves it out."""
    written = pool.copy()
    for row, slot in zip(rows, slots):
        if slot != -1:
            written[slot // pool.shape[1], slot % pool.shape[1]] = row
    return written


def copy_blocks(pool: np.ndarray, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """A copy of `pool` in which each block ``dst`` holds what ``src`` held before."""
    copied = pool.copy()
    for src, dst in pairs:
        copied[dst] = pool[src]
    return copied


def tokens_of(pool: np.ndarray, table: Sequence[int], context_len: int) -> np.ndarray:
    """``[context_len, num_kv_heads, head_dim]``: a sequence's tokens in order."""
    block_size = pool.shape[1]
    tokens = [pool[table[p // block_size], p % block_size] for p in range(context_len)]
    return np.stack(tokens) if tokens else pool[:0, 0]


def gather_kv(
    pool: np.ndarray,
    tables: Sequence[Sequence[int]],
    context_lens: Sequence[int],
    max_context_len: int,
) -> np.ndarray:
    """``[num_seqs, num_kv_heads, max_context_len, head_dim]``, zero past each context."""
    dense = np.zeros((len(tables), pool.shape[2], max_context_len, pool.shape[3]), pool.dtype)
    for i, (table, context_len) in enumerate(zip(tables, context_lens)):
        length = min(context_len, max_context_len)
        dense[i, :, :length] = tokens_of(pool, table, length).swapaxes(0, 1)
    return dense


def paged_attention(
    queries: np.ndarray,
    key_pool: np.ndarray,
    value_pool: np.ndarray,
    tables: Sequence[Sequence[int]],
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    bounds: np.ndarray | None = None,
) -> np.ndarray:
    """``[num_rows, num_q_heads, value_dim]`` float64."""
    rows = []
    for table, context_len, query_len in zip(tables, context_lens, query_lens):
        keys = tokens_of(key_pool, table, context_len).astype(np.float64)
        values = tokens_of(value_pool, table, context_len).astype(np.float64)
        for position in range(context_len - query_len, context_len):
            first = 0 if window is None else max(0, position - window + 1)
            seen: slice | np.ndarray = slice(first, position + 1)
            if bounds is not None:
                tokens = np.arange(context_len)
                in_span = (bounds[0, len(rows)] <= tokens) & (tokens <= bounds[1, len(rows)])
                seen = ((first <= tokens) & (tokens <= position)) | in_span
            query = queries[len(rows)].astype(np.float64)
            rows.append(_attend(query, keys[seen], values[seen], scale, softcap, sinks))
    return np.stack(rows) if rows else np.zeros((0, queries.shape[1], value_pool.shape[3]))


def _attend(
    query: np.ndarray,  # [num_q_heads, key_dim]
    keys: np.ndarray,  # [num_tokens, num_kv_heads, key_dim]
    values: np.ndarray,  # [num_tokens, num_kv_heads, value_dim]
    scale: float,
    softcap: float | None,
    sinks: np.ndarray | None,
) -> np.ndarray:
    num_kv_heads = keys.shape[1]
    grouped = query.reshape(num_kv_heads, -1, query.shape[-1])
    scores = scale * (grouped @ keys.transpose(1, 2, 0))  # [num_kv_heads, group, num_tokens]
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    if sinks is not None:
        logits = np.asarray(sinks, np.float64).reshape(num_kv_heads, -1, 1)
        scores = np.concatenate([scores, logits], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = weights[..., : len(values)] @ values.swapaxes(0, 1)
    return mixed.reshape(query.shape[0], values.shape[-1])


# --- Data -----------------------------------------------------------------------------------------


def to_numpy(a: mx.array) -> np.ndarray:
    """Float64 copy; every value of the three dtypes is exact in it."""
    return np.array(a.astype(mx.float32)).astype(np.float64)


def bits(a: mx.array) -> np.ndarray:
    """The raw words: unlike values they tell -0.0 from 0.0 and one NaN from another."""
    return np.array(mx.contiguous(a).view(mx.uint32 if a.dtype.size == 4 else mx.uint16))


def address(a: mx.array) -> int:
    """Where the buffer of an evaluated array begins."""
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

    def expected(self, *, sinks: mx.array | None = None, **options: float | None) -> np.ndarray:
        return paged_attention(
            to_numpy(self.queries),
            to_numpy(self.key_pool),
            to_numpy(self.value_pool),
            self.tables,
            self.context_lens,
            self.query_lens,
            sinks=None if sinks is None else to_numpy(sinks),
            bounds=self.bounds,
            **options,
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

    `bounds` are those of the rows, `spans_of` makes some; what a row sees of them is no NaN.

    On a GPU, head dims that it has no kernel for become the next larger ones that it has, or
    its largest.
    """
    value_dim = value_dim or key_dim
    if ON_GPU:
        fitting = ((k, v) for k, v in GPU_HEAD_DIMS if k >= key_dim and v >= value_dim)
        key_dim, value_dim = next(fitting, GPU_HEAD_DIMS[-1])
    num_blocks = [-(-n // block_size) for n in context_lens]
    ids = 1 + rng.permutation(sum(num_blocks) + 2)  # block 0 belongs to nobody, two are spare
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
        spans: for each sequence the first and the last position of its spans.
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
    """Each row within the dtype's tolerance of the oracle, relative to the row's norm."""
    assert actual.shape == expected.shape
    rows = expected.reshape(expected.shape[0], int(np.prod(expected.shape[1:])))
    error = np.linalg.norm(to_numpy(actual).reshape(rows.shape) - rows, axis=1)
    bound = (tolerance or TOLERANCE[actual.dtype]) * np.linalg.norm(rows, axis=1)
    worst = int(np.argmax(np.nan_to_num(error - bound, nan=np.inf))) if len(rows) else 0
    assert (error <= bound).all(), f"row {worst}: error {error[worst]} exceeds {bound[worst]}"


def noncontiguous(a: mx.array) -> dict[str, mx.array]:
    """Evaluated arrays equal to `a` whose elements do not lie one after the other from offset 0."""
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
