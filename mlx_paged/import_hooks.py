"""Import hooks: run a function around the first import of a module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Hook = Callable[[ModuleType, Callable[[], None]], None]


def around_import(name: str, hook: Hook) -> None:
    """Calls ``hook(module, execute)`` when the module `name` is imported.

    The hook must call ``execute()``, which runs the module's own code. Each module has one hook;
    setting the same one again is allowed. Modules that are already loaded are not affected.
    """
    assert _finder.hooks.get(name, hook) == hook, f"{name} has another hook"
    _finder.hooks[name] = hook
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def before_import(name: str, function: Callable[[], None]) -> None:
    """Calls ``function()`` before the module `name` is first imported, when it is not begun yet."""
    _finder.before[name] = function
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget_import(name: str) -> None:
    """Removes both hooks of a module, the one before its import and the one after, if any."""
    _finder.hooks.pop(name, None)
    _finder.before.pop(name, None)
    if not (_finder.hooks or _finder.before) and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


class _Finder(MetaPathFinder):
    """Wraps the loaders that other finders return, so that they run the hooks."""

    def __init__(self) -> None:
        self.hooks: dict[str, Hook] = {}
        self.before: dict[str, Callable[[], None]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        before = self.before.pop(name, None)
        if before is not None:
            before()
        hook = self.hooks.get(name)
        if hook is None:
            return None
        others = (f for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, hook)
        return spec


class _Loader(Loader):
    """Wraps a module's own loader in a hook."""

    def __init__(self, loader: Loader, hook: Hook) -> None:
        self._loader = loader
        self._hook = hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Hide the wrapper from other code.
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        self._hook(module, lambda: self._loader.exec_module(module))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


_finder = _Finder()
