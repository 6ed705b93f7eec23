"""How many files and connections this process may have open (``RLIMIT_NOFILE``).

mlx-lm sets both limits when it is imported, to 2048 and 4096. On most servers that lowers them, and
a lowered hard limit cannot be raised again; where the hard limit is below 4096, the import fails.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

#: Most that `raise_limit` asks for: hard limits may be without bounds.
MOST = 1 << 20
_MODULE = "mlx_lm.utils"
# Tried one after the other: macOS accepts no more than a limit of its kernel, whatever is allowed.
_STEPS = (MOST, 65_536, 10_240, 4096)


def keep_limit() -> None:
    """From now on the import of mlx-lm leaves the limits as they are."""
    if resource is None or _MODULE in sys.modules:
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def limit() -> int:
    """Most descriptors that the process may have open now."""
    if resource is None:
        return MOST
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def raise_limit(wanted: int = MOST) -> int:
    """Raises the soft limit to `wanted`, or to the hard limit if that is less; never lowers it.

    Returns:
        The soft limit now.
    """
    if resource is None:
        return MOST
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(wanted, _number(hard))
    for step in (most, *(step for step in _STEPS if step < most)):
        if step <= _number(soft):
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (step, hard))
            break
        except (ValueError, OSError):
            continue
    return limit()


@contextlib.contextmanager
def at_least(wanted: int) -> Iterator[None]:
    """Meanwhile `wanted` descriptors may be open, if the hard limit allows it."""
    before = limit()
    raised = raise_limit(wanted)
    try:
        yield
    finally:
        if raised != before and limit() == raised:
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def _number(value: int) -> int:
    return sys.maxsize if value in (-1, resource.RLIM_INFINITY) else value


class _Finder(MetaPathFinder):
    """Finds nothing itself; has mlx-lm's module loaded by a loader that guards the limits."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (f.find_spec(name, path, target) for f in later if hasattr(f, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """A module's own loader, without the limits that the module sets while it is loaded."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        original = resource.setrlimit

        def setrlimit(which: int, limits: tuple[int, int]) -> None:
            # Other threads, and modules that this one imports, set theirs as ever.
            is_its = sys._getframe(1).f_globals is vars(module)
            if which != resource.RLIMIT_NOFILE or not is_its:
                original(which, limits)

        resource.setrlimit = setrlimit
        try:
            self._loader.exec_module(module)
        finally:
            resource.setrlimit = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
