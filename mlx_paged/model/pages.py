"""Physical pages of arrays: on Linux's CPU backend, gives pages of unused rows back to the system,
and moves weights into huge pages.

The array keeps its address and its size. A row that is given back reads as zeros, and takes memory
again from its next write on.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence

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
    """Allows or forbids huge pages for an array; they would fill its holes again."""
    page, begin = mmap.PAGESIZE, _address(array)
    start, stop = -(-begin // page) * page, (begin + array.nbytes) // page * page
    if start < stop:
        _advise(start, stop - start, mmap.MADV_HUGEPAGE if allowed else mmap.MADV_NOHUGEPAGE)


def collapse_pages(arrays: Iterable[mx.array]) -> threading.Thread | None:
    """Moves arrays into huge pages, where the system has them (Linux 6.1 and later).

    A decode step reads all weights once. With 4 KB pages that takes up to a third longer, because
    the processor prefetches within a page and translates each page's address. The system copies at
    most 4 GB/s, so the move runs in the background of the first steps.

    Args:
        arrays: Evaluated arrays, which stay in memory until they have moved. Those that are not
            contiguous keep their pages.

    Returns:
        The thread that moves them; None if there is nothing to move.
    """
    kept = list(arrays)
    ranges = _whole_huge_pages(_extents(kept)) if sys.platform == "linux" else []
    if not ranges:
        return None

    def move(_: list[mx.array]) -> None:
        for first, end in ranges:
            for start in range(first, end, _HUGE_PAGE):
                _advise(start, _HUGE_PAGE, _MADV_COLLAPSE)

    thread = threading.Thread(target=move, args=(kept,), name="huge pages", daemon=True)
    thread.start()
    return thread


_MADV_COLLAPSE = 25  # Python does not name it yet
_HUGE_PAGE = 2 << 20  # bytes, on x86-64, and on Arm with pages of 4 KB
_NEIGHBORS = 64 << 10  # bytes between arrays that count as one


def _extents(arrays: Iterable[mx.array]) -> Iterator[tuple[int, int]]:
    """Yields the address and the end of each contiguous array."""
    for array in arrays:
        try:
            address = _address(array)
        except (BufferError, ValueError):
            continue
        yield address, address + array.nbytes


def _whole_huge_pages(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the ranges of huge pages that arrays fill, alone or with their neighbors."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(extents):
        if merged and begin - merged[-1][1] <= _NEIGHBORS:
            begin, last = merged.pop()
            end = max(end, last)
        merged.append((begin, end))
    whole = [(-(-begin // _HUGE_PAGE), end // _HUGE_PAGE) for begin, end in merged]
    return [(first * _HUGE_PAGE, last * _HUGE_PAGE) for first, last in whole if first < last]


def trim_heap() -> None:
    """Makes the C library return free heap memory to the system, where it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def host_bytes(array: mx.array) -> npt.NDArray[np.uint8]:
    """Returns ``[nbytes]`` uint8: the memory of an evaluated, contiguous array, to read and write.

    Requires a device that shares the host's memory. The caller keeps the array alive.
    """
    memory = (ctypes.c_uint8 * array.nbytes).from_address(_address(array))
    return np.frombuffer(memory, dtype=np.uint8)  # type: ignore[call-overload, no-any-return]


def _address(array: mx.array) -> int:
    data = np.frombuffer(array, dtype=np.uint8)  # type: ignore[call-overload]
    return int(data.__array_interface__["data"][0])


def _advise(start: int, length: int, advice: int) -> None:
    """Calls `madvise`. It may fail only by leaving pages as they are, so its status is ignored."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(advice))
