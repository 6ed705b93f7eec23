"""An independent definition of plans in NumPy, to compare with `csrc/attention_plan.cpp`.

The package used it before plans were built in C++.
"""

from __future__ import annotations

import numpy as np

from mlx_paged.model.plan import PaddedTables

LONGEST = 4096
SHORTEST = 384
MAX_PIECES = 48
MAX_HALF_PIECES = 12
MAX_DRAFT_ROWS = 8
PREFILL_PIECES = 16
MAX_PREFILL_PIECES = 8
MAX_LONG_PIECES = 64
ROWS_OF_SHARE = 32
SHORTEST_PREFILL = 512


def reference_plan(
    tables: PaddedTables,
    lens: np.ndarray,
    rows: np.ndarray,
    *,
    block_size: int,
    window: int | None = None,
    rows_per_item: int = 32,
    split_tokens: int | None = None,
    bounds: np.ndarray | None = None,
    num_rows: int | None = None,
    on_gpu: bool = False,
    pads: bool = False,
) -> list[np.ndarray]:
    """The arrays of `ops.AttentionPlan`, int32; the bounds only if there are any.

    Args:
        on_gpu, pads: See `ops.plan_attention`; for the others, see `model.plan.build_plan`.
    """
    starts = np.concatenate([[0], np.cumsum(rows)])
    sequence = np.repeat(np.arange(len(rows)), rows)
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - (lens - rows), rows)
    block, offset = positions // block_size, positions % block_size
    slots = tables.blocks[sequence, block] * block_size + offset
    if bounds is not None and (bounds == positions).all():
        bounds = None
    seen = None if bounds is None else _seen(positions, bounds, window)
    items, merges = _work_items(
        lens, rows, starts, block_size, window, rows_per_item, split_tokens, seen, on_gpu
    )
    blocks = tables.blocks
    if pads and (len(positions) == len(rows) or num_rows is not None):
        blocks, items, merges = _in_strides(blocks, items, merges)
    if num_rows is not None:
        positions, slots = _padded(positions, num_rows), _padded(slots, num_rows, value=-1)
    arrays = [positions, slots, blocks, lens, starts, items, merges]
    if bounds is not None:
        arrays.append(np.vstack([positions, bounds]))
    return [a.astype(np.int32) for a in arrays]


def _seen(
    positions: np.ndarray, bounds: np.ndarray, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """First and last position that each row sees."""
    if window is None:
        return np.zeros_like(positions), bounds[1]
    return np.maximum(np.minimum(bounds[0], positions - (window - 1)), 0), bounds[1]


def _in_strides(
    tables: np.ndarray, items: np.ndarray, merges: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same, padded to sizes that stay constant while contexts grow by a few blocks."""

    def grown(a: np.ndarray, axis: int, least: int) -> np.ndarray:
        size = a.shape[axis]
        stride = max(least, 1 << max(0, size.bit_length() - 3))
        return _padded(a, size + -size % stride, axis)

    return (
        grown(tables, 1, 16),
        grown(items, 0, 16),
        grown(merges, 0, 16) if len(merges) else merges,
    )


def _padded(a: np.ndarray, size: int, axis: int = 0, value: int = 0) -> np.ndarray:
    shape = (*a.shape[:axis], size, *a.shape[axis + 1 :])
    padded = np.full(shape, value, dtype=a.dtype)
    padded[tuple(slice(n) for n in a.shape)] = a
    return padded


def _work_items(
    lens: np.ndarray,
    rows: np.ndarray,
    starts: np.ndarray,
    block_size: int,
    window: int | None,
    rows_per_item: int,
    split_tokens: int | None,
    seen: tuple[np.ndarray, np.ndarray] | None,
    on_gpu: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """``[num_items, 6]`` work items, longest context first, and ``[num_merges, 4]`` merges.

    Args:
        seen: First and last position that each row sees, if rows have bounds.
    """
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
    if seen is not None:  # tiles are in row order and cover every row
        num_tokens = np.maximum.reduceat(seen[1], row_begin) + 1
    num_blocks = -(-num_tokens // block_size)
    first_block = np.zeros_like(sequence)
    if seen is not None:
        first_block = np.minimum.reduceat(seen[0], row_begin) // block_size
        num_tokens = num_tokens - first_block * block_size
    elif window is not None:
        # The first row of a tile sees the furthest back.
        first_seen = num_tokens - (row_end - row_begin) - (window - 1)
        first_block = np.maximum(first_seen, 0) // block_size
        num_tokens = num_tokens - first_block * block_size
    items = np.empty((len(sequence), 6), dtype=np.int64)
    for i, column in enumerate((sequence, row_begin, row_end, first_block, num_blocks)):
        items[:, i] = column
    items[:, 5] = -1

    num_blocks = num_blocks - first_block
    num_shares = -(-rows // min(rows_per_item, ROWS_OF_SHARE))
    longest = split_tokens or tokens_per_piece(
        num_tokens, row_end - row_begin, num_shares[sequence], on_gpu=on_gpu
    )
    num_splits = np.minimum(-(-num_tokens // longest), num_blocks)
    aligned = 0 if split_tokens or on_gpu else LONGEST // block_size
    if aligned:  # pieces end at its multiples, regardless of an item's rows
        num_splits = -(-items[:, 4] // aligned) - first_block // aligned
    order = np.argsort(-num_tokens, kind="stable")
    items = items[order]
    if num_splits.max(initial=0) <= 1:
        return items, np.zeros((0, 4), dtype=np.int64)

    # Splits item i into num_splits[i] pieces whose block counts differ by at most one. Vectorized,
    # because 256 decodes of 1024 tokens have 768 pieces.
    num_splits = np.maximum(num_splits[order], 1)
    is_split, heights = num_splits > 1, items[:, 2] - items[:, 1]
    item = np.repeat(np.arange(len(items)), num_splits)
    piece = np.arange(len(item)) - (np.cumsum(num_splits) - num_splits)[item]
    pieces = items[item]
    first, blocks, splits = items[item, 3], num_blocks[order][item], num_splits[item]
    pieces[:, 3] = first + piece * blocks // splits
    pieces[:, 4] = first + (piece + 1) * blocks // splits
    if aligned:
        multiple = (first // aligned + piece) * aligned
        pieces[:, 3] = np.maximum(first, multiple)
        pieces[:, 4] = np.minimum(first + blocks, multiple + aligned)
    # Each item leaves partial results of all its rows, in the order of the pieces.
    num_partials = np.where(is_split, num_splits * heights, 0)
    begins = np.cumsum(num_partials) - num_partials
    pieces[:, 5] = np.where(is_split[item], begins[item] + piece * heights[item], -1)
    merges = np.stack([items[:, 1], items[:, 2], begins, num_splits], axis=1)[is_split]
    return pieces, merges


def tokens_per_piece(
    num_tokens: np.ndarray, num_rows: np.ndarray, num_shares: np.ndarray, *, on_gpu: bool
) -> np.ndarray:
    """Maximum number of context tokens that one piece of each work item covers.

    A row's result is summed in the order of its pieces, so they must depend only on the row: its
    context and the number of rows that share its pass over it. Then the rest of the batch does not
    change its bits.

    Args:
        num_tokens: Tokens that the rows of an item see.
        num_rows: Query rows of the item.
        num_shares: Number of shares of the same sequence.
    """
    longest = np.full_like(num_tokens, LONGEST)
    if not on_gpu:
        return longest
    pieces = np.maximum(-(-num_tokens // MAX_PIECES), SHORTEST)
    halves = (num_tokens > pieces) & (2 * num_tokens <= pieces * MAX_HALF_PIECES)
    pieces = np.where(halves, pieces // 2, pieces)
    if num_rows.max(initial=0) <= MAX_DRAFT_ROWS:
        return pieces
    shares = np.clip(PREFILL_PIECES // num_shares, 1, MAX_PREFILL_PIECES)
    most = np.maximum(MAX_LONG_PIECES // num_shares, 1)
    chunks = np.maximum(-(-num_tokens // shares), SHORTEST_PREFILL)
    chunks = np.minimum(chunks, np.maximum(-(-num_tokens // most), LONGEST))
    chunks = np.where(num_shares < PREFILL_PIECES, chunks, np.maximum(num_tokens, LONGEST))
    return np.where(num_rows <= MAX_DRAFT_ROWS, pieces, chunks)
