"""StateGroup: recurrent states, in slots that never change once written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from mlx_paged.core.kv.groups import KVCacheGroup
from mlx_paged.core.kv.pool import NULL_BLOCK
from mlx_paged.core.kv.restoration import BlockRead
from mlx_paged.core.kv.specs import (
    SLOTS_PER_SEQUENCE,
    BlockCopy,
    KeptState,
    StateGroupSpec,
    StateMove,
    StateSlot,
)
from mlx_paged.core.kv.stored import StoredPrefix
from mlx_paged.core.kv.tables import BlockTables, PrefixSource
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
        self._keeps_newest = spec.keeps_newest
        self._is_unlimited = spec.on_free is not None
        self.pool.on_free = spec.on_free
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

    def usable_stored(self, stored: StoredPrefix, depth: int) -> int:
        while depth and stored.entry(self.number, depth - 1) == ABSENT:
            depth -= 1
        return depth

    def view(self, depth: int) -> range:
        return range(depth - 1, depth)

    def can_copy_from(self, node: PrefixNode) -> bool:
        return False  # no state exists in the middle of a block

    # Lifecycle of a state.

    capacity = None  # a state has the same size at every length

    def can_fork(self, parent: BlockTables, num_tokens: int) -> bool:
        return self._state(parent).num_scheduled == num_tokens  # the only state that it has

    def begin(self, tables: BlockTables, source: PrefixSource) -> None:
        """Takes the snapshot that a new sequence continues from, and plans its own snapshots."""
        slot: int = NULL_BLOCK
        num_full = source.num_full_blocks
        if source.fork_of is not None:
            self.fork(source.fork_of, tables)
            self.plan(tables, len(tables.tokens), source.num_known_blocks)
            return
        if num_full and source.stored is not None:
            slot = max(NULL_BLOCK, source.stored.entry(self.number, num_full - 1))
        elif num_full:
            assert source.tip is not None
            slot = source.tip.entries[self.number]
            assert slot > ABSENT, "a match that has no snapshot"
        if slot != NULL_BLOCK:
            self.pool.retain(slot)
            self._passed.discard(slot)
        tables.state = StateSlot(slot, set(), num_full * self.block_size)
        self._num_sequences += 1
        if len(tables.tokens):
            self.plan(tables, len(tables.tokens), source.num_known_blocks)

    def plan(self, tables: BlockTables, num_tokens: int | None, num_known_blocks: int = 0) -> None:
        """Plans the snapshots of a sequence with a prompt of `num_tokens` tokens; None plans none.

        One is due at the last full block of the prompt, where an equal prompt or the next turn will
        continue. Another is due where the sequence diverges from earlier ones, because a third
        sequence may continue there.

        Args:
            num_known_blocks: Full blocks of the prompt that are indexed.
        """
        state = self._state(tables)
        state.output_from, state.newest, state.due = num_tokens, None, set()
        if num_tokens is None:
            self._drop_pending(state)
            return
        last = (num_tokens - 1) // self.block_size
        for depth in (last, min(last, num_known_blocks)):
            position = self._boundary(tables, depth * self.block_size)
            if position > state.num_scheduled:
                state.due.add(position)

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
        before = self._state(tables)
        self.end(tables)
        due = {position for position in before.due if position > num_tokens}
        tables.state = StateSlot(slot, due, num_tokens, before.output_from, before.newest)
        self._num_sequences += 1

    def make_room(self, num_blocks: int) -> bool:
        if self._is_unlimited and self.pool.num_free < num_blocks:
            self.pool.grow(2 * self.pool.num_blocks + num_blocks)
        return super().make_room(num_blocks)

    def make_room_for(self, tables: BlockTables, headroom: int) -> bool:
        num_needed = SLOTS_PER_SEQUENCE * self._num_sequences
        if self._num_sequences > 1 and num_needed > self.pool.num_usable:
            return self._is_unlimited
        return self.make_room(1)

    def missing_keys(self, tables: BlockTables, stored: StoredPrefix) -> list[int]:
        entry = stored.entry(self.number, stored.num_blocks - 1)
        return [-entry] if entry < ABSENT else []

    def take_missing(self, tables: BlockTables, keys: Sequence[int]) -> list[BlockRead]:
        if not keys:
            return []
        state, [key] = self._state(tables), keys
        state.slot = self.pool.allocate()
        self._passed.discard(state.slot)
        # A snapshot like one that a step has written: the commit hands it to the node.
        self.pool.retain(state.slot)
        state.pending.append((state.num_scheduled // self.block_size, state.slot))
        self._num_pending += 1
        return [BlockRead(self.number, state.slot, key)]

    def will_have_room(self, num_tokens: int, node: PrefixNode | None, headroom: int) -> bool:
        num_needed = SLOTS_PER_SEQUENCE * (self._num_sequences + 1)
        is_first = not self._num_sequences
        return is_first or self._is_unlimited or num_needed <= self.pool.num_usable

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
        """Returns the last block boundary at or before `position` that splits no atomic span."""
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
        self.make_room(1)
        read, write = state.slot, self.pool.allocate()
        self._passed.discard(write)
        if read != NULL_BLOCK:
            if self._is_unlimited:
                self._release(read)
            else:
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
        state = self._state(tables)
        if state.output_from is None or end % self.block_size:
            return False
        if end in state.due or end < len(tables.tokens) or end % self._interval == 0:
            return True
        return self._keeps_newest and end >= state.output_from

    def _has_spare(self) -> bool:
        """True if running sequences do not need the slot of another snapshot."""
        if self._is_unlimited:
            return True
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
                node = tip.ancestor(depth)
                self.cache_block(node, slot)
                if self._keeps_newest:
                    self._replace_newest(state, node)
            self._release(slot)

    def _replace_newest(self, state: StateSlot, node: PrefixNode) -> None:
        """Drops the snapshot of the output before this one, unless the interval keeps it."""
        position = node.depth * self.block_size
        if state.output_from is None or position < state.output_from:
            return
        if state.newest is not None and state.newest is not node:
            self.forget(state.newest)
        state.newest = node if position % self._interval else None

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
        self._drop_pending(state)
        for kept in state.kept:
            self._release(kept.slot)
        if state.slot != NULL_BLOCK:
            self._release(state.slot)

    def _drop_pending(self, state: StateSlot) -> None:
        self._num_pending -= len(state.pending)
        for _, slot in state.pending:
            self._release(slot)
        state.pending.clear()

    def _release(self, slot: int) -> None:
        self.pool.release(slot, passed=slot in self._passed)

    # Steps.

    def launch_step(self, step: int) -> tuple[BlockCopy, ...]:
        """Releases the slots that the step reads, stamped with the step. States are never
        copied."""
        if not self._is_unlimited:
            self.pool.on_step_launched(step)
        for slot in self._read:
            self._release(slot)
        self._read.clear()
        return ()

    def on_step_evaluated(self, step: int) -> None:
        if not self._is_unlimited:
            super().on_step_evaluated(step)

    def recount(self, all_tables: Collection[BlockTables]) -> None:
        self._num_sequences = len(all_tables)
        self._num_pending = sum(len(self._state(tables).pending) for tables in all_tables)
        self._read.clear()
        self._passed.clear()
        super().recount(all_tables)

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
