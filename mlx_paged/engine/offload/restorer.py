"""Restorer: brings blocks back between steps, from host memory at once, from disk ahead of time."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from mlx_paged.core import KVManager, Restoration
from mlx_paged.engine.offload.host_memory import HostMemory
from mlx_paged.model.block_bytes import BlockBytes, Bytes
from mlx_paged.offload.store import FIRST_KEY, BlockStore

# Bytes of blocks that are read from disk ahead of their use, for one restoration and for all.
_AHEAD_BYTES = 64 << 20
_MAX_AHEAD_BYTES = 256 << 20
# Seconds that an idle engine waits for the disk at once. An abort waits for as long.
_WAIT_SECONDS = 0.02


class _Read(NamedTuple):
    data: Bytes
    done: Future[bool] | None  # None: the block is gone


class _Ahead:
    """Reads under way for one restoration.

    Attributes:
        next: Index of the first of `Restoration.reads` that has not been looked at.
        reads: From disk, in order.
    """

    def __init__(self) -> None:
        self.next = 0
        self.reads: deque[_Read] = deque()
        self.num_bytes = 0


class Restorer:
    """Moves the bytes of restorations.

    Args:
        blocks: Writes the blocks of the device.
        store: The disk; None without one.
    """

    def __init__(self, blocks: BlockBytes, store: BlockStore | None) -> None:
        self._blocks = blocks
        self._store = store
        self._ahead: WeakKeyDictionary[Restoration, _Ahead] = WeakKeyDictionary()
        self._arrived = threading.Event()

    def advance(
        self, kv: KVManager, memory: HostMemory, most: int, seconds: float, *, waits: bool
    ) -> None:
        """Brings blocks back, of the oldest restorations first; at least one that is there.

        Args:
            most: About the maximum of bytes.
            seconds: Begins no block after that time.
            waits: Wait a little for the disk, because there is nothing else to do.
        """
        self._arrived.clear()
        left, until = most, time.perf_counter() + seconds
        for restoration in kv.restorations.values():
            left -= self._advance(restoration, memory, left, until)
            if left <= 0 or time.perf_counter() >= until:
                break
        self._blocks.begin_writes()
        some_wait = any(not r.is_done and not r.has_failed for r in kv.restorations.values())
        if waits and left == most and some_wait:
            self._arrived.wait(_WAIT_SECONDS)

    def _advance(
        self, restoration: Restoration, memory: HostMemory, most: int, until: float
    ) -> int:
        """Returns the bytes that have come back."""
        num_bytes = 0
        while num_bytes < most and not restoration.is_done and not restoration.has_failed:
            group, block, key = restoration.reads[restoration.num_done]
            if key < FIRST_KEY:
                if not memory.has(key):
                    break  # it was evicted a moment ago
                data = memory[key]
            else:
                ahead = self._read_ahead(restoration)
                if not ahead.reads:
                    break  # until others have used what was read for them
                read = ahead.reads[0]
                if read.done is not None and not read.done.done():
                    break
                ahead.reads.popleft()
                ahead.num_bytes -= read.data.size
                is_good = read.done is not None and read.done.result()
                assert self._store is not None
                self._store.note_read(key, is_good=is_good)
                if not is_good:
                    restoration.has_failed = True
                    break
                data = read.data
            self._blocks.write(group, block, data)
            restoration.num_done += 1
            num_bytes += max(1, data.size)
            if time.perf_counter() >= until:
                break
        return num_bytes

    def _read_ahead(self, restoration: Restoration) -> _Ahead:
        """Begins to read the next blocks from disk."""
        ahead, store = self._ahead.setdefault(restoration, _Ahead()), self._store
        assert store is not None
        ahead.next = max(ahead.next, restoration.num_done)
        room = _MAX_AHEAD_BYTES - sum(each.num_bytes for each in self._ahead.values())
        while ahead.next < len(restoration.reads):
            group, _, key = restoration.reads[ahead.next]
            size = self._blocks.num_bytes[group]
            is_enough = ahead.num_bytes + size > _AHEAD_BYTES or size > room
            if is_enough and (ahead.reads or room < _MAX_AHEAD_BYTES):
                break
            ahead.next += 1
            if key < FIRST_KEY:
                continue
            data = np.empty(size, dtype=np.uint8)
            ahead.reads.append(_Read(data, store.read(key, data.data, self._arrived)))
            ahead.num_bytes += size
            room -= size
        return ahead
