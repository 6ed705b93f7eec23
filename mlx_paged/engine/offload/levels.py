"""Levels: the tier of an engine. It combines host memory for evicted blocks, a disk, and a prefill
engine that computes blocks for this one."""

from __future__ import annotations

from mlx_paged.core import BlockTables, Level, MemoryTier, PrefixNode, PrefixQuery, RestoreRates
from mlx_paged.core.kv.stored import LookUp, StoredPrefix
from mlx_paged.core.kv.tier import TierOwner
from mlx_paged.engine.offload.disk_level import DiskLevel
from mlx_paged.engine.roles.decode import FIRST_KEY as FIRST_REMOTE_KEY
from mlx_paged.engine.roles.decode import RemoteLevel
from mlx_paged.engine.roles.prefill import Prefilling
from mlx_paged.offload.store import FIRST_KEY, BlockStore


def level_of(key: int) -> Level:
    """Returns the level that a key belongs to."""
    if key >= FIRST_REMOTE_KEY:
        return Level.REMOTE
    return Level.MEMORY if key < FIRST_KEY else Level.DISK


class Levels:
    """Implements `core.kv.tier.Tier`.

    Content in host memory belongs to a node of the prefix tree. Content on disk belongs to none and
    outlives the tree; it is found by the digest of its prefix, like content that another engine
    computes.

    Args:
        memory: Drops everything if its capacity is 0.
        store: The disk; None without one.
        rates: Decides which blocks are restored faster than they are computed.

    Attributes:
        disk: The disk's view of the KV manager, once it is attached.
        remote: Blocks that a prefill engine computes; None without one.
        prefilling: Prompts that this engine computes for others; None without the role.
    """

    def __init__(self, memory: MemoryTier, store: BlockStore | None, rates: RestoreRates) -> None:
        self.memory = memory
        self._store = store
        self._rates = rates
        self._owner: TierOwner | None = None
        self.disk: DiskLevel | None = None
        self.remote: RemoteLevel | None = None
        self.prefilling: Prefilling | None = None

    @property
    def is_empty(self) -> bool:
        """See `Tier`."""
        has_remote = self.remote is not None and not self.remote.is_empty
        return self.disk is None and self.memory.is_empty and not has_remote

    def attach(self, owner: TierOwner) -> None:
        """See `Tier`."""
        self._owner = owner
        self.memory.attach(owner)

    def look_up(self, query: PrefixQuery) -> LookUp | None:
        """See `Tier`."""
        on_disk = None if self.disk is None else self.disk.look_up(query)
        remote = None if self.remote is None else self.remote.look_up(query)
        if on_disk is None or remote is None:
            return on_disk or remote
        return lambda group, index: remote(group, index) or on_disk(group, index)

    def num_worth_restoring(self, stored: StoredPrefix, first: int) -> int:
        """See `Tier`."""
        assert self._owner is not None
        return self._rates.num_worth_restoring(stored, first, self._owner.groups)

    def on_refused(self) -> None:
        """See `Tier`."""
        self._rates.note_refusal()

    def settle(self, tables: BlockTables, depth: int) -> None:
        """See `Tier`. Skips levels from which blocks would not be restored."""
        if self.prefilling is not None:
            self.prefilling.settle(tables, depth)
        if self._rates.is_worthwhile(Level.MEMORY):
            self.memory.settle(tables, depth)
        if self.disk is not None and self._rates.is_worthwhile(Level.DISK):
            self.disk.settle(tables, depth)

    @property
    def has_pending(self) -> bool:
        """True if blocks wait to be copied, and there is room for them."""
        return self.memory.has_pending or (self.disk is not None and self.disk.has_pending)

    def copy_ahead(self, max_bytes: int) -> None:
        """Copies up to `max_bytes` bytes of waiting blocks, to memory first."""
        max_bytes -= self.memory.copy_ahead(max_bytes)
        if self.disk is not None and max_bytes > 0:
            self.disk.write(max_bytes)

    def store(self, node: PrefixNode, group: int, block: int) -> int:
        """See `Tier`. While other sequences run, blocks that are on disk are not copied."""
        disk, memory = self.disk, self.memory
        key = 0
        if memory.copy_of(node, group) or self._is_copied(node, group):
            key = memory.store(node, group, block)
        if disk is not None and not key:
            disk.on_evicted(node, group, memory.spend)
        return key

    def _is_copied(self, node: PrefixNode, group: int) -> bool:
        """True if a block without a copy is worth one when it is evicted."""
        is_hurried = self.memory.allowance is not None
        if is_hurried and self.disk is not None and self.disk.has(node, group):
            return False
        return self._rates.is_worthwhile(Level.MEMORY)

    def forget(self, node: PrefixNode, group: int) -> None:
        """See `Tier`."""
        self.memory.forget(node, group)

    def drop(self, key: int) -> None:
        """See `Tier`."""
        self.memory.drop(key)

    def pin(self, key: int) -> None:
        """See `Tier`."""
        self._level(key).pin(key)

    def unpin(self, key: int) -> None:
        """See `Tier`."""
        self._level(key).unpin(key)

    def _level(self, key: int) -> MemoryTier | BlockStore | RemoteLevel:
        if key < FIRST_KEY:
            return self.memory
        if key >= FIRST_REMOTE_KEY:
            assert self.remote is not None
            return self.remote
        assert self._store is not None
        return self._store

    def check_integrity(self) -> None:
        """See `Tier`."""
        self.memory.check_integrity()
