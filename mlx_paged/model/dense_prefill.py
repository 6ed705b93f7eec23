"""Long prefill chunks by MLX's fused attention over gathered keys and values. (With CUDA.)

There MLX's is cuDNN's, two to eight times as fast as `ops.paged_attention` on such chunks (see
docs/cuda.md), and gathering costs little in comparison. Rows of other sequences, mainly decodes,
use the paged kernels.

cuDNN takes some 35 ms to prepare a new shape. So a chunk is widened to
positions that are multiples of `ALIGNMENT`: by rows before it, which are computed and dropped, and
by rows and keys behind it, which no row of it sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.model.layout import LayerSpec
from mlx_paged.model.plan import PaddedTables, Tables, build_plan
from mlx_paged.ops import AttentionPlan

# Shorter chunks gain less than gathering and another shape cost.
LEAST_ROWS = 512
ALIGNMENT = 256
_MOST_DIM = 128  # cuDNN's


@dataclass(frozen=True)
class Chunk:
    """One sequence's rows of a step."""

    first_row: int
    num_rows: int
    rows_before: int  # to add, down to an aligned position
    rows_behind: int
    num_keys: int  # up to an aligned position
    block_table: mx.array  # [1, num_keys / block_size] int32
    context_len: mx.array  # [1] int32

    def attend(
        self, queries: mx.array, key_pool: mx.array, value_pool: mx.array, scale: float
    ) -> mx.array:
        """``[num_rows, num_q_heads, dim]`` queries -> the same shape."""
        keys, values = ops.gather_kv(
            key_pool, value_pool, self.block_table, self.context_len, self.num_keys
        )
        if self.rows_before or self.rows_behind:
            queries = mx.pad(queries, [(self.rows_before, self.rows_behind), (0, 0), (0, 0)])
        out = mx.fast.scaled_dot_product_attention(
            queries.transpose(1, 0, 2)[None], keys, values, scale=scale, mask="causal"
        )
        return out[0].transpose(1, 0, 2)[self.rows_before : self.rows_before + self.num_rows]


@dataclass(frozen=True)
class DensePrefill:
    """How the rows of a step are divided between MLX's attention and the paged kernels."""

    chunks: tuple[Chunk, ...]
    others: tuple[tuple[int, int], ...]  # rows [b, e) of all other sequences, runs of them
    plan: AttentionPlan | None  # of `others`, side by side; None where there are none

    def attend(
        self, queries: mx.array, key_pool: mx.array, value_pool: mx.array, scale: float
    ) -> mx.array:
        """`ops.paged_attention` of a whole step."""
        parts = {
            c.first_row: c.attend(
                queries[c.first_row : c.first_row + c.num_rows], key_pool, value_pool, scale
            )
            for c in self.chunks
        }
        if self.plan is not None:
            rows = _joined([queries[b:e] for b, e in self.others])
            out = ops.paged_attention(rows, key_pool, value_pool, self.plan, scale=scale)
            at = 0
            for begin, end in self.others:
                parts[begin] = out[at : at + end - begin]
                at += end - begin
        return _joined([parts[first] for first in sorted(parts)])


def plan_dense_prefill(
    tables: Tables,
    context_lens: np.ndarray,
    query_lens: np.ndarray,
    *,
    block_size: int,
    bounds: np.ndarray | None = None,
) -> DensePrefill | None:
    """Plans one step; None where it has no long chunk, or no CUDA. See `build_plan`.

    A chunk of which some row sees behind its position is not MLX's causal attention, and is left
    to the paged kernels.
    """
    long = query_lens >= LEAST_ROWS
    if not (ops.has_cuda() and long.any()):
        return None
    ends = np.cumsum(query_lens)
    starts = ends - query_lens
    if bounds is not None:
        sequence = np.repeat(np.arange(len(query_lens)), query_lens)
        positions = np.arange(len(sequence)) + (context_lens - ends)[sequence]
        long[sequence[bounds[1] > positions]] = False
        if not long.any():
            return None
    if not isinstance(tables, PaddedTables):
        tables = PaddedTables.of(tables)
    chunks = tuple(
        _chunk(
            tables.blocks[i], int(context_lens[i]), int(query_lens[i]), int(starts[i]), block_size
        )
        for i in np.flatnonzero(long)
    )
    rest = np.flatnonzero(~long & (query_lens > 0))
    if not len(rest):
        return DensePrefill(chunks, (), None)
    others: list[tuple[int, int]] = []
    for i in rest:
        if others and others[-1][1] == starts[i]:
            others[-1] = (others[-1][0], int(ends[i]))
        else:
            others.append((int(starts[i]), int(ends[i])))
    plan = build_plan(
        PaddedTables(tables.blocks[rest], tables.lengths[rest]),
        context_lens[rest],
        query_lens[rest],
        block_size=block_size,
        bounds=None if bounds is None else bounds[:, np.isin(sequence, rest)],
    )
    return DensePrefill(chunks, tuple(others), plan)


def serves(spec: LayerSpec, *, sinks: mx.array | None, softcap: float | None) -> bool:
    """Whether MLX's fused attention can compute a layer's attention."""
    return (
        spec.window is None
        and sinks is None
        and softcap is None
        and not spec.latent
        and spec.kv_format is None  # (a dense copy of what is quantised is what it saves)
        and spec.dtype in (mx.float16, mx.bfloat16)
        and spec.key_dim == spec.value_dim <= _MOST_DIM
        and spec.pool_dims == (spec.key_dim, spec.value_dim)
    )


def _chunk(table: np.ndarray, context: int, rows: int, first_row: int, block_size: int) -> Chunk:
    start = context - rows
    before = start % ALIGNMENT
    num_keys = -(-context // ALIGNMENT) * ALIGNMENT
    blocks = np.zeros(-(-num_keys // block_size), dtype=np.int32)
    used = table[: len(blocks)]
    blocks[: len(used)] = used
    block_table, context_len = ops.upload(blocks[None], np.array([context], dtype=np.int32))
    return Chunk(first_row, rows, before, num_keys - context, num_keys, block_table, context_len)


def _joined(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)
