"""AttentionGroup: keys and values in blocks, of all tokens or of a window of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from mlx_paged.core.kv.groups import KVCacheGroup, Supply
from mlx_paged.core.kv.pool import NULL_BLOCK
from mlx_paged.core.kv.restoration import BlockRead
from mlx_paged.core.kv.specs import BlockCopy, WindowGroupSpec
from mlx_paged.core.kv.stored import StoredPrefix
from mlx_paged.core.kv.tables import BlockTable, BlockTables, PrefixSource
from mlx_paged.core.kv.tier import ABSENT, Tier
from mlx_paged.core.kv.tree import PrefixNode
from mlx_paged.errors import IntegrityError, InvalidParameterError


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
        self.is_full_attention = spec is None
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
        if self.is_full_attention:
            # Leaves are evicted first, so all ancestors of a node on the device are on it too.
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
        if self.is_full_attention:
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

        If an equal block is already indexed, one of the two is dropped, so content is stored once.
        The indexed one is dropped if it is unused: its last bits may differ, because the last token
        of a prompt was computed in a chunk then and alone now. A sequence that continued from it
        would have tokens that depend on the time of the drop.
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
            self.forget(node)
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
        """Returns the number of blocks that `make_writable` will allocate."""
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
        return not self.is_full_attention and table.first == len(table.blocks) < first

    def compact(self, num_blocks: int, all_tables: Collection[BlockTables]) -> list[BlockCopy]:
        """See `KVManager.compact`."""
        pool = self.pool
        assert pool.num_used < num_blocks, f"{pool.num_used} blocks are used"
        self.limit_cached(num_blocks - 1 - pool.num_used)
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
        num_blocks = self._blocks_for(len(tables.tokens))
        if self.view_blocks is not None:
            num_blocks = min(num_blocks, table.first + self.view_blocks)
        num_fresh = max(0, num_blocks - len(table.blocks)) + len(table.missing)
        self.supply(num_fresh)
        if num_fresh + headroom > self.pool.num_available:
            return False
        return self.make_room(num_fresh)

    def reserve(self, tables: BlockTables) -> None:
        """Allocates the initial blocks of an admitted sequence, for which there is room."""
        table = self._table(tables)
        if self.is_full_attention:
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
        if self.is_full_attention and num_fresh > self.pool.num_available:
            return num_blocks * self.block_size  # all or nothing: evict none if they are too few
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
                raise IntegrityError("a table changed after its last export without being marked")
            if any(table.blocks[: table.first]) or NULL_BLOCK in table.live:
                raise IntegrityError("a table has block 0 where no block slid out of a window")
            _check_path(tables, table, self.number)
        num_copies = len(self._copying) + len(self._deferred)
        if copying != num_copies:
            raise IntegrityError(f"{copying} copies are due, but {num_copies} will be made")
        return references


def _held(table: BlockTable) -> list[int]:
    """Returns the blocks that a table references."""
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
