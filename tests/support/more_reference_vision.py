"""Configs of further small multimodal transformers models, like `reference_vision`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from support.reference_vision import (
    _EXPERTS,
    _MM,
    _PINPOINTS,
    _QWEN3_VISION,
    _QWEN_IDS,
    _TEXT,
    _VISION,
    _VOCAB,
    REFERENCES,
    Reference,
    _ids,
    _made,
    _padded_tiles,
    _qwen35,
    _rope,
    _tiles,
)


def _llama4(ids: Mapping[str, int]) -> Any:
    return _made("Llama4Config")(
        text_config={
            **_TEXT,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16,
            "floor_scale": 16,
        },
        vision_config={
            **_VISION,
            "intermediate_size": 128,
            "pixel_shuffle_ratio": 0.5,
            "projector_input_dim": 40,
            "projector_output_dim": 40,
            "vision_output_dim": 40,
        },
        image_token_index=ids["<|patch|>"],
        boi_token_index=ids["<|image_start|>"],
        eoi_token_index=ids["<|image_end|>"],
    )


@contextmanager
def _llama4_outputs() -> Iterator[None]:
    """transformers 5.24 reads a field that its text model's outputs do not have."""
    outputs = _made("modeling_outputs").MoeCausalLMOutputWithPast
    outputs.image_outputs = None
    try:
        yield
    finally:
        del outputs.image_outputs


# --- Gemma 4 --------------------------------------------------------------------------------------

_GEMMA4_TEXT = {
    **_TEXT,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
# The smallest ones, and a larger one with experts.
_GEMMA4_SMALL = {
    "vocab_size_per_layer_input": _VOCAB,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "use_bidirectional_attention": None,
}
_GEMMA4_LARGE = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "use_bidirectional_attention": "vision",
}
_GEMMA4_IDS = {
    "image_token_id": "<|image|>",
    "audio_token_id": "<|audio|>",
    "video_token_id": "<|video|>",
    "boi_token_id": "<|boi|>",
    "eoi_token_id": "<|eoi|>",
    "boa_token_id": "<|boa|>",
    "eoa_token_index": "<|eoa|>",
}


def _gemma4(text: Mapping[str, Any]) -> Callable[[Mapping[str, int]], Any]:
    is_small = text is _GEMMA4_SMALL
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "position_embedding_size": 64,
        "use_clipped_linears": is_small,
        "standardize": not is_small,
    }
    audio = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "subsampling_conv_channels": [128, 4],  # the first equals the values per audio frame
        "output_proj_dims": 24,
    }
    return lambda ids: _made("Gemma4Config")(
        text_config={**_GEMMA4_TEXT, **text},
        vision_config=vision,
        audio_config=audio if is_small else None,
        **_ids(ids, _GEMMA4_IDS),
    )


def _gemma4_frames(arrays: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    """The frames of all videos, concatenated; the model counts rows itself."""
    found = {name: np.concatenate(each) for name, each in arrays.items() if np.ndim(each[0])}
    found.pop("num_soft_tokens_per_image", None)
    found.pop("num_frames_per_video", None)
    for name in ("pixel_values_videos", "video_position_ids"):
        if name in found:
            frames = [each.reshape(-1, *each.shape[-2:]) for each in arrays[name]]
            found["num_frames_per_video"] = np.array([len(each) for each in frames])
            found[name] = np.concatenate(frames)
    return found


def _gemma4_patches(arrays: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    """Patches with their columns and rows, padded to an image's maximum number."""
    size, most = 16, 70 * 3**2
    patches, positions = [], []
    for pixels in arrays.pop("pixel_values", ()):
        _, depth, height, width = pixels.shape
        rows, columns = height // size, width // size
        cut = pixels.reshape(depth, rows, size, columns, size).transpose(1, 3, 2, 4, 0)
        none = [(0, most - rows * columns), (0, 0)]
        patches.append(np.pad(cut.reshape(rows * columns, -1), none))
        places = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1)
        positions.append(np.pad(places.reshape(-1, 2), none, constant_values=-1))
    found = _gemma4_frames(arrays)
    if patches:
        found |= {"pixel_values": np.stack(patches), "image_position_ids": np.stack(positions)}
    return found


# --- Gemma 3n -------------------------------------------------------------------------------------


def _gemma3n(ids: Mapping[str, int]) -> Any:
    first = ids["<start_of_image>"]
    return _made("Gemma3nConfig")(
        text_config={
            **_TEXT,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "vocab_size_per_layer_input": 300,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "sliding_window": 16,
            "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "final_logit_softcapping": 30.0,
            "altup_num_inputs": 2,
            "tie_word_embeddings": True,
        },
        vision_config={"hidden_size": 32, "vocab_size": 8, "vocab_offset": first},
        audio_config={
            "hidden_size": 16,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 2,
            "sscp_conv_channel_size": [8, 4],
            "vocab_size": _VOCAB - ids["<audio_soft_token>"],
            "vocab_offset": ids["<audio_soft_token>"],
        },
        vision_soft_tokens_per_image=16,
        audio_soft_tokens_per_image=12,
        image_token_id=ids["<image_soft_token>"],
        audio_token_id=ids["<audio_soft_token>"],
    )


@contextmanager
def _gemma3n_towers() -> Iterator[None]:
    """A convolution in place of MobileNet, for which transformers needs timm."""
    import torch
    from transformers import AutoModel

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 32, 14, 14)

        def forward(self, pixel_values: Any, **options: Any) -> Any:
            return SimpleNamespace(last_hidden_state=self.conv(pixel_values))

    from_config = AutoModel.from_config

    def made(config: Any, **options: Any) -> Any:
        is_tower = config.model_type == "gemma3n_vision"
        return Tower() if is_tower else from_config(config, **options)

    AutoModel.from_config = made
    try:
        yield
    finally:
        AutoModel.from_config = from_config


# --- Qwen 3 Omni ----------------------------------------------------------------------------------


def _qwen3_omni(ids: Mapping[str, int]) -> Any:
    rope = _rope(mrope_section=[2, 3, 3], mrope_interleaved=True)
    return _made("Qwen3OmniMoeConfig")(
        thinker_config={
            "text_config": {**_TEXT, "head_dim": 16, "rope_parameters": rope, **_EXPERTS},
            "vision_config": {**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
            "audio_config": {
                "d_model": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 24,
                "num_mel_bins": 128,
                "output_dim": 48,
                "downsample_hidden_size": 8,
            },
            "position_id_per_seconds": 13,
            **_ids(
                ids,
                {
                    "image_token_id": "<|image_pad|>",
                    "video_token_id": "<|video_pad|>",
                    "audio_token_id": "<|audio_pad|>",
                    "vision_start_token_id": "<|vision_start|>",
                    "vision_end_token_id": "<|vision_end|>",
                    "audio_start_token_id": "<|audio_start|>",
                    "audio_end_token_id": "<|audio_end|>",
                },
            ),
        },
        enable_audio_output=False,
    )


# --- Others ---------------------------------------------------------------------------------------


def _gemma4_unified(ids: Mapping[str, int]) -> Any:
    return _made("Gemma4UnifiedConfig")(
        text_config={
            **_GEMMA4_TEXT,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "use_bidirectional_attention": "vision",
        },
        vision_config={
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "mm_embed_dim": 40,
            "mm_posemb_size": 70,
            "output_proj_dims": 40,
        },
        audio_config={"audio_embed_dim": 640},
        **_ids(ids, _GEMMA4_IDS),
    )


def _granite4(ids: Mapping[str, int]) -> Any:
    return _made("Granite4VisionConfig")(
        text_config={
            **_TEXT,
            "num_hidden_layers": 6,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "logits_scaling": 1.5,
        },
        vision_config={
            **_VISION,
            "model_type": "siglip_vision_model",
            "hidden_size": 64,
            "num_hidden_layers": 4,
        },
        image_token_index=ids["<image>"],
        image_grid_pinpoints=_PINPOINTS,
        downsample_rate="2/4",
        deepstack_layer_map=[[-3, 1], [-1, 0]],
        spatial_target_layers=[2, 3, 4, 5],
        vision_feature_select_strategy="full",
    )


def _muse_glimmer(ids: Mapping[str, int]) -> Any:
    return _made("MuseGlimmerConfig")(
        text_config={**_TEXT, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 16},
        vision_config={
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "num_hidden_layers": 4,
        },
        out_hidden_size=128,
        projector_hidden_size=40,
        image_token_id=ids["<|patch|>"],
        video_token_id=ids["<|video|>"],
    )


def _kimi_k25(ids: Mapping[str, int]) -> Any:
    media = ("<|media_pad|>", "<|media_start|>", "<|media_end|>")
    pad, start, end = (ids[token] for token in media)
    return _made("Kimi_K25Config")(
        text_config={
            **_TEXT,
            "model_type": "deepseek_v3",
            "num_key_value_heads": 3,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "qk_nope_head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        vision_config={
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "num_attention_heads": 2,
            "num_hidden_layers": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
        },
        projection_hidden_size=32,
        image_token_id=pad,
        video_token_id=pad + 1000,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )


def _kimi_patches(arrays: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    grids = [[1, *grid.reshape(-1).tolist()] for grid in arrays["image_grid_hws"]]
    return {
        "pixel_values": np.concatenate(arrays["pixel_values"]),
        "image_grid_thw": np.array(grids),
    }


def _minicpmv(ids: Mapping[str, int]) -> Any:
    return _made("MiniCPMV4_6Config")(
        text_config=_qwen35("Qwen3_5Config")(dict.fromkeys(_QWEN_IDS.values(), 0)).text_config,
        vision_config={**_VISION, "patch_size": 14, "num_hidden_layers": 4},
        insert_layer_id=1,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
    )


def _minicpm_slices(arrays: dict[str, list[Any]]) -> dict[str, np.ndarray]:
    """The patches of all slices, concatenated."""
    slices = [each for item in arrays["pixel_values"] for each in item[0]]
    return {
        "pixel_values": np.concatenate(slices, axis=-1)[None],
        "target_sizes": np.concatenate([item[0] for item in arrays["tgt_sizes"]]),
    }


def _nemotron_omni(ids: Mapping[str, int]) -> Any:
    return _made("NemotronH_Omni_Reasoning_V3_Config")(
        text_config={
            **_TEXT,
            "model_type": "nemotron_h",
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "n_groups": 2,
            "layer_norm_epsilon": 1e-5,
        },
        vision_config={
            "model_type": "radio",
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "mlp_ratio": 1.5,
            "image_size": 64,
            "max_img_size": 128,
            "patch_size": 16,
            "video_temporal_patch_size": 2,
        },
        projector_hidden_size=24,
        vision_hidden_size=32,
        image_token_id=ids["<image>"],
        video_token_id=ids["<video>"],
    )


def _nemotron_patches(arrays: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    size, patches, grids = 16, [], []
    for pixels in arrays["pixel_values"]:
        _, depth, height, width = pixels.shape
        rows, columns = height // size, width // size
        cut = pixels.reshape(depth, rows, size, columns, size).transpose(1, 3, 0, 2, 4)
        patches.append(cut.reshape(rows * columns, -1))
        grids.append([rows, columns])
    return {"pixel_values": np.concatenate(patches), "image_grid_hw": np.array(grids)}


ALL_REFERENCES: dict[str, Reference] = {
    **REFERENCES,
    "llama4": Reference(
        "llama4",
        "Llama4ForConditionalGeneration",
        _llama4,
        joins=_tiles,
        running=_llama4_outputs,
    ),
    "gemma4": Reference(
        "gemma4",
        "Gemma4ForConditionalGeneration",
        _gemma4(_GEMMA4_SMALL),
        _MM,
        joins=_gemma4_patches,
        videos=True,
        sounds=True,
    ),
    "gemma4-large": Reference(
        "gemma4",
        "Gemma4ForConditionalGeneration",
        _gemma4(_GEMMA4_LARGE),
        _MM,
        joins=_gemma4_patches,
        videos=True,
    ),
    "gemma3n": Reference(
        "gemma3n",
        "Gemma3nForConditionalGeneration",
        _gemma3n,
        running=_gemma3n_towers,
        sounds=True,
    ),
    "gemma4_unified": Reference(
        "gemma4_unified",
        "Gemma4UnifiedForConditionalGeneration",
        _gemma4_unified,
        _MM,
        joins=_gemma4_frames,
        videos=True,
        sounds=True,
    ),
    "granite4_vision": Reference(
        "granite4_vision",
        "Granite4VisionForConditionalGeneration",
        _granite4,
        joins=_padded_tiles,
    ),
    "muse_glimmer": Reference("muse_glimmer", "MuseGlimmerForConditionalGeneration", _muse_glimmer),
    "kimi_k25": Reference(
        "kimi_k25", "Kimi_K25ForConditionalGeneration", _kimi_k25, joins=_kimi_patches
    ),
    "minicpmv4_6": Reference(
        "minicpmv4_6", "MiniCPMV4_6ForConditionalGeneration", _minicpmv, joins=_minicpm_slices
    ),
    "nemotron_h_omni": Reference(
        "nemotron_h_nano_omni",
        "NemotronH_Omni_Reasoning_V3",
        _nemotron_omni,
        joins=_nemotron_patches,
    ),
    "qwen3_omni_moe": Reference(
        "qwen3_omni_moe",
        "Qwen3OmniMoeForConditionalGeneration",
        _qwen3_omni,
        videos=True,
        sounds=True,
        generates=lambda model: model.thinker,
    ),
}
