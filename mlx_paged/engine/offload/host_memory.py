"""HostMemory: the bytes of stored blocks, in buffers that are used again."""

from __future__ import annotations

import numpy as np

from mlx_paged.model.block_bytes import BlockBytes, Bytes


class HostMemory:
    """Implements `core.kv.memory_tier.Contents`.

    Buffers are reused for blocks of the same size, because fresh memory costs more than the copy.
    Free buffers of other sizes are released once all buffers exceed the capacity.

    Args:
        blocks: Reads the blocks of the device.
        capacity: Maximum bytes of all buffers, used or not.
    """

    def __init__(self, blocks: BlockBytes, capacity: int) -> None:
        self._blocks = blocks
        self._capacity = capacity
        self._num_bytes = blocks.num_bytes
        self._kept: dict[int, Bytes] = {}  # by key
        self._arriving: set[int] = set()  # keys whose bytes are still on their way
        self._free: dict[int, list[Bytes]] = {}  # by size
        self._num_free_bytes = self._num_kept_bytes = 0

    def save(self, key: int, group: int, block: int) -> bool:
        """See `Contents`."""
        size = self._num_bytes[group]
        buffer = self._take(size)
        if buffer is None:
            return False
        self._kept[key] = buffer
        self._arriving.add(key)
        self._num_kept_bytes += size
        self._blocks.read(group, block, buffer, lambda: self._arriving.discard(key))
        return True

    def has(self, key: int) -> bool:
        """True if the bytes under a key have arrived."""
        return key not in self._arriving

    def __getitem__(self, key: int) -> Bytes:
        """``[num_bytes]`` uint8: the content stored under a key."""
        return self._kept[key]

    def discard(self, key: int) -> None:
        """See `Contents`."""
        buffer = self._kept.pop(key)
        self._num_kept_bytes -= buffer.size
        if key in self._arriving:
            self._arriving.remove(key)
            return  # what arrives late must not overwrite another block
        self._num_free_bytes += buffer.size
        self._free.setdefault(buffer.size, []).append(buffer)

    def give_back(self) -> int:
        """Frees the buffers that hold nothing; returns their bytes."""
        num_bytes, self._num_free_bytes = self._num_free_bytes, 0
        self._free.clear()
        return num_bytes

    def _take(self, size: int) -> Bytes | None:
        free = self._free.get(size)
        if free:
            self._num_free_bytes -= size
            return free.pop()
        if self._num_kept_bytes + self._num_free_bytes + size > self._capacity:
            self.give_back()
        try:
            return np.empty(size, dtype=np.uint8)
        except MemoryError:
            return None
