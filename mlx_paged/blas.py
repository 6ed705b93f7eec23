"""OpenBLAS for MLX's CPU backend on Linux.

MLX's Linux wheel links the reference BLAS (about 1.5 GFLOP/s in float32). PyPI's
``scipy-openblas32`` carries OpenBLAS under prefixed names; a small library of ours forwards the
three names that ``libmlx`` imports. The dynamic linker binds them when ``mlx.core`` is first
imported. Where that has been imported before us, what the linker wrote is written anew (`_rebind`).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

_REMEDY = "pip install 'mlx-paged[cpu]'"
# From this build of scipy-openblas32 on, products are wrong on Arm with SME, and some builds later
# with SVE too: found with scripts/test_aarch64.sh. pyproject.toml asks for an earlier one there.
_WRONG_ON_ARM = (0, 3, 34, 1)
# What libmlx imports.
_NAMES = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
_status: str | None = None
# Handles stay open: closing one would unmap code that libmlx is bound to.
_libraries: list[ctypes.CDLL] = []


def status() -> str:
    """Which BLAS serves MLX's CPU matrix products, in words."""
    return _status or "not decided yet: mlx_paged.blas.preload() has not run"


def preload() -> str:
    """Loads OpenBLAS in place of MLX's own BLAS where that helps; returns `status()`.

    Runs once; later calls only report. ``MLX_PAGED_BLAS=off`` leaves MLX unchanged.

    Raises:
        ValueError: if ``MLX_PAGED_BLAS`` is neither ``auto`` nor ``off``.
    """
    global _status
    if _status is None:
        _status = _preload()
    return _status


def limit_threads(most: int) -> None:
    """Limits the threads of products, unless ``MLX_PAGED_NUM_THREADS`` is set. Call it before the
    first product. A BLAS that is not loaded here is not affected."""
    if _libraries:
        _libraries[-1].mlx_paged_limit_threads(most)


def _preload() -> str:
    choice = os.environ.get("MLX_PAGED_BLAS", "auto")
    if choice not in ("auto", "off"):
        raise ValueError(f"MLX_PAGED_BLAS must be 'auto' or 'off' but got {choice!r}")
    if sys.platform != "linux":
        return "Accelerate (macOS)"
    if choice == "off":
        return "MLX's own (MLX_PAGED_BLAS=off)"
    if _mlx_has_cuda():
        return "MLX's own (this MLX runs on a GPU)"
    if hasattr(ctypes.CDLL(None), "cblas_sgemm"):
        return "preloaded by the environment"
    try:
        import scipy_openblas32
    except ImportError:
        return f"MLX's own (scipy-openblas32 is not installed: {_REMEDY})"
    forwarder = _forwarder()
    if forwarder is None:
        return "MLX's own (mlx_paged's extension is not built)"
    version = metadata.version("scipy-openblas32")
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    if platform.machine() == "aarch64" and numbers >= _WRONG_ON_ARM:
        return f"MLX's own (scipy-openblas32 {version} computes wrong products on Arm: {_REMEDY})"
    openblas = Path(scipy_openblas32.get_lib_dir()) / scipy_openblas32.get_library(fullname=True)
    for library in (openblas, forwarder):
        _libraries.append(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))
    if "mlx.core" in sys.modules:
        try:
            _rebind(_loaded_libmlx(), _libraries[-1], _NAMES)
        except OSError as error:
            warnings.warn(
                f"matrix products stay on MLX's reference BLAS, which is tens of times slower than "
                f"OpenBLAS: mlx was imported before mlx_paged, and {error}. Put `import mlx_paged` "
                f"above the first import of mlx or mlx_lm.",
                RuntimeWarning,
                stacklevel=2,
            )
            return "MLX's own (mlx.core was imported before mlx_paged)"
    return f"OpenBLAS (scipy-openblas32 {version})"


def _mlx_has_cuda() -> bool:
    """Whether the installed MLX is one of the CUDA builds; does not import it."""
    for name in ("mlx-cuda-12", "mlx-cuda-13"):
        try:
            metadata.distribution(name)
            return True
        except metadata.PackageNotFoundError:
            continue
    return False


def _forwarder() -> Path | None:
    """The forwarding library, beside the extension (elsewhere than this file when editable)."""
    from importlib.util import find_spec

    spec = find_spec("mlx_paged._ext")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).with_name("libmlx_paged_blas.so")


# --- mlx.core was imported first ------------------------------------------------------------------

_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_JMPREL = 2, 5, 6, 7, 8, 23
_RTLD_DI_LINKMAP = 2
_PROT_READ, _PROT_WRITE = 1, 2


class _LinkMap(ctypes.Structure):
    """The beginning of ``struct link_map`` of <link.h>."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("dynamic", ctypes.c_uint64),
    )


def _loaded_libmlx() -> str:
    """The file that libmlx was loaded from.

    Raises:
        OSError: there is none.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.endswith("/libmlx.so"):
            return path
    raise OSError("libmlx.so is not among the libraries of this process")


def _rebind(library: str, target: ctypes.CDLL, names: Sequence[str]) -> None:
    """Has a library that is loaded call functions of `target`, in the place of those that it was
    linked to.

    The dynamic linker writes the address of each imported function into a table of the library.
    This writes there once more.

    Args:
        library: its file.
        names: what it imports.

    Raises:
        OSError: it does not import one of these, or its table cannot be written.
    """
    for name, slot in _import_slots(library, names).items():
        _write_address(slot, ctypes.cast(getattr(target, name), ctypes.c_void_p).value or 0)


def _import_slots(library: str, names: Sequence[str]) -> dict[str, int]:
    """Where a library that is loaded keeps the addresses of functions that it imports.

    From its dynamic section: symbols, strings and relocations, as the System V ABI (ELF) has them.
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
    # glibc has made addresses of these offsets; other linkers have not.
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


def _write_address(at: int, address: int) -> None:
    """Writes 8 bytes of this process's memory, on a page that may be read-only."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = os.sysconf("SC_PAGE_SIZE")
    page = ctypes.c_void_p(at - at % size)
    is_writable = _is_writable(at)
    if not is_writable and libc.mprotect(page, ctypes.c_size_t(size), _PROT_READ | _PROT_WRITE):
        raise OSError(f"the linker's table cannot be written: {os.strerror(ctypes.get_errno())}")
    ctypes.c_uint64.from_address(at).value = address
    if not is_writable:
        libc.mprotect(page, ctypes.c_size_t(size), _PROT_READ)


def _is_writable(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        limits, permissions, *_ = line.split()
        start, end = (int(limit, 16) for limit in limits.split("-"))
        if start <= address < end:
            return "w" in permissions
    raise OSError("the linker's table is not mapped")
