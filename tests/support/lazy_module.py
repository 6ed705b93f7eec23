"""Modules that only some tests use, imported on first use: each worker imports all test files."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Stands for a module; its first attribute imports it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
