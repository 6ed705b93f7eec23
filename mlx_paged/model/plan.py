"""Plans one step on the host: block tables, attention work and groups of recurrent layers.

Every index that kernels use is checked here, while the numbers are plain integers, because kernels
cannot check a block table before they use it. C++ makes the attention work from them
(csrc/attention_plan.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.model.layout import KVCacheGroupSpec
from mlx_paged.model.media import StepMedia
from mlx_paged.ops import AttentionPlan
from mlx_paged.platform import Platform

# Query rows that share one pass over K and V. A prefill chunk is cut into items of this many rows.
_ROWS_PER_ITEM = 32
# NVIDIA's kernels take tiles of 128 queries: rows times query heads per KV head, which fill whole
# tiles for any number of heads. Items of 32 rows would leave a quarter empty with three heads.
_CUDA_ROWS_PER_ITEM = 128


def int32(values: np.ndarray, *, stays: bool = False) -> mx.array:
    """Returns the values as an int32 array of the device; `stays` as in `ops.upload`."""
    return ops.upload(values.astype(np.int32), stays=stays)[0]


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
    """Keeps the block tables of running sequences in one array, and updates only the changes.

    A table grows by one block in `block_size` steps, so converting all tables in every step would
    cost more than the rest of the plan. A sequence has one *slot* of the array; slots of sequences
    that left are reused.
    """

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}  # seq_id -> slot
        self._seq_ids: tuple[int, ...] = ()  # of the previous step
        self._last_slots = np.zeros(0, dtype=np.intp)  # of these sequences
        self._tables: Sequence[tuple[Sequence[int], int]] = ()  # in their original form
        self._found: PaddedTables | None = None  # for them; None: something has changed since
        self._free: list[int] = []
        self._blocks = np.zeros((0, 0), dtype=np.int32)  # [num_slots, max_blocks]
        self._lengths = np.zeros(0, dtype=np.int64)  # [num_slots]

    def __len__(self) -> int:
        return len(self._slots)

    def update(
        self, seq_ids: Sequence[int], tables: Sequence[tuple[Sequence[int], int]]
    ) -> PaddedTables:
        """Updates the array with the tables of a step.

        Args:
            seq_ids: The sequences.
            tables: For each its blocks, and the index of the first that may have changed since the
                last time. An identical object has not changed.

        Returns:
            Read-only arrays; the next step may get the same ones.
        """
        fresh: list[int] = []
        seq_ids = tuple(seq_ids)  # a copy, because a list may change
        before: Sequence[object] = self._tables
        if seq_ids != self._seq_ids:
            slots, fresh = self._slots_of(seq_ids)
            self._seq_ids, self._last_slots = seq_ids, np.array(slots, dtype=np.intp)
            before, self._found = [None] * len(seq_ids), None
        rows, self._tables = self._last_slots, tables
        for i, (given, known) in enumerate(zip(tables, before)):
            if given is not known and given[1] < len(given[0]):
                self._write(rows[i], *given)
        for i in fresh:  # An unused slot has been written completely above.
            table, first = tables[i]
            if first >= len(table):
                self._write(rows[i], table, 0)
        if self._found is None:
            lengths = self._lengths[rows]
            blocks = self._blocks[:, : lengths.max(initial=1)].take(rows, axis=0)
            for array in (blocks, lengths):
                array.setflags(write=False)
            self._found = PaddedTables(blocks, lengths)
        return self._found

    def _write(self, slot: int, table: Sequence[int], dirty_from: int) -> None:
        self._found = None
        known, length = int(self._lengths[slot]), len(table)
        if length > self._blocks.shape[1]:
            wider = np.zeros((len(self._blocks), 2 * length), dtype=np.int32)
            wider[:, : self._blocks.shape[1]] = self._blocks
            self._blocks = wider
        first = min(dirty_from, known)  # A new sequence has no old entries.
        self._blocks[slot, first:length] = table[first:]
        self._blocks[slot, length:known] = 0
        self._lengths[slot] = length

    def _slots_of(self, seq_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the slot of each sequence, and the indices of new ones."""
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
    """One step in numbers on the host. All lists are in the order of the rows.

    Attributes:
        context_lens: Tokens of each sequence in the pools after this step's are written.
        query_lens: Number of these, at the end, that are rows of this step.
        tables: Block tables of the sequences: one list for all layers, or one for each group.
        logit_rows: Rows whose logits are needed.
        state_slots: Slots of the sequences, for a model with recurrent state.
        media: Inputs of the rows besides tokens, or None.
        num_ordered_rows: Leading rows that must have the same bits in any batch, on the CPU. Their
            logits are needed.
        features: ``[num_rows, ...]``: hidden states of another model, for a draft head.
        bounds: ``[2, num_rows]`` int32: see `build_plan`; None if no row sees a later one, apart
            from media.
        adapters: ``[num_rows]``: the slot of each row's adapter, from 1; 0 for none. None if no row
            has one.
        may_pad: True if the caller ignores extra logits, which come last: those of rows that are
            added to a step of decodes (`PagedModel.padded_from`), and with CUDA also those of the
            last row, which a step with prompts repeats.
        splits_drafts: True if drafts are separate sequences, over the blocks of their sequence.
    """

    context_lens: np.ndarray
    query_lens: np.ndarray
    tables: Tables | Mapping[KVCacheGroupSpec, Tables]
    logit_rows: np.ndarray
    state_slots: StateSlots | None = None
    media: StepMedia | None = None
    num_ordered_rows: int = 0
    features: mx.array | None = None
    bounds: np.ndarray | None = None
    adapters: np.ndarray | None = None
    may_pad: bool = False
    splits_drafts: bool = False

    def padded(self, num_sequences: int) -> StepInputs:
        """Returns the step with empty sequences added, up to `num_sequences` sequences and logits.

        The caller ignores the added logits, which may be those of any rows.
        """
        num_added = num_sequences - len(self.query_lens)
        zeros = np.zeros(num_added, dtype=np.int64)

        def longer(tables: Tables) -> PaddedTables:
            if not isinstance(tables, PaddedTables):
                tables = PaddedTables.of(tables)
            empty = np.zeros((num_added, tables.blocks.shape[1]), dtype=np.int32)
            return PaddedTables(
                np.concatenate([tables.blocks, empty]), np.concatenate([tables.lengths, zeros])
            )

        if isinstance(self.tables, Mapping):
            # Groups that share tables must keep sharing them.
            done = {id(each): longer(each) for each in self.tables.values()}
            tables: PaddedTables | Mapping[KVCacheGroupSpec, PaddedTables] = {
                group_spec: done[id(each)] for group_spec, each in self.tables.items()
            }
        else:
            tables = longer(self.tables)
        features = self.features
        if features is not None:
            features = mx.pad(features, [(0, num_added)] + [(0, 0)] * (features.ndim - 1))
        return replace(
            self,
            context_lens=np.concatenate([self.context_lens, zeros]),
            query_lens=np.concatenate([self.query_lens, zeros]),
            tables=tables,
            logit_rows=np.append(
                self.logit_rows, np.arange(len(self.logit_rows), num_sequences, dtype=np.int64)
            ),
            features=features,
        )

    @property
    def own_slots(self) -> StateSlots:
        """`state_slots`, which a model with recurrent state needs.

        Raises:
            ValueError: There are none.
        """
        if self.state_slots is None:
            raise ValueError("a step of a model with recurrent state needs state slots")
        return self.state_slots

    def tables_of(self, group_spec: KVCacheGroupSpec) -> Tables:
        """Returns the block tables of these layers."""
        return self.tables[group_spec] if isinstance(self.tables, Mapping) else self.tables


# --- Attention ------------------------------------------------------------------------------------


def build_plan(
    block_tables: Tables,
    context_lens: Sequence[int] | np.ndarray,
    query_lens: Sequence[int] | np.ndarray,
    *,
    block_size: int,
    window: int | None = None,
    rows_per_item: int | None = None,
    split_tokens: int | None = None,
    bounds: np.ndarray | None = None,
    stays_on_host: bool = False,
    num_rows: int | None = None,
    shared_rows: int = 1,
    platform: Platform | None = None,
) -> AttentionPlan:
    """Plans one step over ragged sequences.

    Args:
        block_tables: The blocks of each sequence, in order; there may be more than needed.
        context_lens: Tokens of each sequence in the pool after this step's are written.
        query_lens: Number of these, at the end, that are this step's query rows.
        block_size: Tokens in a block.
        window: A row at position p sees only positions in ``(p - window, p]``, so its work begins
            there; None means all. Earlier blocks may be arbitrary.
        rows_per_item: Maximum query rows of a work item; None: as the device's kernels need.
        split_tokens: Approximate maximum tokens of context of a work item. A longer context is
            split evenly into pieces that run in parallel and are merged afterwards. None: as the
            device needs (`csrc/attention_plan.cpp`), depending only on a row's own context.
        bounds: ``[2, num_rows]`` int32: first and last position of the span that each row sees as a
            whole, besides its causal window: of an image whose tokens see each other, or of a
            prompt's prefix. A row without a span has its own position, twice. None: no row has one.
            A span ends within its sequence's context after this step.
        stays_on_host: With CUDA, kernels read the plan from host memory, which is faster if they
            read it once (`executables.GpuExecutable`).
        num_rows: Pads the step to this many rows, or to as much work as others. Padding rows belong
            to no sequence, write nothing and see nothing. None, or bounds: no padding.
        shared_rows: Maximum rows of a sequence that share a pass over its context although each is
            a separate sequence here, with an equal table: drafts. They do so only where each
            keeps the sums that it has alone. See `ops.max_shared_rows`.
        platform: The device to plan for; None means MLX's default device.

    Raises:
        ValueError: Lists of different lengths, negative lengths, more query rows than context, a
            block table too short for its context, or bounds that exclude the row's position or
            exceed the context.
    """
    platform = platform or Platform.current()
    if rows_per_item is None:
        rows_per_item = _CUDA_ROWS_PER_ITEM if platform.has_cuda else _ROWS_PER_ITEM
    lens = np.asarray(context_lens, dtype=np.int64)
    rows = np.asarray(query_lens, dtype=np.int64)
    if not isinstance(block_tables, PaddedTables):
        block_tables = PaddedTables.of(block_tables)
    limits = {"rows_per_item": rows_per_item, "split_tokens": split_tokens, "window": window}
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            _refuse(name, "at least 1", limit)
    if block_size not in (8, 16, 32, 64):
        _refuse("block_size", "8, 16, 32 or 64", block_size)
    if bounds is not None:
        _validate(block_tables.lengths, lens, rows, block_size)
        bounds = _spans(bounds, lens, rows)
    plan = ops.plan_attention(
        block_tables.blocks,
        block_tables.lengths,
        lens,
        rows,
        bounds=bounds,
        block_size=block_size,
        window=window,
        rows_per_item=rows_per_item,
        split_tokens=split_tokens,
        on_gpu=platform.plans_for_gpu,
        pads=platform.repeats_steps,
        num_rows=num_rows,
        shared_rows=shared_rows,
        stays=stays_on_host,
    )
    if plan is None:
        _validate(block_tables.lengths, lens, rows, block_size)
        width, longest = block_tables.blocks.shape[1], int(block_tables.lengths.max(initial=0))
        if longest > width:
            _refuse("block_tables", f"{longest} blocks wide", width)
        _refuse("num_rows", "at least those of the sequences, or just those with bounds,", num_rows)
    return plan


def _spans(bounds: np.ndarray, lens: np.ndarray, rows: np.ndarray) -> np.ndarray | None:
    """Checks bounds and converts them to int32; None if no row sees more with them."""
    bounds = np.asarray(bounds)
    sequence = np.repeat(np.arange(len(rows)), rows)
    positions = np.arange(len(sequence)) + (lens - np.cumsum(rows))[sequence]
    lens = lens[sequence]
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
    if (first == positions).all() and (last == positions).all():
        return None
    return np.ascontiguousarray(bounds, dtype=np.int32)


def _refuse(what: str, expected: str, actual: object) -> NoReturn:
    raise ValueError(f"[paged_attention] {what} must be {expected} but got {actual}")


def _validate(num_blocks: np.ndarray, lens: np.ndarray, rows: np.ndarray, block_size: int) -> None:
    """Rejects invalid numbers, by name."""
    for name, values in (("context_lens", lens), ("query_lens", rows)):
        if values.shape != num_blocks.shape:
            _refuse(name, f"of shape ({len(num_blocks)},) like block_tables", values.shape)
        if (values < 0).any():
            i = int((values < 0).argmax())
            _refuse(f"{name}[{i}]", "at least 0", values[i])
    if (lens >= 1 << 31).any():
        i = int((lens >= 1 << 31).argmax())
        _refuse(f"context_lens[{i}]", f"below {1 << 31}", lens[i])
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


def build_chunk_plan(
    block_tables: Tables,
    context_lens: Sequence[int] | np.ndarray,
    query_lens: Sequence[int] | np.ndarray,
    *,
    chunk: int,
    block_size: int,
    platform: Platform | None = None,
) -> AttentionPlan:
    """Plans one step of layers with chunked attention (Llama 4).

    A row at position p sees the keys of its own chunk, ``[p - p % chunk, p]``. A chunk is a whole
    number of blocks, so its keys are a slice of the block table, and every chunk of a sequence is
    planned as a separate sequence with causal attention. Positions count from the beginning of a
    row's chunk. See `build_plan` for the other arguments.

    Args:
        chunk: Tokens of a chunk, a multiple of `block_size`.

    Raises:
        ValueError: A chunk that is not a multiple of the block size.
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
    return build_plan(tables, lens, rows, block_size=block_size, platform=platform)


# --- Recurrent layers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences of a step with the same number of rows, either all with a state or all without."""

    rows: mx.array | None  # [num_seqs * length] int32; None: all rows of the step, as they are
    members: np.ndarray  # [num_seqs]: indices of sequences in the step
    length: int
    reads: mx.array  # [num_seqs] int32
    writes: mx.array  # [num_seqs] int32
    begins: bool  # they start here, so model code finds no state, as in mlx-lm

    @property
    def num_seqs(self) -> int:
        return len(self.members)


@dataclass(frozen=True)
class StatePlan:
    """Cuts the rows of a step into equal-length groups, as recurrent layers need them."""

    groups: tuple[SequenceGroup, ...]
    order: (
        mx.array | None
    )  # [num_rows] int32: index of each row in all groups' rows; None: the same


def build_state_plan(query_lens: Sequence[int] | np.ndarray, slots: StateSlots) -> StatePlan:
    """Groups the sequences of a step by their number of rows, and by whether they begin in it.

    Args:
        query_lens: Rows of each sequence.
        slots: Their slots.

    Raises:
        ValueError: Lists of different lengths, a slot that is written twice or that one sequence
            writes and another reads, or a write to slot 0.
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
