"""The host memory of a `MemoryTier`, as copies of what a `FakeDevice` holds."""

from __future__ import annotations

from typing import Any

from mlx_paged.core import KVManager, MemoryTier
from support.fake_model import FakeDevice

#: `MemoryTier` counts at least this for a block.
BLOCK_BYTES = 512


def tier_of(num_blocks: int, num_groups: int, block_size: int) -> MemoryTier:
    """A tier with room for `num_blocks` blocks of all groups together."""
    sizes = [BLOCK_BYTES] * num_groups
    return MemoryTier(FakeContents(), sizes, num_blocks * BLOCK_BYTES, block_size)


def contents_of(device: FakeDevice) -> FakeContents:
    """The contents of the tier of a device's KV manager, from now on copied from the device."""
    tier = device.kv.tier
    assert isinstance(tier, MemoryTier) and isinstance(tier._contents, FakeContents)
    tier._contents.device = device
    return tier._contents


class FakeContents:
    """See `mlx_paged.core.kv.memory_tier.Contents`.

    Attributes:
        device: To be set before the first save.
    """

    def __init__(self) -> None:
        self.device: FakeDevice | None = None
        self.copies: dict[int, Any] = {}

    def save(self, key: int, group: int, block: int) -> bool:
        assert self.device is not None and key not in self.copies
        slots = self._slots(group)
        if slots is None:
            self.copies[key] = self.device.states[block]
        else:
            size = self.device.block_size
            self.copies[key] = slots[block * size : (block + 1) * size]
        return True

    def discard(self, key: int) -> None:
        del self.copies[key]

    def restore(self, most: int) -> None:
        """Brings up to `most` blocks back, of the oldest restorations."""
        assert self.device is not None
        kv = self.device.kv
        for restoration in kv.restorations.values():
            while not restoration.is_done and most:
                group, block, key = restoration.reads[restoration.num_done]
                self._check_unused(kv, group, block)
                slots = self._slots(group)
                if slots is None:
                    self.device.states[block] = self.copies[key]
                else:
                    size = self.device.block_size
                    slots[block * size : (block + 1) * size] = self.copies[key]
                restoration.num_done += 1
                most -= 1

    def _slots(self, group: int) -> list[tuple[int, int] | None] | None:
        """The slots of an attention group; None for the group of states."""
        assert self.device is not None
        return self.device.slots[group] if group < len(self.device.slots) else None

    def _check_unused(self, kv: KVManager, group: int, block: int) -> None:
        assert self.device is not None
        places = {place for step in self.device.in_flight for place in step.touched}
        number = group if group < len(kv.attention) else -1
        assert (number, block) not in places, "a step in flight uses a block that is restored"
