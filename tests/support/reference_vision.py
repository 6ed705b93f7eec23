"""Configs of small multimodal transformers models, which `reference_answers` builds.

The oracle of `test_media_families.py` is mlx-vlm, which cannot reveal its own deviations from the
code that a model was published with. Here, transformers is the reference. Configs are shaped like
published ones: text fields appear only in their section, widths and depths of the two models
differ, and a tower has several layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import numpy as np

try:
    import transformers
except ImportError:
    transformers = None

_VOCAB = 400
_TEXT = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "intermediate_size": 80,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": _VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_VISION = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "num_channels": 3,
}
_NO_HEAD = {"vision_use_head": False}
_QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]


@dataclass(frozen=True)
class Reference:
    """A family.

    Attributes:
        checkpoint: Name in `ALL_CHECKPOINTS`; provides tokenizer and processor.
        model: transformers' class.
        config: Makes transformers' config from the ids of special tokens.
        token_types: Argument with the token types of items: its name, and the values by kind.
        joins: Combines the processor's arrays of several items into a prompt's; None: concatenates
            them.
        tolerance: Tolerance of log-probabilities.
        videos: Compare prompts with videos.
        logit_scale: A factor that transformers omits since version 5.
        without: Prompts that transformers' model or processor does not accept.
        pictures_first: The model needs images before the text.
        sounds: Compare prompts with sounds.
        generates: The part of transformers' model that generates text.
        running: Context for running the models: replaces large towers, or fixes transformers.
    """

    checkpoint: str
    model: str
    config: Callable[[Mapping[str, int]], Any]
    token_types: str | None = None
    joins: Callable[[dict[str, list[np.ndarray]]], dict[str, np.ndarray]] | None = None
    tolerance: float = 2e-4
    videos: bool = False
    logit_scale: float = 1.0
    without: tuple[str, ...] = ()
    pictures_first: bool = False
    sounds: bool = False
    generates: Callable[[Any], Any] = lambda model: model
    running: Callable[[], AbstractContextManager[Any]] = nullcontext

    def made(self) -> Any:
        """transformers' class."""
        return _made(self.model)


def _made(name: str) -> Any:
    return getattr(transformers, name)


def _text(name: str, **changes: Any) -> Any:
    return _made(f"{name}Config")(**{**_TEXT, **changes})


def _ids(ids: Mapping[str, int], names: Mapping[str, str]) -> dict[str, int]:
    return {field: ids[token] for field, token in names.items()}


def _llava(ids: Mapping[str, int]) -> Any:
    return _made("LlavaConfig")(
        text_config=_text("Llama"),
        vision_config=_made("CLIPVisionConfig")(**_VISION, projection_dim=32),
        image_token_index=ids["<image>"],
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )


def _deepseek_vl(ids: Mapping[str, int]) -> Any:
    return _made("DeepseekVLConfig")(
        text_config=_text("Llama"),
        vision_config=_made("SiglipVisionConfig")(
            **_VISION, **_NO_HEAD, hidden_act="gelu", layer_norm_eps=1e-6
        ),
        image_token_id=ids["<image_placeholder>"],
        tie_word_embeddings=False,
    )


def _llava_next(ids: Mapping[str, int]) -> Any:
    return _made("LlavaNextConfig")(
        text_config=_text("Mistral", sliding_window=None),
        vision_config=_made("CLIPVisionConfig")(**_VISION, projection_dim=32),
        image_token_index=ids["<image>"],
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_grid_pinpoints=_PINPOINTS,
    )


def _llava_onevision(ids: Mapping[str, int]) -> Any:
    return _made("LlavaOnevisionConfig")(
        text_config=_text("Qwen2"),
        vision_config=_made("SiglipVisionConfig")(**_VISION, **_NO_HEAD),
        image_token_index=ids["<image>"],
        video_token_index=ids["<|im_start|>"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_grid_pinpoints=_PINPOINTS,
    )


def _gemma3(ids: Mapping[str, int]) -> Any:
    return _made("Gemma3Config")(
        text_config=_made("Gemma3TextConfig")(
            **{**_TEXT, "num_hidden_layers": 4},
            head_dim=16,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"] * 2,
            query_pre_attn_scalar=16,
        ),
        vision_config=_made("SiglipVisionConfig")(**_VISION, **_NO_HEAD),
        mm_tokens_per_image=4,
        **_ids(
            ids,
            {
                "image_token_index": "<image_soft_token>",
                "boi_token_index": "<start_of_image>",
                "eoi_token_index": "<end_of_image>",
            },
        ),
    )


def _idefics2(ids: Mapping[str, int]) -> Any:
    return _made("Idefics2Config")(
        text_config=_text("Mistral", sliding_window=None),
        vision_config={k: v for k, v in _VISION.items() if k != "num_channels"},
        perceiver_config={
            "resampler_n_latents": 6,
            "resampler_depth": 2,
            "resampler_n_heads": 2,
            "resampler_head_dim": 8,
            "num_key_value_heads": 1,
            "hidden_size": 48,
        },
        image_token_id=ids["<image>"],
        pad_token_id=ids["<pad>"],
    )


def _idefics3(name: str) -> Callable[[Mapping[str, int]], Any]:
    return lambda ids: _made(f"{name}Config")(
        text_config=_text("Llama", pad_token_id=ids["<pad>"]),
        vision_config=_VISION,
        image_token_id=ids["<image>"],
        scale_factor=2,
        pad_token_id=ids["<pad>"],
    )


def _paligemma(ids: Mapping[str, int]) -> Any:
    return _made("PaliGemmaConfig")(
        text_config=_text(
            "Gemma", head_dim=16, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True
        ),
        vision_config=_made("SiglipVisionConfig")(**_VISION, projection_dim=48, **_NO_HEAD),
        image_token_index=ids["<image>"],
        projection_dim=48,
        pad_token_id=ids["<pad>"],
    )


def _pixtral_vision() -> Any:
    return _made("PixtralVisionConfig")(
        **{**_VISION, "image_size": 112}, head_dim=16, hidden_act="silu"
    )


def _mistral3(ids: Mapping[str, int]) -> Any:
    return _made("Mistral3Config")(
        text_config=_text("Mistral", head_dim=16, sliding_window=None),
        vision_config=_pixtral_vision(),
        image_token_index=ids["[IMG]"],
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )


def _pixtral(ids: Mapping[str, int]) -> Any:
    return _made("LlavaConfig")(
        text_config=_text("Mistral", head_dim=16, sliding_window=None),
        vision_config=_pixtral_vision(),
        image_token_index=ids["[IMG]"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )


def _aya(name: str) -> Callable[[Mapping[str, int]], Any]:
    def config(ids: Mapping[str, int]) -> Any:
        text = {k: v for k, v in _TEXT.items() if k not in ("rms_norm_eps", "tie_word_embeddings")}
        more = {"vision_feature_layer": -1} if name == "AyaVision" else {}
        return _made(f"{name}Config")(
            text_config=_made("Cohere2Config")(
                **{**text, "num_hidden_layers": 4},
                sliding_window=16,
                layer_types=["sliding_attention", "full_attention"] * 2,
            ),
            vision_config=_made("SiglipVisionConfig")(**_VISION, **_NO_HEAD),
            downsample_factor=2,
            image_token_index=ids["<|IMG_PATCH|>"],
            image_token_id=ids["<|IMG_PATCH|>"],
            alignment_intermediate_size=64,
            **more,
        )

    return config


def _rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


def _qwen2(ids: Mapping[str, int]) -> Any:
    return _made("Qwen2VLConfig")(
        text_config={**_TEXT, "rope_parameters": _rope(mrope_section=[2, 3, 3])},
        vision_config={
            "depth": 3,
            "embed_dim": 32,
            "hidden_size": 48,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
        },
        **_ids(ids, _QWEN_IDS),
    )


def _qwen25(ids: Mapping[str, int]) -> Any:
    return _made("Qwen2_5_VLConfig")(
        text_config={**_TEXT, "rope_parameters": _rope(mrope_section=[2, 3, 3])},
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 48,
            "num_heads": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
            "in_channels": 3,
        },
        **_ids(ids, _QWEN_IDS),
    )


_QWEN3_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 48,
    "num_heads": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "in_channels": 3,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}


def _qwen3(name: str, **text: Any) -> Callable[[Mapping[str, int]], Any]:
    rope = _rope(mrope_section=[2, 3, 3], mrope_interleaved=True)
    return lambda ids: _made(name)(
        text_config={**_TEXT, "head_dim": 16, "rope_parameters": rope, **text},
        vision_config={**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
        **_ids(ids, _QWEN_IDS),
    )


def _qwen35(name: str, **text: Any) -> Callable[[Mapping[str, int]], Any]:
    rope = _rope(mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.5)
    return lambda ids: _made(name)(
        text_config={
            **_TEXT,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "rope_parameters": rope,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 1,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            **text,
        },
        vision_config=_QWEN3_VISION,
        **_ids(ids, _QWEN_IDS),
    )


def _glm(name: str, **text: Any) -> Callable[[Mapping[str, int]], Any]:
    rope = _rope(mrope_section=[2, 1, 1], partial_rotary_factor=0.5)
    return lambda ids: _made(name)(
        text_config={**_TEXT, "pad_token_id": 0, "rope_parameters": rope, **text},
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 48,
            "num_heads": 2,
            "image_size": 112,
            "patch_size": 14,
            "in_channels": 3,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        **_ids(
            ids,
            {
                "image_token_id": "<|image|>",
                "video_token_id": "<|video|>",
                "image_start_token_id": "<|begin_of_image|>",
                "image_end_token_id": "<|end_of_image|>",
                "video_start_token_id": "<|begin_of_video|>",
                "video_end_token_id": "<|end_of_video|>",
            },
        ),
    )


_GLM_MOE = {
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


def _internvl(ids: Mapping[str, int]) -> Any:
    return _made("InternVLConfig")(
        text_config=_text("Qwen3", head_dim=16),
        vision_config={
            **_VISION,
            "image_size": [56, 56],
            "patch_size": [14, 14],
        },
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=4,
        downsample_ratio=0.5,
    )


def _lfm2(ids: Mapping[str, int]) -> Any:
    text = {k: v for k, v in _TEXT.items() if k not in ("rms_norm_eps", "tie_word_embeddings")}
    return _made("Lfm2VlConfig")(
        text_config=_made("Lfm2Config")(
            **{**text, "num_hidden_layers": 4},
            layer_types=["conv", "full_attention"] * 2,
            block_multiple_of=8,
        ),
        vision_config=_made("Siglip2VisionConfig")(
            **{k: v for k, v in _VISION.items() if k not in ("image_size", "patch_size")},
            patch_size=16,
            num_patches=64,
            **_NO_HEAD,
        ),
        image_token_id=ids["<image>"],
        projector_hidden_size=40,
        downsample_factor=2,
    )


def _paddleocr(ids: Mapping[str, int]) -> Any:
    return _made("PaddleOCRVLConfig")(
        text_config={
            **_TEXT,
            "hidden_size": 1024,  # the only size that mlx-vlm supports
            "head_dim": 16,
            "use_bias": False,
            "rope_parameters": _rope(mrope_section=[2, 3, 3]),
        },
        vision_config={**_VISION, "spatial_merge_size": 2},
        image_token_id=ids["<|IMAGE_PLACEHOLDER|>"],
        vision_start_token_id=ids["<|IMAGE_START|>"],
        vision_end_token_id=ids["<|IMAGE_END|>"],
    )


def _padded_tiles(arrays: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    """LLaVA NeXT's tiles, padded to the largest number per image."""
    tiles = [a.reshape(-1, *a.shape[-3:]) for a in arrays["pixel_values"]]
    most = max(map(len, tiles))
    filled = [np.pad(a, [(0, most - len(a)), (0, 0), (0, 0), (0, 0)]) for a in tiles]
    return {"pixel_values": np.stack(filled), "image_sizes": np.concatenate(arrays["image_sizes"])}


def _tiles(arrays: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    """The tiles of all images, concatenated."""
    pixels = [a.reshape(-1, *a.shape[-3:]) for a in arrays["pixel_values"]]
    return {"pixel_values": np.concatenate(pixels)}


def _patches(arrays: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    """``[patches, 3, size, size]`` of all images."""
    pixels = [a.reshape(-1, *a.shape[-3:]) for a in arrays["pixel_values"]]
    grids = [np.reshape(a, (-1, 3)) for a in arrays["image_grid_thw"]]
    return {"pixel_values": np.concatenate(pixels), "image_grid_thw": np.concatenate(grids)}


def _sized(arrays: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    """Pixtral's images, padded to the largest, with each image's size."""
    pixels = [a.reshape(3, *a.shape[-2:]) for a in arrays["pixel_values"]]
    height, width = (max(a.shape[axis] for a in pixels) for axis in (-2, -1))
    filled = [
        np.pad(a, [(0, 0), (0, height - a.shape[1]), (0, width - a.shape[2])]) for a in pixels
    ]
    sizes = np.array([a.shape[-2:] for a in pixels])
    return {"pixel_values": np.stack(filled), "image_sizes": sizes}


def _one_prompt(arrays: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    """``[1, images, ...]``, padded to the largest, from Idefics' processors."""
    pixels = [a.reshape(-1, *a.shape[-3:]) for a in arrays["pixel_values"]]
    masks = [a.reshape(-1, *a.shape[-2:]) for a in arrays["pixel_attention_mask"]]
    height, width = (max(a.shape[axis] for a in pixels) for axis in (-2, -1))

    def filled(array: np.ndarray) -> np.ndarray:
        none = [(0, 0)] * (array.ndim - 2)
        return np.pad(array, [*none, (0, height - array.shape[-2]), (0, width - array.shape[-1])])

    return {
        "pixel_values": np.concatenate([filled(a) for a in pixels])[None],
        "pixel_attention_mask": np.concatenate([filled(a) for a in masks])[None],
    }


_MM = "mm_token_type_ids"

REFERENCES: dict[str, Reference] = {
    "llava": Reference("llava", "LlavaForConditionalGeneration", _llava),
    "deepseek_vl": Reference("deepseek_vl", "DeepseekVLForConditionalGeneration", _deepseek_vl),
    "llava_next": Reference(
        "llava_next", "LlavaNextForConditionalGeneration", _llava_next, joins=_padded_tiles
    ),
    "llava_onevision": Reference(
        "llava_onevision",
        "LlavaOnevisionForConditionalGeneration",
        _llava_onevision,
        joins=_padded_tiles,
    ),
    "gemma3": Reference(
        "gemma3", "Gemma3ForConditionalGeneration", _gemma3, token_types="token_type_ids"
    ),
    "idefics2": Reference(
        "idefics2", "Idefics2ForConditionalGeneration", _idefics2, joins=_one_prompt
    ),
    "idefics3": Reference(
        "idefics3", "Idefics3ForConditionalGeneration", _idefics3("Idefics3"), joins=_one_prompt
    ),
    "smolvlm": Reference(
        "smolvlm", "SmolVLMForConditionalGeneration", _idefics3("SmolVLM"), joins=_one_prompt
    ),
    "paligemma": Reference(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        _paligemma,
        pictures_first=True,
    ),
    "mistral3": Reference(
        "mistral3", "Mistral3ForConditionalGeneration", _mistral3, joins=_sized, without=("tiny",)
    ),
    "pixtral": Reference("pixtral", "LlavaForConditionalGeneration", _pixtral, joins=_sized),
    "aya_vision": Reference(
        "aya_vision", "AyaVisionForConditionalGeneration", _aya("AyaVision"), logit_scale=0.0625
    ),
    "cohere2_vision": Reference(
        "aya_vision",
        "Cohere2VisionForConditionalGeneration",
        _aya("Cohere2Vision"),
        logit_scale=0.0625,
    ),
    "qwen2_vl": Reference("qwen2_vl", "Qwen2VLForConditionalGeneration", _qwen2, _MM, videos=True),
    "qwen2_5_vl": Reference(
        "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", _qwen25, _MM, videos=True
    ),
    "qwen3_vl": Reference(
        "qwen3_vl", "Qwen3VLForConditionalGeneration", _qwen3("Qwen3VLConfig"), _MM, videos=True
    ),
    "qwen3_vl_moe": Reference(
        "qwen3_vl",
        "Qwen3VLMoeForConditionalGeneration",
        _qwen3("Qwen3VLMoeConfig", **_EXPERTS),
        _MM,
        videos=True,
    ),
    "qwen3_5": Reference(
        "qwen3_5", "Qwen3_5ForConditionalGeneration", _qwen35("Qwen3_5Config"), _MM, videos=True
    ),
    "qwen3_5_moe": Reference(
        "qwen3_5",
        "Qwen3_5MoeForConditionalGeneration",
        _qwen35("Qwen3_5MoeConfig", **_EXPERTS, shared_expert_intermediate_size=16),
        _MM,
        videos=True,
    ),
    "glm4v": Reference("glm4v", "Glm4vForConditionalGeneration", _glm("Glm4vConfig"), _MM),
    "glm4v_moe": Reference(
        "glm4v_moe",
        "Glm4vMoeForConditionalGeneration",
        _glm("Glm4vMoeConfig", **_GLM_MOE),
        _MM,
    ),
    "glm_ocr": Reference(
        "glm_ocr",
        "GlmOcrForConditionalGeneration",
        _glm(
            "GlmOcrConfig",
            head_dim=16,
            rope_parameters=_rope(mrope_section=[2, 3, 3], partial_rotary_factor=1.0),
        ),
        _MM,
    ),
    "internvl": Reference("internvl", "InternVLForConditionalGeneration", _internvl, joins=_tiles),
    "lfm2_vl": Reference("lfm2_vl", "Lfm2VlForConditionalGeneration", _lfm2),
    "paddleocr_vl": Reference(
        "paddleocr_vl",
        "PaddleOCRVLForConditionalGeneration",
        _paddleocr,
        _MM,
        joins=_patches,
    ),
}
