"""MemoryTier: keeps evicted blocks in host memory, within a quota.

This is the bookkeeping half; `Contents` moves the bytes. A step that needs many blocks at once
would wait for as many copies, so blocks are copied ahead of their eviction::

      settle          a sequence has computed its prompt or ends: its blocks are queued
      copy_ahead      a few are copied between two steps; the device still has them
      store           a block is evicted: its copy becomes the stored content, which costs nothing

A block without a copy is copied when it is evicted, unless that exceeds `allowance`.

The device evicts the last block of a prefix first, so the oldest content always belongs to a leaf,
and dropping it invalidates nothing else. Copies made ahead are not dropped to make room, because a
prefix could lose its beginning; they are limited to a quarter of the quota instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mlx_paged.core.kv.stored import LookUp, StoredPrefix
from mlx_paged.core.kv.tables import BlockTables
from mlx_paged.core.kv.tier import ABSENT, TierOwner
from mlx_paged.core.kv.tree import TOKEN_BYTES, PrefixNode, PrefixQuery
from mlx_paged.errors import IntegrityError

# Counted for every stored block: a group without layers has none, but its nodes take memory.
_MIN_BYTES = 512
# Copies of blocks that are still on the device take up to this part of the quota (1 / n).
_AHEAD_SHARE = 4
# Blocks that may wait to be copied; the oldest are given up first.
_MAX_PENDING = 1 << 16


class Contents(Protocol):
    """The bytes of stored blocks, by key."""

    def save(self, key: int, group: int, block: int) -> bool:
        """Copies a block from the device; returns False if there is no memory for it."""

    def discard(self, key: int) -> None:
        """Frees the copy stored under a key."""


class _Place(NamedTuple):
    """Where content belongs."""

    node: PrefixNode
    group: int


class MemoryTier:
    """A `Tier` that drops the least recently evicted content when its quota is full.

    Args:
        block_bytes: Bytes of a block, or of a state slot, of each KV cache group.
        capacity: Maximum bytes.
        block_size: Tokens of a block.

    Attributes:
        num_bytes: Bytes of all copies now, pinned and made ahead included.
        num_stored, num_lost: Blocks of all groups that were stored, and dropped for lack of room.
        num_skipped: Blocks that were evicted without a copy because the step had copied enough.
        allowance: Bytes that may still be copied at evictions; None: any number.
    """

    def __init__(
        self, contents: Contents, block_bytes: Sequence[int], capacity: int, block_size: int
    ) -> None:
        self.capacity = capacity
        self.num_bytes = self.num_stored = self.num_lost = self.num_skipped = 0
        self.allowance: int | None = None
        self._contents = contents
        self._block_bytes = tuple(max(size, _MIN_BYTES) for size in block_bytes)
        self._key_bytes = block_size * TOKEN_BYTES
        self._owner: TierOwner | None = None
        self._next_key = 1
        self._sizes: dict[int, int] = {}  # bytes by key, of all copies
        self._stored: dict[int, _Place] = {}  # by key; without dropped content
        self._pins: dict[int, int] = {}
        self._oldest: OrderedDict[int, None] = OrderedDict()  # stored and not pinned
        self._ahead: OrderedDict[_Place, int] = OrderedDict()  # keys of copies made ahead
        self._num_ahead_bytes = 0
        # Bytes of restorations that exceeded the quota when it was lowered.
        self._num_excess_bytes = 0
        self._pending: OrderedDict[_Place, None] = OrderedDict()  # to be copied ahead

    @property
    def is_empty(self) -> bool:
        """See `Tier`."""
        return not self._stored

    def attach(self, owner: TierOwner) -> None:
        """See `Tier`."""
        assert not self._sizes, "a tier serves one KV manager"
        self._owner = owner

    def look_up(self, query: PrefixQuery) -> LookUp | None:
        """See `Tier`. All content is in the prefix tree."""
        return None

    def num_worth_restoring(self, stored: StoredPrefix, first: int) -> int:
        """See `Tier`. All blocks are worth storing."""
        return stored.num_blocks

    def on_refused(self) -> None:
        """See `Tier`."""

    # Copies ahead of evictions.

    def settle(self, tables: BlockTables, depth: int) -> None:
        """See `Tier`. Queues the blocks that another sequence could continue from."""
        if tables.tip is None or not self.capacity:
            return
        assert self._owner is not None
        nodes = tables.tip.ancestor(min(depth, tables.tip.depth)).path()
        # Full attention last: it is most of the bytes, and useless without the rest.
        for group in reversed(self._owner.groups) if nodes else ():
            for index in group.view(len(nodes)):
                place = _Place(nodes[index], group.number)
                if self._may_copy(place):
                    self._pending[place] = None
        while len(self._pending) > _MAX_PENDING:
            self._pending.popitem(last=False)

    def _may_copy(self, place: _Place) -> bool:
        node, group = place
        on_device = node.is_indexed and node.entries[group] > ABSENT
        return on_device and place not in self._ahead and len(node.key) == self._key_bytes

    @property
    def has_pending(self) -> bool:
        """True if blocks wait to be copied, and there is room for the first of them."""
        place = next(iter(self._pending), None)
        return place is not None and self._has_room_ahead(self._block_bytes[place.group])

    def _has_room_ahead(self, size: int) -> bool:
        return self._num_ahead_bytes + size <= self.capacity // _AHEAD_SHARE

    def copy_ahead(self, max_bytes: int) -> int:
        """Copies blocks that are still on the device; returns how many bytes.

        Call it between two steps. No step in flight may write the indexed blocks, and none does.

        Args:
            max_bytes: No copy starts after this many bytes.
        """
        num_bytes = 0
        while num_bytes < max_bytes and self.has_pending:
            place, _ = self._pending.popitem(last=False)
            size = self._block_bytes[place.group]
            if not self._may_copy(place) or not self._make_room(size) or not self._may_copy(place):
                continue
            key = self._save(place)
            if key:
                self._ahead[place] = key
                self._num_ahead_bytes += size
                num_bytes += size
        return num_bytes

    def copy_of(self, node: PrefixNode, group: int) -> int:
        """Returns the key of a copy of a block that is still on the device; 0 if there is none."""
        return self._ahead.get(_Place(node, group), 0)

    def forget(self, node: PrefixNode, group: int) -> None:
        """See `Tier`."""
        if self._ahead:
            key = self._take_ahead(_Place(node, group))
            if key:
                self._free(key)

    def _take_ahead(self, place: _Place) -> int:
        """Takes the key of a copy made ahead; 0 if there is none."""
        key = self._ahead.pop(place, 0)
        self._num_ahead_bytes -= self._sizes.get(key, 0)
        return key

    # Stored content.

    def spend(self, size: int) -> bool:
        """Takes the bytes of a copy at an eviction from the allowance; False if they exceed it."""
        if self.allowance is not None:
            if self.allowance < size:
                self.num_skipped += 1
                return False
            self.allowance -= size
        return True

    def store(self, node: PrefixNode, group: int, block: int) -> int:
        """See `Tier`. A partly filled block is dropped: sequences copy from it and never begin
        after it."""
        place, size = _Place(node, group), self._block_bytes[group]
        key = self._take_ahead(place)
        if not key:
            if len(node.key) < self._key_bytes or size > self.capacity:
                return 0
            if not self.spend(size):
                return 0
            if not self._make_room(size) or not node.is_indexed:
                return 0
            key = self._save(place)
            if not key:
                return 0
        self._stored[key] = place
        self._oldest[key] = None
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
        while self._ahead and not self._has_room_ahead(0):
            self.forget(*next(reversed(self._ahead)))  # the end of a prefix first
        self._make_room(0)
        self._num_excess_bytes = max(0, self.num_bytes - capacity)
        return before - self.num_bytes

    def _make_room(self, size: int) -> bool:
        while self.num_bytes + size > self.capacity:
            if size > self.capacity or not self._oldest:
                return False
            key, _ = self._oldest.popitem(last=False)
            node, group = self._stored.pop(key)
            self._free(key)
            self.num_lost += 1
            assert self._owner is not None
            self._owner.on_lost(node, group)
        return True

    def _save(self, place: _Place) -> int:
        """Copies a block from the device; returns the new key, or 0."""
        key, size = self._next_key, self._block_bytes[place.group]
        if not self._contents.save(key, place.group, place.node.entries[place.group]):
            return 0
        self._next_key += 1
        self._sizes[key] = size
        self.num_bytes += size
        return key

    def _free(self, key: int) -> None:
        self.num_bytes -= self._sizes.pop(key)
        self._contents.discard(key)

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if the records disagree with each other or with the tree."""
        limit = self.capacity + self._num_excess_bytes
        if self.num_bytes != sum(self._sizes.values()) or self.num_bytes > limit:
            raise IntegrityError(f"{self.num_bytes} bytes are stored, of {limit}")
        for key, (node, group) in self._stored.items():
            if node.entries[group] != -key or not node.is_indexed:
                raise IntegrityError(f"no node of the prefix tree has content {key}")
        for (node, group), key in self._ahead.items():
            if node.entries[group] <= ABSENT or not node.is_indexed:
                raise IntegrityError(f"content {key} copies a block that the device does not have")
        if self._num_ahead_bytes != sum(self._sizes[key] for key in self._ahead.values()):
            raise IntegrityError(f"{self._num_ahead_bytes} bytes are counted as copied ahead")
        if {*self._stored, *self._pins, *self._ahead.values()} != set(self._sizes):
            raise IntegrityError("the tier keeps content that nothing stores, pins or copied ahead")
        if self._stored.keys() - self._pins.keys() != self._oldest.keys():
            raise IntegrityError("pinned content could be dropped to make room")
