"""WindowGroup: the blocks of layers that see only the newest tokens.

A table of such a group is as long as the sequence, but holds blocks only where rows that are still
to be computed will look; what slid out is block 0, and free for others::

      window of 8 tokens, blocks of 4, 14 tokens computed
      full group      [ 3 | 7 | 2 | 9 ]
      window group    [ 0 | 5 | 8 | 6 ]      position 14 sees 7 .. 14
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlx_paged.core.block_pool import NULL_BLOCK
from mlx_paged.core.block_table import BlockCopy
from mlx_paged.core.indexed_blocks import IndexedBlocks
from mlx_paged.core.prefix_source import PrefixSource
from mlx_paged.core.radix_node import RadixNode
from mlx_paged.errors import IntegrityError, InvalidParameterError


@dataclass(frozen=True)
class WindowGroupSpec:
    """What a group of windowed layers needs.

    Attributes:
        num_blocks: Blocks of its pool, block 0 included.
        span: Most tokens that a row sees, itself included.
        first_visible: The first position that a row at a given position, or any row after it, sees;
            it never decreases.
    """

    num_blocks: int
    span: int
    first_visible: Callable[[int], int]


class WindowRow(NamedTuple):
    """A sequence's table of one window group, for one step.

    Attributes:
        block_table: As long as the sequence; block 0 where blocks slid out or were never needed.
        dirty_from: First entry that may differ from the previous step's, but for new zeros.
    """

    block_table: tuple[int, ...]
    dirty_from: int


class WindowTable:
    """Blocks of one sequence: entries before `first` are block 0."""

    __slots__ = ("blocks", "copy_source", "dirty_from", "first", "num_shared", "unchanged")

    def __init__(self, blocks: list[int], first: int, num_shared: int, source: int | None) -> None:
        self.blocks = blocks
        self.first = first
        self.num_shared = num_shared  # leading entries that came from the cache or a fork
        self.copy_source = source  # of a copy that is not yet certain
        self.dirty_from = 0
        self.unchanged: WindowRow | None = None  # the next export, if so

    @property
    def live(self) -> list[int]:
        return self.blocks[self.first :]


class WindowGroup:
    """Tables and blocks of all layers that see equally far."""

    def __init__(self, spec: WindowGroupSpec, block_size: int) -> None:
        if spec.span < 1:
            raise InvalidParameterError("span", "at least 1", spec.span)
        self.block_size = block_size
        self.blocks = IndexedBlocks(spec.num_blocks)
        self.pool = self.blocks.pool
        # Most blocks that a row looks into.
        self.view_blocks = (spec.span + block_size - 2) // block_size + 1
        self._first_visible = spec.first_visible
        self._tables: dict[int, WindowTable] = {}
        self._copies: list[BlockCopy] = []  # of the step being built; their sources are held

    def first_block(self, num_tokens: int) -> int:
        """First block that rows after `num_tokens` tokens look into."""
        return self._first_visible(num_tokens) // self.block_size

    @property
    def capacity(self) -> int | None:
        """Longest sequence, in tokens; None where any length fits."""
        fits = self.pool.num_usable >= self.view_blocks
        return None if fits else self.pool.num_usable * self.block_size

    def blocks_of(self, seq_id: int) -> list[int]:
        """A sequence's blocks (a copy; for tests and inspection)."""
        return self._tables[seq_id].blocks.copy()

    # What the index offers.

    def usable_depth(self, path: Sequence[RadixNode], depth: int) -> int:
        """Most leading blocks of a path, up to `depth`, after which a sequence could go on."""
        while depth:
            needed = range(depth - 1, self.first_block(depth * self.block_size) - 1, -1)
            missing = next((i for i in needed if self.blocks.get(path[i]) is None), None)
            if missing is None:
                return depth
            depth = missing
        return 0

    def can_fork(self, seq_id: int, num_tokens: int) -> bool:
        """Whether a sequence still holds what a fork after `num_tokens` tokens looks into."""
        return self._tables[seq_id].first <= self.first_block(num_tokens)

    def has_copy_of(self, node: RadixNode) -> bool:
        """Whether part of a node's block can be taken by copy."""
        return self.blocks.get(node) is not None

    # The life of a table.

    def begin(self, seq_id: int, tokens: Sequence[int], source: PrefixSource) -> None:
        """Takes references to what a new sequence shares."""
        num_full = len(source.blocks)
        blocks = [NULL_BLOCK] * num_full
        copy_source: int | None = None
        if source.fork_of is not None:
            parent = self._tables[source.fork_of]
            first = self.first_block(source.num_tokens(self.block_size))
            blocks[first:] = parent.blocks[first:num_full]
            if source.num_partial_tokens:
                copy_source = parent.blocks[num_full]
        else:
            first = self.first_block(num_full * self.block_size)
            node = source.tip
            for index in range(num_full - 1, first - 1, -1):
                assert node is not None
                blocks[index] = self._block_of(node)
                node = node.parent
            if source.partial_node is not None:
                copy_source = self._block_of(source.partial_node)
        self._tables[seq_id] = table = WindowTable(blocks, first, num_full, copy_source)
        for block in table.live:
            self.blocks.retain(block)
        if copy_source is not None:
            self.blocks.retain(copy_source)

    def _block_of(self, node: RadixNode) -> int:
        block = self.blocks.get(node)
        assert block is not None, "a match that this group does not hold"
        return block

    def drop_copy(self, seq_id: int) -> None:
        """Does without the copy that `begin` prepared."""
        table = self._tables[seq_id]
        if table.copy_source is not None:
            self.blocks.release(table.copy_source)
            table.copy_source = None

    def make_room(self, seq_id: int, num_tokens: int, headroom: int) -> bool:
        """Whether there is room for what a new sequence of `num_tokens` tokens holds at once."""
        table = self._tables[seq_id]
        most = min(self._blocks_for(num_tokens), table.first + self.view_blocks)
        num_fresh = max(0, most - len(table.blocks))
        if num_fresh + headroom > self.pool.num_free + self.pool.num_cached:
            return False
        return self.blocks.make_room(num_fresh)

    def settle(self, seq_id: int) -> None:
        """The sequence begins: makes the target of its copy."""
        table = self._tables[seq_id]
        if table.copy_source is not None:
            table.blocks.append(self.pool.allocate())
            self._copies.append(BlockCopy(table.copy_source, table.blocks[-1]))
            table.copy_source = None

    def coverable(self, seq_id: int, num_tokens: int) -> int:
        """Tokens, at most `num_tokens`, for which there are blocks or room."""
        num_blocks = len(self._tables[seq_id].blocks)
        num_fresh = self._blocks_for(num_tokens) - num_blocks
        if num_fresh <= 0 or self.blocks.make_room(num_fresh):
            return num_tokens
        return (num_blocks + self.pool.num_free) * self.block_size

    def cover(self, seq_id: int, num_tokens: int) -> None:
        """Makes a table cover `num_tokens` tokens; the caller knows that there is room."""
        table = self._tables[seq_id]
        while len(table.blocks) < self._blocks_for(num_tokens):
            table.blocks.append(self.pool.allocate())
            table.unchanged = None

    def can_cover_later(self, seq_id: int, num_tokens: int, num_scheduled: int) -> bool:
        """Whether there will be room once the steps in flight are committed."""
        table = self._tables[seq_id]
        num_fresh = self._blocks_for(num_tokens) - len(table.blocks)
        slides = table.blocks[table.first : self.first_block(num_scheduled)]
        freed = sum(self.pool.ref_count(block) == 1 for block in slides)
        return num_fresh <= self._num_available_later + freed

    def will_have_room(self, num_tokens: int, headroom: int) -> bool:
        """Whether a new sequence will find room once the steps in flight are evaluated."""
        num_needed = min(self._blocks_for(num_tokens), self.view_blocks)
        return num_needed + headroom <= self._num_available_later

    def on_indexed(self, seq_id: int, index: int, node: RadixNode) -> None:
        """Block `index` of a sequence is that of `node` from now on."""
        table = self._tables[seq_id]
        own = table.blocks[index]
        if own == NULL_BLOCK:
            return
        present = self.blocks.hold(node, own)
        if present != own:
            self.blocks.retain(present)
            self.blocks.release(own)
            table.blocks[index] = present
            table.dirty_from = min(table.dirty_from, index)
            table.unchanged = None

    def on_computed(self, seq_id: int, num_tokens: int, tip: RadixNode | None) -> None:
        """Lets go of what rows after `num_tokens` tokens do not see."""
        table = self._tables[seq_id]
        first = min(self.first_block(num_tokens), len(table.blocks))
        for index in range(table.first, first):
            # What came from the cache may well be wanted again.
            self.blocks.release(table.blocks[index], passed=index >= table.num_shared)
            table.blocks[index] = NULL_BLOCK
            table.unchanged = None
        table.first = max(table.first, first)

    def end(self, seq_id: int) -> None:
        """Takes a sequence's blocks back; those that are indexed stay until they are evicted."""
        self.drop_copy(seq_id)
        for block in self._tables.pop(seq_id).live:
            self.blocks.release(block)

    def export(self, seq_id: int) -> WindowRow:
        """The table, and its first entry that may differ from the last export."""
        table = self._tables[seq_id]
        if table.unchanged is not None:
            return table.unchanged
        row = WindowRow(tuple(table.blocks), table.dirty_from)
        table.dirty_from = len(table.blocks)
        table.unchanged = WindowRow(row.block_table, table.dirty_from)
        return row

    def launch_step(self, step: int) -> tuple[BlockCopy, ...]:
        """Ends the building of a step: returns its copies, and dates later releases."""
        self.pool.on_step_launched(step)
        copies = tuple(self._copies)
        for copy in copies:
            self.blocks.release(copy.src)
        self._copies.clear()
        return copies

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def _num_available_later(self) -> int:
        return self.pool.num_free + self.pool.num_cached + self.pool.num_quarantined

    def check_integrity(self, tips: Mapping[int, RadixNode | None], nodes: set[RadixNode]) -> None:
        """Recounts blocks and tables; raises `IntegrityError` with what disagrees."""
        references = Counter(copy.src for copy in self._copies)
        for seq_id, table in self._tables.items():
            references.update(table.live)
            if any(table.blocks[: table.first]) or NULL_BLOCK in table.live:
                raise IntegrityError(f"{seq_id}: block 0 is not just what slid out of the window")
            node = tips[seq_id]
            while node is not None and node.depth > table.first:
                if self.blocks.get(node) != table.blocks[node.depth - 1]:
                    raise IntegrityError(
                        f"entry {node.depth - 1} of sequence {seq_id} is not the indexed block"
                    )
                node = node.parent
        if self._tables.keys() != tips.keys():
            raise IntegrityError("a window group has other sequences than the full group")
        self.blocks.check_integrity(references, nodes)
