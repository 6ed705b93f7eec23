"""Rebinds the functions that a loaded library imports (Linux).

The dynamic linker binds them when it loads the library. `mlx_paged.blas` uses this to serve an MLX
that was imported earlier, and `mlx_paged.extension` to check MLX's allocations.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_JMPREL = 2, 5, 6, 7, 8, 23
_RTLD_DI_LINKMAP = 2
_PROT_READ, _PROT_WRITE = 1, 2


class _LinkMap(ctypes.Structure):
    """The first fields of ``struct link_map`` from <link.h>."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("dynamic", ctypes.c_uint64),
    )


def loaded_libmlx() -> str:
    """Returns the path of the loaded libmlx.

    Raises:
        OSError: libmlx is not loaded.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.endswith("/libmlx.so"):
            return path
    raise OSError("libmlx.so is not among the libraries of this process")


def address_of(library: ctypes.CDLL, name: str) -> int:
    """Returns the address of a library's function."""
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def rebind(library: str, functions: Mapping[str, int]) -> None:
    """Makes a loaded library call other functions than it was linked to.

    The dynamic linker writes the address of each imported function to a table in the library. This
    overwrites the entries.

    Args:
        library: Path of the library.
        functions: Addresses of the new functions, by imported name.

    Raises:
        OSError: The library does not import one of the names, or its table is not writable.
    """
    for name, slot in import_slots(library, tuple(functions)).items():
        write_address(slot, functions[name])


def import_slots(library: str, names: Sequence[str]) -> dict[str, int]:
    """Returns the addresses of a loaded library's table entries for imported functions, by name.

    Reads the symbols, strings and relocations of its dynamic section, as in the System V ABI.

    Raises:
        OSError: The library is not loaded, or does not import one of the names.
    """
    if struct.calcsize("P") != 8 or sys.byteorder != "little":
        raise OSError("this machine does not have 64-bit little-endian addresses")
    handle = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_NOW)._handle
    found = ctypes.POINTER(_LinkMap)()
    dlinfo = ctypes.CDLL(None).dlinfo
    if dlinfo(ctypes.c_void_p(handle), _RTLD_DI_LINKMAP, ctypes.byref(found)):
        raise OSError(f"dlinfo does not know {library}")
    base, at = found.contents.base, found.contents.dynamic
    dynamic: dict[int, int] = {}
    while (entry := struct.unpack("<qQ", ctypes.string_at(at, 16)))[0]:
        dynamic[entry[0]], at = entry[1], at + 16
    # glibc has already turned these offsets into addresses; other linkers have not.
    address = {tag: v if v >= base else v + base for tag, v in dynamic.items()}
    slots: dict[str, int] = {}
    for start, size in ((_DT_JMPREL, _DT_PLTRELSZ), (_DT_RELA, _DT_RELASZ)):
        if start not in dynamic or len(slots) == len(names):
            continue
        relocations = ctypes.string_at(address[start], dynamic[size])
        for offset, info, _ in struct.iter_unpack("<QQq", relocations):
            if info >> 32:
                symbol = ctypes.string_at(address[_DT_SYMTAB] + 24 * (info >> 32), 4)
                name = ctypes.string_at(address[_DT_STRTAB] + struct.unpack("<I", symbol)[0])
                if name.decode() in names:
                    slots[name.decode()] = base + offset
    missing = [name for name in names if name not in slots]
    if missing:
        raise OSError(f"{library} does not import {', '.join(missing)}")
    return slots


def write_address(at: int, address: int) -> None:
    """Writes an 8-byte address to this process's memory; the page may be read-only."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = os.sysconf("SC_PAGE_SIZE")
    page = ctypes.c_void_p(at - at % size)
    was_writable = is_writable(at)
    if not was_writable and libc.mprotect(page, ctypes.c_size_t(size), _PROT_READ | _PROT_WRITE):
        raise OSError(f"the linker's table cannot be written: {os.strerror(ctypes.get_errno())}")
    ctypes.c_uint64.from_address(at).value = address
    if not was_writable:
        libc.mprotect(page, ctypes.c_size_t(size), _PROT_READ)


def is_writable(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        limits, permissions, *_ = line.split()
        start, end = (int(limit, 16) for limit in limits.split("-"))
        if start <= address < end:
            return "w" in permissions
    raise OSError("the linker's table is not mapped")
