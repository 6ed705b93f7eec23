"""Shared parts of draft heads: their files, the model's embeddings, and their own paged caches."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.errors import ModelLoadError
from mlx_paged.model.layout import Mode
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.wrap import convert_to_paged

Config = TypeVar("Config")


def input_embeddings(model: nn.Module) -> tuple[nn.Module, int]:
    """Returns a model's input embeddings and their size.

    Raises:
        ValueError: It has none, or several and none named `embed_tokens`.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))
    ]
    named = [module for name, module in found if name.endswith("embed_tokens")]
    modules = named or [module for _, module in found]
    if len(modules) != 1:
        raise ValueError(f"the model has {len(modules)} input embeddings, and one is expected")
    [module] = modules
    return module, int(module(mx.zeros((1,), dtype=mx.int32)).shape[-1])


def read_config(path: Path, kind: str, of: Callable[[Mapping[str, Any]], Config]) -> Config:
    """Reads a head's ``config.json``.

    Args:
        path: A directory.
        kind: Name of such heads, for the error.
        of: Makes the head's options. It may raise KeyError, TypeError or ValueError.

    Raises:
        ModelLoadError: The file is unreadable, incomplete, or describes another kind of model.
    """
    try:
        config = json.loads((path / "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
        return of(config)
    except (AttributeError, OSError, KeyError, TypeError, ValueError) as error:
        why = str(error) if isinstance(error, ValueError) else repr(error)
        reason = f"its config.json does not describe {kind}: {why}"
        raise ModelLoadError(str(path), reason) from error


def read_weights(path: Path) -> dict[str, mx.array]:
    """Returns all weights of a directory.

    Raises:
        ValueError: It has no safetensors files.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(
            "it has no safetensors files (convert pytorch_model.bin with safetensors.torch)"
        )
    weights: dict[str, mx.array] = {}
    for file in files:
        weights.update(mx.load(str(file)))  # type: ignore[arg-type]
    return weights


def page_head(
    head: nn.Module, target: PagedModel, feedback_layer: int | None, mode: Mode = Mode.NATIVE
) -> PagedModel:
    """Converts a head to paged caches.

    Args:
        target: The model that it drafts for.
        feedback_layer: Layer id of its own states that the next draft reads, see `Taps`; None if
            it reads none.
        mode: Mode of its layers.

    Raises:
        UnsupportedModelError: It does not run in this mode.
    """
    paged = convert_to_paged(
        head,
        str(head.model_type),
        modes=[mode],
        block_size=target.block_size,
        platform=target.platform,
    )
    paged.repeats_steps = target.repeats_steps
    if feedback_layer is not None:
        paged.tap([feedback_layer])
    return paged
