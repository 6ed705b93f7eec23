"""Runs mlx-vlm's models on flat rows: language models in a step, encoders outside of it.

`model.wrap` and `PagedModel` see a `MultiModalModel` as a model of mlx-lm: tokens and caches in,
logits out. mlx-vlm's language models also end in `mx.fast.scaled_dot_product_attention`, so they
need nothing else for paging. Inputs of a step besides tokens (`MediaRows`) are an argument and
never stored on a module, where mlx-vlm stores the RoPE state of one request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as mlx_lm_caches

from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.families import Family
from mlx_paged.model.media import MediaFeatures, MediaInputs, MediaRows
from mlx_paged.model.overrides import overridden
from mlx_paged.model.recurrent import StateArrays
from mlx_paged.model.takes_media import TakesMedia
from mlx_paged.multimodal.families import MediaFamily
from mlx_paged.multimodal.mixtures import use_mlx_lm_mixtures
from mlx_paged.multimodal.mlx_vlm import MLX_VLM_VERSION, installed_version


class MultiModalModel(TakesMedia, nn.Module):  # type: ignore[misc]
    """One of mlx-vlm's models, called as mlx-lm's are.

    Args:
        vlm: mlx-vlm's ``Model``; its modules are changed in place.
        family: How it is run.
        model_type: Names it in errors.
    """

    def __init__(self, vlm: nn.Module, family: MediaFamily, model_type: str) -> None:
        super().__init__()
        self.vlm = vlm
        self.family = family
        self.model_type = model_type
        _scatter_deepstack(vlm)
        use_mlx_lm_mixtures(vlm)

    # The attributes of a model that `model.wrap` and `PagedModel` need.

    @property
    def paged_family(self) -> Family:
        """The possible modes of the language model."""
        return Family(
            self.family.module,
            (self.family.mode,),
            verify=installed_version() != MLX_VLM_VERSION,
            proven=self.family.mode,
        )

    @property
    def uses_bounds(self) -> bool:
        """True if some of its items' positions see each other."""
        return bool(self.family.atomic(self.vlm.config))

    @property
    def sees_within_windows(self) -> bool:
        """See `MediaFamily`."""
        return self.family.sees_within_windows

    @property
    def uses_rope_positions(self) -> bool:
        """See `MediaFamily`."""
        return self.family.uses_rope_positions

    @property
    def adds_to_layers(self) -> bool:
        """True if features are added to the outputs of layers, too (deepstack)."""
        inner = getattr(self.language_model, "model", None)
        return self.family.adds_to_layers or hasattr(inner, "_deepstack_process")

    @property
    def language_model(self) -> Any:
        """mlx-vlm's language model."""
        return self.vlm.language_model

    @property
    def layers(self) -> Any:
        """The layers of the language model."""
        return self.language_model.layers

    def make_cache(self) -> list[Any]:
        """The language model's caches, as mlx-lm's classes."""
        make = getattr(self.language_model, "make_cache", None) or getattr(
            self.vlm, "make_cache", None
        )
        caches = [mlx_lm_caches.KVCache() for _ in self.layers] if make is None else make()
        return [self._as_mlx_lm(cache) for cache in caches]

    def _as_mlx_lm(self, cache: Any) -> Any:
        kind = type(cache).__name__
        if kind in ("KVCache", "SimpleKVCache"):
            return mlx_lm_caches.KVCache()
        if kind == "RotatingKVCache":
            return mlx_lm_caches.RotatingKVCache(max_size=cache.max_size, keep=cache.keep)
        if kind == "ChunkedKVCache":
            return mlx_lm_caches.ChunkedKVCache(cache.chunk_size)
        if kind == "ArraysCache":
            return StateArrays(len(cache.cache))
        if kind == "CacheList":
            return mlx_lm_caches.CacheList(*(self._as_mlx_lm(c) for c in cache.caches))
        raise UnsupportedModelError(self.model_type, f"its {kind} layers are not served")

    # Steps.

    def __call__(
        self, tokens: mx.array, cache: list[Any] | None = None, media: MediaRows | None = None
    ) -> mx.array:
        """Returns logits ``[B, L, vocab_size]`` for ``[B, L]`` tokens.

        Args:
            media: Inputs of a step, whose tokens are ``[T, 1]``.
        """
        arguments: dict[str, Any] = {}
        if self.family.takes_positions:
            positions = None if media is None else media.rope_positions
            if positions is None:
                positions = _positions(tokens, cache or [])
            arguments["position_ids"] = positions
        if media is not None and media.rows is not None:
            assert media.features is not None
            # A placeholder's id may be beyond the embedding.
            known = mx.array(tokens)
            known[media.rows] = 0
            arguments |= self._merged(known, media.rows, media.features)
        elif self.family.embeds is not None:
            arguments["inputs_embeds"] = self.family.embeds(self.vlm, tokens)
        return self.language_model(tokens, cache=cache, **arguments).logits

    def _merged(self, tokens: mx.array, rows: mx.array, features: MediaFeatures) -> dict[str, Any]:
        """Returns inputs that replace tokens, if some rows have features."""
        if self.family.embeds is not None:
            text: Mapping[str, Any] = {"inputs_embeds": self.family.embeds(self.vlm, tokens)}
        else:
            text = self.vlm.get_input_embeddings(tokens, None).to_dict()
        # New arrays, because some models scale theirs in place.
        embeds = text["inputs_embeds"]
        embeds[rows, 0] = features.embeds.astype(embeds.dtype)
        merged: dict[str, Any] = {"inputs_embeds": embeds}
        if features.per_layer_inputs is not None:
            per_layer = text.get("per_layer_inputs")
            if per_layer is None:
                per_layer = self.language_model.model.get_per_layer_inputs(tokens)
            per_layer[rows, 0] = features.per_layer_inputs.astype(per_layer.dtype)
            merged["per_layer_inputs"] = per_layer
        if features.deepstack:
            merged |= self.family.deepstack(self.vlm, rows, tokens.shape[0], features)
        return merged

    # Towers.

    def encode(self, item: MediaInputs) -> MediaFeatures:
        """Encodes an item, lazily.

        Raises:
            ValueError: The model does not take this kind, or its encoder made another number of
                rows than the prompt has.
        """
        if item.kind not in self.family.kinds:
            raise ValueError(
                f"model_type {self.model_type!r} takes {', '.join(self.family.kinds)} but got "
                f"{item.kind}"
            )
        arrays = {name: _on_device(value) for name, value in item.arrays.items()}
        arrays = self.family.prepare(arrays)
        if self.family.tower is not None:
            features = self.family.tower(self.vlm, item.kind, arrays)
        else:
            features = self._from_embeddings(item, arrays)
        if features.embeds.shape[0] != item.num_rows:
            raise ValueError(
                f"the tower of model_type {self.model_type!r} made {features.embeds.shape[0]} rows "
                f"for an item ({item.kind}) that has {item.num_rows} in the prompt"
            )
        return features

    def _from_embeddings(self, item: MediaInputs, arrays: Mapping[str, Any]) -> MediaFeatures:
        """Lets the model merge the item into the embeddings of its own tokens; takes the rows."""
        tokens = mx.array(item.token_ids.astype(np.int32))[None]
        rows = mx.array(item.rows.astype(np.int32))
        given = {name: value for name, value in arrays.items() if name != "pixel_values"}
        if "mask" not in given:
            given["mask"] = mx.ones_like(tokens)
        pixels = arrays.get("pixel_values")
        found = self.vlm.get_input_embeddings(tokens, pixels, **given).to_dict()
        per_layer = found.get("per_layer_inputs")
        deepstack = found.get("deepstack_visual_embeds")
        return MediaFeatures(
            found["inputs_embeds"][0][rows],
            () if deepstack is None else tuple(part[rows] for part in deepstack),
            per_layer_inputs=None if per_layer is None else per_layer[0][rows],
        )


def _on_device(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return mx.array(value)
    if isinstance(value, (list, tuple)):
        return [_on_device(part) for part in value]
    return value


def _positions(tokens: mx.array, caches: list[Any]) -> mx.array:
    """Returns ``[3, B, L]``: for text alone, the positions in the sequence."""
    batch, length = tokens.shape
    offset = next((c.offset for c in caches if hasattr(c, "offset")), 0)
    if isinstance(offset, mx.array):
        offset = offset[:, None]
    positions = offset + mx.arange(length, dtype=mx.int32)[None]
    return mx.broadcast_to(positions, (3, batch, length))


def _scatter_deepstack(vlm: nn.Module) -> None:
    """Replaces mlx-vlm's loop over rows, which reads the mask on the host for each layer."""
    model = getattr(vlm.language_model, "model", None)
    if not hasattr(model, "_deepstack_process"):
        return

    def add(self: Any, hidden: mx.array, rows: mx.array, embeds: mx.array) -> mx.array:
        """``rows`` is ``[m, 1]``: the rows of ``[T, 1, hidden]`` that `embeds` are added to."""
        return hidden.at[rows[:, 0], 0].add(embeds.astype(hidden.dtype))

    model.__class__ = overridden(type(model), "_deepstack_process", add)
