"""SideGroups: the window groups and the state group of a model, behind the full group's tables.

A model with full attention alone has none, and every loop here goes over nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mlx_paged.core.block_table import BlockCopy, BlockTable
from mlx_paged.core.prefix_source import PrefixSource
from mlx_paged.core.radix_index import PrefixMatch
from mlx_paged.core.radix_node import RadixNode
from mlx_paged.core.state_group import StateGroup, StateGroupSpec, StateMove
from mlx_paged.core.window_group import WindowGroup, WindowGroupSpec, WindowRow


class GroupRows(NamedTuple):
    """What the side groups tell a step about one sequence.

    Attributes:
        windows: Its table in each window group.
        state: Its slots; None where the model has no recurrent layers.
    """

    windows: tuple[WindowRow, ...] = ()
    state: StateMove | None = None


NO_ROWS = GroupRows()


class SideGroups:
    """Does to every side group what is done to the full group."""

    def __init__(
        self, windows: Sequence[WindowGroupSpec], states: StateGroupSpec | None, block_size: int
    ) -> None:
        self.windows = tuple(WindowGroup(spec, block_size) for spec in windows)
        self.states = None if states is None else StateGroup(states, block_size)
        self._all: tuple[WindowGroup | StateGroup, ...] = self.windows
        if self.states is not None:
            self._all += (self.states,)

    def __iter__(self) -> Iterator[WindowGroup | StateGroup]:
        return iter(self._all)

    def __bool__(self) -> bool:
        return bool(self._all)

    def capacity(self, full: int) -> int:
        """Tokens of the longest sequence, where the full group holds `full`."""
        return min([full, *(g.capacity for g in self._all if g.capacity is not None)])

    # What the index offers.

    def limit(self, match: PrefixMatch) -> PrefixMatch:
        """The part of a match that every group can continue from."""
        if match.node is None:
            return match
        path = match.node.path()
        depth = len(path)
        while depth:
            usable = min(group.usable_depth(path, depth) for group in self._all)
            if usable == depth:
                break
            depth = usable
        if depth < len(path):
            return PrefixMatch(match.node.ancestor(depth), None, 0)
        node = match.partial
        if node is not None and not all(group.has_copy_of(node) for group in self._all):
            return PrefixMatch(match.node, None, 0)
        return match

    def can_fork(self, seq_id: int, num_tokens: int) -> bool:
        """Whether every group still holds what a fork after `num_tokens` tokens looks into."""
        return all(group.can_fork(seq_id, num_tokens) for group in self._all)

    # The life of a sequence.

    def begin(self, seq_id: int, tokens: Sequence[int], source: PrefixSource) -> None:
        """Takes references to what a new sequence shares."""
        for group in self._all:
            group.begin(seq_id, tokens, source)

    def drop_copy(self, seq_id: int) -> None:
        """Does without the copies that `begin` prepared."""
        for group in self._all:
            group.drop_copy(seq_id)

    def make_room(self, seq_id: int, num_tokens: int, share: float) -> bool:
        """Whether every group has room for a new sequence, and a share of its pool besides."""
        return all(
            group.make_room(seq_id, num_tokens, int(share * group.pool.num_usable))
            for group in self._all
        )

    def settle(self, seq_id: int) -> None:
        """The sequence begins."""
        for group in self._all:
            group.settle(seq_id)

    def coverable(self, seq_id: int, num_tokens: int) -> int:
        """Tokens, at most `num_tokens`, that the next step may bring a sequence to."""
        for group in self._all:
            num_tokens = group.coverable(seq_id, num_tokens)
        return num_tokens

    def cover(self, seq_id: int, num_tokens: int) -> None:
        """Makes the tables cover `num_tokens` tokens; `coverable` said that there is room."""
        for group in self._all:
            group.cover(seq_id, num_tokens)

    def can_cover_later(self, seq_id: int, num_tokens: int, num_scheduled: int) -> bool:
        """Whether there will be room once the steps in flight are committed."""
        return all(g.can_cover_later(seq_id, num_tokens, num_scheduled) for g in self._all)

    def will_have_room(self, num_tokens: int, share: float) -> bool:
        """Whether a new sequence will find room once the steps in flight are evaluated."""
        return all(
            group.will_have_room(num_tokens, int(share * group.pool.num_usable))
            for group in self._all
        )

    def on_indexed(self, seq_id: int, index: int, node: RadixNode) -> None:
        """Block `index` of a sequence is that of `node` from now on."""
        for group in self._all:
            group.on_indexed(seq_id, index, node)

    def on_computed(self, seq_id: int, num_tokens: int, tip: RadixNode | None) -> None:
        """A sequence has `num_tokens` tokens; what the rest does not need goes."""
        for group in self._all:
            group.on_computed(seq_id, num_tokens, tip)

    def end(self, seq_id: int) -> None:
        """Takes back all that a sequence holds."""
        for group in self._all:
            group.end(seq_id)

    def forget(self, node: RadixNode) -> None:
        """A node leaves the index."""
        for group in self._all:
            group.blocks.forget(node)

    def clear(self) -> None:
        """The index is emptied."""
        for group in self._all:
            group.blocks.clear()

    # Steps.

    def rows(self, seq_id: int, end: int, *, is_indexed: bool) -> GroupRows:
        """What a step that brings a sequence to `end` tokens must know; once for each step."""
        if not self._all:
            return NO_ROWS
        windows = tuple(group.export(seq_id) for group in self.windows)
        if self.states is None:
            return GroupRows(windows)
        return GroupRows(windows, self.states.move(seq_id, end, is_indexed=is_indexed))

    def launch_step(self, step: int) -> tuple[tuple[BlockCopy, ...], ...]:
        """Ends the building of a step; returns the copies of each window group."""
        if self.states is not None:
            self.states.launch_step(step)
        return tuple(group.launch_step(step) for group in self.windows)

    def on_step_evaluated(self, step: int) -> None:
        """A step ran to its end."""
        for group in self._all:
            group.pool.on_step_evaluated(step)

    def check_integrity(self, tables: Mapping[int, BlockTable], nodes: set[RadixNode]) -> None:
        """Checks every group against the full group's tables; raises `IntegrityError`."""
        tips = {seq_id: table.tip for seq_id, table in tables.items()}
        for group in self._all:
            group.check_integrity(tips, nodes)
