"""The native extension, loaded only with the MLX version that it was built for.

MLX has no stable ABI: an extension built against another version may crash, or reject every
``mx.array``. This module checks for both once; the error names the fix.
"""

from __future__ import annotations

import math
import re
import sys
import warnings
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from mlx_paged import blas, cgroups, linker
from mlx_paged.errors import InstallationError

# mlx::core::allocator::allocator()
_ALLOCATOR = "_ZN3mlx4core9allocator9allocatorEv"


def _load() -> ModuleType:
    blas.preload()  # before mlx.core, if it is not imported yet
    try:
        from mlx_paged._build import MLX_VERSION, NANOBIND_VERSION
    except ImportError as error:
        raise InstallationError(
            "mlx_paged's native extension is not built. In its checkout, run: pip install ."
        ) from error

    try:
        import mlx.core as mx
    except ImportError as error:
        raise InstallationError.of(error) or error from error

    found: str = mx.__version__  # type: ignore[attr-defined]
    if found != MLX_VERSION:
        raise InstallationError(
            f"mlx_paged was built with MLX {MLX_VERSION} but found MLX {found}, and MLX "
            f"has no stable ABI. Run: pip install 'mlx=={MLX_VERSION}' (on Linux with its backend, "
            f"as in 'mlx[cpu]=={MLX_VERSION}'), or rebuild mlx_paged with "
            "`pip install --force-reinstall --no-deps .` in its checkout."
        )
    has_cuda = _has_cuda_mlx(mx) and find_spec("mlx_paged._ext_cuda") is not None
    extension = import_module("mlx_paged._ext_cuda" if has_cuda else "mlx_paged._ext")
    _require_names(extension)
    try:
        extension.accepts(mx.array(0))
    except TypeError as error:
        raise InstallationError(
            f"mlx_paged was built with nanobind {NANOBIND_VERSION}, whose internals MLX "
            f"{found} does not share, so it cannot take MLX's arrays. Rebuild it with the "
            "pinned nanobind: `pip install --force-reinstall --no-deps .` in its checkout."
        ) from error
    _limit_threads(extension, cgroups.current().cpus)
    if sys.platform == "linux" and not has_cuda:
        _check_allocations(extension, mx)
    return extension


def _require_names(extension: ModuleType) -> None:
    """Raises `InstallationError` if the extension lacks a name of its stub: a checkout was updated
    and not built again. Models would otherwise fall back to slower paths."""
    try:
        stub = Path(__file__).with_name("_ext.pyi").read_text()
    except OSError:
        return
    names = re.findall(r"^(?:def|class) (\w+)", stub, re.MULTILINE)
    missing = [name for name in names if not hasattr(extension, name)]
    if missing:
        raise InstallationError(
            f"mlx_paged's native extension is older than its Python code: it has no "
            f"'{missing[0]}'. In its checkout, run: pip install ."
        )


def _has_cuda_mlx(mx: ModuleType) -> bool:
    """True if MLX was built with CUDA, so `_ext_cuda` can load."""
    return mx.cuda.is_available()


def _check_allocations(extension: ModuleType, mx: ModuleType) -> None:
    """Makes MLX raise `OutOfMemoryError` when its CPU allocator finds no memory.

    MLX's operations would write to a null pointer. Its GPU allocators raise on their own.
    """
    try:
        function = extension.allocator_function()
        for library in (linker.loaded_libmlx(), mx.__file__, extension.__file__):
            linker.rebind(str(library), {_ALLOCATOR: function})
    except (OSError, AttributeError) as error:  # AttributeError: an outdated extension
        warnings.warn(
            f"a lack of memory in one of MLX's operations will end this process: {error}",
            RuntimeWarning,
            stacklevel=2,
        )


def _limit_threads(ext: ModuleType, cpus: float | None) -> None:
    """Limits threads to a control group's CPU quota: more would use it up sooner and then stall."""
    if cpus is not None:
        num_threads = max(1, math.ceil(cpus))
        ext.limit_threads(num_threads)
        blas.limit_threads(num_threads)


ext = _load()


def build_info() -> dict[str, str]:
    """Describes this build and its choices on this machine.

    Returns:
        ``version``, ``mlx_version``, ``mlx_lm_version``, ``nanobind_version``, ``compiler``,
        ``backends`` (space-separated), ``simd`` (instruction set of the CPU kernels),
        ``amx`` (``yes``, ``no``, or why its tiles cannot be used), ``num_threads`` and ``blas``.
    """
    return {
        "version": metadata.version("mlx-paged"),
        "mlx_lm_version": metadata.version("mlx-lm"),
        **ext.build_info(),
        "blas": blas.status(),
    }
