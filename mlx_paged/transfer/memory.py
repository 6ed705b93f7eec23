"""Memory that two engines on one machine share, for the blocks that one sends to the other.

The prefill engine owns it, and copies blocks from its device directly into slots. The decode engine
maps it for reading, and reads blocks where they are::

      prefill engine   free ][ copying ][ sent: the slot stays as it is ][ free
      decode engine                     [ read ]  [ given back ]

The memory has no name: the system frees it once both processes have unmapped it or are gone.
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
#: Bytes of the token by which two processes know that they see the same memory.
TOKEN_BYTES = 32
_PAGE = mmap.PAGESIZE
# How to give pages of shared memory back: Linux makes a hole; macOS takes the pages when it needs
# some, and has no holes.
_DISCARD: int | None = getattr(mmap, "MADV_REMOVE", getattr(mmap, "MADV_FREE", None))


def sight_of(token: bytes) -> bytes:
    """The digest of a token. With it one recognizes the memory without knowing the token."""
    return hashlib.sha256(_MAGIC + token).digest()


class Slot:
    """The place of one block. It is free again when nothing refers to it, or after `free`.

    Attributes:
        offset: In the memory, in bytes.
        data: Its bytes.
    """

    def __init__(self, memory: SharedMemory, offset: int, size: int) -> None:
        self._memory: SharedMemory | None = memory
        self.offset = offset
        self.data = memory.bytes_at(offset, size)

    def free(self) -> None:
        """Lets the next block have the place. No process may use the data any more."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.give(self.offset, self.data.nbytes)

    def __del__(self) -> None:
        self.free()


class SharedMemory:
    """The owner's end. Any thread may call it.

    The system provides pages when they are first written, and keeps them until `discard_free`. The
    lowest free place is used, so that few pages are ever written where few blocks wait.

    Args:
        size: Bytes for blocks.

    Attributes:
        fd: Descriptor for other processes.
        num_bytes: Bytes that `fd` has.
        token: See `TOKEN_BYTES`.

    Raises:
        OSError: There is no such memory.
    """

    def __init__(self, size: int) -> None:
        self.num_bytes = _PAGE + _pages(size)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._free: list[tuple[int, int]] = [(_PAGE, self.num_bytes)]  # (begin, end), ascending
        self._given: deque[tuple[int, int]] = deque()  # to be merged into these
        self._is_written = bytearray(self.num_bytes // _PAGE)  # by page: 1 once a slot had it
        self._lock = threading.Lock()
        self._is_closed = False
        self.fd = _nameless(self.num_bytes)
        try:
            self._map = mmap.mmap(self.fd, self.num_bytes)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise OSError(f"cannot map {self.num_bytes} bytes of shared memory: {error}") from error
        self._map[: len(_MAGIC) + TOKEN_BYTES] = _MAGIC + self.token
        # Not in `close`: another thread may be passing the descriptor on, and would pass a new file
        # that got the same number.
        weakref.finalize(self, os.close, self.fd)

    def take(self, size: int) -> Slot | None:
        """Returns a slot for a block; None if there is no room, or `size` is 0."""
        length = _pages(size)
        if not length or self._is_closed:
            return None
        with self._lock:
            self._merge_given()
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
        """Gives the pages of free places back to the system; returns their bytes."""
        if _DISCARD is None:
            return 0
        num_bytes = 0
        with self._lock:
            self._merge_given()
            for begin, end in self._free:
                first, stop = begin // _PAGE, end // _PAGE
                num_written = self._is_written.count(1, first, stop)
                if num_written:
                    try:
                        self._map.madvise(_DISCARD, begin, end - begin)
                    except OSError:
                        return num_bytes  # the system cannot, so the pages stay
                    self._is_written[first:stop] = bytes(stop - first)
                    num_bytes += num_written * _PAGE
        return num_bytes

    def give(self, offset: int, size: int) -> None:
        """Takes the place of a slot back. The collection of garbage may call it at any moment."""
        self._given.append((offset, offset + _pages(size)))

    def _merge_given(self) -> None:
        while self._given:
            begin, end = self._given.popleft()
            index = bisect(self._free, (begin, end))
            if index < len(self._free) and self._free[index][0] == end:
                end = self._free.pop(index)[1]
            if index and self._free[index - 1][1] == begin:
                index -= 1
                begin = self._free.pop(index)[0]
            self._free.insert(index, (begin, end))

    def bytes_at(self, offset: int, size: int) -> memoryview:
        """The bytes of a place."""
        return memoryview(self._map)[offset : offset + size]

    @property
    def num_free_bytes(self) -> int:
        """Bytes that slots may have."""
        with self._lock:
            self._merge_given()
            return sum(end - begin for begin, end in self._free)

    def close(self) -> None:
        """Hands out no more slots. The memory stays while something refers to it."""
        with self._lock:
            self._is_closed = True


class MemoryView:
    """The reader's end.

    Args:
        fd: The owner's descriptor; it need not stay open.
        num_bytes: Bytes that it has.

    Attributes:
        token: What the memory has as its token.

    Raises:
        OSError: It cannot be mapped.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        try:
            self._map = mmap.mmap(fd, num_bytes, access=mmap.ACCESS_READ)
        except (ValueError, OverflowError) as error:  # it is smaller than that
            raise OSError(f"cannot map {num_bytes} bytes of shared memory: {error}") from error
        self.num_bytes = num_bytes
        self.token = self._map[len(_MAGIC) : len(_MAGIC) + TOKEN_BYTES]

    def bytes_at(self, offset: int, size: int) -> memoryview:
        """``[size]`` bytes that must not be written.

        Raises:
            ValueError: They are not in the memory.
        """
        if not 0 <= offset <= self.num_bytes - size:
            raise ValueError(f"{size} bytes at {offset} are not in {self.num_bytes}")
        return memoryview(self._map)[offset : offset + size]


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _nameless(num_bytes: int) -> int:
    """Returns a descriptor of shared memory that no other process can find."""
    return _memory_file(num_bytes) if hasattr(os, "memfd_create") else _posix_memory(num_bytes)


def _memory_file(num_bytes: int) -> int:
    """The same on Linux. It ignores the limit of /dev/shm, which containers set to 64 MiB."""
    fd = os.memfd_create("mlx-paged-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        # A reader would be killed where the memory became smaller.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def _posix_memory(num_bytes: int) -> int:
    """The same on macOS. The name is gone before anything else happens."""
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
