"""Replaces methods of single modules of a model.

A module stays in its tree and keeps its parameters; its class becomes a subclass of itself.
mlx-lm's own classes do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.nn as nn


def overridden(base: type, method: str, function: Callable[..., Any]) -> type:
    """Returns a subclass with the same name and module, and another method."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {method: function, **names})


class Overrides:
    """The replaced attributes of one model."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, type]] = []

    def replace(self, module: nn.Module, method: str, function: Callable[..., Any]) -> None:
        """Makes `function(module, *args)` the module's method."""
        base = type(module)
        self._before.append((module, base))
        module.__class__ = overridden(base, method, function)

    def undo(self) -> None:
        """Restores everything."""
        for module, base in reversed(self._before):
            module.__class__ = base
        self._before = []
