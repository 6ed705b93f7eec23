"""Plans one step on the host: block tables, attention work and groups of recurrent layers.

Everything the kernels index with is made and checked here, where the numbers are still plain
integers; the kernels cannot check a block table before they use it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.model.layout import Reach
from mlx_paged.model.media import StepMedia
from mlx_paged.ops import AttentionPlan

# Query rows that share one pass over K and V. A prefill chunk is cut into items of this many rows.
_ROWS_PER_ITEM = 32

# Most tokens of a piece. On a CPU a core works on one item, and the step would wait for a longer
# one when all others are done. On a GPU this bounds the pieces of a short prefill chunk.
_LONGEST = 4096
# Decodes and drafts on a GPU. 8192 tokens are 22 pieces: 176 threadgroups at 8 KV heads, where
# four for each of 40 cores are 160. A query head's partial, written once and read once, is half a
# percent of its piece's keys and values at a head dim of 128 in 16 bits.
_SHORTEST = 384
# More pieces of a long context fill no GPU better, and merging them takes time.
_MOST_PIECES = 48
# A short context that is alone would leave most of a GPU idle: 1024 tokens are 24 threadgroups at
# 8 KV heads, or 48 where pieces are half as long. As many as a merge takes at once.
_MOST_HALF_PIECES = 12
_ANY_NUMBER = 1 << 62
_MOST_DRAFT_ROWS = 8  # as in csrc/launch_attention.cpp
# A short prefill chunk behind a long cached prefix has few items, and each would have to go through
# all of the prefix. 16 pieces of them at 8 KV heads are 128 threadgroups; a chunk of 16 items has
# as many by itself, and its items are not split however long the prefix. Every piece leaves
# partials of all its rows, so that a step of short chunks needs room for up to eight times its
# rows; behind prefixes so long that pieces reach `_LONGEST` there are more, up to 2048 a chunk.
_PREFILL_PIECES = 16  # of all items of a chunk together
_MOST_PREFILL_PIECES = 8  # of an item
_MOST_LONG_PIECES = 64  # of all items of a chunk together, where they would be over `_LONGEST`
_SHORTEST_PREFILL = 512


def int32(values: np.ndarray) -> mx.array:
    """The values as an int32 array of the device."""
    return ops.upload(values.astype(np.int32))[0]


# --- Block tables ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaddedTables:
    """The block tables of one step."""

    blocks: np.ndarray  # [num_seqs, max_blocks] int32; padding is block 0, never handed out
    lengths: np.ndarray  # [num_seqs]

    @classmethod
    def of(cls, tables: Sequence[Sequence[int]]) -> PaddedTables:
        """Pads plain lists."""
        lengths = np.array([len(table) for table in tables], dtype=np.int64)
        blocks = np.zeros((len(tables), max(1, lengths.max(initial=0))), dtype=np.int32)
        for padded, table in zip(blocks, tables):
            padded[: len(table)] = table
        return cls(blocks, lengths)


class BlockTableCache:
    """Keeps the block tables of running sequences in one array, and updates only what changed.

    A table grows by one block in `block_size` steps; turning all of them from tuples into an array
    in every step would cost more than the rest of the plan. A sequence has one *slot* of the array;
    slots of sequences that are no longer in a step are used again.
    """

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}  # seq_id -> slot
        self._seq_ids: tuple[int, ...] = ()  # of the step before,
        self._places = np.zeros(0, dtype=np.intp)  # and their slots
        self._free: list[int] = []
        self._blocks = np.zeros((0, 0), dtype=np.int32)  # [num_slots, max_blocks]
        self._lengths = np.zeros(0, dtype=np.int64)  # [num_slots]

    def __len__(self) -> int:
        return len(self._slots)

    def update(
        self,
        seq_ids: Sequence[int],
        tables: Sequence[Sequence[int]],
        dirty_from: Sequence[int],
    ) -> PaddedTables:
        """Updates the array with the tables of a step.

        Args:
            seq_ids: the sequences.
            tables: for each its blocks.
            dirty_from: for each the first of its blocks that may differ from what it had the last
                time.
        """
        fresh: list[int] = []
        seq_ids = tuple(seq_ids)  # (a copy, where it is a list that may change)
        if seq_ids != self._seq_ids:
            slots, fresh = self._slots_of(seq_ids)
            self._seq_ids, self._places = seq_ids, np.array(slots, dtype=np.intp)
        places = self._places
        for i, (table, first) in enumerate(zip(tables, dirty_from)):
            if first < len(table):
                self._write(places[i], table, first)
        for i in fresh:
            self._write(places[i], tables[i], 0)
        lengths = self._lengths[places]
        return PaddedTables(self._blocks[:, : lengths.max(initial=1)].take(places, axis=0), lengths)

    def _write(self, slot: int, table: Sequence[int], dirty_from: int) -> None:
        known, length = int(self._lengths[slot]), len(table)
        if length > self._blocks.shape[1]:
            wider = np.zeros((len(self._blocks), 2 * length), dtype=np.int32)
            wider[:, : self._blocks.shape[1]] = self._blocks
            self._blocks = wider
        first = min(dirty_from, known)  # (a new sequence has no old entries)
        self._blocks[slot, first:length] = table[first:]
        self._blocks[slot, length:known] = 0
        self._lengths[slot] = length

    def _slots_of(self, seq_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The slot of each sequence, and the indices of those that are new here."""
        fresh = [i for i, seq_id in enumerate(seq_ids) if seq_id not in self._slots]
        if len(fresh) > len(self._free):
            self._collect(set(seq_ids))
        if len(fresh) > len(self._free):
            self._enlarge(len(self._slots) + len(fresh))
        for i in fresh:
            slot = self._free.pop()
            self._slots[seq_ids[i]] = slot
            self._lengths[slot] = 0
        return [self._slots[seq_id] for seq_id in seq_ids], fresh

    def _collect(self, seen: set[int]) -> None:
        """Frees the slots of sequences that are not in this step; if they return, they are new."""
        for seq_id in self._slots.keys() - seen:
            slot = self._slots.pop(seq_id)
            self._blocks[slot] = 0
            self._free.append(slot)

    def _enlarge(self, num_slots: int) -> None:
        old = len(self._blocks)
        num_slots = max(num_slots, 2 * old)
        blocks = np.zeros((num_slots, self._blocks.shape[1]), dtype=np.int32)
        blocks[:old] = self._blocks
        lengths = np.zeros(num_slots, dtype=np.int64)
        lengths[:old] = self._lengths
        self._blocks, self._lengths = blocks, lengths
        self._free += range(num_slots - 1, old - 1, -1)


# --- Inputs of a step -----------------------------------------------------------------------------

Tables = Sequence[Sequence[int]] | PaddedTables


@dataclass(frozen=True)
class StateSlots:
    """State slots of a step's sequences, in the order of their rows; see `model.recurrent`."""

    reads: Sequence[int]  # [num_seqs]; 0: the initial state
    writes: Sequence[int]  # [num_seqs]; -1: nowhere


@dataclass(frozen=True)
class StepInputs:
    """One step, as numbers on the host. All lists are in the order of the rows.

    Attributes:
        context_lens: Tokens of each sequence in the pools once this step's are written.
        query_lens: How many of them, the last ones, are rows of this step.
        tables: Block tables of the sequences: one list for all layers, or one for each reach.
        logit_rows: Rows whose logits are wanted.
        state_slots: Slots of the sequences, for a model that has recurrent state.
        media: What the rows bring besides tokens; None: nothing.
    """

    context_lens: np.ndarray
    query_lens: np.ndarray
    tables: Tables | Mapping[Reach, Tables]
    logit_rows: np.ndarray
    state_slots: StateSlots | None = None
    media: StepMedia | None = None

    def tables_of(self, reach: Reach) -> Tables:
        """The block tables that layers of this reach use."""
        return self.tables[reach] if isinstance(self.tables, Mapping) else self.tables


# --- Attention ------------------------------------------------------------------------------------


def build_plan(
    block_tables: Tables,
    context_lens: Sequence[int] | np.ndarray,
    query_lens: Sequence[int] | np.ndarray,
    *,
    block_size: int,
    window: int | None = None,
    rows_per_item: int = _ROWS_PER_ITEM,
    split_tokens: int | None = None,
    bounds: np.ndarray | None = None,
    stays_on_host: bool = False,
    num_rows: int | None = None,
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
            device needs (`tokens_per_piece`), from a row's own context alone.
        bounds: ``[2, num_rows]`` int32: the first and the last position of the span that each row
            sees as a whole, besides what its position and the window let it see: of a picture
            whose tokens see each other, or of a prompt's prefix. Its own position, twice: none.
            None: no row has one. A span ends within what its sequence has once this step is
            written.
        stays_on_host: of decodes, with CUDA: kernels read the plan from there, which pays where
            they do it once (`ops.DeviceProgram`).
        num_rows: of a step that is to have as many as others, or as much work: the last rows
            belong to no sequence, write nothing and see nothing. None: it has those of its
            sequences. (No row may have bounds then.)

    Raises:
        ValueError: for lists of different lengths, negative lengths, more query rows than context,
            a block table too short for its context, or bounds that do not hold the row's position
            or go beyond the context.
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

    if bounds is None and split_tokens is None and (rows == 1).all():
        on_gpu = _on_gpu()
        plan = ops.plan_decodes(
            block_tables.blocks,
            block_tables.lengths,
            lens,
            block_size=block_size,
            window=window,
            shortest_piece=_SHORTEST if on_gpu else _LONGEST,
            most_pieces=_MOST_PIECES if on_gpu else _ANY_NUMBER,
            most_half_pieces=_MOST_HALF_PIECES if on_gpu else 0,
            pads=ops.repeats_steps(),
            stays=stays_on_host,
        )
        if plan is not None:
            return plan

    tables = block_tables.blocks
    if (rows == 1).all():  # only decodes: the general case gives the same
        starts = np.arange(len(rows) + 1)
        sequence, positions = starts[:-1], lens - 1
    else:
        starts = np.concatenate([[0], np.cumsum(rows)])
        sequence = np.repeat(np.arange(len(rows)), rows)
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - (lens - rows), rows)
    block, offset = positions // block_size, positions % block_size
    slots = tables[sequence, block] * block_size + offset
    seen = None
    if bounds is not None:
        bounds = _spans(bounds, positions, lens[sequence])
        if bounds is not None:
            seen = _seen(positions, bounds, window)
    items, merges = _work_items(
        lens, rows, starts, block_size, window, rows_per_item, split_tokens, seen
    )
    if ops.repeats_steps() and (len(positions) == len(rows) or num_rows is not None):
        tables, items, merges = _in_strides(tables, items, merges)
    if num_rows is not None:
        positions, slots = _padded(positions, num_rows), _padded(slots, num_rows, value=-1)
    arrays = [positions, slots, tables, lens, starts, items, merges]
    if bounds is not None:
        arrays.append(np.vstack([positions, bounds]))
    return AttentionPlan(*ops.upload(*(a.astype(np.int32) for a in arrays)))


def _spans(bounds: np.ndarray, positions: np.ndarray, lens: np.ndarray) -> np.ndarray | None:
    """The same, checked; None where no row sees more than without them."""
    bounds = np.asarray(bounds)
    if bounds.shape != (2, len(positions)):
        _refuse("bounds", f"of shape (2, {len(positions)})", bounds.shape)
    if not np.issubdtype(bounds.dtype, np.integer):
        _refuse("bounds", "integers", bounds.dtype)
    first, last = bounds
    wrong = (first < 0) | (first > positions) | (last < positions) | (last >= lens)
    if wrong.any():
        i = int(wrong.argmax())
        _refuse(
            f"bounds[:, {i}]",
            f"around position {positions[i]} and in [0, {lens[i]})",
            f"{first[i]} and {last[i]}",
        )
    return bounds if (first < positions).any() or (last > positions).any() else None


def _seen(
    positions: np.ndarray, bounds: np.ndarray, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last position that each row sees."""
    if window is None:
        return np.zeros_like(positions), bounds[1]
    return np.maximum(np.minimum(bounds[0], positions - (window - 1)), 0), bounds[1]


def _in_strides(
    tables: np.ndarray, items: np.ndarray, merges: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same, padded to sizes that stay constant while contexts grow by some blocks.

    Steps of one shape can be one graph (`model.compiled`). An item or merge of no rows does
    nothing, and no item leads to the additional blocks.
    """

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
    """As `np.pad` at the end of one axis, in a tenth of its time."""
    if a.shape[axis] == size:
        return a
    shape = (*a.shape[:axis], size, *a.shape[axis + 1 :])
    padded = np.full(shape, value, dtype=a.dtype)
    padded[tuple(slice(n) for n in a.shape)] = a
    return padded


def _refuse(what: str, expected: str, actual: object) -> NoReturn:
    raise ValueError(f"[paged_attention] {what} must be {expected} but got {actual}")


def _validate(num_blocks: np.ndarray, lens: np.ndarray, rows: np.ndarray, block_size: int) -> None:
    if block_size not in (8, 16, 32, 64):
        _refuse("block_size", "8, 16, 32 or 64", block_size)
    same = lens.shape == rows.shape == num_blocks.shape
    if same and (
        np.minimum(rows, np.minimum(lens - rows, num_blocks * block_size - lens)).min(initial=0)
        >= 0
    ):
        return
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
    seen: tuple[np.ndarray, np.ndarray] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """``[num_items, 6]`` work items, longest context first, and ``[num_merges, 4]`` merges.

    Args:
        seen: the first and the last position that each row sees, where they have bounds.
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
    if seen is not None:  # (tiles come in the order of their rows and leave none out)
        num_tokens = np.maximum.reduceat(seen[1], row_begin) + 1
    num_blocks = -(-num_tokens // block_size)
    first_block = np.zeros_like(sequence)
    if seen is not None:
        first_block = np.minimum.reduceat(seen[0], row_begin) // block_size
        num_tokens = num_tokens - first_block * block_size
    elif window is not None:
        # The first row of a tile looks furthest back.
        first_seen = num_tokens - (row_end - row_begin) - (window - 1)
        first_block = np.maximum(first_seen, 0) // block_size
        num_tokens = num_tokens - first_block * block_size
    items = np.empty((len(sequence), 6), dtype=np.int64)
    for i, column in enumerate((sequence, row_begin, row_end, first_block, num_blocks)):
        items[:, i] = column
    items[:, 5] = -1

    num_blocks = num_blocks - first_block
    longest = split_tokens or tokens_per_piece(num_tokens, row_end - row_begin, num_tiles[sequence])
    num_splits = np.minimum(-(-num_tokens // longest), num_blocks)
    order = np.argsort(-num_tokens, kind="stable")
    items = items[order]
    if num_splits.max(initial=0) <= 1:
        return items, np.zeros((0, 4), dtype=np.int64)

    # Item i becomes num_splits[i] pieces of as many blocks, within one. (No loop over the items:
    # 256 decodes of 1024 tokens have 768 pieces.)
    num_splits = np.maximum(num_splits[order], 1)
    is_split, heights = num_splits > 1, items[:, 2] - items[:, 1]
    item = np.repeat(np.arange(len(items)), num_splits)
    piece = np.arange(len(item)) - (np.cumsum(num_splits) - num_splits)[item]
    pieces = items[item]
    first, blocks, splits = items[item, 3], num_blocks[order][item], num_splits[item]
    pieces[:, 3] = first + piece * blocks // splits
    pieces[:, 4] = first + (piece + 1) * blocks // splits
    # Each leaves partials of all its rows, in the order of the pieces.
    num_partials = np.where(is_split, num_splits * heights, 0)
    begins = np.cumsum(num_partials) - num_partials
    pieces[:, 5] = np.where(is_split[item], begins[item] + piece * heights[item], -1)
    merges = np.stack([items[:, 1], items[:, 2], begins, num_splits], axis=1)[is_split]
    return pieces, merges


def tokens_per_piece(
    num_tokens: np.ndarray, num_rows: np.ndarray, num_items: np.ndarray
) -> np.ndarray:
    """How many tokens of context one piece of a work item covers at most, for each item.

    A row's result is summed in the order of its pieces, so they depend on the row alone: on its
    context and on how many rows share its pass over it. The rest of the batch does not change its
    bits.

    Args:
        num_tokens: that the rows of an item see.
        num_rows: query rows of the item.
        num_items: into which the rows of its sequence are cut.
    """
    longest = np.full_like(num_tokens, _LONGEST)
    if not _on_gpu():
        return longest
    pieces = np.maximum(-(-num_tokens // _MOST_PIECES), _SHORTEST)
    halves = (num_tokens > pieces) & (2 * num_tokens <= pieces * _MOST_HALF_PIECES)
    pieces = np.where(halves, pieces // 2, pieces)
    if num_rows.max(initial=0) <= _MOST_DRAFT_ROWS:
        return pieces
    shares = np.clip(_PREFILL_PIECES // num_items, 1, _MOST_PREFILL_PIECES)
    most = np.maximum(_MOST_LONG_PIECES // num_items, 1)
    chunks = np.maximum(-(-num_tokens // shares), _SHORTEST_PREFILL)
    chunks = np.minimum(chunks, np.maximum(-(-num_tokens // most), _LONGEST))
    chunks = np.where(num_items < _PREFILL_PIECES, chunks, np.maximum(num_tokens, _LONGEST))
    return np.where(num_rows <= _MOST_DRAFT_ROWS, pieces, chunks)


def _on_gpu() -> bool:
    simulated = os.environ.get("MLX_PAGED_SIM") == "1"
    return simulated or mx.default_device() == mx.Device(mx.gpu)


def build_chunk_plan(
    block_tables: Tables,
    context_lens: Sequence[int] | np.ndarray,
    query_lens: Sequence[int] | np.ndarray,
    *,
    chunk: int,
    block_size: int,
) -> AttentionPlan:
    """Plans one step of layers with chunked attention (Llama 4).

    A row at position p sees the keys of its own chunk, ``[p - p % chunk, p]``. A chunk is a whole
    number of blocks, so its keys are a slice of the block table, and every chunk of a sequence is
    planned as a sequence of its own, with causal attention. Positions count from the beginning of
    a row's chunk. See `build_plan` for the other arguments.

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


# --- Recurrent layers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences of a step that have the same number of rows, and all a state or all none yet."""

    rows: mx.array | None  # [num_seqs * length] int32; None: all rows of the step, as they are
    members: np.ndarray  # [num_seqs]: which of the step's sequences
    length: int
    reads: mx.array  # [num_seqs] int32
    writes: mx.array  # [num_seqs] int32
    begins: bool  # their first tokens: model code finds no state, as in mlx-lm

    @property
    def num_seqs(self) -> int:
        return len(self.members)


@dataclass(frozen=True)
class StatePlan:
    """How the rows of a step are cut into equal-length groups, as recurrent layers need them."""

    groups: tuple[SequenceGroup, ...]
    order: mx.array | None  # [num_rows] int32: where each row is among the groups'; None: in order


def build_state_plan(query_lens: Sequence[int] | np.ndarray, slots: StateSlots) -> StatePlan:
    """Groups the sequences of a step by their number of rows, and whether they begin in it.

    Args:
        query_lens: rows of each sequence.
        slots: their slots.

    Raises:
        ValueError: for lists of different lengths, a slot that is written twice or that is written
            by one sequence and read by another, or a write to slot 0.
    """
    lens = np.asarray(query_lens, dtype=np.int64)
    reads = np.asarray(slots.reads, dtype=np.int64)
    writes = np.asarray(slots.writes, dtype=np.int64)
    _validate_slots(lens, reads, writes)
    starts = np.cumsum(lens) - lens
    rows, groups = [], []
    kinds = 2 * lens + (reads == 0)
    some = [int(kind) for kind in np.unique(kinds) if kind > 1]
    for kind in some:
        members, length = np.flatnonzero(kinds == kind), kind // 2
        rows.append((starts[members][:, None] + np.arange(length)).reshape(-1))
        groups.append(
            SequenceGroup(
                None if len(some) == 1 else int32(rows[-1]),
                members,
                length,
                int32(reads[members]),
                int32(writes[members]),
                begins=kind % 2 == 1,
            )
        )
    if len(groups) <= 1:
        return StatePlan(tuple(groups), None)
    return StatePlan(tuple(groups), int32(np.argsort(np.concatenate(rows))))


def _validate_slots(lens: np.ndarray, reads: np.ndarray, writes: np.ndarray) -> None:
    for name, values in (("reads", reads), ("writes", writes)):
        if values.shape != lens.shape:
            raise ValueError(
                f"[state slots] {name} must be of shape {lens.shape} like query_lens but got "
                f"{values.shape}"
            )
    if (reads < 0).any():
        raise ValueError(f"[state slots] reads must be at least 0 but got {reads.min()}")
    if (writes == 0).any():
        raise ValueError("[state slots] writes must not be 0: that slot is the initial state")
    written = writes[writes > 0]
    if len(np.unique(written)) != len(written):
        raise ValueError(f"[state slots] writes must be distinct but got {writes.tolist()}")
    crossed = np.isin(reads, written) & (reads != writes)
    if crossed.any():
        slot = reads[crossed][0]
        raise ValueError(
            f"[state slots] slot {slot} is written by one sequence and read by another"
        )
