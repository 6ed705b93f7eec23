"""The memory of arrays that host and device share. On Linux's CPU backend, gives the physical pages
of unused rows back to the system.

The array keeps its address and its size. A row that is given back reads as zeros, and takes memory
again from its next write on.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged.platform import Platform


def can_discard(platform: Platform) -> bool:
    """True if the device's arrays are ordinary memory, so `discard_rows` can return parts of it.

    Metal's buffers are not: macOS keeps a whole buffer while any of it is in use.
    """
    return platform.on_cpu and sys.platform == "linux"


def runs_of(rows: Sequence[int], fresh: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the runs ``[first, end)`` of consecutive numbers in `rows` that contain any of
    `fresh`."""
    numbers = np.unique(np.array(rows, dtype=np.int64))
    if not len(numbers) or not len(fresh):
        return []
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    firsts = numbers[np.concatenate(([0], breaks))]
    ends = numbers[np.concatenate((breaks - 1, [len(numbers) - 1]))] + 1
    wanted = np.unique(np.searchsorted(firsts, np.array(fresh, dtype=np.int64), side="right") - 1)
    return list(zip(firsts[wanted].tolist(), ends[wanted].tolist()))


def discard_rows(array: mx.array, num_rows: int, runs: Sequence[tuple[int, int]]) -> None:
    """Gives back the pages that lie wholly within runs of rows, whose contents are lost.

    Args:
        array: An evaluated, contiguous array.
        num_rows: Number of equal rows that it consists of.
        runs: (first, end) of the rows; nothing may be reading or writing them.
    """
    begin, row_bytes = _address(array), array.nbytes // num_rows
    page = mmap.PAGESIZE
    for first, end in runs:
        assert 0 <= first < end <= num_rows
        start = -(-(begin + first * row_bytes) // page) * page
        stop = (begin + end * row_bytes) // page * page
        if start < stop:
            _advise(start, stop - start, mmap.MADV_DONTNEED)


def allow_huge_pages(array: mx.array, allowed: bool) -> None:
    """Lets the system back an array with huge pages, or not: it would fill the holes again."""
    page, begin = mmap.PAGESIZE, _address(array)
    start, stop = -(-begin // page) * page, (begin + array.nbytes) // page * page
    if start < stop:
        _advise(start, stop - start, mmap.MADV_HUGEPAGE if allowed else mmap.MADV_NOHUGEPAGE)


def trim_heap() -> None:
    """Has the C library give back free memory of its heap, where it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def host_bytes(array: mx.array) -> npt.NDArray[np.uint8]:
    """Returns ``[nbytes]`` uint8: the memory of an evaluated, contiguous array, to read and write.

    Where the device shares the host's memory. The caller keeps the array alive.
    """
    memory = (ctypes.c_uint8 * array.nbytes).from_address(_address(array))
    return np.frombuffer(memory, dtype=np.uint8)  # type: ignore[call-overload, no-any-return]


def _address(array: mx.array) -> int:
    data = np.frombuffer(array, dtype=np.uint8)  # type: ignore[call-overload]
    return int(data.__array_interface__["data"][0])


def _advise(start: int, length: int, advice: int) -> None:
    """Calls `madvise`. It may fail only by not giving memory back, so its status is ignored."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(advice))
