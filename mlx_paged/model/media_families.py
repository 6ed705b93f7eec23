"""Which of mlx-vlm's families are proven with media, how each is run, and which are refused.

A family is a package of `mlx_vlm.models`. `tests/model/test_media_families.py` holds each of these
to mlx-vlm's own generation, with pictures cut by chunks and beside other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_paged.model.layout import Mode
from mlx_paged.model.media import Kind, MediaFeatures

#: What the table was proven with.
MLX_VLM_VERSION = "0.7.10"

# The model, what the item is, and its arrays -> its features.
Tower = Callable[[Any, Kind, Mapping[str, Any]], MediaFeatures]


@dataclass(frozen=True)
class MediaFamily:
    """How a family is run.

    Attributes:
        module: Package of mlx-vlm.
        kinds: What its prompts may hold.
        mode: How the language model runs.
        uses_rope_positions: Its RoPE turns by time, height and width.
        tower: Makes an item's features; None: the model's own `get_input_embeddings` over the
            item's span does.
        atomic: Kinds whose positions see each other, so that a span is computed in one step.
    """

    module: str
    kinds: tuple[Kind, ...] = ("image",)
    mode: Mode = Mode.NATIVE
    uses_rope_positions: bool = False
    tower: Tower | None = None
    atomic: tuple[Kind, ...] = ()


def _pixels(kind: Kind, arrays: Mapping[str, Any]) -> tuple[mx.array, mx.array]:
    """Patches and grid of a picture or a video of Qwen's processors."""
    if kind == "video":
        return arrays["pixel_values_videos"], arrays["video_grid_thw"]
    return arrays["pixel_values"], arrays["image_grid_thw"]


def _qwen2_tower(vlm: Any, kind: Kind, arrays: Mapping[str, Any]) -> MediaFeatures:
    pixels, grid = _pixels(kind, arrays)
    tower = vlm.vision_tower
    pixels = pixels.astype(tower.patch_embed.proj.weight.dtype)
    return MediaFeatures(tower(pixels, grid, output_hidden_states=False))


def _qwen3_tower(vlm: Any, kind: Kind, arrays: Mapping[str, Any]) -> MediaFeatures:
    pixels, grid = _pixels(kind, arrays)
    tower = vlm.vision_tower
    embeds, deepstack = tower(pixels.astype(tower.patch_embed.proj.weight.dtype), grid)
    return MediaFeatures(embeds, tuple(deepstack or ()))


_PICTURES_AND_VIDEOS: tuple[Kind, ...] = ("image", "video")


def _qwen(module: str, tower: Tower, mode: Mode = Mode.NATIVE) -> MediaFamily:
    return MediaFamily(module, _PICTURES_AND_VIDEOS, mode, True, tower)


_FAMILIES = (
    _qwen("qwen2_vl", _qwen2_tower),
    _qwen("qwen2_5_vl", _qwen2_tower),
    _qwen("qwen3_vl", _qwen3_tower),
    _qwen("qwen3_vl_moe", _qwen3_tower),
    _qwen("qwen3_5", _qwen3_tower, Mode.REGROUPED),
    _qwen("qwen3_5_moe", _qwen3_tower, Mode.REGROUPED),
    MediaFamily("gemma3"),
    MediaFamily("idefics3"),
    MediaFamily("smolvlm"),
    MediaFamily("llava"),
)

#: Proven families by their package of mlx-vlm.
MEDIA_FAMILIES: dict[str, MediaFamily] = {family.module: family for family in _FAMILIES}

#: Multimodal families of mlx-vlm that are refused, and why.
MEDIA_REFUSED: dict[str, str] = {
    "mllama": (
        "its layers attend to the picture through cross-attention, which has keys of its own "
        "beside the paged cache"
    ),
    "florence2": "it is an encoder-decoder model, whose decoder attends to an encoder's output",
    "diffusion_gemma": "it makes text by diffusion, not token by token",
}

# Names of configs whose package has another one (as in mlx-vlm's own table).
_PACKAGES = {
    "lfm2-vl": "lfm2_vl",
    "llava-qwen2": "llava_bunny",
    "bunny-llama": "llava_bunny",
    "cohere2_vision": "aya_vision",
}
# What a config of a multimodal model has.
_SECTIONS = ("vision_config", "audio_config")


def package_of(config: Mapping[str, Any]) -> str | None:
    """mlx-vlm's package for a multimodal ``config.json``; None: it describes a text model."""
    name = str(config.get("model_type", "")).lower()
    name = _PACKAGES.get(name, name)
    if any(config.get(section) for section in _SECTIONS) or name in _WITHOUT_SECTIONS:
        return name
    return None


# Multimodal families whose configs have no section of their own for a tower.
_WITHOUT_SECTIONS: frozenset[str] = frozenset()
