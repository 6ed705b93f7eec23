"""DiskLevel: finds blocks of an engine's prefix tree on disk, and queues new ones to be written."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from mlx_paged.core import BlockTables, PrefixNode, PrefixQuery
from mlx_paged.core.kv.stored import LookUp
from mlx_paged.core.kv.tier import TierOwner
from mlx_paged.core.kv.write_policy import WritePolicy
from mlx_paged.engine.offload.buffers import Buffers
from mlx_paged.engine.offload.names import PrefixNames
from mlx_paged.model.block_bytes import Bytes
from mlx_paged.offload.store import BlockStore

#: Copies the content of (node, group) to a buffer, and calls back once it is there; returns False
#: if it is gone.
CopyOut = Callable[[PrefixNode, int, Bytes, Callable[[], None]], bool]

# Bytes that `drain` copies at once.
_DRAIN_BYTES = 32 << 20
# Blocks that may wait to be copied; the oldest are given up first.
_MAX_PENDING = 1 << 16


class DiskLevel:
    """The disk of one KV manager.

    Args:
        names: Names the blocks.
        block_bytes: Bytes of a block of each group.
        copy_out: Copies a block from the device or from host memory.
        buffers: For the blocks that are written.
    """

    def __init__(
        self,
        store: BlockStore,
        names: PrefixNames,
        block_bytes: list[int],
        block_size: int,
        owner: TierOwner,
        copy_out: CopyOut,
        buffers: Buffers,
    ) -> None:
        self._store = store
        self._names = names
        self._block_bytes = block_bytes
        self._copy_out = copy_out
        self._buffers = buffers
        self._policy = WritePolicy(owner.groups, block_bytes, block_size, self._is_stored)
        # Blocks that wait to be written, oldest first.
        self._pending: OrderedDict[tuple[PrefixNode, int], None] = OrderedDict()
        # The buffers of blocks that are being copied, by digest and group.
        self._copying: dict[tuple[bytes, int], Bytes] = {}

    # Finding.

    def look_up(self, query: PrefixQuery) -> LookUp | None:
        """See `Tier.look_up`."""
        self._store.look()
        if self._store.is_empty:
            return None

        def key(group: int, index: int) -> int:
            digest = self._names.of_query(query, index)
            return 0 if digest is None else self._store.key(digest, group)

        return key

    # Writing.

    @property
    def has_pending(self) -> bool:
        """True if blocks wait to be written and the writer has room for some."""
        return bool(self._pending) and self._room > 0

    @property
    def _room(self) -> int:
        """Bytes that the writer can still accept, besides those being copied for it."""
        copying = sum(self._block_bytes[group] for _, group in self._copying)
        return self._store.room - copying

    def settle(self, tables: BlockTables, depth: int) -> None:
        """See `Tier.settle`."""
        tip = tables.tip
        if tip is None or self._store.is_paused:
            return
        for pair in self._policy.choose(tables, min(depth, self._names.name(tip))):
            self._pending[pair] = None
        while len(self._pending) > _MAX_PENDING:
            self._pending.popitem(last=False)

    def _is_stored(self, node: PrefixNode, group: int) -> bool:
        return (node, group) in self._pending or self.has(node, group)

    def has(self, node: PrefixNode, group: int) -> bool:
        """True if a block is on disk, or copied to be written."""
        if node.digest is None:
            return False
        return (node.digest, group) in self._copying or self._store.has(node.digest, group)

    def write(self, max_bytes: int) -> int:
        """Copies up to `max_bytes` bytes of pending blocks; returns how many bytes it copied."""
        num_bytes = 0
        while self._pending and num_bytes < max_bytes:
            node, group = next(iter(self._pending))
            if self._block_bytes[group] > self._room:
                break
            self._write(node, group)
            num_bytes += self._block_bytes[group]
        return num_bytes

    def drain(self, timeout: float, collect: Callable[[], None]) -> bool:
        """Copies all pending blocks. May block until the disk has caught up.

        Args:
            collect: Waits for the copies that have begun.
        """
        while self._pending:
            collect()
            _, group = next(iter(self._pending))
            if not self._store.wait_for_room(self._block_bytes[group], timeout):
                return False
            if self._store.is_paused:
                self._pending.clear()
            self.write(_DRAIN_BYTES)
        collect()
        return True

    def on_evicted(self, node: PrefixNode, group: int, spend: Callable[[int], bool]) -> None:
        """Copies a block that is about to be evicted and still has to be written.

        Args:
            spend: Returns True if a number of bytes may be copied now.
        """
        size = self._block_bytes[group]
        if (node, group) in self._pending and size <= self._room and spend(size):
            self._write(node, group)

    def _write(self, node: PrefixNode, group: int) -> None:
        del self._pending[node, group]
        if not node.is_indexed or node.digest is None:
            return
        digest, data = node.digest, self._buffers.take(self._block_bytes[group])

        def copied() -> None:
            if self._copying.get((digest, group)) is data:
                del self._copying[digest, group]
                self._store.write(digest, group, data.data, lambda: self._buffers.give(data))
            else:  # It was distrusted meanwhile, and another copy may be on its way.
                self._buffers.give(data)

        self._copying[digest, group] = data
        if not self._copy_out(node, group, data, copied):
            del self._copying[digest, group]
            self._buffers.give(data)

    def distrust(self) -> None:
        """Drops pending blocks, and deletes the files that this process wrote."""
        self._pending.clear()
        self._copying.clear()
        self._store.distrust()
