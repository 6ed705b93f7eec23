"""Launches and reports as Python sees them; runtime/metal_sim.h in ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char, c_char_p, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ABI = 2
ACCESS = {"read": 1, "write": 2, "readwrite": 3}
OK, FAULTS, NOT_LAUNCHED = 0, 1, 2
MAX_BUFFERS = 32


class CBuffer(Structure):
    _fields_ = (
        ("index", c_uint32),
        ("access", c_uint32),
        ("data", c_void_p),
        ("bytes", c_uint64),
        ("label", c_char_p),
        ("offset", c_uint64),
    )


class CBytes(Structure):
    _fields_ = (("index", c_uint32), ("bytes", c_uint32), ("data", c_void_p))


class CThreadgroup(Structure):
    _fields_ = (("index", c_uint32), ("bytes", c_uint64))


class CLaunch(Structure):
    _fields_ = (
        ("abi", c_uint32),
        ("kernel", c_char_p),
        ("buffers", POINTER(CBuffer)),
        ("num_buffers", c_uint32),
        ("bytes", POINTER(CBytes)),
        ("num_bytes", c_uint32),
        ("constants", POINTER(CBytes)),
        ("num_constants", c_uint32),
        ("threadgroup", POINTER(CThreadgroup)),
        ("num_threadgroup", c_uint32),
        ("grid", c_uint32 * 3),
        ("threads", c_uint32 * 3),
        ("seed", c_uint64),
    )


class CTraffic(Structure):
    _fields_ = (
        ("index", c_uint32),
        ("bytes_read", c_uint64),
        ("bytes_written", c_uint64),
        ("unique_bytes_read", c_uint64),
        ("unique_bytes_written", c_uint64),
    )


_COUNTS = (
    "threadgroups",
    "threads",
    "barriers",
    "simdgroup_barriers",
    "simd_ops",
    "matrix_ops",
    "threadgroup_bytes",
)


class CReport(Structure):
    _fields_ = (
        *((name, c_uint64) for name in _COUNTS),
        ("num_traffic", c_uint32),
        ("traffic", CTraffic * MAX_BUFFERS),
        ("num_faults", c_uint32),
        ("faults", c_char * 32768),
    )


class SimFault(Exception):
    """An error of a kernel, with its lines."""


class SimLaunchError(Exception):
    """A launch that no GPU would take: unknown kernel, wrong binding, too many threads."""


@dataclass
class Buffer:
    """An array bound with setBuffer. `offset` in bytes, as Metal's."""

    array: np.ndarray  # any shape and dtype, C-contiguous
    access: str = "read"  # read, write or readwrite
    label: str = ""
    offset: int = 0


@dataclass(frozen=True)
class Traffic:
    """Bytes of one buffer: as all threads asked for them, and each byte once."""

    label: str
    bytes_read: int
    bytes_written: int
    unique_bytes_read: int
    unique_bytes_written: int


@dataclass(frozen=True)
class Report:
    """Counts of a launch. Barriers are counted once per threadgroup, SIMD-group operations and
    simdgroup barriers once per SIMD-group."""

    threadgroups: int
    threads: int
    barriers: int
    simdgroup_barriers: int
    simd_ops: int
    matrix_ops: int
    threadgroup_bytes: int
    buffers: dict[int, Traffic] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


def buffers_of(buffers: dict[int, Buffer | np.ndarray]) -> Any:
    """The C array, whose entries point into the arrays given."""
    out = (CBuffer * max(1, len(buffers)))()
    for slot, (index, given) in zip(out, buffers.items()):
        buffer = given if isinstance(given, Buffer) else Buffer(given)
        array = buffer.array
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
            raise SimLaunchError(f"buffer {index} must be a C-contiguous numpy array")
        if buffer.access not in ACCESS:
            raise SimLaunchError(
                f"the access of buffer {index} must be one of {', '.join(ACCESS)} "
                f"but is {buffer.access!r}"
            )
        if buffer.access != "read" and not array.flags.writeable:
            raise SimLaunchError(f"buffer {index} is written but its array is read-only")
        slot.index, slot.access = index, ACCESS[buffer.access]
        slot.data = array.ctypes.data + buffer.offset
        slot.bytes = array.nbytes - buffer.offset
        slot.label = buffer.label.encode()
        slot.offset = slot.data % 16  # numpy's arrays begin at a multiple of that
    return out


def raw(value: Any) -> bytes:
    """Returns an inline constant as bytes: bytes, ctypes, numpy, 32-bit int or float."""
    if isinstance(value, bool):
        return bytes([value])
    if isinstance(value, int):
        return int(value).to_bytes(4, "little", signed=value < 0)
    if isinstance(value, float):
        return np.float32(value).tobytes()
    if isinstance(value, np.ndarray | np.generic):
        return value.tobytes()
    return bytes(value)


def bytes_of(values: dict[int, bytes]) -> tuple[Any, list[Any]]:
    """The C array and the memory that it points to, which must outlive the launch."""
    out, keep = (CBytes * max(1, len(values)))(), []
    for slot, (index, value) in zip(out, values.items()):
        memory = ctypes.create_string_buffer(value, max(1, len(value)))
        keep.append(memory)
        slot.index, slot.bytes, slot.data = index, len(value), ctypes.addressof(memory)
    return out, keep


def report_of(c: CReport, labels: dict[int, str]) -> Report:
    traffic = {
        t.index: Traffic(
            labels.get(t.index, ""),
            t.bytes_read,
            t.bytes_written,
            t.unique_bytes_read,
            t.unique_bytes_written,
        )
        for t in c.traffic[: c.num_traffic]
    }
    text = c.faults.decode(errors="replace")
    faults = tuple(text.split("\n\n")) if text else ()
    return Report(*(getattr(c, name) for name in _COUNTS), buffers=traffic, faults=faults)
