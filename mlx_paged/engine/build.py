"""Parts of an engine, made from a loaded model and the engine's options."""

from __future__ import annotations

import logging
from typing import Any

from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.kv_cache_config import KVCacheConfig
from mlx_paged.engine.media.step_media import StepMediaBuilder
from mlx_paged.engine.pooling.params import check_dimensions_fit
from mlx_paged.engine.pooling.runner import Classifier, PoolingRunner
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.engine.sampling.masks import MaskSource
from mlx_paged.errors import InvalidParameterError, UnsupportedModelError
from mlx_paged.model.loader import LoadedModel
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.wrap import build_paged_model
from mlx_paged.platform import Platform

logger = logging.getLogger(__name__)


def make_paged_model(model: LoadedModel, config: EngineConfig, platform: Platform) -> PagedModel:
    """Builds the paged model, with the KV format and the activations that the options name."""
    paged = build_paged_model(
        model.model, model.config, block_size=config.block_size, platform=platform
    )
    _set_kv_format(paged, config)
    paged.round_activations(config.cpu_activations)
    paged.repeats_steps = not config.enforce_eager
    return paged


def _set_kv_format(paged: PagedModel, config: EngineConfig) -> None:
    if config.kv_format is None:
        return
    layout = paged.layout.with_kv_format(config.kv_format, config.kv_cache_dtype_skip_layers)
    paged.layout = layout
    name, kept = config.kv_format.name, [spec for spec in layout.attention if not spec.kv_format]
    if any(spec.latent for spec in kept):
        logger.warning("kv_cache_dtype %r: latents (MLA) are kept as the model computes", name)
    if layout.has_states:
        logger.info("kv_cache_dtype %r: recurrent states are kept as the model computes", name)


def make_runner(
    paged: PagedModel,
    config: EngineConfig,
    kv_config: KVCacheConfig,
    model: LoadedModel,
    masks: MaskSource,
) -> ModelRunner:
    """Makes the runner that the options name: for generation or for pooling.

    Raises:
        UnsupportedModelError: The model cannot be pooled.
        InvalidParameterError: More dimensions than its hidden states have.
    """
    pooler = config.pooler
    if pooler is None:
        media = None
        if model.media is not None:
            rope = model.media.uses_rope_positions
            media = StepMediaBuilder(paged.encode, uses_rope_positions=rope)
        return ModelRunner(paged, windows=kv_config.windows, media=media, masks=masks)
    assert pooler.pooling_type is not None
    try:
        runner = PoolingRunner(paged, pooler.pooling_type, windows=kv_config.windows)
    except ValueError as error:
        raise UnsupportedModelError(model.model_type, str(error)) from error
    check_dimensions_fit("pooler_config.dimensions", pooler.dimensions, runner.hidden_size)
    return runner


def make_classifier(
    paged: PagedModel, model: LoadedModel, config: EngineConfig, tokenizer: Any
) -> Classifier | None:
    """Makes the classifier of a model that classifies texts or scores pairs; None for others.

    Raises:
        InvalidParameterError: A token of `classifier_from_token` that the model does not have.
    """
    if model.head is not None:
        return Classifier(model.head)
    pooler = config.pooler
    if pooler is None or pooler.classifier_from_token is None:
        return None
    vocabulary = tokenizer.get_vocab()
    ids = []
    for token in pooler.classifier_from_token:
        if vocabulary.get(token, model.vocab_size) >= model.vocab_size:
            expected = "tokens of the model's vocabulary"
            raise InvalidParameterError("pooler_config.classifier_from_token", expected, token)
        ids.append(vocabulary[token])
    return Classifier.of(paged, ids)


def feature_bytes(model: LoadedModel) -> int | None:
    """Estimates the bytes of one row's features before any are made; None: unknown."""
    if model.media is None:
        return None
    inner = model.config.get("text_config")
    config = inner if isinstance(inner, dict) and "hidden_size" in inner else model.config
    hidden_size = config.get("hidden_size")
    return hidden_size * 4 if isinstance(hidden_size, int) and hidden_size > 0 else None
