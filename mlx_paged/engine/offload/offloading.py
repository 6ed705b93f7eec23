"""Offloading: connects an engine's KV store to host memory, and brings blocks back between steps.

Eviction copies a block to host memory at once. A prompt whose prefix is there is admitted with
blocks of its own, which are filled a few at a time, so that running sequences do not stall::

      step 7                   step 8                   step 9
      [decodes]                [decodes]                [decodes + the rest of the prompt]
               copy 32 MiB              copy 20 MiB
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_paged.core import KVManager, MemoryTier
from mlx_paged.engine.offload.host_memory import HostMemory
from mlx_paged.model.block_bytes import BlockBytes

# Bytes that come back between two steps while other sequences run: a few milliseconds.
_STEP_BYTES = 32 << 20
# The same if nothing runs. An abort waits for that long.
_IDLE_BYTES = 512 << 20


@dataclass(frozen=True)
class OffloadStats:
    """Blocks outside of the device at one moment, and since the engine was made.

    Attributes:
        memory_bytes: Bytes stored in host memory.
        memory_capacity: Their maximum.
        num_stored_blocks: Blocks of all groups that were copied to host memory.
        num_lost_blocks: Those dropped again for lack of room.
    """

    memory_bytes: int = 0
    memory_capacity: int = 0
    num_stored_blocks: int = 0
    num_lost_blocks: int = 0


class Offloading:
    """The host memory of one engine.

    Args:
        capacity: Maximum bytes.
    """

    def __init__(self, blocks: BlockBytes, capacity: int, block_size: int) -> None:
        self._blocks = blocks
        self._capacity = capacity
        self._block_size = block_size
        self._past = OffloadStats()
        self._memory = HostMemory(blocks, capacity)
        self._tier: MemoryTier | None = None

    def new_tier(self) -> MemoryTier:
        """Makes an empty tier for a new KV manager; the one before is given up."""
        if self._tier is not None:
            self._past = self.stats
        self._memory = HostMemory(self._blocks, self._capacity)
        sizes, size = self._blocks.num_bytes, self._block_size
        self._tier = MemoryTier(self._memory, sizes, self._capacity, size)
        return self._tier

    def advance(self, kv: KVManager, *, is_idle: bool) -> None:
        """Brings a bounded number of bytes back. Call it between two steps.

        Args:
            is_idle: True if no sequence runs meanwhile.
        """
        left = _IDLE_BYTES if is_idle else _STEP_BYTES
        for restoration in kv.restorations.values():
            while not restoration.is_done:
                if left <= 0:
                    return
                group, block, key = restoration.reads[restoration.num_done]
                data = self._memory[key]
                self._blocks.write(group, block, data)
                restoration.num_done += 1
                left -= data.size

    def shed(self) -> int:
        """Gives all memory back, and stores nothing until `resume`; returns the bytes."""
        if self._tier is None or not self._tier.capacity:
            return 0
        self._tier.limit(0)
        return self._memory.give_back()

    def resume(self) -> None:
        """Stores blocks again."""
        if self._tier is not None:
            self._tier.limit(self._capacity)

    @property
    def stats(self) -> OffloadStats:
        """The statistics at this moment."""
        tier, past = self._tier, self._past
        assert tier is not None, "an engine makes its KV store before anything else"
        return OffloadStats(
            memory_bytes=tier.num_bytes,
            memory_capacity=tier.capacity,
            num_stored_blocks=past.num_stored_blocks + tier.num_stored,
            num_lost_blocks=past.num_lost_blocks + tier.num_lost,
        )
