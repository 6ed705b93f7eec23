"""Imports transformers in little more than half the time, for the command line.

transformers reads every file of its `models` folder (some 1,600) to learn what it could import, and
does so twice: the function is cached, but its `lru_cache` holds 128 folders and there are 550. Here
the cache has no limit. If transformers has changed, nothing is done.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MODULE = "transformers.utils.import_utils"
FUNCTION = "create_import_structure_from_path"


def arrange() -> None:
    """Lets transformers, when it is first imported, scan its files once."""
    if MODULE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


def _remember_all(module: ModuleType) -> None:
    plain = getattr(getattr(module, FUNCTION, None), "__wrapped__", None)
    if plain is not None:
        setattr(module, FUNCTION, functools.cache(plain))


class _Finder(MetaPathFinder):
    """Finds the one module as always, and changes it as soon as it has been executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ChangingLoader(spec.loader)
        return spec


class _ChangingLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader  # what others see of it is what it would have been
        self._loader.exec_module(module)
        _remember_all(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
