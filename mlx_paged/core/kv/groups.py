"""KV cache groups: model layers that need the same past tokens share blocks and tables.

Two classes implement `KVCacheGroup` for three kinds of layers:

- *Full attention* sees every token.
- *Windows* see only the newest tokens. Their tables are as long as the sequence, but hold only
  blocks that later tokens will read; entries that slid out are block 0::

      window of 8 tokens, blocks of 4, 14 tokens computed
      full attention  [ 3 | 7 | 2 | 9 ]
      window          [ 0 | 5 | 8 | 6 ]      position 14 sees 7 .. 14

- *Recurrent layers* keep a state of fixed size. A step reads a sequence's state from one slot and
  writes the new state to another, so a slot never changes once written::

      step         1        2        3        4
      tokens     0..63    64..95     96       97
      slots      0 -> 5   5 -> 2   2 -> 7   7 -> 4
                      |        |
                      |        snapshot of 96 tokens: slot 2 stays, for sequences with this prefix
                      freed once step 2 has been evaluated

  Slot 0 is the state before the first token. A snapshot needs no copy, and any sequence can
  continue from its slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from mlx_paged.core.kv.pool import NULL_BLOCK, BlockPool
from mlx_paged.core.kv.restoration import BlockRead, Restoration
from mlx_paged.core.kv.specs import BlockCopy, StateSlot, StepTable, WindowGroupSpec
from mlx_paged.core.kv.stored import StoredPrefix
from mlx_paged.core.kv.tier import ABSENT, Tier
from mlx_paged.core.kv.tree import TOKEN_TYPE, PrefixNode, PrefixQuery, common_prefix_len
from mlx_paged.errors import IntegrityError, InvalidParameterError

#: Called with (group number, num_blocks); makes that many blocks free or evictable.
Supply = Callable[[int, int], None]


class BlockTable:
    """A sequence's blocks in one attention group; entries before `first` are block 0.

    Attributes:
        num_shared: Number of leading entries that came from the cache or a fork.
        missing: Entries below `num_shared` whose content is elsewhere, in ascending order. They
            have no block until `take_missing`.
        copy_source: Block whose head the step being built copies to entry `num_shared`.
        dirty_from: First entry changed since the last export, ignoring entries that slid out.
    """

    __slots__ = ("blocks", "copy_source", "dirty_from", "first", "missing", "num_shared")

    def __init__(self, blocks: list[int], first: int = 0, copy_source: int | None = None) -> None:
        self.blocks = blocks
        self.first = first
        self.num_shared = len(blocks)
        self.missing: tuple[int, ...] = ()
        self.copy_source = copy_source
        self.dirty_from = 0

    @property
    def live(self) -> list[int]:
        """Blocks that the sequence references."""
        return self.blocks[self.first :]

    def repair(self) -> None:
        """Repairs the table after an interrupted change, which may leave zeros between blocks."""
        holes = [i for i, block in enumerate(self.blocks) if block == NULL_BLOCK]
        self.first = holes[-1] + 1 if holes else 0
        self.blocks[: self.first] = [NULL_BLOCK] * self.first


class BlockTables:
    """The tables of one sequence, one per KV cache group, and how far it is indexed.

    ::

        [0, tip.depth)            indexed: shared with sequences that have the same prefix
        [tip.depth, len(blocks))  not indexed: its own; without a tip, its forks may share them

    Attributes:
        tokens: The sequence's live token list. The sequence appends to it; the KV manager reads it.
        tip: Node of the last indexed block, or the root; None if the sequence is not indexed.
        attention: Its table in each attention group, full attention first.
        state: Its recurrent state; None if the model has none.
        num_prompt_tokens: Its tokens at admission. Another sequence may continue from there: the
            next turn, or an equal prompt.
        num_cached_tokens: Leading tokens found in the cache.
        num_computed_tokens: Leading tokens in the blocks, cached or computed by committed steps.
        exported: The next result of `export`; None if a table has changed since the last one.
        owner: The sequence that these tables belong to.
        is_settled: True once the tier knows that the prompt is computed.
        restoration: Content that the sequence waits for; None if it waits for none.
        atomic: Spans that one step must compute as a whole (`PrefixQuery.atomic`).
    """

    __slots__ = (
        "atomic",
        "attention",
        "exported",
        "is_settled",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "owner",
        "restoration",
        "state",
        "tip",
        "tokens",
    )

    def __init__(
        self,
        tokens: Sequence[int],
        owner: Any = None,
        atomic: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.tokens = tokens
        self.owner = owner
        self.atomic = atomic
        self.tip: PrefixNode | None = None
        self.attention: list[BlockTable] = []
        self.state: StateSlot | None = None
        self.num_prompt_tokens = len(tokens)
        self.num_cached_tokens = 0
        self.num_computed_tokens = 0
        self.exported: tuple[StepTable, ...] | None = None
        self.restoration: Restoration | None = None
        self.is_settled = False

    @property
    def blocks(self) -> list[int]:
        """Blocks of full attention, in order; read-only."""
        return self.attention[0].blocks

    def num_equal(self, query: PrefixQuery, start: int = 0) -> int:
        """Number of leading tokens shared with a query; the first `start` are known to match."""
        tokens = self.tokens if isinstance(self.tokens, array) else array(TOKEN_TYPE, self.tokens)
        # An array does not grow while a view of it exists.
        with memoryview(tokens) as view, view.cast("B") as own:
            return common_prefix_len(query.tokens, own, start)

    def export(self) -> tuple[StepTable, ...]:
        """Returns the tables for a step, in the order of the attention groups."""
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

    # Table updates. `number` is the group number.

    def append(self, number: int, *blocks: int) -> None:
        """Appends blocks."""
        table = self.attention[number]
        table.dirty_from = min(table.dirty_from, len(table.blocks))
        table.blocks += blocks
        self.exported = None

    def replace(self, number: int, index: int, block: int) -> None:
        """Replaces the block of entry `index`."""
        table = self.attention[number]
        table.dirty_from = min(table.dirty_from, index)
        table.blocks[index] = block
        self.exported = None

    def slide(self, number: int, index: int) -> None:
        """Clears entry `index`, which slid out of the window."""
        self.attention[number].blocks[index] = NULL_BLOCK
        self.exported = None

    def truncate(self, number: int, num_blocks: int) -> list[int]:
        """Cuts a table to `num_blocks` entries; returns the rest."""
        table = self.attention[number]
        cut = table.blocks[num_blocks:]
        del table.blocks[num_blocks:]
        table.dirty_from = min(table.dirty_from, num_blocks)
        table.num_shared = min(table.num_shared, num_blocks)
        self.exported = None
        return cut


class PrefixSource(NamedTuple):
    """The source of a new sequence's cached head: the prefix tree, or a sequence to fork.

    Attributes:
        num_full_blocks: Full blocks, taken by reference.
        tip: Node of the last full block; the root or None if there is no full block, and None if
            the forked sequence is not indexed.
        partial: Node whose block's first `num_partial_tokens` tokens are copied; None if there is
            none or a fork provides them.
        num_partial_tokens: Tokens copied from the block after the full ones.
        fork_of: The sequence to fork; None if the blocks come from the tree.
        num_known_blocks: Full blocks of the new sequence that are indexed, even if some group
            cannot continue after them.
        stored: Its entries, if some of the content is elsewhere and must be restored first.
    """

    num_full_blocks: int
    tip: PrefixNode | None
    partial: PrefixNode | None = None
    num_partial_tokens: int = 0
    fork_of: BlockTables | None = None
    num_known_blocks: int = 0
    stored: StoredPrefix | None = None

    def num_tokens(self, block_size: int) -> int:
        """Number of tokens that the source provides."""
        return self.num_full_blocks * block_size + self.num_partial_tokens


class KVCacheGroup(ABC):
    """A pool of blocks or slots, and their use by sequences and by the prefix tree.

    Attributes:
        number: Its index among the groups, and in `PrefixNode.entries`.
        pool: Its blocks or slots.
        num_evictions: Cached blocks evicted to make room.
        sees_everything: True if a row reads every token before it. A node without an entry in such
            a group is useless and leaves the tree with everything below it. Sequences only grow in
            such a group; in the others they release blocks as they advance.
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
        self._remove = remove  # removes a node from the tree and from all groups

    # The prefix tree.

    def forget(self, node: PrefixNode) -> None:
        """Clears a node's entry, which no sequence references."""
        entry = node.entries[self.number]
        node.entries[self.number] = ABSENT
        if entry > ABSENT:
            self.pool.uncache(entry)
        elif entry < ABSENT:
            self._tier.drop(-entry)

    def cache_block(self, node: PrefixNode, block: int) -> int:
        """Makes a node hold a block in use. Returns the node's block: `block`, or the one that it
        already held."""
        present = node.entries[self.number]
        if present > ABSENT:
            return present
        if present < ABSENT:
            self._tier.drop(-present)  # recomputed, so the stored copy is redundant
        node.entries[self.number] = block
        self.pool.cache(block, node)
        return block

    def evict(self, node: PrefixNode) -> None:
        """Moves a node's block off the device; the tier stores or drops it.

        What running sequences have passed is dropped: others rarely continue there.
        """
        block = node.entries[self.number]
        is_kept = self.sees_everything or not self.pool.is_passed(block)
        key = self._tier.store(node, self.number, block) if is_kept else 0
        if not node.is_indexed:
            pass  # The tier made room by dropping what the node had of another group.
        elif not key and self.sees_everything:
            self._remove(node)
        else:
            node.entries[self.number] = -key
            self.pool.uncache(block)
        self.num_evictions += 1

    def make_room(self, num_blocks: int) -> bool:
        """Evicts until `num_blocks` are free; returns False if not enough can be freed now."""
        while self.pool.num_free < num_blocks:
            node = self.pool.next_to_evict()
            if node is None:
                return False
            self.evict(node)
        return True

    def evict_idle(self) -> None:
        """Evicts every cached block that no step in flight may read."""
        while (node := self.pool.next_to_evict()) is not None:
            self.evict(node)

    def keep_at_most(self, num_blocks: int) -> None:
        """Evicts until at most `num_blocks` cached blocks are left. No step may be in flight."""
        while self.pool.num_cached > num_blocks:
            node = self.pool.next_to_evict()
            assert node is not None
            self.evict(node)

    @abstractmethod
    def usable_depth(self, node: PrefixNode, depth: int) -> int:
        """Largest number of leading blocks on the path to `node`, up to `depth`, from which a
        sequence can continue."""

    @abstractmethod
    def usable_stored(self, stored: StoredPrefix, depth: int) -> int:
        """The same of a prefix whose content is partly elsewhere."""

    @abstractmethod
    def view(self, depth: int) -> range:
        """The blocks that a sequence needs to continue after its first `depth` blocks."""

    @abstractmethod
    def can_copy_from(self, node: PrefixNode) -> bool:
        """True if a sequence may start from a copy of part of a node's block."""

    # Lifecycle of a sequence.

    @property
    @abstractmethod
    def capacity(self) -> int | None:
        """Longest sequence in tokens; None if any length fits."""

    @abstractmethod
    def can_fork(self, parent: BlockTables, num_tokens: int) -> bool:
        """True if `parent` still holds everything that a fork after `num_tokens` tokens reads."""

    @abstractmethod
    def begin(self, tables: BlockTables, source: PrefixSource) -> None:
        """Takes references to the blocks that a new sequence shares."""

    @abstractmethod
    def fork(self, parent: BlockTables, tables: BlockTables) -> None:
        """Shares everything that `parent` holds with a new sequence."""

    @abstractmethod
    def attach(self, tables: BlockTables, nodes: Sequence[PrefixNode], num_tokens: int) -> None:
        """Replaces a sequence's blocks with the blocks of a prefix."""

    @abstractmethod
    def make_room_for(self, tables: BlockTables, headroom: int) -> bool:
        """Makes room for the blocks that a new sequence holds at once; returns False if it cannot.

        Args:
            headroom: Additional blocks that must stay available.
        """

    @abstractmethod
    def missing_keys(self, tables: BlockTables, stored: StoredPrefix) -> list[int]:
        """Returns the tier's keys of content that a new sequence needs and that is elsewhere.

        Args:
            stored: The prefix after which the sequence continues.
        """

    @abstractmethod
    def take_missing(self, tables: BlockTables, keys: Sequence[int]) -> list[BlockRead]:
        """Gives an admitted sequence blocks for that content. There is room.

        Args:
            keys: The result of `missing_keys`.
        """

    @abstractmethod
    def will_have_room(self, num_tokens: int, node: PrefixNode | None, headroom: int) -> bool:
        """True if a new sequence that continues after `node` will find room once the steps in
        flight are evaluated."""

    @abstractmethod
    def try_allocate(self, tables: BlockTables, num_tokens: int) -> int:
        """Returns the number of tokens, at most `num_tokens`, that the next step may reach.

        Evicts as needed, so there is room for them on return.
        """

    @abstractmethod
    def could_allocate_later(
        self, tables: BlockTables, num_tokens: int, num_scheduled: int
    ) -> bool:
        """True if there will be room for `num_tokens` once the steps in flight are committed."""

    @abstractmethod
    def on_computed(self, tables: BlockTables, num_tokens: int) -> None:
        """Releases everything that tokens after the first `num_tokens` do not need."""

    @abstractmethod
    def resume_point(self, tables: BlockTables, num_tokens: int) -> int:
        """Largest number of leading tokens, at most `num_tokens`, from which a running sequence
        can continue after it drops the rest."""

    @abstractmethod
    def truncate(self, tables: BlockTables, start: int, num_tokens: int) -> None:
        """Rolls a sequence back to its first `num_tokens` tokens.

        Args:
            start: Tokens that need no recomputation; a resume point of every group.
        """

    @abstractmethod
    def end(self, tables: BlockTables) -> None:
        """Releases everything that a sequence holds. Indexed blocks stay cached until evicted."""

    # Steps.

    @abstractmethod
    def launch_step(self, step: int) -> tuple[BlockCopy, ...]:
        """Finishes building a step; returns its block copies. Stamps later releases with `step`."""

    def on_step_evaluated(self, step: int) -> None:
        """Frees what waited for an evaluated step."""
        self.pool.on_step_evaluated(step)

    def recount(self, all_tables: Collection[BlockTables]) -> None:
        """Frees everything that no table names, after an interrupted change. The prefix tree is
        now empty."""
        self.pool.recount(self.references(all_tables))

    @abstractmethod
    def references(self, all_tables: Collection[BlockTables]) -> Counter[int]:
        """Counts references to each block by sequences and by the step being built.

        Raises:
            IntegrityError: A table is inconsistent.
        """

    def check_integrity(
        self, all_tables: Collection[BlockTables], nodes: Collection[PrefixNode]
    ) -> None:
        """Recounts pool and tables; raises `IntegrityError` on a mismatch."""
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
    """Attention layers with the same window.

    Args:
        spec: The window; None for full attention. Full attention reserves the blocks of all known
            tokens at admission. Windows do not, because a long prompt never needs most of them at
            once.
        supply: See `KVManager`.

    Attributes:
        max_usable: Usable blocks that it was made with. A pool that has shrunk since grows back for
            a sequence that needs them, so they limit its length.
    """

    def __init__(
        self,
        number: int,
        num_blocks: int,
        block_size: int,
        spec: WindowGroupSpec | None,
        tier: Tier,
        remove: Callable[[PrefixNode], None],
        supply: Supply | None = None,
    ) -> None:
        if spec is not None and spec.span < 1:
            raise InvalidParameterError("span", "at least 1", spec.span)
        super().__init__(number, num_blocks, block_size, tier, remove)
        self.sees_everything = spec is None
        self._first_visible = None if spec is None else spec.first_visible
        # Maximum number of blocks that a row sees.
        self.view_blocks = None if spec is None else (spec.span + block_size - 2) // block_size + 1
        self._supply = supply
        self.max_usable = self.pool.num_usable
        self._copying: list[BlockTable] = []  # the step being built makes their copies
        self._deferred: list[BlockTable] = []  # a later step makes their copies
        self.num_deduplicated = 0

    def supply(self, num_blocks: int) -> None:
        """Asks for blocks, if the pool grows on demand."""
        if self._supply is not None and self.pool.num_free < num_blocks:
            self._supply(self.number, num_blocks)

    def make_room(self, num_blocks: int) -> bool:
        self.supply(num_blocks)
        return super().make_room(num_blocks)

    def first_block(self, num_tokens: int) -> int:
        """First block that rows at positions from `num_tokens` on see."""
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
            # Leaves are evicted first, so all ancestors of a node on the device are there too.
            while node.parent is not None and node.entries[self.number] <= ABSENT:
                node = node.parent
            return node.depth
        while depth:
            # Walk up from `depth` over the blocks that the next row sees.
            first, step = self.first_block(depth * self.block_size), node
            while step.depth > first and step.entries[self.number] > ABSENT:
                assert step.parent is not None
                step = step.parent
            if step.depth <= first:
                return depth
            assert step.parent is not None
            depth, node = step.depth - 1, step.parent
        return 0

    def usable_stored(self, stored: StoredPrefix, depth: int) -> int:
        if self.sees_everything:
            return depth  # a prefix consists of blocks that have content of this group
        while depth:
            first, index = self.first_block(depth * self.block_size), depth
            while index > first and stored.entry(self.number, index - 1) != ABSENT:
                index -= 1
            if index <= first:
                return depth
            depth = index - 1
        return 0

    def view(self, depth: int) -> range:
        return range(self.first_block(depth * self.block_size), depth)

    def can_copy_from(self, node: PrefixNode) -> bool:
        return node.entries[self.number] > ABSENT

    def on_indexed(self, tables: BlockTables, index: int, node: PrefixNode) -> None:
        """Indexes block `index` of a sequence under `node`.

        If an equal block is already indexed, one of the two goes, so content is stored once. The
        indexed one goes if nothing uses it: it may have other last bits, as the last token of a
        prompt has that was computed alone now and in a chunk then. A sequence that went on with it
        would have tokens that depend on when that happened.
        """
        table = tables.attention[self.number]
        own = table.blocks[index]
        if own == NULL_BLOCK:
            return
        present = self.cache_block(node, own)
        if present == own:
            return
        self.num_deduplicated += 1
        if not self.pool.ref_count(present):
            self.pool.uncache(present)
            node.entries[self.number] = ABSENT
            self.cache_block(node, own)
            return
        self.pool.retain(present)
        self.pool.release(own)
        tables.replace(self.number, index, present)

    # Lifecycle of a table.

    @property
    def capacity(self) -> int | None:
        fits = self.view_blocks is not None and self.max_usable >= self.view_blocks
        return None if fits or self._supply is not None else self.max_usable * self.block_size

    def can_fork(self, parent: BlockTables, num_tokens: int) -> bool:
        if num_tokens == parent.num_computed_tokens:
            return True  # it would continue there itself
        return self._table(parent).first <= self.first_block(num_tokens)

    def begin(self, tables: BlockTables, source: PrefixSource) -> None:
        num_full = source.num_full_blocks
        blocks = [NULL_BLOCK] * num_full
        copy_source: int | None = None
        if source.fork_of is not None:
            parent = self._table(source.fork_of)
            first = max(parent.first, self.first_block(source.num_tokens(self.block_size)))
            blocks[first:] = parent.blocks[first:num_full]
            if source.num_partial_tokens:
                copy_source = parent.blocks[num_full]
        else:
            first, node = self.first_block(num_full * self.block_size), source.tip
            if source.stored is not None:
                for index in range(first, num_full):
                    blocks[index] = source.stored.entry(self.number, index)
                node, num_full = None, 0
            for index in range(num_full - 1, first - 1, -1):
                assert node is not None
                blocks[index] = node.entries[self.number]
                node = node.parent
            if source.partial is not None:
                copy_source = source.partial.entries[self.number]
        table = BlockTable(blocks, first, copy_source)
        if source.stored is not None:
            table.missing = tuple(i for i in range(first, len(blocks)) if blocks[i] < ABSENT)
            for index in table.missing:
                blocks[index] = NULL_BLOCK
        self.pool.retain(*_held(table))
        if copy_source is not None:
            self.pool.retain(copy_source)
        tables.attention.append(table)

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
        """Number of blocks that `make_writable` will allocate."""
        table, is_own = self._table(tables), self.pool.is_own
        first, length = start // self.block_size, len(table.blocks)
        num_to_replace = sum(not is_own(block) for block in table.blocks[first:])
        begin = max(first, length) if self._may_begin_at(table, first) else length
        return num_to_replace + max(0, self._blocks_for(end) - begin)

    def make_writable(self, tables: BlockTables, start: int, end: int) -> list[BlockCopy]:
        """Makes ``[start, end)`` of a sequence writable. The caller made sure that there is room.

        Returns:
            Block copies to run before the write.
        """
        table, pool, number = self._table(tables), self.pool, self.number
        first = start // self.block_size
        # Blocks that slid out of a window get fresh blocks; there is nothing to copy.
        while table.first > first:
            tables.replace(number, table.first - 1, pool.allocate())
            table.first -= 1
        # Through the end of the table: a block must never outlive the block before it.
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
        """True for an empty window table, which needs no blocks before entry `first`."""
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
            if table.copy_source in moved:
                table.copy_source = moved[table.copy_source]
        for block in moved.values():
            node = pool.node_of(block)
            if node is not None:
                node.entries[self.number] = block
        return [BlockCopy(src, dst) for src, dst in moved.items()]

    def drop_copy(self, tables: BlockTables) -> None:
        """Drops the pending copy of a sequence, if any."""
        table = self._table(tables)
        if table.copy_source is not None:
            self.pool.release(table.copy_source)
            table.copy_source = None
            self._copying = [other for other in self._copying if other is not table]
            self._deferred = [other for other in self._deferred if other is not table]

    def defer_copy(self, tables: BlockTables) -> None:
        """Defers the copy that `reserve` prepared to a later step."""
        table = self._table(tables)
        if table.copy_source is not None:
            self._copying = [other for other in self._copying if other is not table]
            self._deferred.append(table)

    def resume_copy(self, tables: BlockTables) -> None:
        """Adds a deferred copy, if any, to the step being built."""
        table = self._table(tables)
        if any(other is table for other in self._deferred):
            self._deferred = [other for other in self._deferred if other is not table]
            self._copying.append(table)

    def awaits_copy(self, tables: BlockTables, num_tokens: int) -> bool:
        """True if the first `num_tokens` tokens of a sequence include a block whose copy is due."""
        table = self._table(tables)
        return table.copy_source is not None and num_tokens > table.num_shared * self.block_size

    def is_written_by_one(self, block: int) -> bool:
        """True if the one sequence that references `block` may write to it.

        Copies that are due do not count: they need only the head of the block, which stays.
        """
        pool, copying = self.pool, (*self._copying, *self._deferred)
        num_copies = sum(table.copy_source == block for table in copying)
        return pool.ref_count(block) - num_copies == 1 and pool.node_of(block) is None

    def make_room_for(self, tables: BlockTables, headroom: int) -> bool:
        table = self._table(tables)
        most = self._blocks_for(len(tables.tokens))
        if self.view_blocks is not None:
            most = min(most, table.first + self.view_blocks)
        num_fresh = max(0, most - len(table.blocks)) + len(table.missing)
        self.supply(num_fresh)
        if num_fresh + headroom > self.pool.num_available:
            return False
        return self.make_room(num_fresh)

    def reserve(self, tables: BlockTables) -> None:
        """Allocates the initial blocks of an admitted sequence, for which there is room."""
        table = self._table(tables)
        if self.sees_everything:
            self.allocate_slots(tables, len(tables.tokens))
        elif table.copy_source is not None:
            tables.append(self.number, self.pool.allocate())
        if table.copy_source is not None:
            self._copying.append(table)

    def missing_keys(self, tables: BlockTables, stored: StoredPrefix) -> list[int]:
        return [-stored.entry(self.number, index) for index in self._table(tables).missing]

    def take_missing(self, tables: BlockTables, keys: Sequence[int]) -> list[BlockRead]:
        table = self._table(tables)
        blocks = self.pool.allocate_many(len(keys))
        for index, block in zip(table.missing, blocks, strict=True):
            tables.replace(self.number, index, block)
        table.missing = ()
        return [BlockRead(self.number, block, key) for block, key in zip(blocks, keys)]

    def will_have_room(self, num_tokens: int, node: PrefixNode | None, headroom: int) -> bool:
        num_needed = self._blocks_for(num_tokens)
        if self.view_blocks is not None:
            num_needed = min(num_needed, self.view_blocks)
        else:
            # Blocks in use by others cost nothing; they are a prefix of the path.
            while node is not None and node.depth:
                if self.pool.ref_count(node.entries[self.number]):
                    num_needed -= node.depth
                    break
                node = node.parent
        return num_needed + headroom <= self.pool.num_available_later

    def try_allocate(self, tables: BlockTables, num_tokens: int) -> int:
        num_blocks = len(tables.attention[self.number].blocks)
        num_fresh = -(-num_tokens // self.block_size) - num_blocks
        if num_fresh <= 0 or num_fresh <= self.pool.num_free:
            return num_tokens
        self.supply(num_fresh)
        if self.sees_everything and num_fresh > self.pool.num_available:
            return num_blocks * self.block_size  # all or nothing: evict no block in vain
        if self.make_room(num_fresh):
            return num_tokens
        return (num_blocks + self.pool.num_free) * self.block_size

    def allocate_slots(self, tables: BlockTables, num_tokens: int) -> None:
        """Extends a table to `num_tokens` tokens; `try_allocate` made the room."""
        num_held = len(tables.attention[self.number].blocks)
        num_fresh = -(-num_tokens // self.block_size) - num_held
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
        if table.first >= first:
            return
        # Blocks from the cache are likely to be reused, so they are evicted later. So are those
        # that an equal prompt would continue from.
        last = max(0, tables.num_prompt_tokens - 1) // self.block_size
        kept = range(self.first_block(last * self.block_size), last)
        for index in range(table.first, first):
            passed = index >= table.num_shared and index not in kept
            self.pool.release(table.blocks[index], passed=passed)
            tables.slide(self.number, index)
        table.first = first

    def resume_point(self, tables: BlockTables, num_tokens: int) -> int:
        table = self._table(tables)
        if self.first_block(num_tokens) < table.first:
            return 0  # the window has slid past
        index, num_partial = divmod(num_tokens, self.block_size)
        # The rest of a block can be overwritten unless the block is shared.
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
                end = index  # recomputed into other blocks
                break
        first, table.first = table.first, min(table.first, end)
        cut = tables.truncate(self.number, end)
        self.pool.release(*reversed(cut[max(0, first - end) :]))

    def end(self, tables: BlockTables) -> None:
        self.drop_copy(tables)
        # Last block first: blocks are evicted in release order.
        self.pool.release(*reversed(_held(self._table(tables))))

    # Steps.

    def launch_step(self, step: int) -> tuple[BlockCopy, ...]:
        self.pool.on_step_launched(step)
        return self.take_copies()

    @property
    def has_copies(self) -> bool:
        """True if the step being built, or a later one, has copies to make."""
        return bool(self._copying or self._deferred)

    def recount(self, all_tables: Collection[BlockTables]) -> None:
        for tables in all_tables:
            self._table(tables).copy_source = None
        self._copying.clear()
        self._deferred.clear()
        super().recount(all_tables)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Returns the block copies of the step being built, which runs them."""
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


def _held(table: BlockTable) -> list[int]:
    """The blocks that a table references."""
    if not table.missing:
        return table.live
    return [block for block in table.live if block != NULL_BLOCK]


def _check_path(tables: BlockTables, table: BlockTable, number: int) -> None:
    """Checks that the indexed part of a table matches the nodes of its path."""
    node = tables.tip
    while node is not None and node.depth > table.first:
        if node.entries[number] != table.blocks[node.depth - 1]:
            raise IntegrityError(f"entry {node.depth - 1} of a table is not the indexed block")
        node = node.parent
