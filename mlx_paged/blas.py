"""OpenBLAS for MLX's CPU backend on Linux.

MLX's Linux wheel links the reference BLAS, which reaches about 1.5 GFLOP/s in float32. PyPI's
``scipy-openblas32`` has OpenBLAS under prefixed names; our forwarding library exports the three
names that ``libmlx`` imports. The dynamic linker binds them at the first import of ``mlx.core``. If
``mlx.core`` was imported before mlx_paged, `linker` rebinds them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import warnings
from importlib import metadata
from pathlib import Path

from mlx_paged import linker

_REMEDY = "pip install 'mlx-paged[cpu]'"
# From this scipy-openblas32 build on, products are wrong on Arm with SME; some later builds are
# also wrong with SVE. Found with scripts/test_aarch64.sh. pyproject.toml pins an earlier one there.
_WRONG_ON_ARM = (0, 3, 34, 1)
# BLAS symbols that libmlx imports.
_NAMES = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
_status: str | None = None
# Handles stay open, because libmlx is bound to their code.
_libraries: list[ctypes.CDLL] = []


def status() -> str:
    """Names the BLAS used for MLX's CPU matrix products."""
    return _status or "not decided yet: mlx_paged.blas.preload() has not run"


def preload() -> str:
    """Loads OpenBLAS in place of MLX's own BLAS if that helps; returns `status()`.

    Runs once; later calls only report. ``MLX_PAGED_BLAS=off`` leaves MLX unchanged.

    Raises:
        ValueError: ``MLX_PAGED_BLAS`` is neither ``auto`` nor ``off``.
    """
    global _status
    if _status is None:
        _status = _preload()
    return _status


def limit_threads(num_threads: int) -> None:
    """Limits the threads of our OpenBLAS, unless ``MLX_PAGED_NUM_THREADS`` is set.

    Call it before the first product. Has no effect on any other BLAS.
    """
    if _libraries:
        _libraries[-1].mlx_paged_limit_threads(num_threads)


def _preload() -> str:
    choice = os.environ.get("MLX_PAGED_BLAS", "auto")
    if choice not in ("auto", "off"):
        raise ValueError(f"MLX_PAGED_BLAS must be 'auto' or 'off' but got {choice!r}")
    if sys.platform != "linux":
        return "Accelerate (macOS)"
    if choice == "off":
        return "MLX's own (MLX_PAGED_BLAS=off)"
    if _mlx_is_for_cuda():
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
            addresses = {name: linker.address_of(_libraries[-1], name) for name in _NAMES}
            linker.rebind(linker.loaded_libmlx(), addresses)
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


def _mlx_is_for_cuda() -> bool:
    """True if the installed MLX is a CUDA build; does not import it."""
    for name in ("mlx-cuda-12", "mlx-cuda-13"):
        try:
            metadata.distribution(name)
            return True
        except metadata.PackageNotFoundError:
            continue
    return False


def _forwarder() -> Path | None:
    """Returns the path of the forwarding library. It is next to the extension, which an editable
    install keeps outside this folder."""
    from importlib.util import find_spec

    spec = find_spec("mlx_paged._ext")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).with_name("libmlx_paged_blas.so")
