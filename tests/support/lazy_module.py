"""Modules that only some tests use, imported on first use: each worker imports all test files."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Stands for a module; its first public attribute imports it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for these in all that a file of tests imports
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
