"""Small Qwen models with media, see `media_models`."""

from __future__ import annotations

from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import numpy as np

from support.media_cases import (
    IMG,
    SOUND,
    START,
    TEXT,
    VIDEO,
    Case,
    Item,
    V,
    noise_of,
    package,
    patch_item,
    sections,
)
from support.reference import HEAD_DIM


def _qwen2(name: str, vision: dict[str, Any]) -> Case:
    m = package(name)
    model = m.Model(
        m.ModelConfig(
            text_config=m.TextConfig(
                model_type=name,
                **TEXT,
                rope_scaling={"type": "mrope", "mrope_section": sections(2, 3, 3)},
            ),
            vision_config=m.VisionConfig(model_type=name, **vision),
            model_type=name,
            image_token_id=IMG,
            video_token_id=VIDEO,
            vision_start_token_id=START,
            vocab_size=V,
        )
    )
    return Case(model, name, patch_item, {})


def qwen2_vl() -> Case:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
    return _qwen2("qwen2_vl", {**vision, "image_size": 56, "patch_size": 14, "in_channels": 3})


def qwen2_5_vl() -> Case:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    more = {"out_hidden_size": 64, "image_size": 56, "patch_size": 14, "in_channels": 3}
    return _qwen2("qwen2_5_vl", {**vision, **more, "fullatt_block_indexes": [1], "window_size": 28})


_QWEN3_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "in_channels": 3,
    "num_position_embeddings": 16,
}
QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def _qwen3(
    name: str, text: dict[str, Any], deepstack: list[int], *, tower: str | None = None
) -> Case:
    m = package(name)
    model = m.Model(
        m.ModelConfig.from_dict(
            {
                "text_config": m.TextConfig.from_dict({**TEXT, "head_dim": HEAD_DIM, **text}),
                "vision_config": m.VisionConfig.from_dict(
                    {
                        "model_type": tower or name,
                        **_QWEN3_VISION,
                        "deepstack_visual_indexes": deepstack,
                    }
                ),
                "model_type": name,
                "image_token_id": IMG,
                "video_token_id": VIDEO,
                "image_token_index": IMG,
                "video_token_index": VIDEO,
                "vision_start_token_id": START,
                "vocab_size": V,
            }
        )
    )
    return Case(model, name, patch_item, {})


QWEN_MROPE = {"rope_type": "mrope", "mrope_section": sections(2, 3, 3)}


def qwen3_vl() -> Case:
    text = {"model_type": "qwen3_vl_text", "rope_theta": 1e4, "max_position_embeddings": 1000}
    return _qwen3("qwen3_vl", {**text, "rope_scaling": QWEN_MROPE}, [0, 1])


def qwen3_vl_moe() -> Case:
    text = {"model_type": "qwen3_vl_moe_text", "rope_theta": 1e4, "max_position_embeddings": 1000}
    return _qwen3("qwen3_vl_moe", {**text, **QWEN_EXPERTS, "rope_scaling": QWEN_MROPE}, [0, 1])


QWEN_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "max_position_embeddings": 1000,
    "rope_parameters": {
        "type": "default",
        "mrope_section": sections(1, 1, 0),
        "rope_theta": 10000,
        "partial_rotary_factor": 0.25,
    },
}


def qwen3_5() -> Case:
    return _qwen3("qwen3_5", {"model_type": "qwen3_5_text", **QWEN_DELTA}, [])


def qwen3_5_moe() -> Case:
    more = {"shared_expert_intermediate_size": 32, **QWEN_EXPERTS}
    return _qwen3("qwen3_5_moe", {"model_type": "qwen3_5_moe_text", **QWEN_DELTA, **more}, [])


def qwen3_omni_moe() -> Case:
    m = package("qwen3_omni_moe")
    text = {
        **TEXT,
        **QWEN_EXPERTS,
        "head_dim": HEAD_DIM,
        "rope_theta": 1e4,
        "max_position_embeddings": 1000,
        "rope_scaling": QWEN_MROPE,
    }
    thinker = m.config.ThinkerConfig.from_dict(
        {
            "text_config": text,
            "vision_config": {
                **_QWEN3_VISION,
                "deepstack_visual_indexes": [0, 1],
            },
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "num_mel_bins": 16,
                "output_dim": 64,
                "downsample_hidden_size": 8,
            },
            "image_token_id": IMG,
            "video_token_id": VIDEO,
            "audio_token_id": SOUND,
            "vision_start_token_id": START,
        }
    )
    config = m.ModelConfig(thinker, None, None, enable_audio_output=False)

    def sound(seed: int) -> Item:
        arrays = {
            "input_features": noise_of(seed, 1, 16, 96),
            "audio_feature_lengths": np.array([96]),
        }
        return Item([SOUND] * 12, arrays, "audio", np.arange(12, dtype=np.int32))

    return Case(m.Model(config), "qwen3_omni_moe", patch_item, sound=sound)
