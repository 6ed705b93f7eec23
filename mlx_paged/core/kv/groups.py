"""KV cache groups: layers of a model that need the same past tokens share blocks and tables.

Three kinds of layers, two classes, one protocol (`KVCacheGroup`):

- *Full attention* sees every token.
- *Windows* see the newest tokens. Their tables are as long as the sequence, but hold blocks only
  that tokens still to be computed will read; entries that slid out are block 0::

      window of 8 tokens, blocks of 4, 14 tokens computed
      full attention  [ 3 | 7 | 2 | 9 ]
      window          [ 0 | 5 | 8 | 6 ]      position 14 sees 7 .. 14

- *Recurrent layers* keep a state of one size. A step reads a sequence's state from one slot and
  writes the state after its rows to another, so that a slot never changes once it is written::

      step         1        2        3        4
      tokens     0..63    64..95     96       97
      slots      0 -> 5   5 -> 2   2 -> 7   7 -> 4
                      |        |
                      |        snapshot of 96 tokens: slot 2 stays, for sequences with this prefix
                      freed once step 2 has been evaluated

  Slot 0 is the state before the first token. A snapshot costs no copy, and a sequence that
  continues from one reads its slot as if it had written it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from mlx_paged.core.kv.pool import NULL_BLOCK, BlockPool
from mlx_paged.core.kv.specs import BlockCopy, StateSlot, StepTable, WindowGroupSpec
from mlx_paged.core.kv.tier import ABSENT, Tier
from mlx_paged.core.kv.tree import (
    TOKEN_BYTES,
    PrefixNode,
    PrefixQuery,
    common_prefix_len,
    token_bytes,
)
from mlx_paged.errors import IntegrityError, InvalidParameterError


class BlockTable:
    """Blocks of a sequence in one attention group: entries before `first` are block 0.

    Attributes:
        num_shared: Leading entries that came from the cache or a fork.
        copy_source: Block whose head is copied to entry `num_shared` by the step being built.
        dirty_from: First entry that changed since the last export, but for those that slid out.
    """

    __slots__ = ("blocks", "copy_source", "dirty_from", "first", "num_shared")

    def __init__(self, blocks: list[int], first: int = 0, copy_source: int | None = None) -> None:
        self.blocks = blocks
        self.first = first
        self.num_shared = len(blocks)
        self.copy_source = copy_source
        self.dirty_from = 0

    @property
    def live(self) -> list[int]:
        """The blocks that the sequence references."""
        return self.blocks[self.first :]

    def repair(self) -> None:
        """After a change was cut off in the middle, zeros may lie between blocks."""
        holes = [i for i, block in enumerate(self.blocks) if block == NULL_BLOCK]
        self.first = holes[-1] + 1 if holes else 0
        self.blocks[: self.first] = [NULL_BLOCK] * self.first


class BlockTables:
    """The tables of one sequence, one for each KV cache group, and how much of it is indexed.

    ::

        [0, tip.depth)            indexed: shared with sequences that have the same prefix
        [tip.depth, len(blocks))  not indexed: its own (or, where it is not indexed, its forks' too)

    Attributes:
        tokens: The sequence's live token list: the sequence appends to it, the KV manager reads it.
        tip: Node of the last indexed block (or the root); None when this sequence is not indexed at
            all.
        attention: Its table in each attention group; the first is that of full attention.
        state: Its recurrent state; None where the model has none.
        num_cached_tokens: Leading tokens that need not be computed.
        num_computed_tokens: Leading tokens that are in the blocks: cached, or computed by steps
            that were committed.
        exported: What `export` returns next; None where a table has changed since the last time.
        owner: The sequence that has these tables.
        prompt: The tokens that it looked for when it was admitted (`PrefixQuery.tokens`).
        atomic: Spans that are computed in one step (`PrefixQuery.atomic`).
    """

    __slots__ = (
        "atomic",
        "attention",
        "exported",
        "num_cached_tokens",
        "num_computed_tokens",
        "owner",
        "prompt",
        "state",
        "tip",
        "tokens",
    )

    def __init__(
        self,
        tokens: Sequence[int],
        owner: Any = None,
        prompt: bytes = b"",
        atomic: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.tokens = tokens
        self.owner = owner
        self.prompt = prompt
        self.atomic = atomic
        self.tip: PrefixNode | None = None
        self.attention: list[BlockTable] = []
        self.state: StateSlot | None = None
        self.num_cached_tokens = 0
        self.num_computed_tokens = 0
        self.exported: tuple[StepTable, ...] | None = None

    @property
    def blocks(self) -> list[int]:
        """Blocks of full attention, in order; not to be changed."""
        return self.attention[0].blocks

    def num_equal(self, query: PrefixQuery, start: int = 0) -> int:
        """Leading tokens of a query that this sequence has too; `start` of them are known."""
        num_equal = common_prefix_len(query.tokens, self.prompt, start)
        if num_equal * TOKEN_BYTES >= len(self.prompt):  # (the prompt without its last token)
            rest = token_bytes(self.tokens[num_equal:])
            begin = num_equal * TOKEN_BYTES
            num_equal += common_prefix_len(query.tokens[begin : begin + len(rest)], rest)
        return num_equal

    def export(self) -> tuple[StepTable, ...]:
        """The tables for a step, in the order of the attention groups."""
        if self.exported is not None:
            return self.exported
        tables, unchanged = [], []
        for table in self.attention:
            blocks = tuple(table.blocks)
            tables.append(StepTable(blocks, table.dirty_from))
            unchanged.append(StepTable(blocks, len(blocks)))
            table.dirty_from = len(blocks)
        self.exported = tuple(unchanged)
        return tuple(tables)

    # Changes of a table. (`number` is that of its group.)

    def append(self, number: int, *blocks: int) -> None:
        """Blocks at the end."""
        table = self.attention[number]
        table.dirty_from = min(table.dirty_from, len(table.blocks))
        table.blocks += blocks
        self.exported = None

    def replace(self, number: int, index: int, block: int) -> None:
        """Another block for entry `index`."""
        table = self.attention[number]
        table.dirty_from = min(table.dirty_from, index)
        table.blocks[index] = block
        self.exported = None

    def slide(self, number: int, index: int) -> None:
        """Entry `index` is not seen any more."""
        self.attention[number].blocks[index] = NULL_BLOCK
        self.exported = None

    def truncate(self, number: int, num_blocks: int) -> list[int]:
        """Takes the blocks from `num_blocks` on out of a table, and returns them."""
        table = self.attention[number]
        cut = table.blocks[num_blocks:]
        del table.blocks[num_blocks:]
        table.dirty_from = min(table.dirty_from, num_blocks)
        table.num_shared = min(table.num_shared, num_blocks)
        self.exported = None
        return cut


class PrefixSource(NamedTuple):
    """Where a new sequence's cached head comes from: the prefix tree, or a sequence it forks.

    Attributes:
        num_full_blocks: Full blocks, taken by reference.
        tip: Node of the last of them; the root or None where there are none, and None where the
            forked sequence is not indexed.
        partial: Node whose block's first `num_partial_tokens` tokens are taken by copy; None where
            there is none, or where they are a fork's.
        num_partial_tokens: Tokens of the block after the full ones that are taken by copy.
        fork_of: The sequence that is forked; None where the blocks come from the tree.
        num_known_blocks: Full blocks of the new sequence that are indexed, whether or not every
            group can continue after them.
    """

    num_full_blocks: int
    tip: PrefixNode | None
    partial: PrefixNode | None = None
    num_partial_tokens: int = 0
    fork_of: BlockTables | None = None
    num_known_blocks: int = 0

    def num_tokens(self, block_size: int) -> int:
        """Tokens that need not be computed."""
        return self.num_full_blocks * block_size + self.num_partial_tokens


class KVCacheGroup(ABC):
    """A pool, and what its blocks (or slots) are to sequences and to the prefix tree.

    Attributes:
        number: Its place among the groups, and in `PrefixNode.entries`.
        pool: Its blocks, or slots.
        num_evictions: Cached blocks given up to make room.
        sees_everything: True if a row reads every token before it. So a node without an entry in
            this group is of no use, nor are those below it: they leave the tree. And all that a
            sequence holds grows with it; the other groups let go of blocks as it advances.
    """

    sees_everything = False

    def __init__(
        self,
        number: int,
        num_blocks: int,
        block_size: int,
        tier: Tier,
        remove: Callable[[PrefixNode], None],
    ) -> None:
        self.number = number
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.num_evictions = 0
        self._tier = tier
        self._remove = remove  # takes a node out of the tree, with all that groups hold of it

    # The prefix tree.

    def forget(self, node: PrefixNode) -> None:
        """A node gives up its entry, which no sequence references."""
        entry = node.entries[self.number]
        node.entries[self.number] = ABSENT
        if entry > ABSENT:
            self.pool.uncache(entry)
        elif entry < ABSENT:
            self._tier.drop(-entry)

    def hold(self, node: PrefixNode, block: int) -> int:
        """A node starts to hold a block in use; returns the one that it already held, if any."""
        present = node.entries[self.number]
        if present > ABSENT:
            return present
        if present < ABSENT:
            self._tier.drop(-present)  # computed once more
        node.entries[self.number] = block
        self.pool.cache(block, node)
        return block

    def evict(self, node: PrefixNode) -> None:
        """A node's block leaves the device: the tier takes it, or drops it."""
        block = node.entries[self.number]
        key = self._tier.store(node, self.number, block)
        if not key and self.sees_everything:
            self._remove(node)
        else:
            node.entries[self.number] = -key
            self.pool.uncache(block)
        self.num_evictions += 1

    def make_room(self, num_blocks: int) -> bool:
        """Evicts until `num_blocks` are free; false where fewer are there for now."""
        while self.pool.num_free < num_blocks:
            node = self.pool.next_to_evict()
            if node is None:
                return False
            self.evict(node)
        return True

    def keep_at_most(self, num_blocks: int) -> None:
        """Evicts until no more than `num_blocks` cached blocks are left. No step is in flight."""
        while self.pool.num_cached > num_blocks:
            node = self.pool.next_to_evict()
            assert node is not None
            self.evict(node)

    @abstractmethod
    def usable_depth(self, node: PrefixNode, depth: int) -> int:
        """Most leading blocks of the path to `node`, up to `depth`, after which a sequence could
        go on."""

    @abstractmethod
    def can_copy_from(self, node: PrefixNode) -> bool:
        """True if a sequence may begin with a part of a node's block, taken by copy."""

    # The life of a sequence.

    @property
    @abstractmethod
    def capacity(self) -> int | None:
        """Longest sequence, in tokens; None where any length fits."""

    @abstractmethod
    def can_fork(self, parent: BlockTables, num_tokens: int) -> bool:
        """True if `parent` still holds what a fork after `num_tokens` tokens reads."""

    @abstractmethod
    def begin(self, tables: BlockTables, source: PrefixSource) -> None:
        """Takes references to what a new sequence shares."""

    @abstractmethod
    def fork(self, parent: BlockTables, tables: BlockTables) -> None:
        """A new sequence shares everything that another one holds."""

    @abstractmethod
    def attach(self, tables: BlockTables, nodes: Sequence[PrefixNode], num_tokens: int) -> None:
        """A sequence exchanges what it holds for what the nodes of a prefix hold."""

    @abstractmethod
    def make_room_for(self, tables: BlockTables, headroom: int) -> bool:
        """True if there is room for what a sequence that has begun will hold at once.

        Args:
            headroom: further blocks that must stay available.
        """

    @abstractmethod
    def will_have_room(self, num_tokens: int, node: PrefixNode | None, headroom: int) -> bool:
        """True if a new sequence, which continues after `node`, will find room once the steps in
        flight are evaluated."""

    @abstractmethod
    def try_allocate(self, tables: BlockTables, num_tokens: int) -> int:
        """Tokens, at most `num_tokens`, that the next step may bring a sequence to.

        There is room for them then: whatever is evicted for that has been evicted.
        """

    @abstractmethod
    def could_allocate_later(
        self, tables: BlockTables, num_tokens: int, num_scheduled: int
    ) -> bool:
        """True if there will be room for `num_tokens` once the steps in flight are committed."""

    @abstractmethod
    def on_computed(self, tables: BlockTables, num_tokens: int) -> None:
        """A sequence has `num_tokens` tokens; releases what later tokens do not need."""

    @abstractmethod
    def resume_point(self, tables: BlockTables, num_tokens: int) -> int:
        """Leading tokens, at most `num_tokens`, after which a running sequence can go on once it
        loses all later ones."""

    @abstractmethod
    def truncate(self, tables: BlockTables, start: int, num_tokens: int) -> None:
        """Takes back all but the first `num_tokens` tokens of a sequence.

        Args:
            start: tokens that are not computed again: a resume point of every group.
        """

    @abstractmethod
    def end(self, tables: BlockTables) -> None:
        """Releases all that a sequence holds; what nodes hold stays until it is evicted."""

    # Steps.

    @abstractmethod
    def launch_step(self, step: int) -> tuple[BlockCopy, ...]:
        """Ends the building of a step: returns its block copies, and dates later releases."""

    @abstractmethod
    def references(self, all_tables: Collection[BlockTables]) -> Counter[int]:
        """By block, how often sequences and the step being built name it.

        Raises:
            IntegrityError: a table is not as it must be.
        """

    def check_integrity(
        self, all_tables: Collection[BlockTables], nodes: Collection[PrefixNode]
    ) -> None:
        """Recounts pool and tables; raises `IntegrityError` with what disagrees."""
        self.pool.check_integrity(self.references(all_tables))
        holders = [node for node in nodes if node.entries[self.number] > ABSENT]
        held = {node.entries[self.number]: node for node in holders}
        if len(held) != len(holders):
            raise IntegrityError("two nodes of the prefix tree hold the same block")
        if self.sees_everything and not all(node.entries[self.number] for node in nodes):
            raise IntegrityError("a node has nothing of a group that sees everything")
        for block in range(self.pool.num_blocks):
            if self.pool.node_of(block) is not held.get(block):
                raise IntegrityError(f"the pool and the prefix tree disagree about block {block}")


class AttentionGroup(KVCacheGroup):
    """Attention layers that see equally far.

    Args:
        spec: how far; None: everything. Then all blocks of a sequence's known tokens are reserved
            when it is admitted. Those of windows are not: most of a long prompt's would never be
            needed at the same time.
    """

    def __init__(
        self,
        number: int,
        num_blocks: int,
        block_size: int,
        spec: WindowGroupSpec | None,
        tier: Tier,
        remove: Callable[[PrefixNode], None],
    ) -> None:
        if spec is not None and spec.span < 1:
            raise InvalidParameterError("span", "at least 1", spec.span)
        super().__init__(number, num_blocks, block_size, tier, remove)
        self.sees_everything = spec is None
        self._first_visible = None if spec is None else spec.first_visible
        # Most blocks that a row sees.
        self.view_blocks = None if spec is None else (spec.span + block_size - 2) // block_size + 1
        self._copying: list[BlockTable] = []  # whose copies the step being built makes,
        self._deferred: list[BlockTable] = []  # and those that a later one makes
        self.num_deduplicated = 0

    def first_block(self, num_tokens: int) -> int:
        """First block that rows after `num_tokens` tokens see."""
        if self._first_visible is None:
            return 0
        return self._first_visible(num_tokens) // self.block_size

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _table(self, tables: BlockTables) -> BlockTable:
        return tables.attention[self.number]

    # The prefix tree.

    def usable_depth(self, node: PrefixNode, depth: int) -> int:
        node = node.ancestor(depth)
        if self.sees_everything:
            # (Leaves are evicted first, so what is above a node on the device is there too.)
            while node.parent is not None and node.entries[self.number] <= ABSENT:
                node = node.parent
            return node.depth
        while depth:
            # (Climbs from `depth` over the blocks that the next row sees.)
            first, step = self.first_block(depth * self.block_size), node
            while step.depth > first and step.entries[self.number] > ABSENT:
                assert step.parent is not None
                step = step.parent
            if step.depth <= first:
                return depth
            assert step.parent is not None
            depth, node = step.depth - 1, step.parent
        return 0

    def can_copy_from(self, node: PrefixNode) -> bool:
        return node.entries[self.number] > ABSENT

    def on_indexed(self, tables: BlockTables, index: int, node: PrefixNode) -> None:
        """Block `index` of a sequence is that of `node` from now on.

        If an equal block has been indexed by now, it replaces the sequence's own: content is
        stored once.
        """
        table = self._table(tables)
        own = table.blocks[index]
        if own == NULL_BLOCK:
            return
        present = self.hold(node, own)
        if present != own:
            self.pool.retain(present)
            self.pool.release(own)
            tables.replace(self.number, index, present)
            self.num_deduplicated += 1

    # The life of a table.

    @property
    def capacity(self) -> int | None:
        fits = self.view_blocks is not None and self.pool.num_usable >= self.view_blocks
        return None if fits else self.pool.num_usable * self.block_size

    def can_fork(self, parent: BlockTables, num_tokens: int) -> bool:
        return self._table(parent).first <= self.first_block(num_tokens)

    def begin(self, tables: BlockTables, source: PrefixSource) -> None:
        num_full = source.num_full_blocks
        blocks = [NULL_BLOCK] * num_full
        copy_source: int | None = None
        if source.fork_of is not None:
            parent = self._table(source.fork_of)
            first = self.first_block(source.num_tokens(self.block_size))
            blocks[first:] = parent.blocks[first:num_full]
            if source.num_partial_tokens:
                copy_source = parent.blocks[num_full]
        else:
            first, node = self.first_block(num_full * self.block_size), source.tip
            for index in range(num_full - 1, first - 1, -1):
                assert node is not None
                blocks[index] = node.entries[self.number]
                node = node.parent
            if source.partial is not None:
                copy_source = source.partial.entries[self.number]
        self.pool.retain(*blocks[first:])
        if copy_source is not None:
            self.pool.retain(copy_source)
        tables.attention.append(BlockTable(blocks, first, copy_source))

    def fork(self, parent: BlockTables, tables: BlockTables) -> None:
        table = self._table(parent)
        self.pool.retain(*table.live)
        tables.attention.append(BlockTable(list(table.blocks), table.first))

    def attach(self, tables: BlockTables, nodes: Sequence[PrefixNode], num_tokens: int) -> None:
        first = min(self.first_block(num_tokens), len(nodes))
        blocks = [node.entries[self.number] for node in nodes[first:]]
        self.pool.retain(*blocks)
        self.end(tables)
        tables.attention[self.number] = BlockTable([NULL_BLOCK] * first + blocks, first)
        tables.exported = None

    def num_to_write(self, tables: BlockTables, start: int, end: int) -> int:
        """Blocks that `make_writable` allocates."""
        table, is_own = self._table(tables), self.pool.is_own
        first, length = start // self.block_size, len(table.blocks)
        num_to_replace = sum(not is_own(block) for block in table.blocks[first:])
        begin = max(first, length) if self._may_begin_at(table, first) else length
        return num_to_replace + max(0, self._blocks_for(end) - begin)

    def make_writable(self, tables: BlockTables, start: int, end: int) -> list[BlockCopy]:
        """Makes ``[start, end)`` of a sequence its own to write, for which there is room.

        Returns:
            Copies to make before.
        """
        table, pool, number = self._table(tables), self.pool, self.number
        first = start // self.block_size
        # Blocks that slid out of a window and are written again have no content to keep.
        while table.first > first:
            tables.replace(number, table.first - 1, pool.allocate())
            table.first -= 1
        # (To the end of the table: a block must not be used longer than the one before it.)
        shared = [i for i in range(first, len(table.blocks)) if not pool.is_own(table.blocks[i])]
        copies = [BlockCopy(table.blocks[i], pool.allocate()) for i in shared]
        for i, copy in reversed(list(zip(shared, copies, strict=True))):
            tables.replace(number, i, copy.dst)
            pool.release(copy.src)
        if self._may_begin_at(table, first):
            while len(table.blocks) < first:
                tables.append(number, NULL_BLOCK)
                table.first += 1
        while len(table.blocks) * self.block_size < end:
            tables.append(number, pool.allocate())
        return copies

    def _may_begin_at(self, table: BlockTable, first: int) -> bool:
        """True if a table needs nothing in front of entry `first`: that of a window which holds
        nothing yet."""
        return not self.sees_everything and table.first == len(table.blocks) < first

    def compact(self, num_blocks: int, all_tables: Collection[BlockTables]) -> list[BlockCopy]:
        """See `KVManager.compact`."""
        pool = self.pool
        assert pool.num_used < num_blocks, f"{pool.num_used} blocks are used"
        self.keep_at_most(num_blocks - 1 - pool.num_used)
        moved = pool.compact(num_blocks)
        for tables in all_tables:
            table = self._table(tables)
            for index in range(table.first, len(table.blocks)):
                block = table.blocks[index]
                if block in moved:
                    tables.replace(self.number, index, moved[block])
        for block in moved.values():
            node = pool.node_of(block)
            if node is not None:
                node.entries[self.number] = block
        return [BlockCopy(src, dst) for src, dst in moved.items()]

    def drop_copy(self, tables: BlockTables) -> None:
        """Drops the copy that `begin` prepared, or that the step being built would make."""
        table = self._table(tables)
        if table.copy_source is not None:
            self.pool.release(table.copy_source)
            table.copy_source = None
            self._copying = [other for other in self._copying if other is not table]
            self._deferred = [other for other in self._deferred if other is not table]

    def defer_copy(self, tables: BlockTables) -> None:
        """The copy that `reserve` prepared is left to a later step."""
        table = self._table(tables)
        if table.copy_source is not None:
            self._copying = [other for other in self._copying if other is not table]
            self._deferred.append(table)

    def resume_copy(self, tables: BlockTables) -> None:
        """The step being built makes a copy that was deferred, if there is one."""
        table = self._table(tables)
        if any(other is table for other in self._deferred):
            self._deferred = [other for other in self._deferred if other is not table]
            self._copying.append(table)

    def make_room_for(self, tables: BlockTables, headroom: int) -> bool:
        table = self._table(tables)
        most = self._blocks_for(len(tables.tokens))
        if self.view_blocks is not None:
            most = min(most, table.first + self.view_blocks)
        num_fresh = max(0, most - len(table.blocks))
        if num_fresh + headroom > self.pool.num_available:
            return False
        return self.make_room(num_fresh)

    def reserve(self, tables: BlockTables) -> None:
        """The sequence is admitted, there is room: takes the blocks that it begins with."""
        table = self._table(tables)
        if self.sees_everything:
            self.allocate_slots(tables, len(tables.tokens))
        elif table.copy_source is not None:
            tables.append(self.number, self.pool.allocate())
        if table.copy_source is not None:
            self._copying.append(table)

    def will_have_room(self, num_tokens: int, node: PrefixNode | None, headroom: int) -> bool:
        num_needed = self._blocks_for(num_tokens)
        if self.view_blocks is not None:
            num_needed = min(num_needed, self.view_blocks)
        else:
            # Blocks in use by others cost nothing. They are the first part of a path.
            while node is not None and node.depth:
                if self.pool.ref_count(node.entries[self.number]):
                    num_needed -= node.depth
                    break
                node = node.parent
        return num_needed + headroom <= self.pool.num_available_later

    def try_allocate(self, tables: BlockTables, num_tokens: int) -> int:
        num_blocks = len(self._table(tables).blocks)
        num_fresh = self._blocks_for(num_tokens) - num_blocks
        if num_fresh <= 0:
            return num_tokens
        if self.sees_everything and num_fresh > self.pool.num_available:
            return num_blocks * self.block_size  # all or nothing: no block is evicted in vain
        if self.make_room(num_fresh):
            return num_tokens
        return (num_blocks + self.pool.num_free) * self.block_size

    def allocate_slots(self, tables: BlockTables, num_tokens: int) -> None:
        """Makes a table cover `num_tokens` tokens; `try_allocate` made the room."""
        num_fresh = self._blocks_for(num_tokens) - len(self._table(tables).blocks)
        if num_fresh > 0:
            tables.append(self.number, *self.pool.allocate_many(num_fresh))

    def could_allocate_later(
        self, tables: BlockTables, num_tokens: int, num_scheduled: int
    ) -> bool:
        table = self._table(tables)
        num_fresh = self._blocks_for(num_tokens) - len(table.blocks)
        slides = table.blocks[table.first : self.first_block(num_scheduled)]
        freed = sum(self.pool.ref_count(block) == 1 for block in slides)
        return num_fresh <= self.pool.num_available_later + freed

    def on_computed(self, tables: BlockTables, num_tokens: int) -> None:
        table = self._table(tables)
        first = min(self.first_block(num_tokens), len(table.blocks))
        for index in range(table.first, first):
            # Blocks that came from the cache are likely to be used again.
            self.pool.release(table.blocks[index], passed=index >= table.num_shared)
            tables.slide(self.number, index)
        table.first = max(table.first, first)

    def resume_point(self, tables: BlockTables, num_tokens: int) -> int:
        table = self._table(tables)
        if self.first_block(num_tokens) < table.first:
            return 0  # its window has slid on
        index, num_partial = divmod(num_tokens, self.block_size)
        # The rest of a block is written anew, unless somebody else may read it.
        has_block = num_partial and index < len(table.blocks)
        if has_block and not self.pool.is_own(table.blocks[index]):
            return index * self.block_size
        return num_tokens

    def truncate(self, tables: BlockTables, start: int, num_tokens: int) -> None:
        table = self._table(tables)
        if start <= table.num_shared * self.block_size:
            self.drop_copy(tables)
        end = min(self._blocks_for(num_tokens), len(table.blocks))
        for index in range(start // self.block_size, end):
            if not self.pool.is_own(table.blocks[index]):
                end = index  # to be computed again, into other blocks
                break
        first, table.first = table.first, min(table.first, end)
        cut = tables.truncate(self.number, end)
        self.pool.release(*reversed(cut[max(0, first - end) :]))

    def end(self, tables: BlockTables) -> None:
        self.drop_copy(tables)
        # The last block first: what is released first is evicted first.
        self.pool.release(*reversed(self._table(tables).live))

    # Steps.

    def launch_step(self, step: int) -> tuple[BlockCopy, ...]:
        self.pool.on_step_launched(step)
        copies = []
        for table in self._copying:
            assert table.copy_source is not None
            copies.append(BlockCopy(table.copy_source, table.blocks[table.num_shared]))
            self.pool.release(table.copy_source)
            table.copy_source = None
        self._copying.clear()
        return tuple(copies)

    def references(self, all_tables: Collection[BlockTables]) -> Counter[int]:
        references: Counter[int] = Counter()
        copying = 0
        for tables in all_tables:
            table = self._table(tables)
            references.update(table.live)
            if table.copy_source is not None:
                references[table.copy_source] += 1
                copying += 1
            if (
                tables.exported is not None
                and list(tables.exported[self.number].blocks) != table.blocks
            ):
                raise IntegrityError("a table has changed since its last export, and is not marked")
            if any(table.blocks[: table.first]) or NULL_BLOCK in table.live:
                raise IntegrityError("block 0 is not just what slid out of a window")
            _check_path(tables, table, self.number)
        num_copies = len(self._copying) + len(self._deferred)
        if copying != num_copies:
            raise IntegrityError(f"{copying} copies are due, but {num_copies} will be made")
        return references


def _check_path(tables: BlockTables, table: BlockTable, number: int) -> None:
    """The indexed part of a table is what the nodes of its path hold."""
    node = tables.tip
    while node is not None and node.depth > table.first:
        if node.entries[number] != table.blocks[node.depth - 1]:
            raise IntegrityError(f"entry {node.depth - 1} of a table is not the indexed block")
        node = node.parent
