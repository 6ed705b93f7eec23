"""IndexedBlocks: a side group's pool, and what the nodes of the prefix index hold of it."""

from __future__ import annotations

from collections import Counter

from mlx_paged.core.block_pool import BlockPool
from mlx_paged.core.idle_queue import IdleQueue
from mlx_paged.core.radix_node import RadixNode
from mlx_paged.errors import IntegrityError


class IndexedBlocks:
    """A pool of blocks (or state slots) of which every node may hold one.

    Unlike the blocks of the full group these come and go while their node stays: a node without one
    is a bridge that others hang under.
    """

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.num_evictions = 0
        self._block_of: dict[RadixNode, int] = {}
        self._node_of: dict[int, RadixNode] = {}
        self._idle = IdleQueue()

    def __len__(self) -> int:
        return len(self._block_of)

    def get(self, node: RadixNode) -> int | None:
        """The block that a node holds."""
        return self._block_of.get(node)

    def hold(self, node: RadixNode, block: int) -> int:
        """A node takes hold of a block in use; returns the one that it has had, if any."""
        present = self._block_of.setdefault(node, block)
        if present == block and not self.pool.is_cached(block):
            self._node_of[block] = node
            self.pool.cache(block)
        return present

    def retain(self, block: int) -> None:
        """Adds a reference; what was idle is not any more."""
        if self.pool.ref_count(block) == 0:
            self._idle.discard(self._node_of[block])
        self.pool.retain(block)

    def release(self, block: int, *, passed: bool = False) -> None:
        """Drops a reference; `passed` where the sequence merely goes on (see `IdleQueue`)."""
        self.pool.release(block)
        if self.pool.ref_count(block) == 0 and self.pool.is_cached(block):
            self._idle.add(self._node_of[block], block, passed=passed)

    def forget(self, node: RadixNode) -> None:
        """A node leaves the index; nobody references its block."""
        block = self._block_of.pop(node, None)
        if block is not None:
            del self._node_of[block]
            self._idle.discard(node)
            self.pool.uncache(block)

    def clear(self) -> None:
        """The index is emptied; blocks that sequences reference stay theirs."""
        for block in self._block_of.values():
            self.pool.uncache(block)
        self._block_of.clear()
        self._node_of.clear()
        self._idle.clear()

    def make_room(self, num_blocks: int) -> bool:
        """Evicts until `num_blocks` are free; false where fewer are there for now."""
        while self.pool.num_free < num_blocks:
            node = self._idle.first(self.pool.is_settled)
            if node is None:
                return False
            self.forget(node)
            self.num_evictions += 1
        return True

    def check_integrity(self, references: Counter[int], nodes: set[RadixNode]) -> None:
        """Recounts; raises `IntegrityError` with what disagrees.

        Args:
            references: by block, how often sequences and copies name it.
            nodes: all nodes of the index.
        """
        pool = self.pool
        pool.check_integrity()
        for block in range(pool.num_blocks):
            if pool.ref_count(block) != references[block]:
                raise IntegrityError(
                    f"block {block} has {pool.ref_count(block)} references, "
                    f"but {references[block]} holders"
                )
        if not self._block_of.keys() <= nodes:
            raise IntegrityError("a block is held by a node that is not in the index")
        if {b: n for n, b in self._block_of.items()} != self._node_of:
            raise IntegrityError("the blocks by node and the nodes by block disagree")
        cached = {block for block in range(pool.num_blocks) if pool.is_cached(block)}
        if cached != self._node_of.keys():
            raise IntegrityError(f"blocks {cached ^ self._node_of.keys()} are booked differently")
        for node, block in self._block_of.items():
            if (node in self._idle) != (pool.ref_count(block) == 0):
                raise IntegrityError(f"block {block} is not idle, or eviction does not know it")
        if len(self._idle) != pool.num_cached:
            raise IntegrityError(f"{len(self._idle)} blocks are idle, but {pool.num_cached} cached")
