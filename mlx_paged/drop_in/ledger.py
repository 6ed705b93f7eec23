"""Ledger: who holds which blocks of a store whose sequences fork, shrink and are forgotten.

mlx-lm's prompt caches are objects: a copy is a fork, `trim` shrinks one, and one that nobody refers
to any more is simply gone. So blocks are held through `Lease` objects here. A fork shares the whole
table of its original until one of the two changes it, and a block that others hold too is copied
before it is written::

      lease A --.                          lease A ---> table [7 3 12]
                >--> table [7 3 12]  ==>                       | |
      lease B --'                          lease B ---> table [7 3 15]   B wrote to its last block

The engine's `KVManager` serves sequences that only grow and that a scheduler starts and ends; this
one serves the same `BlockPool` and `RadixIndex` to those that do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from mlx_paged.core import BlockCopy, BlockPool, PrefixMatch, RadixIndex, RadixNode


class Table:
    """Blocks in order, and how many of them the prefix index holds (those above `tip`)."""

    __slots__ = ("blocks", "epoch", "num_users", "tip")

    def __init__(self, blocks: list[int], tip: RadixNode | None, epoch: int) -> None:
        self.blocks = blocks
        self.tip = tip  # locked, where there is one
        self.epoch = epoch  # of the index that `tip` is in
        self.num_users = 1


class Lease:
    """One sequence's hold on its blocks; it ends with the object."""

    __slots__ = ("_ended", "table")

    def __init__(self, table: Table, ended: deque[Table]) -> None:
        self.table = table
        self._ended = ended

    @property
    def blocks(self) -> list[int]:
        """Blocks in order; not to be changed."""
        return self.table.blocks

    def __del__(self) -> None:
        # Any thread, any moment: so it is only noted, and the ledger's next call sees to it.
        self._ended.append(self.table)


class Ledger:
    """Block tables of one store.

    Args:
        settle: waits until no step reads or writes the store any more.
        grow: makes the store hold so many blocks.
        max_cached_blocks: blocks from which on unused prefixes are dropped rather than that the
            store grows. It grows all the same for sequences that live.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        settle: Callable[[], None],
        grow: Callable[[int], None],
        max_cached_blocks: int,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.index = RadixIndex(block_size)
        self.max_cached_blocks = max_cached_blocks
        self.num_evictions = 0
        self._settle = settle
        self._grow = grow
        self._epoch = 0
        self._ended: deque[Table] = deque()
        self.indexing = True

    # Leases.

    def lease(self) -> Lease:
        """A sequence without blocks."""
        self.collect()
        return Lease(Table([], self._lock(self._root()), self._epoch), self._ended)

    def fork(self, lease: Lease) -> Lease:
        """The same blocks, for another sequence. O(1), and nothing happens on the device."""
        lease.table.num_users += 1
        return Lease(lease.table, self._ended)

    def reserve(self, lease: Lease, start: int, end: int) -> list[BlockCopy]:
        """Makes positions ``[start, end)`` of a sequence its own to write.

        Returns:
            Copies to make before anything is written.
        """
        self.collect()
        size = self.block_size
        table = self._own(lease)
        first, last = start // size, -(-end // size)
        self._lower_tip(table, first)
        shared = [
            i
            for i in range(first, min(last, len(table.blocks)))
            if self._is_shared(table.blocks[i])
        ]
        num_fresh = max(0, last - len(table.blocks))
        self._make_room(len(shared) + num_fresh)
        copies = []
        for i in shared:
            old, new = table.blocks[i], self.pool.allocate()
            copies.append(BlockCopy(old, new))
            table.blocks[i] = new
            self.pool.release(old)
        table.blocks += [self.pool.allocate() for _ in range(num_fresh)]
        return copies

    def truncate(self, lease: Lease, num_tokens: int) -> None:
        """Gives back the blocks past the first `num_tokens` tokens."""
        self.collect()
        num_blocks = -(-num_tokens // self.block_size)
        if num_blocks < len(lease.table.blocks):
            table = self._own(lease)
            self._lower_tip(table, num_tokens // self.block_size)
            for block in table.blocks[num_blocks:]:
                self.pool.release(block)
            del table.blocks[num_blocks:]

    # Prefixes.

    def match(self, tokens: Sequence[int], limit: int) -> PrefixMatch:
        """The longest indexed prefix of ``tokens[:limit]``."""
        return self.index.match(tokens, limit)

    def adopt(self, lease: Lease, match: PrefixMatch) -> None:
        """Replaces what a sequence holds by the blocks of a match, all by reference."""
        self.collect()
        node = self._lock(match.node or self._root())
        blocks = node.path_blocks()
        if match.partial is not None:
            blocks.append(match.partial.block)
        for block in blocks:
            self.pool.retain(block)
        self._leave(lease.table)
        lease.table = Table(blocks, node, self._epoch)

    def publish(self, lease: Lease, tokens: Sequence[int], num_tokens: int) -> None:
        """Indexes the full blocks among the first `num_tokens` tokens, which steps have filled.

        Where an equal block is indexed already, that one replaces the sequence's own.
        """
        table, size = lease.table, self.block_size
        if not self.indexing or table.epoch != self._epoch or table.tip is None:
            return
        while (table.tip.depth + 1) * size <= num_tokens:
            i = table.tip.depth
            own = table.blocks[i]
            table.tip = self.index.extend(table.tip, tuple(tokens[i * size : (i + 1) * size]), own)
            kept = table.tip.block
            if kept != own:
                self.pool.retain(kept)
                self.pool.release(own)
                table.blocks[i] = kept
            elif not self.pool.is_cached(own):
                self.pool.cache(own)

    def forget_prefixes(self) -> None:
        """Empties the index; live sequences keep their blocks and are not indexed any more."""
        self.collect()
        for block in self.index.clear():
            self.pool.uncache(block)
        self._epoch += 1

    # Inside.

    def _root(self) -> RadixNode:
        return self.index.root()

    def _lock(self, node: RadixNode) -> RadixNode:
        self.index.lock(node)
        return node

    def _unlock(self, table: Table) -> None:
        if table.tip is not None and table.epoch == self._epoch:
            self.index.unlock(table.tip)

    def _is_shared(self, block: int) -> bool:
        return self.pool.ref_count(block) > 1 or self.pool.is_cached(block)

    def _own(self, lease: Lease) -> Table:
        """The lease's table, which nobody else uses from now on."""
        shared = lease.table
        if shared.num_users > 1:
            tip = shared.tip if shared.epoch == self._epoch else None
            if tip is not None:
                self.index.lock(tip)
            for block in shared.blocks:
                self.pool.retain(block)
            shared.num_users -= 1
            lease.table = Table(list(shared.blocks), tip, self._epoch)
        return lease.table

    def _lower_tip(self, table: Table, depth: int) -> None:
        """What comes after the first `depth` blocks is about to differ from what is indexed."""
        if table.tip is None or table.epoch != self._epoch or table.tip.depth <= depth:
            return
        ancestor = self._lock(table.tip.ancestor(depth))
        self.index.unlock(table.tip)
        table.tip = ancestor

    def collect(self) -> None:
        """Takes back what ended leases held."""
        while self._ended:
            self._leave(self._ended.popleft())

    def _leave(self, table: Table) -> None:
        table.num_users -= 1
        if table.num_users == 0:
            self._unlock(table)
            for block in table.blocks:
                self.pool.release(block)

    def _make_room(self, num_blocks: int) -> None:
        pool = self.pool
        if pool.num_free < num_blocks and pool.num_quarantined:
            self.settle()
        if pool.num_free < num_blocks and pool.num_blocks < self.max_cached_blocks:
            enough = pool.num_blocks + num_blocks - pool.num_free
            self._enlarge(min(max(2 * pool.num_blocks, enough), self.max_cached_blocks))
        if pool.num_free < num_blocks:
            self.settle()  # so that what is evicted is free at once
        while pool.num_free < num_blocks:
            node = self.index.least_recently_used()
            if node is None:  # all that is there is in use
                missing = num_blocks - pool.num_free
                self._enlarge(pool.num_blocks + max(missing, pool.num_blocks // 4))
                return
            pool.uncache(self.index.evict(node))
            self.num_evictions += 1

    def _enlarge(self, num_blocks: int) -> None:
        self._grow(num_blocks)
        self.pool.grow(num_blocks)

    # Steps.

    def begin_step(self) -> None:
        """From now on a released block may be in use by a step."""
        self.pool.on_step_launched(self.pool.launched_step + 1)

    def settle(self) -> None:
        """Waits for the steps, so that the blocks they might read can be used again."""
        self._settle()
        if self.pool.evaluated_step < self.pool.launched_step:
            self.pool.on_step_evaluated(self.pool.launched_step)

    def check_integrity(self) -> None:
        """Recounts pool and index; raises `IntegrityError`."""
        self.collect()
        self.pool.check_integrity()
        self.index.check_integrity()
