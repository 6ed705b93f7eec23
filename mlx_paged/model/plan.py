"""Builds a step's `AttentionPlan` on the host.

Everything the kernels index with is made and checked here, where the numbers are still plain
integers; the kernels themselves cannot see a wrong block table before they follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

import numpy as np

from mlx_paged import ops
from mlx_paged.model import split
from mlx_paged.model.tables import PaddedTables
from mlx_paged.ops import AttentionPlan

# Query rows that share one pass over K and V. A prefill chunk is cut into items of this many rows.
ROWS_PER_ITEM = 32


def build_plan(
    block_tables: Sequence[Sequence[int]] | PaddedTables,
    context_lens: Sequence[int] | np.ndarray,
    query_lens: Sequence[int] | np.ndarray,
    *,
    block_size: int,
    window: int | None = None,
    rows_per_item: int = ROWS_PER_ITEM,
    split_tokens: int | None = None,
) -> AttentionPlan:
    """Plans one step over ragged sequences.

    Args:
        block_tables: for each sequence its blocks, in order; more than the context needs is fine.
        context_lens: for each sequence its tokens in the pool once this step's are written.
        query_lens: for each sequence how many of them, the last ones, are this step's query rows.
        block_size: tokens in a block.
        window: a row at position p sees positions in ``(p - window, p]`` only, so that the work
            begins there; None: it sees all. Blocks before may be any.
        rows_per_item: most query rows that one work item holds.
        split_tokens: most tokens of context that one work item covers, about; a longer context is
            split evenly, in pieces that run in parallel and are merged afterwards. None: as the
            device needs (`split.split_tokens`), from a row's own context alone.

    Raises:
        ValueError: for lists of different lengths, negative lengths, more query rows than context,
            or a block table too short for its context.
    """
    lens = np.asarray(context_lens, dtype=np.int64)
    rows = np.asarray(query_lens, dtype=np.int64)
    if not isinstance(block_tables, PaddedTables):
        block_tables = PaddedTables.of(block_tables)
    _validate(block_tables.lengths, lens, rows, block_size)
    limits = {"rows_per_item": rows_per_item, "split_tokens": split_tokens, "window": window}
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            _refuse(name, "at least 1", limit)

    tables = block_tables.blocks
    if (rows == 1).all():  # only decodes: what follows comes to this
        starts = np.arange(len(rows) + 1)
        sequence, positions = starts[:-1], lens - 1
    else:
        starts = np.concatenate([[0], np.cumsum(rows)])
        sequence = np.repeat(np.arange(len(rows)), rows)
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - (lens - rows), rows)
    block, offset = positions // block_size, positions % block_size
    slots = tables[sequence, block] * block_size + offset
    items, merges = _work_items(lens, rows, starts, block_size, window, rows_per_item, split_tokens)
    if ops.has_cuda() and len(positions) == len(rows):
        tables, items, merges = _in_strides(tables, items, merges)
    arrays = (positions, slots, tables, lens, starts, items, merges)
    return AttentionPlan(*ops.upload(*(a.astype(np.int32) for a in arrays)))


def _in_strides(
    tables: np.ndarray, items: np.ndarray, merges: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same, grown to sizes that stay while contexts grow by some blocks.

    Steps of one shape can be one graph (`models.compiled_step`). An item or merge of no rows does
    nothing, and no item leads to the additional blocks.
    """

    def grown(a: np.ndarray, axis: int, least: int) -> np.ndarray:
        size = a.shape[axis]
        stride = max(least, 1 << max(0, size.bit_length() - 3))
        missing = -size % stride
        if not missing:
            return a
        widths = [(0, missing if i == axis else 0) for i in range(a.ndim)]
        return np.pad(a, widths)

    return (
        grown(tables, 1, 16),
        grown(items, 0, 16),
        grown(merges, 0, 16) if len(merges) else merges,
    )


def _refuse(what: str, expected: str, actual: object) -> NoReturn:
    raise ValueError(f"[paged_attention] {what} must be {expected} but got {actual}")


def _validate(num_blocks: np.ndarray, lens: np.ndarray, rows: np.ndarray, block_size: int) -> None:
    if block_size not in (8, 16, 32, 64):
        _refuse("block_size", "8, 16, 32 or 64", block_size)
    for name, values in (("context_lens", lens), ("query_lens", rows)):
        if values.shape != num_blocks.shape:
            _refuse(name, f"of shape ({len(num_blocks)},) like block_tables", values.shape)
        if (values < 0).any():
            i = int((values < 0).argmax())
            _refuse(f"{name}[{i}]", "at least 0", values[i])
    if (rows > lens).any():
        i = int((rows > lens).argmax())
        _refuse(f"query_lens[{i}]", f"at most its context length {lens[i]}", rows[i])
    needed = -(-lens // block_size)
    if (num_blocks < needed).any():
        i = int((num_blocks < needed).argmax())
        _refuse(
            f"block_tables[{i}]",
            f"at least {needed[i]} blocks for context length {lens[i]} at block size {block_size}",
            num_blocks[i],
        )


def _work_items(
    lens: np.ndarray,
    rows: np.ndarray,
    starts: np.ndarray,
    block_size: int,
    window: int | None,
    rows_per_item: int,
    split_tokens: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """``[num_items, 6]`` work items, longest context first, and ``[num_merges, 4]`` merges."""
    if (rows == 1).all():  # one tile each
        sequence, row_begin, row_end, num_tokens = starts[:-1], starts[:-1], starts[1:], lens
        num_tiles = rows
    else:
        num_tiles = -(-rows // rows_per_item)
        sequence = np.repeat(np.arange(len(rows)), num_tiles)
        tile = np.arange(len(sequence)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
        row_begin = starts[sequence] + tile * rows_per_item
        row_end = np.minimum(row_begin + rows_per_item, starts[sequence + 1])
        # The last row of a tile sees the most: everything up to its own position.
        num_tokens = lens[sequence] - (starts[sequence + 1] - row_end)
    num_blocks = -(-num_tokens // block_size)
    first_block = no_partial = np.zeros_like(sequence)
    if window is not None:
        # The first row of a tile looks furthest back.
        first_seen = num_tokens - (row_end - row_begin) - (window - 1)
        first_block = np.maximum(first_seen, 0) // block_size
        num_tokens = num_tokens - first_block * block_size
    items = np.stack(
        [sequence, row_begin, row_end, first_block, num_blocks, no_partial - 1], axis=1
    )

    num_blocks = num_blocks - first_block
    longest = split_tokens or split.split_tokens(
        num_tokens, row_end - row_begin, num_tiles[sequence]
    )
    num_splits = np.minimum(-(-num_tokens // longest), num_blocks)
    order = np.argsort(-num_tokens, kind="stable")
    if not (num_splits > 1).any():
        return items[order], np.zeros((0, 4), dtype=np.int64)

    pieces: list[np.ndarray] = []
    merges: list[tuple[int, int, int, int]] = []
    partial = 0
    for i in order:
        if num_splits[i] <= 1:
            pieces.append(items[i])
            continue
        height = int(row_end[i] - row_begin[i])
        merges.append((int(row_begin[i]), int(row_end[i]), partial, int(num_splits[i])))
        bounds = np.arange(num_splits[i] + 1) * num_blocks[i] // num_splits[i] + first_block[i]
        for first, last in pairwise(bounds):
            pieces.append(np.array([*items[i, :3], first, last, partial]))
            partial += height
    return np.stack(pieces), np.array(merges)
