"""Computes long prefill chunks with MLX's fused attention over gathered keys and values, on CUDA.

MLX uses cuDNN there, which is faster than `ops.paged_attention` on such chunks even if keys and
values must be gathered first (see docs/cuda.md). Rows of other sequences, mainly decodes, use the
paged kernels.

cuDNN takes some 40 ms to prepare a new shape. So a chunk is padded to positions that are multiples
of `ALIGNMENT`: with rows before it, which are computed and dropped, and with rows and keys after
it, which none of its rows sees. A step with a whole prompt gathers nothing: it has just written all
keys and values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.model.layout import LayerSpec
from mlx_paged.model.plan import PaddedTables, Tables, build_plan
from mlx_paged.ops import AttentionOptions, AttentionPlan
from mlx_paged.platform import Platform

# Shorter chunks gain less than gathering and another shape cost.
MIN_ROWS = 512
ALIGNMENT = 256
# The Hopper kernel of `ops.paged_attention` takes a quarter longer than cuDNN. Only the shapes of
# chunks of multiples of this many rows recur, and the warm-up prepares those of a prompt's first
# two steps. For other shapes, cuDNN must make up for its preparation, which takes as long as this
# many products of a row with a key.
PREPARED_MULTIPLE = 4096
_PAIRS_ON_HOPPER = 8192 * 32768
_MAX_DIM = 128  # cuDNN's
# Maximum tokens of all sequences of one call. Gathered keys and values take memory, and longer
# calls are no faster, because the host is no longer the bottleneck.
_MAX_KEYS = 16384

Pools = tuple[mx.array, mx.array]  # of keys and of values
Rows = tuple[mx.array, mx.array]  # [num_rows, num_kv_heads, dim] keys and values


@dataclass(frozen=True)
class ChunkChoice:
    """Selects the chunks that MLX's attention computes.

    Attributes:
        on_hopper: True if there is a Hopper kernel for the other chunks.
    """

    on_hopper: bool = False

    def of(self, context_lens: np.ndarray, query_lens: np.ndarray) -> np.ndarray:
        """Returns ``[num_sequences]`` bools."""
        if not self.on_hopper:
            return query_lens >= MIN_ROWS
        is_whole = (query_lens % PREPARED_MULTIPLE == 0) & (context_lens % PREPARED_MULTIPLE == 0)
        return (query_lens > 0) & (is_whole | (query_lens * context_lens >= _PAIRS_ON_HOPPER))


@dataclass(frozen=True)
class Chunk:
    """The rows of one sequence in a step, or of several adjacent ones of the same shape."""

    first_row: int
    num_rows: int  # of all sequences
    num_sequences: int
    rows_before: int  # to add to each sequence, down to an aligned position
    rows_after: int
    num_keys: int  # of each, up to an aligned position
    block_tables: mx.array  # [num_sequences, num_keys / block_size] int32
    context_lens: mx.array  # [num_sequences] int32

    @property
    def _rows(self) -> int:
        """Columns of each sequence."""
        return self.num_rows // self.num_sequences

    @property
    def has_all_keys(self) -> bool:
        """True if its rows include all keys: no prompt is cached, and none is padded."""
        return self._rows == self.num_keys

    def attend(self, queries: mx.array, pools: Pools, own: Rows | None, scale: float) -> mx.array:
        """Attends with ``[num_rows, num_q_heads, dim]`` queries; returns the same shape.

        Args:
            own: Keys and values of the chunk's rows in the pools' dtype; None reads the pools.
        """
        if own is not None and self.has_all_keys:
            keys, values = map(self._by_sequence, own)
        else:
            keys, values = ops.gather_kv(
                *pools, self.block_tables, self.context_lens, self.num_keys
            )
        # The result has the memory layout of the queries, so this is no copy; an index would be.
        out = mx.fast.scaled_dot_product_attention(
            self._by_sequence(queries), keys, values, scale=scale, mask="causal"
        ).transpose(0, 2, 1, 3)
        return out[:, self.rows_before : self.rows_before + self._rows].flatten(0, 1)

    def _by_sequence(self, rows: mx.array) -> mx.array:
        """Pads ``[num_rows, heads, dim]`` to ``[num_sequences, heads, padded rows, dim]``."""
        rows = mx.unflatten(rows, 0, (self.num_sequences, self._rows))
        if self.rows_before or self.rows_after:
            around = (self.rows_before, self.rows_after)
            rows = mx.pad(rows, [(0, 0), around, (0, 0), (0, 0)])
        return rows.transpose(0, 2, 1, 3)


@dataclass(frozen=True)
class DensePrefill:
    """Divides the rows of a step between MLX's attention and the paged kernels."""

    chunks: tuple[Chunk, ...]
    others: tuple[tuple[int, int], ...]  # rows [b, e) of all other sequences, in runs
    plan: AttentionPlan | None  # of `others`, concatenated; None if there are none

    def attend(self, queries: mx.array, pools: Pools, own: Rows | None, scale: float) -> mx.array:
        """Computes `ops.paged_attention` of a whole step.

        Args:
            own: Keys and values of the step's rows, if available.
        """
        parts: dict[int, mx.array] = {}
        for chunk in self.chunks:
            rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
            of_chunk = None if own is None else (own[0][rows], own[1][rows])
            parts[chunk.first_row] = chunk.attend(queries[rows], pools, of_chunk, scale)
        if self.plan is not None:
            others = _joined([queries[b:e] for b, e in self.others])
            out = ops.paged_attention(others, *pools, self.plan, scale=scale)
            at = 0
            for begin, end in self.others:
                parts[begin] = out[at : at + end - begin]
                at += end - begin
        return _joined([parts[first] for first in sorted(parts)])


def choice_for(specs: Iterable[LayerSpec], block_size: int) -> ChunkChoice:
    """Returns the choice for a model with these layers."""
    dims = {spec.pool_dims for spec in specs}
    has_kernels = all(ops.has_wgmma_prefill(k, v, block_size) for k, v in dims)
    return ChunkChoice(on_hopper=ops.has_wgmma() and has_kernels)


def plan_dense_prefill(
    tables: Tables,
    context_lens: np.ndarray,
    query_lens: np.ndarray,
    *,
    block_size: int,
    bounds: np.ndarray | None = None,
    choice: ChunkChoice = ChunkChoice(),
    platform: Platform | None = None,
) -> DensePrefill | None:
    """Plans one step; None without a long chunk, or without CUDA. See `build_plan`.

    Args:
        choice: Selects the long chunks.

    A chunk with rows that see later positions is not MLX's causal attention, and is left to the
    paged kernels.
    """
    long = choice.of(context_lens, query_lens)
    platform = platform or Platform.current()
    if not (platform.has_cuda and long.any()):
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
            tables.blocks[group],
            context_lens[group],
            query_lens[group],
            int(starts[group[0]]),
            block_size,
        )
        for group in _alike(np.flatnonzero(long), context_lens, query_lens)
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
        platform=platform,
    )
    return DensePrefill(chunks, tuple(others), plan)


def serves(spec: LayerSpec, options: AttentionOptions) -> bool:
    """True if MLX's fused attention can compute a layer's attention."""
    return (
        spec.window is None
        and all(value is None for name, value in options.items() if name != "scale")
        and not spec.latent
        and spec.kv_format is None  # A quantized pool exists to avoid a dense copy.
        and spec.dtype in (mx.float16, mx.bfloat16)
        and spec.key_dim == spec.value_dim <= _MAX_DIM
        and spec.pool_dims == (spec.key_dim, spec.value_dim)
    )


def _alike(
    members: np.ndarray, context_lens: np.ndarray, query_lens: np.ndarray
) -> Iterator[np.ndarray]:
    """Adjacent sequences with equal numbers of rows and keys. Their number is a power of two,
    because each number is another shape.
    """
    first = 0
    while first < len(members):
        count = 1
        keys = _aligned(int(context_lens[members[first]]))
        while first + 2 * count <= len(members) and 2 * count * keys <= _MAX_KEYS:
            group = members[first : first + 2 * count]
            is_run = group[-1] - group[0] == len(group) - 1
            if not (is_run and np.ptp(context_lens[group]) == np.ptp(query_lens[group]) == 0):
                break
            count *= 2
        yield members[first : first + count]
        first += count


def _chunk(
    tables: np.ndarray,
    context_lens: np.ndarray,
    query_lens: np.ndarray,
    first_row: int,
    block_size: int,
) -> Chunk:
    """Groups adjacent sequences of the same shape."""
    count, rows, context = len(tables), int(query_lens[0]), int(context_lens[0])
    num_keys = _aligned(context)
    blocks = np.zeros((count, -(-num_keys // block_size)), dtype=np.int32)
    used = tables[:, : blocks.shape[1]]
    blocks[:, : used.shape[1]] = used
    block_tables, lens = ops.upload(blocks, context_lens.astype(np.int32))
    return Chunk(
        first_row=first_row,
        num_rows=count * rows,
        num_sequences=count,
        rows_before=(context - rows) % ALIGNMENT,
        rows_after=num_keys - context,
        num_keys=num_keys,
        block_tables=block_tables,
        context_lens=lens,
    )


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _joined(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)
