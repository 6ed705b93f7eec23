"""StateGroup: recurrent states, in slots that never change once written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from mlx_paged.core.kv.groups import BlockTables, KVCacheGroup, PrefixSource
from mlx_paged.core.kv.pool import NULL_BLOCK
from mlx_paged.core.kv.specs import (
    SLOTS_PER_SEQUENCE,
    BlockCopy,
    KeptState,
    StateGroupSpec,
    StateMove,
    StateSlot,
)
from mlx_paged.core.kv.tier import ABSENT, Tier
from mlx_paged.core.kv.tree import PrefixNode, PrefixQuery
from mlx_paged.core.media import outside
from mlx_paged.errors import IntegrityError


class StateGroup(KVCacheGroup):
    """State slots of all sequences. All recurrent layers of a model advance together."""

    def __init__(
        self,
        number: int,
        spec: StateGroupSpec,
        block_size: int,
        tier: Tier,
        remove: Callable[[PrefixNode], None],
    ) -> None:
        super().__init__(number, spec.num_slots, block_size, tier, remove)
        self._interval = spec.snapshot_interval * block_size
        self._num_sequences = 0
        self._num_pending = 0
        self._passed: set[int] = set()  # snapshots taken in the middle of a prompt
        self._read: list[int] = []  # read by the step being built; released at its launch

    @staticmethod
    def _state(tables: BlockTables) -> StateSlot:
        assert tables.state is not None
        return tables.state

    # The prefix tree.

    def usable_depth(self, node: PrefixNode, depth: int) -> int:
        node = node.ancestor(depth)
        while node.parent is not None and node.entries[self.number] <= ABSENT:
            node = node.parent
        return node.depth

    def can_copy_from(self, node: PrefixNode) -> bool:
        return False  # no state exists in the middle of a block

    # Lifecycle of a state.

    capacity = None  # a state has the same size at every length

    def can_fork(self, parent: BlockTables, num_tokens: int) -> bool:
        return False  # the state is already past those tokens

    def begin(self, tables: BlockTables, source: PrefixSource) -> None:
        """Takes the snapshot that a new sequence continues from, and plans its own snapshots.

        One is due at the last full block of the known tokens, where an equal prompt or the next
        turn will continue. Another is due where the sequence diverges from earlier ones, because a
        third sequence may continue there.
        """
        slot: int = NULL_BLOCK
        num_full = source.num_full_blocks
        if num_full:
            assert source.tip is not None
            slot = source.tip.entries[self.number]
            assert slot > ABSENT, "a match that has no snapshot"
            self.pool.retain(slot)
            self._passed.discard(slot)
        last = (len(tables.tokens) - 1) // self.block_size
        due = {
            self._boundary(tables, depth * self.block_size)
            for depth in (last, min(last, source.num_known_blocks))
        }
        positions = {position for position in due if position > num_full * self.block_size}
        tables.state = StateSlot(slot, positions, num_full * self.block_size)
        self._num_sequences += 1

    def fork(self, parent: BlockTables, tables: BlockTables) -> None:
        # A slot never changes once written, so both can share it.
        state = self._state(parent)
        if state.slot != NULL_BLOCK:
            self.pool.retain(state.slot)
        tables.state = StateSlot(state.slot, set(), state.num_scheduled)
        self._num_sequences += 1

    def attach(self, tables: BlockTables, nodes: Sequence[PrefixNode], num_tokens: int) -> None:
        slot = nodes[-1].entries[self.number] if nodes else NULL_BLOCK
        if slot != NULL_BLOCK:
            self.pool.retain(slot)
            self._passed.discard(slot)
        self.end(tables)
        tables.state = StateSlot(slot, set(), num_tokens)
        self._num_sequences += 1

    def make_room_for(self, tables: BlockTables, headroom: int) -> bool:
        num_needed = SLOTS_PER_SEQUENCE * self._num_sequences
        if self._num_sequences > 1 and num_needed > self.pool.num_usable:
            return False
        return self.make_room(1)

    def will_have_room(self, num_tokens: int, node: PrefixNode | None, headroom: int) -> bool:
        num_needed = SLOTS_PER_SEQUENCE * (self._num_sequences + 1)
        return not self._num_sequences or num_needed <= self.pool.num_usable

    def try_allocate(self, tables: BlockTables, num_tokens: int) -> int:
        """Stops where a snapshot is due. Unless it reaches the last known token, it stops at the
        end of a block."""
        state = self._state(tables)
        start = state.num_scheduled
        if not self.make_room(1):
            return start
        end = min([num_tokens, *(due for due in state.due if due > start)])
        if end < len(tables.tokens):
            aligned = self._boundary(tables, end)
            end = aligned if aligned > start else end
        return end

    def _boundary(self, tables: BlockTables, position: int) -> int:
        """The last block boundary at or before `position` that splits no atomic span."""
        while True:
            aligned = position // self.block_size * self.block_size
            position = outside(tables.atomic, aligned)
            if position == aligned:
                return aligned

    def could_allocate_later(
        self, tables: BlockTables, num_tokens: int, num_scheduled: int
    ) -> bool:
        return self.pool.num_available_later > 0

    def move(self, tables: BlockTables, end: int, *, keep: bool = False) -> StateMove:
        """Returns the slots of a step that brings a sequence to `end` tokens. There must be room.

        Args:
            keep: Keep the state before the step until its commit, so that `truncate` can roll it
                back.
        """
        state = self._state(tables)
        read, write = state.slot, self.pool.allocate()
        self._passed.discard(write)
        if read != NULL_BLOCK:
            self._read.append(read)
            if keep:
                self.pool.retain(read)
                state.kept.append(KeptState(read, state.num_scheduled, end))
        state.slot, state.num_scheduled = write, end
        if tables.tip is not None and self._is_due(tables, end) and self._has_spare():
            if end < len(tables.tokens) and end not in state.due:
                self._passed.add(write)
            state.pending.append((end // self.block_size, write))
            self._num_pending += 1
            self.pool.retain(write)
        state.due.discard(end)
        return StateMove(read, write)

    def _is_due(self, tables: BlockTables, end: int) -> bool:
        if end % self.block_size:
            return False
        is_inside = end < len(tables.tokens)
        return end in self._state(tables).due or is_inside or end % self._interval == 0

    def _has_spare(self) -> bool:
        """True if running sequences do not need the slot of another snapshot."""
        num_needed = SLOTS_PER_SEQUENCE * self._num_sequences + self._num_pending
        return num_needed < self.pool.num_usable

    def request_snapshot(self, running: BlockTables, query: PrefixQuery) -> bool:
        """True if `query` will find a snapshot by waiting for a running sequence.

        If that sequence has not passed the end of their common prefix, it takes one there.
        """
        state = self._state(running)
        common = running.num_equal(query)
        end = self._boundary(running, common)
        if end <= state.num_scheduled:
            return any(depth * self.block_size <= end for depth, _ in state.pending)
        state.due.add(end)
        return True

    def on_computed(self, tables: BlockTables, num_tokens: int) -> None:
        """Hands snapshots to the nodes that now exist."""
        state, tip = self._state(tables), tables.tip
        while state.kept and state.kept[0].end <= num_tokens:
            self._release(state.kept.pop(0).slot)
        for depth, slot in state.pending.copy():
            if tip is not None and depth > tip.depth:
                continue
            state.pending.remove((depth, slot))
            self._num_pending -= 1
            if tip is not None:
                self.cache_block(tip.ancestor(depth), slot)
            self._release(slot)

    def resume_point(self, tables: BlockTables, num_tokens: int) -> int:
        """Only existing states qualify: the newest, a kept one or the initial one."""
        state = self._state(tables)
        lengths = [state.num_scheduled, *(kept.num_tokens for kept in state.kept)]
        return max((length for length in lengths if length <= num_tokens), default=0)

    def truncate(self, tables: BlockTables, start: int, num_tokens: int) -> None:
        state = self._state(tables)
        for depth, slot in state.pending.copy():
            if depth * self.block_size > num_tokens:
                state.pending.remove((depth, slot))
                self._num_pending -= 1
                self._release(slot)
        while state.num_scheduled > start:
            if state.slot != NULL_BLOCK:
                self._release(state.slot)
            state.slot, state.num_scheduled = NULL_BLOCK, 0
            if state.kept:
                state.slot, state.num_scheduled, _ = state.kept.pop()

    def end(self, tables: BlockTables) -> None:
        state = self._state(tables)
        self._num_sequences -= 1
        self._num_pending -= len(state.pending)
        for _, slot in state.pending:
            self._release(slot)
        for kept in state.kept:
            self._release(kept.slot)
        if state.slot != NULL_BLOCK:
            self._release(state.slot)

    def _release(self, slot: int) -> None:
        self.pool.release(slot, passed=slot in self._passed)

    # Steps.

    def launch_step(self, step: int) -> tuple[BlockCopy, ...]:
        """Releases the slots that the step reads, stamped with the step. States are never
        copied."""
        self.pool.on_step_launched(step)
        for slot in self._read:
            self._release(slot)
        self._read.clear()
        return ()

    def references(self, all_tables: Collection[BlockTables]) -> Counter[int]:
        references = Counter(self._read)
        num_pending = 0
        for tables in all_tables:
            state = self._state(tables)
            num_pending += len(state.pending)
            references.update(slot for _, slot in state.pending)
            references.update(kept.slot for kept in state.kept)
            references.update([state.slot] if state.slot else [])
        if (len(all_tables), num_pending) != (self._num_sequences, self._num_pending):
            raise IntegrityError(
                f"{self._num_sequences} sequences with {self._num_pending} snapshots to come are "
                f"counted, but there are {len(all_tables)} and {num_pending}"
            )
        return references
