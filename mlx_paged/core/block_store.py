"""BlockStore: blocks in use and blocks kept for later, and what of them can be had."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_paged.core.block_pool import BlockPool
from mlx_paged.core.prefix_source import PrefixSource
from mlx_paged.core.radix_index import RadixIndex
from mlx_paged.core.radix_node import RadixNode
from mlx_paged.core.side_groups import SideGroups
from mlx_paged.core.stats import KVCounters


class BlockStore:
    """Pool and index in step: who holds blocks locks their path, and eviction takes from both."""

    def __init__(
        self, pool: BlockPool, index: RadixIndex, groups: SideGroups, counters: KVCounters
    ) -> None:
        self.pool = pool
        self.index = index
        self._groups = groups
        self._counters = counters

    @property
    def num_available_later(self) -> int:
        """Blocks that can be had once the steps in flight are evaluated."""
        return self.pool.num_free + self.pool.num_cached + self.pool.num_quarantined

    def hold(self, source: PrefixSource) -> None:
        """Takes references to all that a sequence is to begin with."""
        for block in source.blocks:
            self.pool.retain(block)
        if source.tip is not None:
            self.index.lock(source.tip)
        for block in source.held_for_copy:
            self.pool.retain(block)
        if source.partial_node is not None:
            self.index.lock(source.partial_node)

    def let_go(self, blocks: Sequence[int], node: RadixNode | None) -> None:
        """Gives up references to blocks, and to the path that ends at `node`."""
        if node is not None:
            self.index.unlock(node)
        for block in blocks:
            self.pool.release(block)

    def make_room(self, num_blocks: int, headroom: int = 0) -> bool:
        """Evicts until `num_blocks` are free; false when that leaves less than `headroom`."""
        if num_blocks + headroom > self.pool.num_free + self.pool.num_cached:
            return False
        while self.pool.num_free < num_blocks:
            node = self.index.least_recently_used()
            # Blocks are released and become most recently used in one go: if the oldest may still
            # be read by a step in flight, so may all others.
            if node is None or not self.pool.is_settled(node.block):
                return False
            self.pool.uncache(self.index.evict(node))
            self._groups.forget(node)
            self._counters.num_evictions += 1
        return True
