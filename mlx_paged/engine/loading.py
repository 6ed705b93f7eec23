"""load: loads a model for the engine, with its towers if it is multimodal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_paged.model import loader
from mlx_paged.model.loader import LoadedModel, MultiModalCheckpoint, Shard
from mlx_paged.multimodal.packages import package_of


def load(
    path_or_hub_id: str | Path | None = None,
    *,
    dtype: str = "auto",
    generation_config: Mapping[str, Any] | None = None,
    shard: Shard | None = None,
) -> LoadedModel:
    """Loads a model for paged serving.

    Args:
        path_or_hub_id: A directory in mlx-lm's format, a GGUF file, or a Hugging Face id. None
            loads the model embedded in this package.
        dtype: "auto", "float32", "float16" or "bfloat16"; see `model.loader.load`.
        generation_config: Replaces the model's own ``generation_config.json``. Its end tokens
            become end tokens of the model, too.
        shard: See `model.loader.load`.

    Raises:
        InvalidParameterError: The generation config cannot be read.
        ModelLoadError: The path, its weights or the hub cannot be read.
        UnsupportedModelError: The family is not verified with the paged cache.
    """
    return loader.load(
        path_or_hub_id,
        dtype=dtype,
        generation_config=generation_config,
        find_multimodal=_find_multimodal,
        shard=shard,
    )


def require_served(path: Path, config: Mapping[str, Any]) -> None:
    """Refuses a family that is not served, without reading weights.

    Args:
        path: A model's directory.
        config: Its ``config.json``.

    Raises:
        UnsupportedModelError: The family is not supported.
    """
    loader.require_served(config, _find_multimodal(path, config))


def _find_multimodal(path: Path, config: Mapping[str, Any]) -> MultiModalCheckpoint | None:
    package = package_of(config)
    if package is None:
        return None
    from mlx_paged.multimodal.loading import Checkpoint  # mlx-vlm's families

    return Checkpoint(path, package)
