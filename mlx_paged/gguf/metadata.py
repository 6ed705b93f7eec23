"""Metadata: typed reads of a file's keys, with an error that names the key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np

from mlx_paged.gguf.errors import GGUFError
from mlx_paged.gguf.reader import GGUFFile

_REQUIRED: Any = object()


class Metadata:
    """The keys of a file that describe its model.

    Keys are written without the architecture: ``block_count`` reads ``llama.block_count`` of a
    Llama. A key with its own namespace begins with "general." or "tokenizer.".

    Args:
        file: The file, whose tensors decide on some features.

    Attributes:
        architecture: GGUF's name of the architecture.
        values: All values by whole keys.

    Raises:
        GGUFError: The file names no architecture.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.values = file.metadata
        found = self.values.get("general.architecture")
        if not isinstance(found, str) or not found:
            raise GGUFError("its metadata has no general.architecture")
        self.architecture = found

    def with_value(self, name: str, value: Any) -> Metadata:
        """Returns the same metadata with another value of a key."""
        found = copy(self)
        found.values = {**self.values, self.key(name): value}
        return found

    def key(self, name: str) -> str:
        """The whole key."""
        if name.startswith(("general.", "tokenizer.")):
            return name
        return f"{self.architecture}.{name}"

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.values

    def _get(self, name: str, default: Any, expected: str, *kinds: type) -> Any:
        found = self.values.get(self.key(name))
        if found is None:
            if default is _REQUIRED:
                raise GGUFError(f"its metadata has no {self.key(name)}")
            return default
        if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
            shown = found if isinstance(found, int | float | bool) else type(found).__name__
            raise GGUFError(f"its metadata {self.key(name)} must be {expected} but is {shown!r}")
        return found

    def integer(self, name: str, default: Any = _REQUIRED) -> Any:
        """A number of at least 0.

        Raises:
            GGUFError: The key is missing and has no default, or has another value. So do the other
                methods.
        """
        found = self._get(name, default, "an integer", int)
        if found is not default and found < 0:
            raise GGUFError(f"its metadata {self.key(name)} must be at least 0 but is {found}")
        return found

    def size(self, name: str, default: Any = _REQUIRED) -> Any:
        """A number of at least 1."""
        found = self.integer(name, default)
        if found is not default and found == 0:
            raise GGUFError(f"its metadata {self.key(name)} must be at least 1 but is 0")
        return found

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """A finite number, as the shortest decimal of its float32."""
        found = self._get(name, default, "a number", float, int)
        if found is default:
            return found
        if not math.isfinite(found):
            raise GGUFError(f"its metadata {self.key(name)} must be a finite number")
        return float(str(np.float32(found)))

    def flag(self, name: str, default: Any = _REQUIRED) -> Any:
        """True or False."""
        return self._get(name, default, "a boolean", bool)

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        """A text."""
        return self._get(name, default, "a text", str)

    def texts(self, name: str, default: Any = _REQUIRED) -> Any:
        """A list of texts."""
        found = self._get(name, default, "a list of texts", list, np.ndarray)
        if isinstance(found, np.ndarray):
            raise GGUFError(f"its metadata {self.key(name)} must be a list of texts")
        return found

    def array(self, name: str, default: Any = _REQUIRED) -> Any:
        """An array of numbers."""
        return self._get(name, default, "an array of numbers", np.ndarray)

    def per_layer(self, name: str, num_layers: int, default: Any = _REQUIRED) -> list[Any]:
        """An integer for each layer, from one for all of them or an array."""
        found = self._get(name, default, "an integer or an array of them", int, np.ndarray)
        if not isinstance(found, np.ndarray):
            return [found] * num_layers
        if len(found) < num_layers or found.dtype.kind not in "iub":
            raise GGUFError(
                f"its metadata {self.key(name)} must have an integer for each of the {num_layers} "
                "layers"
            )
        return [item.item() for item in found[:num_layers]]

    def same(self, name: str, num_layers: int, default: Any = _REQUIRED) -> Any:
        """An integer that all layers share.

        Raises:
            GGUFError: Layers differ.
        """
        found = set(self.per_layer(name, num_layers, default))
        if len(found) > 1:
            raise GGUFError(
                f"its layers differ in {self.key(name)} ({sorted(found)}), which mlx-lm's code of "
                "the architecture cannot express"
            )
        return found.pop() if found else default

    def has_tensor(self, *names: str) -> bool:
        """True if the file has one of these tensors."""
        return any(name in self.file for name in names)

    @cached_property
    def num_layers(self) -> int:
        """Number of layers that compute the answer; every one has a tensor.

        Some models have further layers behind them, which draft tokens.

        Raises:
            GGUFError: The metadata says another number.
        """
        count = self.size("block_count")
        numbers = {int(n.split(".")[1]) for n in self.file.names() if _is_block(n.split("."))}
        if numbers != set(range(count)):
            raise GGUFError(
                f"its metadata says {count} layers, but it has tensors of {len(numbers)}"
            )
        drafting: int = self.integer("nextn_predict_layers", 0)
        if drafting >= count:
            raise GGUFError(f"its metadata says that {drafting} of {count} layers draft tokens")
        return count - drafting


def _is_block(parts: Sequence[str]) -> bool:
    return len(parts) > 2 and parts[0] == "blk" and parts[1].isdecimal() and len(parts[1]) < 6
