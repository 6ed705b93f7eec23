"""MemoryTier: keeps evicted blocks in host memory, within a quota.

This is the bookkeeping half; `Contents` moves the bytes. A device evicts the last block of a prefix
first, so the oldest content is always that of a leaf: dropping it takes nothing else along.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mlx_paged.core.kv.stored import LookUp
from mlx_paged.core.kv.tables import BlockTables
from mlx_paged.core.kv.tier import OnLost, TierOwner
from mlx_paged.core.kv.tree import TOKEN_BYTES, PrefixNode, PrefixQuery
from mlx_paged.errors import IntegrityError

# Counted for every stored block: a group without layers has none, but its nodes take memory.
_LEAST_BYTES = 512


class Contents(Protocol):
    """The bytes of stored blocks, by key."""

    def save(self, key: int, group: int, block: int) -> bool:
        """Copies a block from the device; returns False if there is no memory for it."""

    def discard(self, key: int) -> None:
        """Frees the copy stored under a key."""


class _Stored(NamedTuple):
    node: PrefixNode
    group: int


class MemoryTier:
    """A `Tier` that drops the least recently evicted content when its quota is full.

    Args:
        block_bytes: Bytes of a block, or of a state slot, of each KV cache group.
        capacity: Maximum bytes.
        block_size: Tokens of a block.

    Attributes:
        num_bytes: Bytes stored now, pinned ones included.
        num_stored, num_lost: Blocks of all groups that were stored, and dropped for lack of room.
    """

    def __init__(
        self, contents: Contents, block_bytes: Sequence[int], capacity: int, block_size: int
    ) -> None:
        self.capacity = capacity
        self.num_bytes = self.num_stored = self.num_lost = 0
        self._contents = contents
        self._block_bytes = tuple(max(size, _LEAST_BYTES) for size in block_bytes)
        self._key_bytes = block_size * TOKEN_BYTES
        self._on_lost: OnLost | None = None
        self._next_key = 1
        self._stored: dict[int, _Stored] = {}  # by key; what has been dropped is not in here
        self._sizes: dict[int, int] = {}  # bytes by key; includes dropped content that is pinned
        self._pins: dict[int, int] = {}
        self._oldest: OrderedDict[int, None] = OrderedDict()  # stored and not pinned

    @property
    def is_empty(self) -> bool:
        """See `Tier`."""
        return not self._stored

    def attach(self, owner: TierOwner) -> None:
        """See `Tier`."""
        assert not self._sizes, "a tier serves one KV manager"
        self._on_lost = owner.on_lost

    def look_up(self, query: PrefixQuery) -> LookUp | None:
        """See `Tier`. All content is in the prefix tree."""
        return None

    def settle(self, tables: BlockTables, depth: int) -> None:
        """See `Tier`. Blocks are stored when they are evicted."""

    def store(self, node: PrefixNode, group: int, block: int) -> int:
        """See `Tier`. A partly filled block is dropped: sequences copy from it and never begin
        after it."""
        size = self._block_bytes[group]
        if len(node.key) < self._key_bytes or not self._make_room(size) or not node.is_indexed:
            return 0
        key = self._next_key
        if not self._contents.save(key, group, block):
            return 0
        self._next_key += 1
        self._stored[key] = _Stored(node, group)
        self._sizes[key] = size
        self._oldest[key] = None
        self.num_bytes += size
        self.num_stored += 1
        return key

    def drop(self, key: int) -> None:
        """See `Tier`."""
        del self._stored[key]
        if key not in self._pins:
            del self._oldest[key]
            self._free(key)

    def pin(self, key: int) -> None:
        """See `Tier`."""
        self._pins[key] = self._pins.get(key, 0) + 1
        self._oldest.pop(key, None)

    def unpin(self, key: int) -> None:
        """See `Tier`."""
        self._pins[key] -= 1
        if self._pins[key]:
            return
        del self._pins[key]
        if key in self._stored:
            self._oldest[key] = None
        else:
            self._free(key)

    def limit(self, capacity: int) -> int:
        """Changes the quota, and drops what exceeds it; returns the bytes that this freed."""
        before, self.capacity = self.num_bytes, capacity
        self._make_room(0)
        return before - self.num_bytes

    def _make_room(self, size: int) -> bool:
        while self.num_bytes + size > self.capacity:
            if size > self.capacity or not self._oldest:
                return False
            key, _ = self._oldest.popitem(last=False)
            node, group = self._stored.pop(key)
            self._free(key)
            self.num_lost += 1
            assert self._on_lost is not None
            self._on_lost(node, group)
        return True

    def _free(self, key: int) -> None:
        self.num_bytes -= self._sizes.pop(key)
        self._contents.discard(key)

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if the books disagree with each other or with the tree."""
        if self.num_bytes != sum(self._sizes.values()) or self.num_bytes > self.capacity:
            raise IntegrityError(f"{self.num_bytes} bytes are stored, of {self.capacity}")
        for key, (node, group) in self._stored.items():
            if node.entries[group] != -key or not node.is_indexed:
                raise IntegrityError(f"no node of the prefix tree has content {key}")
        if {*self._stored, *self._pins} != set(self._sizes):
            raise IntegrityError("content is kept that is neither stored nor pinned")
        if self._stored.keys() - self._pins.keys() != self._oldest.keys():
            raise IntegrityError("content is in use by a restoration, and may be dropped")
