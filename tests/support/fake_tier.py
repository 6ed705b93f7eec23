"""Tiers over a `FakeDevice`: host memory, and a "disk" that outlives the prefix tree and fails."""

from __future__ import annotations

from array import array
from typing import Any

from mlx_paged.core import (
    BlockTables,
    KVManager,
    Level,
    MemoryTier,
    PrefixNode,
    PrefixQuery,
    RestoreRates,
)
from mlx_paged.core.kv.restore_rates import MIN_BYTES, MIN_TOKENS
from mlx_paged.core.kv.stored import LookUp, StoredPrefix
from mlx_paged.core.kv.tier import TierOwner
from mlx_paged.core.kv.write_policy import WritePolicy
from mlx_paged.errors import IntegrityError
from support.fake_model import FakeDevice

#: `MemoryTier` counts at least this for a block.
BLOCK_BYTES = 512
FIRST_DISK_KEY = 1 << 48

Prefix = tuple[str | None, tuple[Any, ...], int]  # salt, tokens or contents of media, group


def _level_of(key: int) -> Level:
    return Level.MEMORY if key < FIRST_DISK_KEY else Level.DISK


class FakeTier:
    """Implements `core.kv.tier.Tier`. `restore` brings blocks back as an engine does between steps.

    Args:
        num_blocks: Room in host memory, of all groups together.
        has_disk: Keep what `WritePolicy` chooses, by its prefix.

    Attributes:
        device: To be set before the first block is stored.
        disk: (key, content) by prefix.
        rates: Nothing is known at first, so everything is restored.
    """

    def __init__(
        self, num_blocks: int, num_groups: int, block_size: int, *, has_disk: bool
    ) -> None:
        self._sizes = [BLOCK_BYTES] * num_groups
        self._block_size = block_size
        self.memory = MemoryTier(self, self._sizes, num_blocks * BLOCK_BYTES, block_size)
        self.device: FakeDevice | None = None
        self.has_disk = has_disk
        self.disk: dict[Prefix, tuple[int, Any]] = {}
        self._next_key = FIRST_DISK_KEY
        self._copies: dict[int, Any] = {}  # by key of host memory
        self._pins: dict[int, int] = {}  # of the disk
        self._owner: TierOwner | None = None
        self.rates = RestoreRates(self._sizes, block_size, _level_of)

    # Contents of the memory.

    def save(self, key: int, group: int, block: int) -> bool:
        assert key not in self._copies
        self._copies[key] = self._read(group, block)
        return True

    def discard(self, key: int) -> None:
        del self._copies[key]

    # Tier.

    @property
    def is_empty(self) -> bool:
        return self.memory.is_empty and not self.disk

    def attach(self, owner: TierOwner) -> None:
        self.memory.attach(owner)
        self._owner = owner
        self._policy = WritePolicy(owner.groups, self._sizes, self._block_size, self._is_stored)

    def look_up(self, query: PrefixQuery) -> LookUp | None:
        if not self.disk:
            return None
        tokens = array("I", query.tokens)

        def key(group: int, index: int) -> int:
            prefix = self._prefix(query.salt, tokens[: (index + 1) * self._block_size], group)
            return 0 if prefix is None else self.disk.get(prefix, (0, None))[0]

        return key

    def num_worth_restoring(self, stored: StoredPrefix, first: int) -> int:
        assert self._owner is not None
        return self.rates.num_worth_restoring(stored, first, self._owner.groups)

    def on_refused(self) -> None:
        self.rates.note_refusal()

    def settle(self, tables: BlockTables, depth: int) -> None:
        self.memory.settle(tables, depth)
        if not self.has_disk or tables.tip is None:
            return
        nodes = tables.tip.path()[:depth]
        named = [node for node in nodes if self._prefix_of(node, 0) is not None]
        for node, group in self._policy.choose(tables, len(named)):
            prefix = self._prefix_of(node, group)
            entry = node.entries[group]
            assert prefix is not None and entry
            content = self._read(group, entry) if entry > 0 else self._copies[-entry]
            self.disk[prefix] = self._next_key, content
            self._next_key += 1

    def store(self, node: PrefixNode, group: int, block: int) -> int:
        return self.memory.store(node, group, block)

    def forget(self, node: PrefixNode, group: int) -> None:
        self.memory.forget(node, group)

    def drop(self, key: int) -> None:
        self.memory.drop(key)

    def pin(self, key: int) -> None:
        if key < FIRST_DISK_KEY:
            self.memory.pin(key)
        else:
            self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: int) -> None:
        if key < FIRST_DISK_KEY:
            self.memory.unpin(key)
        else:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]

    def check_integrity(self) -> None:
        self.memory.check_integrity()
        assert isinstance(self._owner, KVManager)
        waiting = {r.key for x in self._owner.restorations.values() for r in x.reads}
        if {key for key in waiting if key >= FIRST_DISK_KEY} != self._pins.keys():
            raise IntegrityError("pins of the disk do not match the restorations")

    # The engine's part.

    def restore(self, most: int) -> None:
        """Brings up to `most` blocks back, of the oldest restorations."""
        assert isinstance(self._owner, KVManager)
        contents = dict(self.disk.values()) | self._copies
        for restoration in self._owner.restorations.values():
            while not restoration.is_done and not restoration.has_failed and most:
                group, block, key = restoration.reads[restoration.num_done]
                if key not in contents:
                    restoration.has_failed = True  # lost from disk
                    break
                self._write(group, block, contents[key])
                restoration.num_done += 1
                most -= 1

    def lose(self, choice: int) -> None:
        """Loses a block of the disk, if possible one that a sequence waits for."""
        waited = [prefix for prefix, (key, _) in self.disk.items() if key in self._pins]
        found = waited or list(self.disk)
        if found:
            del self.disk[found[choice % len(found)]]

    def learn(self, memory: float, disk: float) -> None:
        """Sets the time to restore a block, relative to computing it.

        A few refusals later, nothing is known again.
        """
        self.rates = RestoreRates(self._sizes, self._block_size, _level_of)
        self.rates.note_computed(MIN_TOKENS, MIN_TOKENS / self._block_size)
        for level, ratio in ((Level.MEMORY, memory), (Level.DISK, disk)):
            num_bytes = 2 * MIN_BYTES
            self.rates.note_restored(level, num_bytes, ratio * num_bytes / BLOCK_BYTES)

    # Inside.

    def _prefix_of(self, node: PrefixNode, group: int) -> Prefix | None:
        tokens = array("I", b"".join(each.key for each in node.path()))
        return self._prefix(node.salt, tokens, group)

    def _prefix(self, salt: str | None, tokens: array[int], group: int) -> Prefix | None:
        """The name of a prefix; None if it has media that are forgotten."""
        assert self._owner is not None
        named: list[Any] = []
        for token in tokens:
            named.append(token if token < 1 << 31 else self._owner.media_content(token))
        return None if None in named else (salt, tuple(named), group)

    def _is_stored(self, node: PrefixNode, group: int) -> bool:
        return self._prefix_of(node, group) in self.disk

    def _read(self, group: int, block: int) -> Any:
        slots, size = self._slots(group), self._block_size
        assert self.device is not None
        return self.device.states[block] if slots is None else slots[block * size :][:size]

    def _write(self, group: int, block: int, content: Any) -> None:
        assert self.device is not None
        kv, slots, size = self.device.kv, self._slots(group), self._block_size
        number = group if group < len(kv.attention) else -1
        places = {place for step in self.device.in_flight for place in step.touched}
        assert (number, block) not in places, "a step in flight uses a block that is restored"
        if slots is None:
            self.device.states[block] = content
        else:
            slots[block * size : (block + 1) * size] = content

    def _slots(self, group: int) -> list[tuple[int, int] | None] | None:
        """The slots of an attention group; None for the group of states."""
        assert self.device is not None
        return self.device.slots[group] if group < len(self.device.slots) else None
