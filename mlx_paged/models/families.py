"""Which model families are proven, and what their layers ask of the KV store.

A family enters `PROVEN` when a mixed step (prefill, decodes and a second chunk at once) matches
mlx-lm's dense cache; `tests/test_families.py` holds each of them to it. Any other is refused by
name: a family that merely seems to work would be wrong in ways that nobody sees.
"""

from __future__ import annotations

from inspect import unwrap
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
    if not isinstance(model_type, str) or model_type not in PROVEN:
        raise UnsupportedModelError(
            str(model_type), "the paged cache has not been proven for it", sorted(PROVEN)
        )


# Two rows: code that takes `cache.offset` for a number fails on two and not on one.
_PROBE_ROWS = 2


class _RecordingCache:
    """Stands in for one layer's cache in a forward that is built but never evaluated."""

    def __init__(self) -> None:
        self.offset = mx.arange(_PROBE_ROWS)
        self.shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self.dtype: mx.Dtype | None = None
        self.mask_window: int | None = None

    def make_mask(
        self, length: int, *, window_size: int | None = None, return_array: bool = False
    ) -> None:
        self.mask_window = window_size

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.shapes, self.dtype = (keys.shape, values.shape), keys.dtype
        return keys, values


def layer_specs(model: nn.Module, model_type: str) -> list[LayerSpec]:
    """What each layer writes to its cache, read off a lazy forward of two rows.

    Raises:
        UnsupportedModelError: for a layer whose cache is of a kind that is not served, or that does
            not use its cache the way an attention layer does, and for a model that computes on the
            host with positions, as dynamic RoPE scaling does.
    """
    # Unwrapped: the drop-in puts paged caches in the place of those that are asked about here.
    windows = [_window(cache, model_type) for cache in unwrap(make_prompt_cache)(model)]
    recorders = [_RecordingCache() for _ in windows]
    try:
        model(mx.zeros((_PROBE_ROWS, 1), dtype=mx.int32), cache=recorders)
    except (TypeError, ValueError) as error:
        raise UnsupportedModelError(
            model_type,
            f"it does not take an array of positions (dynamic rope scaling does not): {error}",
        ) from error
    specs = []
    for i, (recorder, window) in enumerate(zip(recorders, windows)):
        if recorder.shapes is None or recorder.dtype is None:
            raise UnsupportedModelError(model_type, f"layer {i} does not write to its cache")
        if recorder.mask_window not in (None, window):
            raise UnsupportedModelError(
                model_type,
                f"layer {i} masks a window of {recorder.mask_window} over a cache of another",
            )
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
