"""Main memory that arrays occupy, as the operating system counts it."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

import mlx.core as mx
import numpy as np


def can_count() -> bool:
    """Whether `resident_bytes` can be asked: arrays lie in main memory, and Linux tells."""
    return sys.platform == "linux" and mx.default_device() == mx.Device(mx.cpu)


def resident_bytes(arrays: Iterable[mx.array]) -> int:
    """Bytes of the pages that are there: those that were never written are not.

    Raises:
        OSError: the system refused to tell.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    page, total = mmap.PAGESIZE, 0
    for array in arrays:
        data = np.asarray(memoryview(array))  # type: ignore[arg-type]
        begin = data.ctypes.data // page * page
        num_pages = -(-(data.ctypes.data + data.nbytes - begin) // page)
        states = (ctypes.c_ubyte * num_pages)()
        if libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(num_pages * page), states):
            raise OSError(ctypes.get_errno(), "mincore")
        total += sum(state & 1 for state in states) * page
    return total
