"""The plan of chunked attention (Llama 4): every chunk of a sequence is a sequence of its own.

A row at position p sees the keys of its own chunk, ``[p - p % chunk, p]``. A chunk is a whole
number of blocks, so its keys are a slice of the block table, and causal attention over that slice
is all that the kernels need to know.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_paged.model.plan import build_plan
from mlx_paged.model.tables import PaddedTables
from mlx_paged.ops import AttentionPlan


def build_chunk_plan(
    block_tables: Sequence[Sequence[int]] | PaddedTables,
    context_lens: Sequence[int] | np.ndarray,
    query_lens: Sequence[int] | np.ndarray,
    *,
    chunk: int,
    block_size: int,
) -> AttentionPlan:
    """Plans one step of layers with chunked attention.

    Its positions count from the beginning of a row's chunk. See `build_plan` for the arguments.

    Args:
        chunk: tokens of a chunk, a multiple of `block_size`.

    Raises:
        ValueError: for a chunk that is not a multiple of the block size.
    """
    if chunk < 1 or chunk % block_size:
        raise ValueError(
            f"[paged_attention] chunk must be a multiple of block_size {block_size} but got {chunk}"
        )
    if not isinstance(block_tables, PaddedTables):
        block_tables = PaddedTables.of(block_tables)
    blocks_per_chunk = chunk // block_size
    tables: list[list[int]] = []
    lens: list[int] = []
    rows: list[int] = []
    for i, (context, num_rows) in enumerate(zip(context_lens, query_lens)):
        first = int(context) - int(num_rows)
        table = block_tables.blocks[i, : block_tables.lengths[i]]
        while first < context:
            number = first // chunk
            end = min(int(context), (number + 1) * chunk)
            tables.append(
                table[number * blocks_per_chunk : (number + 1) * blocks_per_chunk].tolist()
            )
            lens.append(end - number * chunk)
            rows.append(end - first)
            first = end
    return build_plan(tables, lens, rows, block_size=block_size)
