"""mlx-vlm's families: those verified with media, with the way each is run, and those refused.

A family is a package of `mlx_vlm.models`. `tests/multimodal/test_media_families.py` compares each
with mlx-vlm's own generation, with pictures cut by chunks and in batches with other requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.content import Kind
from mlx_paged.model.layout import Mode
from mlx_paged.model.media import MediaFeatures

# (model, item, its arrays) -> its features.
Tower = Callable[[Any, Kind, Mapping[str, Any]], MediaFeatures]
# (model, rows of a step ``[T, 1]``, T, their features) -> inputs of the language model.
Deepstack = Callable[[Any, mx.array, int, MediaFeatures], dict[str, Any]]


def _rows_and_features(
    vlm: Any, rows: mx.array, num_rows: int, features: MediaFeatures
) -> dict[str, Any]:
    """Returns rows and features; `multimodal.model` makes mlx-vlm's models add one to the other."""
    return {
        "visual_pos_masks": rows[:, None],
        "deepstack_visual_embeds": list(features.deepstack),
    }


@dataclass(frozen=True)
class MediaFamily:
    """How a family is run.

    Attributes:
        module: Package of mlx-vlm.
        kinds: Media that its prompts may have.
        mode: Mode of the language model.
        uses_rope_positions: True if its RoPE uses time, height and width.
        has_fractions: True if these positions may be fractions, for a video's frames and later
            tokens.
        takes_positions: True if its language model always gets positions; without them, it keeps
            those of one request on itself.
        embeds: Makes input embeddings of ``[B, L]`` tokens, for a model that needs these for text,
            too; None uses `get_input_embeddings` if some rows have features.
        tower: Makes an item's features; None uses the model's own `get_input_embeddings` over the
            item's span.
        prepare: Changes the arrays of an item before its encoder takes them.
        deepstack: How features reach later layers, if an item has such features.
        refuses: Why a checkpoint of the family is not served; None if it is.
        atomic: From mlx-vlm's config: kinds whose positions see each other, so that a span is
            computed in one step.
        sees_within_windows: True if they do so only within the windows of layers with one; all
            other layers are causal.
        sees_whole_prompt: True if an item's span is its whole prompt without other items: all
            positions of a prompt see each other.
    """

    module: str
    kinds: tuple[Kind, ...] = ("image",)
    mode: Mode = Mode.NATIVE
    uses_rope_positions: bool = False
    has_fractions: bool = False
    takes_positions: bool = False
    embeds: Callable[[Any, mx.array], mx.array] | None = None
    tower: Tower | None = None
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict
    deepstack: Deepstack = _rows_and_features
    refuses: Callable[[Any], str | None] = lambda vlm: None
    atomic: Callable[[Any], tuple[Kind, ...]] = lambda config: ()
    sees_within_windows: bool = False
    sees_whole_prompt: bool = False

    @property
    def adds_to_layers(self) -> bool:
        """True if some of its features are added to the output of later layers."""
        return self.deepstack is not _rows_and_features


def _embed_tokens(vlm: Any, tokens: mx.array) -> mx.array:
    # `get_input_embeddings` would also compute positions, on the host.
    return vlm.language_model.model.embed_tokens(tokens)


def _gemma3n_embeds(vlm: Any, tokens: mx.array) -> mx.array:
    """Gives marks around items, whose ids are beyond those of text, the encoders' embeddings."""
    found = _embed_tokens(vlm, tokens) * vlm.language_model.model.hidden_size**0.5
    image, audio = vlm.embed_vision, vlm.embed_audio
    for embedder, is_own in (
        (image, (tokens >= image.vocab_offset) & (tokens < audio.vocab_offset)),
        (audio, tokens >= audio.vocab_offset),
    ):
        ids = mx.where(is_own, tokens, embedder.vocab_offset)
        found = mx.where(is_own[..., None], embedder(input_ids=ids), found)
    return found


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


def _omni_tower(vlm: Any, kind: Kind, arrays: Mapping[str, Any]) -> MediaFeatures:
    if kind == "audio":
        names = ("input_features", "feature_attention_mask", "audio_feature_lengths")
        given = {name: arrays[name] for name in names if name in arrays}
        return MediaFeatures(vlm.thinker.get_audio_features(**given))
    return _qwen3_tower(vlm.thinker, kind, arrays)


def _llava_next_tower(vlm: Any, kind: Kind, arrays: Mapping[str, Any]) -> MediaFeatures:
    """Joins a picture with its tiles, without padding, each line with an end.

    As in Hugging Face's `pack_image_features`; mlx-vlm's own forward has another layout.
    """
    pixels = arrays["pixel_values"]
    tiles = pixels.reshape(-1, *pixels.shape[-3:])  # the first is the whole
    *_, states = vlm.vision_tower(tiles.transpose(0, 2, 3, 1), output_hidden_states=True)
    selected = states[vlm.vision_feature_layer]
    if vlm.vision_feature_select_strategy == "default":
        selected = selected[:, 1:]
    features = vlm.multi_modal_projector(selected)  # [tiles, side * side, hidden]
    newline = vlm.image_newline.astype(features.dtype)
    if features.shape[0] == 1:
        return MediaFeatures(mx.concatenate([features[0], newline[None]]))
    [[height, width]] = np.array(arrays["image_sizes"]).tolist()
    rows, columns = np.array(arrays["tile_grid"]).tolist()
    side = math.isqrt(features.shape[1])
    lines = features[1:].reshape(rows, columns, side, side, -1).transpose(0, 2, 1, 3, 4)
    lines = lines.reshape(rows * side, columns * side, -1)
    if width / height > columns / rows:
        shown = int(round(height * (columns * side / width), 7))
        padding = (rows * side - shown) // 2
        lines = lines[padding : rows * side - padding]
    else:
        shown = int(round(width * (rows * side / height), 7))
        padding = (columns * side - shown) // 2
        lines = lines[:, padding : columns * side - padding]
    ends = mx.broadcast_to(newline, (lines.shape[0], 1, lines.shape[2]))
    lines = mx.concatenate([lines, ends], axis=1).reshape(-1, lines.shape[2])
    return MediaFeatures(mx.concatenate([features[0], lines]))


def _reason_of_adapters(vlm: Any) -> str | None:
    if not getattr(vlm, "_base_weights", None):
        return None
    return (
        "this checkpoint has separate weights (LoRA) of its language model for pictures and for "
        "sounds, so requests cannot share a step; mlx-vlm merges them when it quantizes "
        "(mlx_vlm.convert -q)"
    )


class _Rows:
    """Rows of a step where mlx-vlm slices a whole prompt: any slice of it is all rows."""

    def __init__(self, array: mx.array) -> None:
        self._array = array

    def __getitem__(self, index: Any) -> mx.array:
        return self._array


def _granite_deepstack(
    vlm: Any, rows: mx.array, num_rows: int, features: MediaFeatures
) -> dict[str, Any]:
    def spread(part: mx.array) -> _Rows:
        return _Rows(mx.zeros((num_rows, 1, part.shape[-1]), part.dtype).at[rows, 0].add(part))

    config = vlm.config
    # mlx-vlm sets these for the last prompt with a picture only.
    vlm.language_model.model._deepstack_target_layers = [
        *(layer for _, layer in config.deepstack_layer_map or ()),
        *(config.spatial_target_layers or ()),
    ]
    mask = mx.zeros((num_rows, 1), mx.int32).at[rows, 0].add(1) > 0
    return {
        "visual_pos_masks": _Rows(mask),
        "deepstack_visual_embeds": [spread(part) for part in features.deepstack],
    }


def _pad_crops(arrays: dict[str, Any]) -> dict[str, Any]:
    """Pads crops with zeros: mlx-vlm reads as many as there are tiles, until one of zeros."""
    crops, tiles = arrays["images_spatial_crop"], arrays["pixel_values"].shape[1]
    missing = tiles + 1 - crops.shape[1]
    return {**arrays, "images_spatial_crop": mx.pad(crops, [(0, 0), (0, missing), (0, 0)])}


def _gemma4_atomic(config: Any) -> tuple[Kind, ...]:
    sees = config.text_config.use_bidirectional_attention == "vision"
    return ("image", "video") if sees else ()


def _paligemma_atomic(config: Any) -> tuple[Kind, ...]:
    return ("image",) if config.text_config.use_bidirectional_attention else ()


_PICTURES_AND_VIDEOS: tuple[Kind, ...] = ("image", "video")


def _qwen(module: str, tower: Tower, mode: Mode = Mode.NATIVE) -> MediaFamily:
    return MediaFamily(
        module,
        _PICTURES_AND_VIDEOS,
        mode,
        uses_rope_positions=True,
        takes_positions=True,
        embeds=_embed_tokens,
        tower=tower,
    )


def _with_rope_positions(module: str) -> MediaFamily:
    return MediaFamily(module, uses_rope_positions=True, takes_positions=True, embeds=_embed_tokens)


_FAMILIES = (
    _qwen("qwen2_vl", _qwen2_tower),
    _qwen("qwen2_5_vl", _qwen2_tower),
    _qwen("qwen3_vl", _qwen3_tower),
    _qwen("qwen3_vl_moe", _qwen3_tower),
    _qwen("qwen3_5", _qwen3_tower, Mode.REGROUPED),
    _qwen("qwen3_5_moe", _qwen3_tower, Mode.REGROUPED),
    # mlx-vlm has a causal mask over pictures, but the model was trained with another.
    MediaFamily("gemma3", atomic=lambda config: ("image",)),
    MediaFamily("idefics3"),
    MediaFamily("smolvlm"),
    MediaFamily("llava"),
    MediaFamily("llava_next", tower=_llava_next_tower),
    MediaFamily("llava_bunny"),
    MediaFamily("pixtral"),
    MediaFamily("mistral3"),
    MediaFamily("idefics2"),
    MediaFamily("internvl_chat"),
    # mlx-vlm's pictures and frames see themselves in all layers; Hugging Face's do not.
    MediaFamily(
        "gemma4",
        ("image", "video", "audio"),
        atomic=_gemma4_atomic,
        sees_within_windows=True,
    ),
    # mlx-vlm's generation omits the scale of prompts' embeddings, but not that of decodes.
    MediaFamily(
        "gemma3n",
        ("image", "audio"),
        embeds=_gemma3n_embeds,
    ),
    MediaFamily(
        "qwen3_omni_moe",
        ("image", "video", "audio"),
        uses_rope_positions=True,
        has_fractions=True,
        takes_positions=True,
        embeds=_embed_tokens,
        tower=_omni_tower,
    ),
    MediaFamily("paligemma", atomic=_paligemma_atomic, sees_whole_prompt=True),
    MediaFamily("aya_vision"),
    MediaFamily("llama4"),
    MediaFamily("lfm2_vl", mode=Mode.REGROUPED),
    MediaFamily("kimi_vl"),
    MediaFamily("phi3_v", embeds=lambda vlm, tokens: vlm.model.embed_tokens(tokens)),
    MediaFamily("deepseek_vl_v2", prepare=_pad_crops),
    MediaFamily("minicpmo", takes_positions=True, embeds=_embed_tokens),
    MediaFamily("molmo"),
    _with_rope_positions("glm4v"),
    _with_rope_positions("glm4v_moe"),
    _with_rope_positions("glm_ocr"),
    _with_rope_positions("paddleocr_vl"),
    MediaFamily("dots_ocr"),
    MediaFamily("internvl"),
    MediaFamily("llava_onevision"),
    MediaFamily("kimi_k25"),
    MediaFamily("deepseekocr"),
    MediaFamily("fastvlm"),
    MediaFamily("mage_vl"),
    MediaFamily("minicpmv4_6", mode=Mode.REGROUPED, takes_positions=True, embeds=_embed_tokens),
    MediaFamily("deepseekocr_2"),
    MediaFamily("muse_glimmer"),
    MediaFamily("step3p7"),
    MediaFamily("nemotron_h_nano_omni", mode=Mode.REGROUPED),
    _qwen("indic_ocr", _qwen3_tower, Mode.REGROUPED),
    MediaFamily("gemma4_unified", ("image", "video", "audio"), atomic=_gemma4_atomic),
    MediaFamily("granite4_vision", deepstack=_granite_deepstack),
    MediaFamily("phi4mm", ("image", "audio"), embeds=_embed_tokens, refuses=_reason_of_adapters),
)

#: Proven families by their package of mlx-vlm.
MEDIA_FAMILIES: dict[str, MediaFamily] = {family.module: family for family in _FAMILIES}

_EMBEDDINGS = "it is an embedding model"
_DECISIONS = "it answers typed questions from its hidden states, and generates no text"
_NOT_COMPARED = "it has not been compared with mlx-vlm's generation"
_VISION = "it finds objects or depth in pictures, and generates no text"
_ENCODER_DECODER = "it is an encoder-decoder model, whose decoder attends to an encoder's output"
_PREFIX = "its picture and the start token attend to each other, by a mask of the whole prompt"
_WHOLE_MASK = "its forward pass takes one prompt's positions and mask, not those of a step"
_OWN_CODE = "its only processor is code in its checkpoints, which is never run"
_OWN_CACHE = "its layers cache more than keys and values"

#: Multimodal families of mlx-vlm that are refused, and why.
MEDIA_REFUSED: dict[str, str] = {
    "mllama": (
        "its layers attend to the picture through cross-attention, whose keys and values are not "
        "paged"
    ),
    "florence2": _ENCODER_DECODER,
    "nemotron_parse": _ENCODER_DECODER,
    "diffusion_gemma": "it generates by diffusion, not token by token",
    "locateanything": "it generates blocks of tokens, not token by token",
    "moss_image": "it generates pictures, not text",
    "multi_modality": "its second tower (SAM) needs opencv in mlx-vlm, or it generates pictures",
    "inkling": "mlx-vlm's code of it needs mlx-audio",
    "nemotron_voicechat": "mlx-vlm's code of it needs mlx-audio",
    "phi4_siglip": "mlx-vlm's processor of it needs torchvision",
    "llmjpvl": _OWN_CODE,
    "youtu_vl": _OWN_CODE,
    "granite_vision": (
        "mlx-vlm replaces one token by a tile and puts all line ends after the tiles, unlike the "
        "model's training"
    ),
    "hunyuan_vl": "mlx-vlm applies RoPE at one position to all rows of a step",
    "jina_vlm": "mlx-vlm applies RoPE at one position to all rows of a step",
    "ernie4_5_moe_vl": (
        "mlx-vlm sends pictures through the text experts in generation, unlike the model's training"
    ),
    "zaya1_vl": (
        "its layers have separate weights (LoRA) for rows of pictures, which they cannot tell "
        "apart in a step"
    ),
    "molmo2": (
        "all pictures of a prompt attend to each other, which mlx-vlm omits; prefill could not be "
        "chunked between them"
    ),
    "molmo_point": (
        "all pictures of a prompt attend to each other, which mlx-vlm omits; prefill could not be "
        "chunked between them"
    ),
    "moondream2": _PREFIX,
    "moondream3": _PREFIX,
    "falcon_ocr": _WHOLE_MASK,
    "falcon_perception": _WHOLE_MASK,
    "unlimited_ocr": _OWN_CACHE,
    "deepseek_v41": _OWN_CACHE,
    "glm5_next": _OWN_CACHE,
    "minimax_m3_vl": _OWN_CACHE,
    "qwen4_exp": _OWN_CACHE,
    "clef": _DECISIONS,
    "d1": _DECISIONS,
    "d1_omni": _DECISIONS,
    "colidefics3": _EMBEDDINGS,
    "colqwen2_5": _EMBEDDINGS,
    "embedding_gemma2": _EMBEDDINGS,
    "llama_nemotron_vl_embedding": _EMBEDDINGS,
    "qwen3_vl_embedding": _EMBEDDINGS,
    "siglip": _EMBEDDINGS,
    **dict.fromkeys(
        (
            "pp_doclayout_v3",
            "rfdetr",
            "rt_detr_v2",
            "sam3",
            "sam3_1",
            "sam3d_body",
            "sam3d_objects",
            "video_depth_anything",
        ),
        _VISION,
    ),
    **dict.fromkeys(
        (
            "cohere_compass",
            "got",
            "kimi_k3",
            "mimo_v2",
            "minicpmv4_7",
            "mistral_large3",
            "muse_spark",
            "plamo2vl",
            "prism_hadamard_qwen35",
        ),
        _NOT_COMPARED,
    ),
}
