"""StateGroup: the states of recurrent layers, in slots, and their snapshots.

A step reads a sequence's state from one slot and writes the state after its rows to another, so
that a slot never changes once it is written::

      step         1        2        3        4
      tokens     0..63    64..95     96       97
      slots      0 -> 5   5 -> 2   2 -> 7   7 -> 4
                      |        |
                      |        snapshot of 96 tokens: slot 2 stays, for whoever has the same prefix
                      freed once step 2 has been evaluated

Slot 0 is the state before the first token. A snapshot costs no copy, and a sequence that continues
from one reads its slot as if it had written it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mlx_paged.core.block_pool import NULL_BLOCK
from mlx_paged.core.indexed_blocks import IndexedBlocks
from mlx_paged.core.prefix_source import PrefixSource
from mlx_paged.core.radix_node import RadixNode
from mlx_paged.errors import IntegrityError, InvalidParameterError

#: Slots of a running sequence: one read and one written by the step that runs, and one more written
#: by the step launched meanwhile.
SLOTS_PER_SEQUENCE = 3


@dataclass(frozen=True)
class StateGroupSpec:
    """What the recurrent layers need.

    Attributes:
        num_slots: Slots of the pool, slot 0 included.
        snapshot_interval: Blocks between two snapshots while tokens are generated.
    """

    num_slots: int
    snapshot_interval: int = 8

    def __post_init__(self) -> None:
        if self.num_slots < 3:
            raise InvalidParameterError(
                "num_slots", "at least 3 (slot 0 is the initial state)", self.num_slots
            )
        if self.snapshot_interval < 1:
            raise InvalidParameterError("snapshot_interval", "at least 1", self.snapshot_interval)


class StateMove(NamedTuple):
    """Slots of one sequence in one step: state before its rows, and after them."""

    read: int
    write: int


class Pending(NamedTuple):
    """A snapshot whose node is not there yet."""

    depth: int
    slot: int


@dataclass
class SequenceState:
    """Slots of one sequence.

    Attributes:
        tokens: Its live token list.
        slot: Newest state; 0 before the first token.
        due: Positions at which a snapshot is wanted, in tokens.
        num_scheduled: Tokens in `slot`.
        pending: Snapshots written or being written.
    """

    tokens: Sequence[int]
    slot: int
    due: set[int]
    num_scheduled: int
    pending: list[Pending] = field(default_factory=list)


class StateGroup:
    """State slots of all sequences; the recurrent layers of a model move in step."""

    def __init__(self, spec: StateGroupSpec, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = IndexedBlocks(spec.num_slots)
        self.pool = self.blocks.pool
        self._interval = spec.snapshot_interval * block_size
        self._states: dict[int, SequenceState] = {}
        self._passed: set[int] = set()  # snapshots on the way through a prompt
        self._read: list[int] = []  # by the step being built; let go when it is launched

    capacity: int | None = None  # a state has the same size at every length

    # What the index offers.

    def usable_depth(self, path: Sequence[RadixNode], depth: int) -> int:
        """Most leading blocks of a path, up to `depth`, after which a sequence could go on."""
        while depth and self.blocks.get(path[depth - 1]) is None:
            depth -= 1
        return depth

    def can_fork(self, seq_id: int, num_tokens: int) -> bool:
        """Never: the state is past those tokens already."""
        return False

    def has_copy_of(self, node: RadixNode) -> bool:
        """Never: there is no state in the middle of a block."""
        return False

    # The life of a state.

    def begin(self, seq_id: int, tokens: Sequence[int], source: PrefixSource) -> None:
        """Takes over the snapshot that a new sequence continues from, and plans its own ones.

        They are due at the last full block of what is known, where an equal prompt or the next turn
        will continue, and where the sequence leaves what others have computed before it: there the
        third one will continue.
        """
        slot: int = NULL_BLOCK
        num_full = len(source.blocks)
        if num_full:
            assert source.tip is not None
            snapshot = self.blocks.get(source.tip)
            assert snapshot is not None, "a match that has no snapshot"
            slot = snapshot
            self.blocks.retain(slot)
            self._passed.discard(slot)
        last = (len(tokens) - 1) // self.block_size
        due = {last, min(last, source.num_known_blocks)}
        positions = {depth * self.block_size for depth in due if depth > num_full}
        self._states[seq_id] = SequenceState(tokens, slot, positions, num_full * self.block_size)

    def drop_copy(self, seq_id: int) -> None:
        """Nothing is copied here."""

    def make_room(self, seq_id: int, num_tokens: int, headroom: int) -> bool:
        """Whether there are slots for one sequence more."""
        num_needed = SLOTS_PER_SEQUENCE * len(self._states)
        if len(self._states) > 1 and num_needed > self.pool.num_usable:
            return False
        return self.blocks.make_room(1)

    def settle(self, seq_id: int) -> None:
        """Nothing is to be made."""

    def coverable(self, seq_id: int, num_tokens: int) -> int:
        """Tokens, at most `num_tokens`, up to which a step may go.

        It ends where a snapshot is due, and where it does not reach the end of what is known, at
        the end of a block.
        """
        state = self._states[seq_id]
        start = state.num_scheduled
        if not self.blocks.make_room(1):
            return start
        end = min([num_tokens, *(due for due in state.due if due > start)])
        if end < len(state.tokens):
            aligned = end // self.block_size * self.block_size
            end = aligned if aligned > start else end
        return end

    def cover(self, seq_id: int, num_tokens: int) -> None:
        """The slot is made by `move`."""

    def can_cover_later(self, seq_id: int, num_tokens: int, num_scheduled: int) -> bool:
        """Whether there will be a slot once the steps in flight are committed."""
        return self.pool.num_free + self.pool.num_cached + self.pool.num_quarantined > 0

    def will_have_room(self, num_tokens: int, headroom: int) -> bool:
        """Whether a new sequence will find slots once the steps in flight are evaluated."""
        num_running = len(self._states)
        return not num_running or SLOTS_PER_SEQUENCE * (num_running + 1) <= self.pool.num_usable

    def move(self, seq_id: int, end: int, *, is_indexed: bool) -> StateMove:
        """Slots of a step that brings a sequence to `end` tokens; `coverable` made the room."""
        state = self._states[seq_id]
        read, write = state.slot, self.pool.allocate()
        self._passed.discard(write)
        if read != NULL_BLOCK:
            self._read.append(read)
        state.slot, state.num_scheduled = write, end
        if is_indexed and self._is_due(state, end) and self._has_spare():
            if end < len(state.tokens) and end not in state.due:
                self._passed.add(write)
            state.pending.append(Pending(end // self.block_size, write))
            self.pool.retain(write)
        state.due.discard(end)
        return StateMove(read, write)

    def _is_due(self, state: SequenceState, end: int) -> bool:
        if end % self.block_size:
            return False
        return end in state.due or end < len(state.tokens) or end % self._interval == 0

    def _has_spare(self) -> bool:
        """Whether a snapshot takes no slot that running sequences need."""
        num_pending = sum(len(state.pending) for state in self._states.values())
        needed = SLOTS_PER_SEQUENCE * len(self._states) + num_pending
        return needed < self.pool.num_usable

    def wait_for(self, seq_id: int, tokens: Sequence[int]) -> bool:
        """Whether `tokens` will find a snapshot if they wait for a running sequence.

        If it is to pass the end of what the two have in common, it will leave one there.
        """
        state = self._states[seq_id]
        limit = min(len(tokens) - 1, len(state.tokens))
        common = 0
        while common < limit and tokens[common] == state.tokens[common]:
            common += 1
        end = common // self.block_size * self.block_size
        if end <= state.num_scheduled:
            return any(p.depth * self.block_size <= end for p in state.pending)
        state.due.add(end)
        return True

    def on_indexed(self, seq_id: int, index: int, node: RadixNode) -> None:
        """Blocks are nothing to a state."""

    def on_computed(self, seq_id: int, num_tokens: int, tip: RadixNode | None) -> None:
        """Gives snapshots to the nodes that are there by now."""
        state = self._states[seq_id]
        for pending in state.pending.copy():
            if tip is not None and pending.depth > tip.depth:
                continue
            state.pending.remove(pending)
            if tip is not None:
                self.blocks.hold(tip.ancestor(pending.depth), pending.slot)
            self._release(pending.slot)

    def end(self, seq_id: int) -> None:
        """Takes a sequence's slots back; snapshots stay until they are evicted."""
        state = self._states.pop(seq_id)
        for pending in state.pending:
            self._release(pending.slot)
        if state.slot != NULL_BLOCK:
            self._release(state.slot)

    def launch_step(self, step: int) -> None:
        """Ends the building of a step: what it reads is let go, dated with it."""
        self.pool.on_step_launched(step)
        for slot in self._read:
            self._release(slot)
        self._read.clear()

    def _release(self, slot: int) -> None:
        self.blocks.release(slot, passed=slot in self._passed)

    def check_integrity(self, tips: Mapping[int, RadixNode | None], nodes: set[RadixNode]) -> None:
        """Recounts slots; raises `IntegrityError` with what disagrees."""
        references = Counter(self._read)
        for state in self._states.values():
            references.update(pending.slot for pending in state.pending)
            references.update([state.slot] if state.slot else [])
        if self._states.keys() != tips.keys():
            raise IntegrityError("the state group has other sequences than the full group")
        self.blocks.check_integrity(references, nodes)
