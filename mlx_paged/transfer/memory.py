"""Shared memory through which one engine sends blocks to another on the same machine.

The prefill engine owns the memory and copies blocks from its device directly into slots. The decode
engine maps it read-only and reads blocks in place::

      prefill engine   free ][ copying ][ sent: must not change ][ free
      decode engine                     [ reading ]  [ released ]

The memory has no name: the system frees it once both processes have unmapped it or exited.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
import threading
import weakref
from bisect import bisect
from collections import deque

_MAGIC = b"mlxpkm1\n"
#: Bytes of the token with which two processes verify that they see the same memory.
TOKEN_BYTES = 32
_PAGE = mmap.PAGESIZE
# How pages of shared memory are returned to the system: Linux punches a hole; macOS, which has no
# holes, reclaims the pages when memory is short.
_DISCARD: int | None = getattr(mmap, "MADV_REMOVE", getattr(mmap, "MADV_FREE", None))


def token_digest(token: bytes) -> bytes:
    """Returns the digest of a token, which identifies memory without revealing its token."""
    return hashlib.sha256(_MAGIC + token).digest()


class Slot:
    """A region of shared memory for one block. Freed by `free` or with its last reference.

    Attributes:
        offset: Offset in the memory, in bytes.
        data: ``[size]`` bytes.
    """

    def __init__(self, memory: SharedMemory, offset: int, size: int) -> None:
        self._memory: SharedMemory | None = memory
        self.offset = offset
        self.data = memory.bytes_at(offset, size)

    def free(self) -> None:
        """Makes the region available for other blocks. No process may use the data any more."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.release(self.offset, self.data.nbytes)

    def __del__(self) -> None:
        self.free()


class SharedMemory:
    """The owner's end: allocates slots, first fit. Thread-safe.

    Pages are allocated when they are first written and stay until `discard_free`. First fit keeps
    the number of written pages small while few blocks are in flight.

    Args:
        size: Bytes for blocks.

    Attributes:
        fd: Descriptor to pass to other processes.
        num_bytes: Size of the memory, including a page for the token.
        token: See `TOKEN_BYTES`.

    Raises:
        OSError: The system cannot provide or map the memory.
    """

    def __init__(self, size: int) -> None:
        self.num_bytes = _PAGE + _pages(size)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._free: list[tuple[int, int]] = [(_PAGE, self.num_bytes)]  # (begin, end), ascending
        self._released: deque[tuple[int, int]] = deque()  # not merged into `_free` yet
        self._is_written = bytearray(self.num_bytes // _PAGE)  # per page: 1 once a slot used it
        self._lock = threading.Lock()
        self._is_closed = False
        self.fd = _anonymous_memory(self.num_bytes)
        try:
            self._map = mmap.mmap(self.fd, self.num_bytes)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise OSError(f"cannot map {self.num_bytes} bytes of shared memory: {error}") from error
        self._map[: len(_MAGIC) + TOKEN_BYTES] = _MAGIC + self.token
        # Not in `close`: another thread may be about to pass the descriptor on, and a new file may
        # have its number by then.
        weakref.finalize(self, os.close, self.fd)

    def take(self, size: int) -> Slot | None:
        """Allocates a slot of `size` bytes; returns None if there is no room or `size` is 0."""
        length = _pages(size)
        if not length or self._is_closed:
            return None
        with self._lock:
            self._merge_released()
            for index, (begin, end) in enumerate(self._free):
                if end - begin > length:
                    self._free[index] = (begin + length, end)
                elif end - begin == length:
                    del self._free[index]
                else:
                    continue
                pages = slice(begin // _PAGE, (begin + length) // _PAGE)
                self._is_written[pages] = b"\1" * (length // _PAGE)
                return Slot(self, begin, size)
        return None

    def discard_free(self) -> int:
        """Returns the pages of free regions to the system; returns their bytes."""
        if _DISCARD is None:
            return 0
        num_bytes = 0
        with self._lock:
            self._merge_released()
            for begin, end in self._free:
                first, stop = begin // _PAGE, end // _PAGE
                num_written = self._is_written.count(1, first, stop)
                if num_written:
                    try:
                        self._map.madvise(_DISCARD, begin, end - begin)
                    except OSError:
                        return num_bytes  # unsupported here: the pages stay
                    self._is_written[first:stop] = bytes(stop - first)
                    num_bytes += num_written * _PAGE
        return num_bytes

    def release(self, offset: int, size: int) -> None:
        """Frees the region of a slot. Takes no lock: the garbage collector may call it anywhere."""
        self._released.append((offset, offset + _pages(size)))

    def _merge_released(self) -> None:
        while self._released:
            begin, end = self._released.popleft()
            index = bisect(self._free, (begin, end))
            if index < len(self._free) and self._free[index][0] == end:
                end = self._free.pop(index)[1]
            if index and self._free[index - 1][1] == begin:
                index -= 1
                begin = self._free.pop(index)[0]
            self._free.insert(index, (begin, end))

    def bytes_at(self, offset: int, size: int) -> memoryview:
        """Returns ``[size]`` writable bytes at an offset."""
        return memoryview(self._map)[offset : offset + size]

    @property
    def num_free_bytes(self) -> int:
        """Bytes available for slots; may be fragmented."""
        with self._lock:
            self._merge_released()
            return sum(end - begin for begin, end in self._free)

    def close(self) -> None:
        """Allocates no more slots. The memory itself lives as long as anything refers to it."""
        with self._lock:
            self._is_closed = True


class MemoryView:
    """The reader's end: a read-only mapping.

    Args:
        fd: The owner's descriptor; may be closed afterwards.
        num_bytes: Size of the memory.

    Attributes:
        token: The token stored in the memory.

    Raises:
        OSError: The memory cannot be mapped.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        try:
            self._map = mmap.mmap(fd, num_bytes, access=mmap.ACCESS_READ)
        except (ValueError, OverflowError) as error:  # the memory is smaller than `num_bytes`
            raise OSError(f"cannot map {num_bytes} bytes of shared memory: {error}") from error
        self.num_bytes = num_bytes
        self.token = self._map[len(_MAGIC) : len(_MAGIC) + TOKEN_BYTES]

    def bytes_at(self, offset: int, size: int) -> memoryview:
        """Returns ``[size]`` read-only bytes at an offset.

        Raises:
            ValueError: The range is outside the memory.
        """
        if not 0 <= offset <= self.num_bytes - size:
            raise ValueError(
                f"{size} bytes at {offset} exceed the memory of {self.num_bytes} bytes"
            )
        return memoryview(self._map)[offset : offset + size]


def _pages(size: int) -> int:
    """Rounds bytes up to whole pages."""
    return -(-size // _PAGE) * _PAGE


def _anonymous_memory(num_bytes: int) -> int:
    """Returns a descriptor of shared memory that no other process can open by name."""
    return _memfd(num_bytes) if hasattr(os, "memfd_create") else _posix_memory(num_bytes)


def _memfd(num_bytes: int) -> int:
    """Linux: not subject to the size limit of /dev/shm, which is 64 MiB in containers."""
    fd = os.memfd_create("mlx-paged-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        # Sealed, because a reader would be killed by SIGBUS if the memory shrank.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def _posix_memory(num_bytes: int) -> int:
    """macOS: unlinks the required name immediately."""
    # The standard library's `multiprocessing.shared_memory` is built on this module, too.
    from _posixshmem import shm_open, shm_unlink  # type: ignore[import-not-found]

    name = f"/mlxp{secrets.token_hex(8)}"
    fd: int = shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
    try:
        shm_unlink(name)
        os.ftruncate(fd, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd
