"""Adds windows to models of mlx-lm that ignore the window of their config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_paged.model.overrides import overridden


def install_windows(model: nn.Module, windows: Sequence[int | None]) -> None:
    """Makes each layer see a window of tokens, including its own; None means all tokens.

    The model's caches report the windows, like those of mlx-lm's own models with windows, and each
    layer has its own mask.
    """
    assert len(windows) == len(model.layers)

    def make_cache(self: Any) -> list[Any]:
        return [KVCache() if w is None else RotatingKVCache(max_size=w) for w in windows]

    model.__class__ = overridden(type(model), "make_cache", make_cache)
    for layer, window in zip(model.layers, windows):
        layer.__class__ = overridden(type(layer), "__call__", _masked(type(layer), window))


def _masked(kind: type, window: int | None) -> Any:
    forward: Any = kind.__call__  # type: ignore[operator]

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        # Some modules add masks to scores, and always need an array.
        is_array = isinstance(mask, mx.array)
        mask = create_attention_mask(x, cache, window_size=window, return_array=is_array)
        return forward(self, x, mask, cache)

    return call
