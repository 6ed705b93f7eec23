"""Patching: applies and removes all seams together.

A program may import mlx_lm before mlx_paged, after it, or never. `arrange` patches at once in the
first case, and hooks the import otherwise.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from mlx_paged.drop_in.seams import CHECKED_ON, SEAMS, Seam, mismatch, resolve
from mlx_paged.errors import MlxPagedError
from mlx_paged.import_hooks import around_import, before_import, forget_import

DISABLE_VARIABLE = "MLX_PAGED_DISABLE"
# `import mlx_lm` loads these, with the last one last; the other modules load on demand.
_CORE_MODULES = ("mlx_lm.models.cache", "mlx_lm.utils", "mlx_lm.generate")
_LAST_MODULE = _CORE_MODULES[-1]
_LATER_MODULES = tuple({seam.module for seam in SEAMS} - set(_CORE_MODULES))
_WATCHED_MODULES = (*_LATER_MODULES, _LAST_MODULE)
# Modules of ours that import mlx-lm, and that its patches need. If a program imports one of them
# first, it would be half initialized when mlx-lm has loaded and is patched.
_MODULES_ON_MLX_LM = (
    "mlx_paged.drop_in.batch",
    "mlx_paged.drop_in.caches",
    "mlx_paged.drop_in.generation",
    "mlx_paged.drop_in.registry",
    "mlx_paged.model.families",
    "mlx_paged.model.recurrent",
    "mlx_paged.model.state_arrays",
)


class MlxLmMismatchError(MlxPagedError, RuntimeError):
    """mlx-lm differs from what the seams expect. Nothing was replaced.

    Attributes:
        reasons: One per symbol that differs.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        from importlib.metadata import version

        super().__init__(
            f"mlx_paged does not fit mlx-lm {version('mlx-lm')} and leaves it as it is (checked on "
            f"{', '.join(CHECKED_ON)}): {'; '.join(reasons)}. Install one of the versions it was "
            f"checked on, or set {DISABLE_VARIABLE}=1 to use mlx-lm without it"
        )
        self.reasons = tuple(reasons)


class _Replaced(NamedTuple):
    """One applied seam."""

    seam: Seam
    original: Any
    replacement: Any


_replaced: list[_Replaced] = []


def is_disabled() -> bool:
    """True if the environment disables the drop-in."""
    return os.environ.get(DISABLE_VARIABLE, "") not in ("", "0")


def is_patched() -> bool:
    """True if mlx-lm is currently paged."""
    return bool(_replaced)


def arrange() -> None:
    """Patches mlx-lm now if it is loaded, otherwise when it loads. Never raises."""
    if is_disabled():
        return
    _watch_imports()
    if _is_loaded(_LAST_MODULE):
        _patch_or_warn()


def patch() -> bool:
    """Makes mlx-lm paged. Idempotent.

    Returns:
        True if mlx-lm is paged; False if ``MLX_PAGED_DISABLE`` is set.

    Raises:
        MlxLmMismatchError: A symbol of mlx-lm is missing or takes other parameters. Nothing was
            replaced.
    """
    if is_disabled():
        return False
    _watch_imports()
    import_module(_LAST_MODULE)
    if not is_patched():
        later = [name for name in _LATER_MODULES if _is_loaded(name)]
        _apply([seam for seam in SEAMS if seam.module in (*_CORE_MODULES, *later)])
    return True


def unpatch() -> None:
    """Restores everything that was replaced, and stops patching later imports.

    Live prompt caches keep working.
    """
    for name in (*_WATCHED_MODULES, *_MODULES_ON_MLX_LM):
        forget_import(name)
    _rebind([(entry.seam, entry.replacement, entry.original) for entry in reversed(_replaced)])
    _replaced.clear()
    if "mlx_paged.drop_in.registry" in sys.modules:
        import_module("mlx_paged.drop_in.registry").forget_all()
        import_module("mlx_paged.model.patches").uninstall()  # reinstalled on demand


def _apply(seams: Sequence[Seam]) -> None:
    """Applies seams, all or none."""
    modules = {seam.module: sys.modules[seam.module] for seam in seams}
    reasons = [r for seam in seams if (r := mismatch(modules[seam.module], seam)) is not None]
    if reasons:
        raise MlxLmMismatchError(reasons)
    # Build every replacement before applying any, so a failure leaves mlx-lm unchanged.
    made = []
    for seam in seams:
        if seam.maker is not None:
            module, function = seam.maker.split(":")
            maker: Callable[[Any], Any] = getattr(
                import_module(f"mlx_paged.drop_in.{module}"), function
            )
            _, _, original = resolve(modules[seam.module], seam.symbol)
            made.append(_Replaced(seam, original, maker(original)))
    _rebind([(entry.seam, entry.original, entry.replacement) for entry in made])
    _replaced.extend(made)


def _rebind(replacements: Sequence[tuple[Seam, Any, Any]]) -> None:
    """Replaces the old object in every mlx-lm module, because many import it by name."""
    new_of: dict[int, Any] = {}  # by id(old), because not every object is hashable
    for seam, old, new in replacements:
        owner, name, _ = resolve(sys.modules[seam.module], seam.symbol)
        setattr(owner, name, new)
        if not isinstance(owner, type):
            new_of[id(old)] = new
    # Scan only once: a large program may have ten thousand modules.
    for module_name, module in sys.modules.copy().items():  # other threads may import meanwhile
        if module is None or not (module_name == "mlx_lm" or module_name.startswith("mlx_lm.")):
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in new_of:
                setattr(module, attribute, new_of[id(value)])


def _patch_or_warn() -> None:
    try:
        patch()
    except Exception as error:
        # Never fail an import of mlx_lm: the program works without us.
        reason = error if isinstance(error, MlxPagedError) else f"{type(error).__name__}: {error}"
        warnings.warn(f"mlx-lm is not paged: {reason}", RuntimeWarning, stacklevel=2)


def _patch_later_module(name: str) -> None:
    if not is_patched():
        return
    try:
        _apply([seam for seam in SEAMS if seam.module == name])
    except Exception as error:
        unpatch()
        warnings.warn(f"mlx-lm is not paged any more: {error}", RuntimeWarning, stacklevel=2)


def _watch_imports() -> None:
    for name in _WATCHED_MODULES:
        around_import(name, _import_and_patch)
    for name in _MODULES_ON_MLX_LM:
        before_import(name, _load_mlx_lm)


def _load_mlx_lm() -> None:
    with contextlib.suppress(ImportError):  # The module that needs it says so.
        import_module(_LAST_MODULE)


def _import_and_patch(module: ModuleType, execute: Callable[[], None]) -> None:
    execute()
    if module.__name__ == _LAST_MODULE:
        _patch_or_warn()
    else:
        _patch_later_module(module.__name__)


def _is_loaded(name: str) -> bool:
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return module is not None and not getattr(spec, "_initializing", False)
