"""Levels: the tier of an engine: evicted blocks in host memory, and on disk what is worth it."""

from __future__ import annotations

from mlx_paged.core import BlockTables, MemoryTier, PrefixNode, PrefixQuery
from mlx_paged.core.kv.stored import LookUp
from mlx_paged.core.kv.tier import TierOwner
from mlx_paged.engine.offload.disk_level import DiskLevel
from mlx_paged.offload.store import FIRST_KEY, BlockStore


class Levels:
    """Implements `core.kv.tier.Tier`.

    Content in host memory belongs to a node of the prefix tree. Content on disk belongs to none,
    and outlives the tree: it is found by the digest of its prefix.

    Args:
        memory: Drops everything if its capacity is 0.
        store: The disk; None without one.

    Attributes:
        disk: The disk's view of the KV manager, once it is attached.
    """

    def __init__(self, memory: MemoryTier, store: BlockStore | None) -> None:
        self.memory = memory
        self._store = store
        self.disk: DiskLevel | None = None

    @property
    def is_empty(self) -> bool:
        """See `Tier`."""
        return self.disk is None and self.memory.is_empty

    def attach(self, owner: TierOwner) -> None:
        """See `Tier`."""
        self.memory.attach(owner)

    def look_up(self, query: PrefixQuery) -> LookUp | None:
        """See `Tier`."""
        return None if self.disk is None else self.disk.look_up(query)

    def settle(self, tables: BlockTables, depth: int) -> None:
        """See `Tier`."""
        if self.disk is not None:
            self.disk.settle(tables, depth)

    def store(self, node: PrefixNode, group: int, block: int) -> int:
        """See `Tier`."""
        if self.disk is not None:
            self.disk.on_evicted(node, group)
        return self.memory.store(node, group, block)

    def drop(self, key: int) -> None:
        """See `Tier`."""
        self.memory.drop(key)

    def pin(self, key: int) -> None:
        """See `Tier`."""
        self._level(key).pin(key)

    def unpin(self, key: int) -> None:
        """See `Tier`."""
        self._level(key).unpin(key)

    def _level(self, key: int) -> MemoryTier | BlockStore:
        if key < FIRST_KEY:
            return self.memory
        assert self._store is not None
        return self._store

    def check_integrity(self) -> None:
        """See `Tier`."""
        self.memory.check_integrity()
