"""Which model families are proven, and what their layers ask of the KV store.

A family enters `PROVEN` when a mixed step (prefill, decodes and a second chunk at once) matches
mlx-lm's dense cache; `tests/test_families.py` holds each of them to it. Any other is refused by
name: a family that merely seems to work would be wrong in ways that nobody sees.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_paged.attention.cache import LayerSpec
from mlx_paged.errors import UnsupportedModelError

PROVEN = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})


def require_proven(model_type: str) -> None:
    """Refuses a model that the paged cache has not been proven for.

    Raises:
        UnsupportedModelError: names the model type and those that are served.
    """
    if model_type not in PROVEN:
        raise UnsupportedModelError(
            model_type, "the paged cache has not been proven for it", sorted(PROVEN)
        )


class _RecordingCache:
    """Stands in for one layer's cache in a forward that is built but never evaluated."""

    offset = 0

    def __init__(self) -> None:
        self.shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self.dtype: mx.Dtype | None = None

    def make_mask(self, *args: Any, **kwargs: Any) -> None:
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.shapes, self.dtype = (keys.shape, values.shape), keys.dtype
        return keys, values


def layer_specs(model: nn.Module, model_type: str) -> list[LayerSpec]:
    """What each layer writes to its cache, read off a lazy forward of one token.

    Raises:
        UnsupportedModelError: for a layer whose cache is of a kind that is not served, or that does
            not use its cache the way an attention layer does.
    """
    windows = [_window(cache, model_type) for cache in make_prompt_cache(model)]
    recorders = [_RecordingCache() for _ in windows]
    model(mx.array([[0]]), cache=recorders)
    specs = []
    for i, (recorder, window) in enumerate(zip(recorders, windows)):
        if recorder.shapes is None or recorder.dtype is None:
            raise UnsupportedModelError(model_type, f"layer {i} does not write to its cache")
        (_, num_kv_heads, _, key_dim), (*_, value_dim) = recorder.shapes
        specs.append(LayerSpec(num_kv_heads, key_dim, value_dim, recorder.dtype, window))
    return specs


def _window(cache: Any, model_type: str) -> int | None:
    """The sliding window that mlx-lm's own cache for this layer stands for."""
    if type(cache) is KVCache:
        return None
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return cache.max_size
    raise UnsupportedModelError(model_type, f"its {type(cache).__name__} layers are not served")
