"""Restorer: brings blocks back to the device between steps. It takes them from host memory
immediately, reads ahead from disk, and waits for a prefill engine."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from time import perf_counter
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from mlx_paged.core import KVManager, Level, Restoration, RestoreRates
from mlx_paged.engine.offload.buffers import Buffers
from mlx_paged.engine.offload.host_memory import HostMemory
from mlx_paged.engine.offload.levels import level_of
from mlx_paged.engine.roles.decode import RemoteLevel
from mlx_paged.model.block_bytes import BlockBytes, Bytes
from mlx_paged.offload.store import BlockStore

# Bytes of blocks that are read from disk ahead of their use, for one restoration and for all.
_AHEAD_BYTES = 64 << 20
_MAX_AHEAD_BYTES = 256 << 20
# The same for all while other sequences run, whose steps need the cores that check the blocks.
_BUSY_AHEAD_BYTES = 16 << 20
# Maximum seconds of one wait for the disk in an idle engine. An abort waits as long.
_WAIT_SECONDS = 0.02


class _Read(NamedTuple):
    data: Bytes
    done: Future[bool] | None  # None: the block is gone


class _Ahead:
    """Reads in flight for one restoration.

    Attributes:
        next: Index of the first of `Restoration.reads` that has not been handled.
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
        buffers: For the blocks that are read from disk.
        rates: Learns the speed of restoring.

    Attributes:
        arrived: Set when a block has arrived, from disk or from a prefill engine.
    """

    def __init__(
        self, blocks: BlockBytes, store: BlockStore | None, buffers: Buffers, rates: RestoreRates
    ) -> None:
        self._blocks = blocks
        self._store = store
        self._buffers = buffers
        self._rates = rates
        self._ahead: WeakKeyDictionary[Restoration, _Ahead] = WeakKeyDictionary()
        self.arrived = threading.Event()
        # Callbacks that release buffers. Once the writes have begun, nothing reads the buffers.
        self._used: list[Callable[[], None]] = []

    def advance(
        self,
        kv: KVManager,
        memory: HostMemory,
        remote: RemoteLevel | None,
        max_bytes: int,
        seconds: float,
        *,
        is_idle: bool,
    ) -> None:
        """Restores blocks, of the oldest restorations first; at least one that is available.

        Args:
            max_bytes: Approximate maximum bytes.
            seconds: Starts no block after this time.
            is_idle: True if nothing else runs. It then waits a little for the disk, and measures
                the speed of each level.
        """
        self.arrived.clear()
        began = perf_counter()
        until, moved = began + seconds, Counter[Level]()
        max_ahead = _MAX_AHEAD_BYTES if is_idle else _BUSY_AHEAD_BYTES
        for restoration in kv.restorations.values():
            self._advance(restoration, memory, remote, max_bytes, until, max_ahead, moved)
            if moved.total() >= max_bytes or perf_counter() >= until:
                break
        self._blocks.begin_writes()
        self.release_used()
        some_wait = any(not r.is_done and not r.has_failed for r in kv.restorations.values())
        if is_idle and not moved and some_wait:
            self.arrived.wait(_WAIT_SECONDS)
        if is_idle:
            self._learn(kv, moved, perf_counter() - began)

    def release_used(self) -> None:
        """Releases the buffers of blocks that were written, or whose writes were abandoned."""
        while self._used:
            self._used.pop()()

    def _learn(self, kv: KVManager, moved: Counter[Level], seconds: float) -> None:
        """Charges a time to the levels whose blocks were restored or awaited. Waiting for a prefill
        engine does not count, because it computes in the meantime."""
        num_bytes = moved.total()
        if num_bytes:
            for level, part in moved.items():
                if level is not Level.REMOTE:
                    self._rates.note_restored(level, part, seconds * part / num_bytes)
            return
        for restoration in kv.restorations.values():
            if not restoration.is_done and not restoration.has_failed:
                level = level_of(restoration.reads[restoration.num_done].key)
                if level is not Level.REMOTE:
                    self._rates.note_restored(level, 0, seconds)
                return

    def _advance(
        self,
        restoration: Restoration,
        memory: HostMemory,
        remote: RemoteLevel | None,
        max_bytes: int,
        until: float,
        max_ahead: int,
        moved: Counter[Level],
    ) -> None:
        """Adds the restored bytes to `moved`."""
        while moved.total() < max_bytes and not restoration.is_done and not restoration.has_failed:
            group, block, key = restoration.reads[restoration.num_done]
            level = level_of(key)
            if level is Level.MEMORY:
                if not memory.has(key):
                    break  # it was evicted a moment ago
                data = memory[key]
            elif level is Level.REMOTE:
                assert remote is not None
                arrived_block = remote.take(key)
                if arrived_block is None:
                    restoration.has_failed = remote.has_failed(key)
                    break
                self._used.append(arrived_block.release)
                data = np.frombuffer(arrived_block.data, dtype=np.uint8)
            else:
                ahead = self._read_ahead(restoration, max_ahead)
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
                self._used.append(partial(self._buffers.give, read.data))
                if not is_good:
                    restoration.has_failed = True
                    break
                data = read.data
            self._blocks.write(group, block, data)
            restoration.num_done += 1
            moved[level] += max(1, data.size)
            if perf_counter() >= until:
                break

    def _read_ahead(self, restoration: Restoration, max_ahead: int) -> _Ahead:
        """Begins to read the next blocks from disk.

        Args:
            max_ahead: Maximum bytes of blocks that were read but not used; at least one is read.
        """
        ahead, store = self._ahead.setdefault(restoration, _Ahead()), self._store
        assert store is not None
        ahead.next = max(ahead.next, restoration.num_done)
        num_ahead = sum(each.num_bytes for each in self._ahead.values())
        while ahead.next < len(restoration.reads):
            group, _, key = restoration.reads[ahead.next]
            size = self._blocks.num_bytes[group]
            is_enough = ahead.num_bytes + size > _AHEAD_BYTES or num_ahead + size > max_ahead
            if is_enough and num_ahead:
                break
            ahead.next += 1
            if level_of(key) is not Level.DISK:
                continue
            data = self._buffers.take(size)
            ahead.reads.append(_Read(data, store.read(key, data.data, self.arrived)))
            ahead.num_bytes += size
            num_ahead += size
        return ahead
