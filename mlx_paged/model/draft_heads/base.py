"""What draft heads share: files, the model's embeddings, and paged caches of their own."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.model.layout import Mode
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.wrap import convert_to_paged


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
    head: nn.Module, target: PagedModel, place: int | None, mode: Mode = Mode.NATIVE
) -> PagedModel:
    """Converts a head to paged caches.

    Args:
        target: The model that it drafts for.
        place: Place of its own states for the next draft, see `Taps`; None if it needs none.
        mode: How its layers run.

    Raises:
        UnsupportedModelError: It does not run so.
    """
    paged = convert_to_paged(
        head,
        str(head.model_type),
        modes=[mode],
        block_size=target.block_size,
        platform=target.platform,
    )
    paged.repeats_steps = target.repeats_steps
    if place is not None:
        paged.tap([place])
    return paged
