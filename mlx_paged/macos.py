"""macOS's system values, and its limit of the memory that the GPU may use."""

from __future__ import annotations

import ctypes
import os
import sys

WIRED_LIMIT = "iogpu.wired_limit_mb"
_GIB = 1 << 30
# Left to the system: at least so much, and this part of large memories.
_MIN_LEFT, _PART_LEFT = 4 * _GIB, 8
# With the limit's default of 0, the GPU of a Mac with at most this much memory may use two thirds
# of it, that of others three quarters.
_SMALL = 36 * _GIB


def sysctl_integer(name: str) -> int:
    """Returns an integer of the system's state.

    Raises:
        OSError: There is no such name.
        AttributeError: This system has no such function.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    value = ctypes.c_int64()  # A 32-bit value fills the lower half.
    size = ctypes.c_size_t(ctypes.sizeof(value))
    status = libc.sysctlbyname(
        name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    if status != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), name)
    return value.value


def gpu_bytes(memory_bytes: int, limit_mb: int) -> int:
    """Returns the bytes that the GPU may use.

    Args:
        limit_mb: Value of `WIRED_LIMIT`; 0 is the system's default.
    """
    if limit_mb > 0:
        return min(memory_bytes, limit_mb << 20)
    return memory_bytes * 2 // 3 if memory_bytes <= _SMALL else memory_bytes * 3 // 4


def max_gpu_bytes(memory_bytes: int) -> int:
    """Returns the largest sensible limit: the system keeps 4 GiB, or an eighth if that is more."""
    return max(0, memory_bytes - max(_MIN_LEFT, memory_bytes // _PART_LEFT))


def limit_advice(memory_bytes: int, limit_mb: int) -> str:
    """Returns one sentence on the GPU's limit, for what does not fit: its value, and whether and
    how to raise it."""
    now, limit = gpu_bytes(memory_bytes, limit_mb), max_gpu_bytes(memory_bytes)
    default = ", the default" if limit_mb == 0 else ""
    state = (
        f"this Mac's GPU may use {_gib(now)} of {_gib(memory_bytes)} "
        f"({WIRED_LIMIT} is {limit_mb}{default})"
    )
    if limit <= now:
        return f"{state}, and the system needs the rest"
    return (
        f"{state}; 'sudo sysctl {WIRED_LIMIT}={limit >> 20}' raises that to {_gib(limit)} until "
        f"the next restart and leaves {_gib(memory_bytes - limit)} to the system"
    )


def limit_advice_here() -> str:
    """Returns `limit_advice` for this machine; empty if it is no Mac or does not tell."""
    if sys.platform != "darwin":
        return ""
    try:
        return limit_advice(sysctl_integer("hw.memsize"), sysctl_integer(WIRED_LIMIT))
    except (OSError, AttributeError):
        return ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
