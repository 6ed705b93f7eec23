"""Runs mlx-vlm's models on flat rows: language models in a step, encoders outside of it.

`model.wrap` and `PagedModel` see a `MultiModalModel` as a model of mlx-lm: tokens and caches in,
logits out. mlx-vlm's language models also end in `mx.fast.scaled_dot_product_attention`, so they
need nothing else for paging. Inputs of a step besides tokens (`MediaRows`) are an argument and
never stored on a module, where mlx-vlm stores the RoPE state of one request.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as mlx_lm_caches

from mlx_paged.errors import ModelLoadError, UnsupportedModelError
from mlx_paged.model import deepseek_vl
from mlx_paged.model.families import Family
from mlx_paged.model.media import MediaFeatures, MediaInputs, MediaRows
from mlx_paged.model.media_corrections import correct
from mlx_paged.model.media_families import MLX_VLM_VERSION, MediaFamily
from mlx_paged.model.multimodal_files import as_published
from mlx_paged.model.patches import overridden
from mlx_paged.model.recurrent import WindowedStates

#: The message if mlx-vlm is missing.
INSTALL = (
    "pictures, videos and sounds need mlx-vlm: run pip install 'mlx-paged[vision]' && "
    f"pip install --no-deps mlx-vlm=={MLX_VLM_VERSION}"
)


# Packages that mlx-vlm imports for any model; the extra `vision` has these.
_IMPORTED = ("PIL", "requests", "sentencepiece", "tqdm")


def installed_version() -> str | None:
    """Version of mlx-vlm, without importing it; None: it, or a package it needs, is missing."""
    if any(importlib.util.find_spec(name) is None for name in _IMPORTED):
        return None
    try:
        return importlib.metadata.version("mlx-vlm")
    except importlib.metadata.PackageNotFoundError:
        return None


class StateArrays(WindowedStates, mlx_lm_caches.ArraysCache):  # type: ignore[misc]
    """mlx-lm's cache of recurrent state, with the methods of mlx-vlm's."""


class MultiModalModel(nn.Module):  # type: ignore[misc]
    """One of mlx-vlm's models, called as mlx-lm's are.

    Args:
        vlm: mlx-vlm's ``Model``; its modules are changed in place.
        family: how it is run.
        model_type: names it in errors.
    """

    def __init__(self, vlm: nn.Module, family: MediaFamily, model_type: str) -> None:
        super().__init__()
        self.vlm = vlm
        self.family = family
        self.model_type = model_type
        _scatter_deepstack(vlm)

    # The attributes of a model that `model.wrap` needs.

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


# --- Loading --------------------------------------------------------------------------------------


def import_mlx_vlm() -> ModuleType:
    """Imports mlx-vlm without its side effects on this process and its children.

    It sets variables that silence transformers, and would do so in every child process, too.

    Raises:
        ImportError: mlx-vlm is not installed.
    """
    from transformers.utils import logging

    logging.get_verbosity()  # This reads the variables, once for the process.
    names = ("TRANSFORMERS_VERBOSITY", "TRANSFORMERS_NO_ADVISORY_WARNINGS")
    before = {name: os.environ.get(name) for name in names}
    try:
        return importlib.import_module("mlx_vlm")
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def load(path: Path, family: MediaFamily, model_type: str) -> tuple[MultiModalModel, Any]:
    """Loads a checkpoint with mlx-vlm.

    Returns:
        The model, and mlx-vlm's or transformers' processor of it.

    Raises:
        ModelLoadError: mlx-vlm has no processor for its files.
        UnsupportedModelError: its weights are not such as the family is proven with.
    """
    import_mlx_vlm()
    from mlx_vlm.utils import load_model

    with as_published(path) as config:
        vlm = load_model(path)
    correct(family.module, vlm, config)
    reason = family.refuses(vlm)
    if reason is not None:
        raise UnsupportedModelError(model_type, reason)
    try:
        # Some processors print messages, which are no output of ours.
        with contextlib.redirect_stdout(sys.stderr):
            return MultiModalModel(vlm, family, model_type), _processor(path, family.module)
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        lines = str(error).strip().splitlines()
        raise ModelLoadError(
            str(path),
            f"mlx-vlm could not make a processor of its files ({type(error).__name__}: "
            f"{lines[0] if lines else ''})",
        ) from error


def _processor(path: Path, package: str = "") -> Any:
    from mlx_vlm.utils import load_image_processor, load_processor

    config_type = json.loads((path / "config.json").read_text()).get("model_type")
    with _without_word_on_arguments():
        # By default, mlx-vlm runs code that comes with a checkpoint.
        if package == "pixtral":  # By name, its checkpoints are LLaVA's.
            from mlx_vlm.models.pixtral.processing_pixtral import PixtralProcessor

            processor = PixtralProcessor.from_pretrained(path, trust_remote_code=False)
        elif config_type in deepseek_vl.TYPES:
            return deepseek_vl.processor(path)
        else:
            processor = load_processor(path, add_detokenizer=False, trust_remote_code=False)
        image_processor = load_image_processor(path)
    # One of the same class was made from the checkpoint's files.
    if image_processor is not None and not isinstance(
        getattr(processor, "image_processor", None), type(image_processor)
    ):
        processor.image_processor = image_processor
    if hasattr(
        getattr(processor, "image_processor", None), "to_mlx"
    ):  # Kimi's makes a list of all pixels.
        processor.image_processor.to_mlx = _pixels
    return processor


def _pixels(image: Any) -> mx.array:
    """``[3, height, width]`` from 0 to 1 of a picture of Pillow."""
    return mx.array(np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / np.float32(255))


@contextlib.contextmanager
def _without_word_on_arguments() -> Iterator[None]:
    """Drops transformers' warnings about an argument of mlx-vlm's, which no user can change."""
    logger = logging.getLogger("transformers.models.auto.image_processing_auto")

    def is_for_users(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("The `use_fast` parameter is deprecated")

    logger.addFilter(is_for_users)
    try:
        yield
    finally:
        logger.removeFilter(is_for_users)
