"""Weights: detects whether a model's weights have changed."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_paged import runtime

_SMALL = 1 << 16  # maximum bytes of arrays that are compared by value


class Weights:
    """Identifies the current weights of a model without keeping them alive."""

    def __init__(self, model: nn.Module) -> None:
        self._known = [(name, _Weight(array)) for name, array in weights_of(model)]

    def are_still_of(self, model: nn.Module) -> bool:
        """True if the model has the same weights, or small ones with equal values."""
        weights = weights_of(model)
        return len(weights) == len(self._known) and all(
            name == known_name and weight.is_still(array)
            for (name, array), (known_name, weight) in zip(weights, self._known)
        )


class _Weight:
    """Identifies an array's contents without keeping them alive; also copies small arrays."""

    def __init__(self, array: mx.array) -> None:
        self._contents = runtime.array_contents(array)
        # A separate object, so that in-place updates do not change it.
        self._value = mx.array(array) if array.nbytes <= _SMALL else None

    def is_still(self, array: mx.array) -> bool:
        """True if this array has the same contents, or is small and has equal values.

        Gemma 3n replaces some of its small weights with equal ones in every forward.
        """
        if self._contents.are_still_of(array):
            return True
        old = self._value
        if old is None or (old.shape, old.dtype) != (array.shape, array.dtype):
            return False
        if not mx.array_equal(old, array).item():
            return False
        self._contents = runtime.array_contents(array)
        return True


def weights_of(model: nn.Module) -> list[tuple[str, mx.array]]:
    """Returns the parameters in order, each with its name in its module.

    Runs for every new prompt cache; `Module.parameters` is several times slower.
    """
    found: list[tuple[str, mx.array]] = []

    def collect(name: str, value: object) -> None:
        if isinstance(value, mx.array):
            found.append((name, value))
        elif isinstance(value, dict):  # includes modules
            for key, inner in value.items():
                if isinstance(inner, (mx.array, dict, list)) and not key.startswith("_"):
                    collect(key, inner)
        elif isinstance(value, list):
            for inner in value:
                collect(name, inner)

    collect("", model)
    return found
