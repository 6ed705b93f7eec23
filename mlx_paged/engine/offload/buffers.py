"""Buffers: reusable memory for blocks on their way to or from the disk."""

from __future__ import annotations

import threading

import numpy as np

from mlx_paged.model.block_bytes import Bytes

#: Bytes that are kept for the next blocks.
MAX_SPARE_BYTES = 64 << 20
#: The same for an engine that sends or receives blocks, which come by the gigabyte.
ROLE_SPARE_BYTES = 256 << 20


class Buffers:
    """Keeps buffers that are no longer needed, by size. Any thread may call it.

    The system maps fresh memory page by page when it is first written, which takes several times as
    long as the copy itself.

    Args:
        max_spare_bytes: Bytes that are kept.
    """

    def __init__(self, max_spare_bytes: int = MAX_SPARE_BYTES) -> None:
        self._max_spare_bytes = max_spare_bytes
        self._lock = threading.Lock()
        self._spare: dict[int, list[Bytes]] = {}
        self._num_bytes = 0

    def take(self, size: int) -> Bytes:
        """Returns ``[size]`` uint8 of any content."""
        with self._lock:
            spare = self._spare.get(size)
            if spare:
                self._num_bytes -= size
                return spare.pop()
        return np.empty(size, dtype=np.uint8)

    def give(self, buffer: Bytes) -> None:
        """Takes a buffer that nothing uses any more."""
        with self._lock:
            if self._num_bytes + buffer.size <= self._max_spare_bytes:
                self._num_bytes += buffer.size
                self._spare.setdefault(buffer.size, []).append(buffer)

    def give_back(self) -> int:
        """Frees all buffers that it keeps; returns their bytes."""
        with self._lock:
            spare, self._spare = self._spare, {}
            num_bytes, self._num_bytes = self._num_bytes, 0
        del spare  # not under the lock: unmapping memory takes long
        return num_bytes
