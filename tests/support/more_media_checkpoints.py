"""Checkpoints of further small multimodal models, as in `media_checkpoints`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.media_checkpoint_table import NORMALIZED, SIGLIP, TEXT, VOCAB
from support.media_checkpoints import CHECKPOINTS, Checkpoint, checkpoint
from support.media_models import smaller_gemma3n, smaller_phi3_v
from support.more_media_models import (
    LATENT,
    smaller_deepseekocr_2,
    smaller_fastvlm,
    smaller_sam,
)

_GLM_IMAGES = {
    "size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 112 * 112 * 2},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    **NORMALIZED,
}


def _glm(name: str, text: dict[str, Any], processor_class: str) -> Checkpoint:
    found = checkpoint("glm4v")
    make = found.config

    def config(ids: dict[str, int]) -> dict[str, Any]:
        config = make(ids)
        config["text_config"].pop("rope_scaling")  # (the package refuses it for some)
        config["text_config"] |= text
        config["vision_config"]["model_type"] = f"{name}_vision" if name == "glm_ocr" else name
        return {**config, "model_type": name}

    found.config = config
    found.processor = {
        "image_processor_type": "Glm46VImageProcessor",
        "processor_class": processor_class,
        **_GLM_IMAGES,
    }
    return found


def glm_ocr() -> Checkpoint:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    text = {
        "model_type": "glm_ocr_text",
        "head_dim": 16,
        "rope_parameters": {**rope, "partial_rotary_factor": 1.0},
    }
    return _glm("glm_ocr", text, "Glm46VProcessor")


def glm4v_moe() -> Checkpoint:
    text = {
        "model_type": "glm4v_moe_text",
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 16,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.0,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]},
    }
    return _glm("glm4v_moe", text, "Glm4vMoeProcessor")


def paddleocr_vl() -> Checkpoint:
    return Checkpoint(
        config=lambda ids: {
            "model_type": "paddleocr_vl",
            "image_token_id": ids["<|IMAGE_PLACEHOLDER|>"],
            "vision_start_token_id": ids["<|IMAGE_START|>"],
            "vision_end_token_id": ids["<|IMAGE_END|>"],
            **TEXT,
            "hidden_size": 1024,
            "head_dim": 16,
            "use_bias": False,
            "rope_theta": 1e4,
            "rope_scaling": {
                "rope_type": "default",
                "type": "default",
                "mrope_section": [2, 3, 3],
            },
            "vision_config": {**SIGLIP, "model_type": "paddleocr_vl", "spatial_merge_size": 2},
        },
        special=["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"],
        marks={"image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"},
        processor={
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "processor_class": "PaddleOCRVLProcessor",
            "patch_size": 14,
            "temporal_patch_size": 1,
            "merge_size": 2,
            "min_pixels": 28 * 28 * 2,
            "max_pixels": 112 * 112,
            **NORMALIZED,
        },
    )


def dots_ocr() -> Checkpoint:
    return Checkpoint(
        config=lambda ids: {
            "model_type": "dots_ocr",
            "image_token_id": ids["<|imgpad|>"],
            **TEXT,
            "vision_config": {
                **SIGLIP,
                "model_type": "dots_vit",
                "embed_dim": 16,
                "hidden_size": 32,
                "temporal_patch_size": 1,
                "spatial_merge_size": 2,
            },
        },
        special=["<|imgpad|>", "<|img|>", "<|endofimg|>"],
        marks={"image": "<|img|><|imgpad|><|endofimg|>"},
        processor={
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "patch_size": 14,
            "temporal_patch_size": 1,
            "merge_size": 2,
            "min_pixels": 4 * 14 * 14,
            "max_pixels": 64 * 14 * 14,
            **NORMALIZED,
        },
    )


def internvl() -> Checkpoint:
    return Checkpoint(
        config=lambda ids: {
            "model_type": "internvl",
            "image_token_id": ids["<IMG_CONTEXT>"],
            "text_config": {
                "model_type": "qwen3",
                **TEXT,
                "head_dim": 16,
                "rope_theta": 1e4,
                "tie_word_embeddings": False,
            },
            "vision_config": {**SIGLIP, "model_type": "internvl_vision", "image_size": [56, 56]}
            | {"patch_size": [14, 14]},
            "max_dynamic_patch": 4,
        },
        special=["<IMG_CONTEXT>", "<img>", "</img>", "<image>"],
        marks={"image": "<IMG_CONTEXT>\n"},
        processor={},
        more={"processor_config.json": {"image_seq_length": 4}},
    )


def llava_onevision() -> Checkpoint:
    found = checkpoint("llava_next")

    def config(ids: dict[str, int]) -> dict[str, Any]:
        return {
            "model_type": "llava_onevision",
            "image_token_index": ids["<image>"],
            "video_token_index": 0,
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {"model_type": "siglip_vision_model", **SIGLIP},
            "image_grid_pinpoints": found.processor["image_grid_pinpoints"],
            "vision_feature_layer": -1,
            "vocab_size": VOCAB,
        }

    found.config = config
    found.processor |= {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "processor_class": "LlavaOnevisionProcessor",
        "size": {"height": 56, "width": 56},
    }
    for name in ("crop_size", "do_center_crop"):
        del found.processor[name]
    found.more = {
        "processor_config.json": {
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "processor_class": "LlavaOnevisionProcessor",
        }
    }
    return found


def kimi_k25() -> Checkpoint:
    found = checkpoint("kimi_vl")
    make = found.config
    found.config = lambda ids: {**make(ids), "model_type": "kimi_k25"}
    found.processor = {"media_proc_cfg": {"patch_size": 14, "in_patch_limit": 64}}
    return found


def mage_vl() -> Checkpoint:
    special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    return Checkpoint(
        config=lambda ids: {
            "model_type": "mage_vl",
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "text_config": {"model_type": "qwen3", **TEXT, "head_dim": 16},
            "vision_config": {
                **SIGLIP,
                "model_type": "mage_vl_vision",
                "hidden_size": 64,  # (heads of 32, which are cut in 16 for time and place)
                "patch_size": 16,
                "out_hidden_size": 32,
                "text_hidden_size": 32,
            },
        },
        special=special,
        marks={"image": "<|vision_start|><|image_pad|><|vision_end|>"},
        processor={
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "MageVLProcessor",
            "patch_size": 16,
            "temporal_patch_size": 1,
            "merge_size": 2,
            "min_pixels": 4 * 16 * 16,
            "max_pixels": 64 * 16 * 16,
            **NORMALIZED,
        },
    )


_MINICPM = ["<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>", "<unk>"]


def minicpmv4_6() -> Checkpoint:
    inner = checkpoint("qwen3_5")

    def config(ids: dict[str, int]) -> dict[str, Any]:
        text = inner.config({**dict.fromkeys(inner.special, 0), **ids})["text_config"]
        return {
            "model_type": "minicpmv4_6",
            "text_config": text,
            "vision_config": {**SIGLIP, "model_type": "minicpmv4_6_vision"},
            "insert_layer_id": 0,
            "vocab_size": VOCAB,
        }

    return Checkpoint(
        config=config,
        special=[*_MINICPM, "<|image_pad|>", "<|video_pad|>"],
        marks={"image": "<|image_pad|>"},
        processor={
            "image_processor_type": "MiniCPMV4_6ImageProcessor",
            "max_slice_nums": 4,
            "patch_size": 14,
            "scale_resolution": 56,
            "image_feature_size": 4,
        },
        named={"unk_token": "<unk>"},
    )


def minicpmo() -> Checkpoint:
    sounds = ["<|audio_start|>", "<|audio_end|>", "<|spk_bos|>", "<|spk_eos|>"]
    sounds += ["<|tts_bos|>", "<|tts_eos|>", "<|listen|>"]
    return Checkpoint(
        config=lambda ids: {
            "model_type": "minicpmo",
            **TEXT,
            "head_dim": 16,
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "default", "mrope_section": [4, 2, 2]},
            "vision_config": {**SIGLIP, "model_type": "siglip_vision_model"},
            "query_num": 4,
            "init_audio": False,
            "init_tts": False,
        },
        special=[*_MINICPM, *sounds],
        marks={"image": "<image>./</image>"},
        processor={
            "image_processor_type": "MiniCPMVImageProcessor",
            "feature_extractor_type": "WhisperFeatureExtractor",
            "patch_size": 14,
            "scale_resolution": 56,
            "image_feature_size": 4,
        },
        named={"unk_token": "<unk>"},
    )


def granite4_vision() -> Checkpoint:
    found = checkpoint("llava_next")

    def config(ids: dict[str, int]) -> dict[str, Any]:
        return {
            "model_type": "granite4_vision",
            "image_token_index": ids["<image>"],
            "text_config": {
                "model_type": "granitemoehybrid",
                **TEXT,
                "shared_intermediate_size": 48,
            },
            "vision_config": {"model_type": "siglip_vision_model", **SIGLIP, "hidden_size": 64},
            "image_grid_pinpoints": found.processor["image_grid_pinpoints"],
            "deepstack_layer_map": [[-1, 0]],
            "spatial_target_layers": [1],
            "vision_feature_select_strategy": "full",
            "downsample_rate": "2/4",
            "vocab_size": VOCAB,
        }

    found.config = config
    found.processor |= {"size": {"height": 56, "width": 56}}
    found.more = {
        "processor_config.json": {
            "patch_size": 14,
            "vision_feature_select_strategy": "full",
            "downsample_rate": "2/4",
        }
    }
    return found


def deepseekocr() -> Checkpoint:
    """A picture as a whole, of 16 x 16 rows and an end of each line."""
    smaller_sam(stride=64)
    return Checkpoint(
        config=lambda ids: {
            "model_type": "deepseekocr",
            "image_token_index": ids["<image>"],
            "language_config": {
                "model_type": "deepseek_v2",
                **TEXT,
                **LATENT,
                "moe_intermediate_size": 16,
                "num_key_value_heads": 2,
                "qk_nope_head_dim": 0,
                "qk_rope_head_dim": 0,
            },
            "vision_config": {
                "model_type": "vision",
                "layers": 1,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_attention_heads": 2,
            },
            "projector_config": {"projector_type": "linear", "input_dim": 32, "n_embed": 32},
        },
        special=["<image>"],
        marks={"image": "<image>\n"},
        processor={},
        more={
            "processor_config.json": {
                "candidate_resolutions": [[1024, 1024]],
                "patch_size": 16,
                "downsample_ratio": 4,
                "pad_token": "<pad>",
            }
        },
        named={"bos_token": "!"},  # (token 0, as in the published tokenizer)
    )


def fastvlm() -> Checkpoint:
    smaller_fastvlm()
    return Checkpoint(
        config=lambda ids: {
            "model_type": "llava_qwen2",
            "mm_hidden_size": 64,
            "text_config": {"model_type": "llava_qwen2", **TEXT},
            "vision_config": {"model_type": "llava_qwen2", "projection_dim": 16},
        },
        special=[],
        marks={"image": "<image>\n"},
        processor={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 256},
            "crop_size": {"height": 256, "width": 256},
        },
    )


def deepseekocr_2() -> Checkpoint:
    smaller_deepseekocr_2(stride=64)
    found = deepseekocr()
    make = found.config
    found.config = lambda ids: {
        **make(ids),
        "model_type": "deepseekocr_2",
        "vision_config": {"model_type": "vision"},
    }
    return found


def indic_ocr() -> Checkpoint:
    found = checkpoint("qwen3_5")
    make = found.config
    found.config = lambda ids: {**make(ids), "model_type": "indic_ocr"}
    return found


def gemma4_unified() -> Checkpoint:
    found = checkpoint("gemma4")
    make = found.config

    def config(ids: dict[str, int]) -> dict[str, Any]:
        config = make(ids)
        text = config["text_config"] | {
            "model_type": "gemma4_unified_text",
            "hidden_size_per_layer_input": 0,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        }
        return {
            **config,
            "model_type": "gemma4_unified",
            "text_config": text,
            "vision_config": {
                "model_type": "gemma4_unified_vision",
                "patch_size": 4,
                "pooling_kernel_size": 3,
                "model_patch_size": 12,
                "mm_embed_dim": 16,
                "mm_posemb_size": 32,
                "num_soft_tokens": 70,
                "output_proj_dims": 16,
            },
            "audio_config": {"audio_embed_dim": 640, "output_proj_dims": 640},
        }

    found.config = config
    images = {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3}
    found.processor = {"image_processor": images | {"model_patch_size": 12}}
    found.more = {"processor_config.json": {"image_processor": images | {"model_patch_size": 12}}}
    return found


def phi4mm() -> Checkpoint:
    """As mlx-vlm converts it, with the names of mlx-vlm's modules."""
    audio = {
        "attention_dim": 16,
        "attention_heads": 2,
        "num_blocks": 1,
        "linear_units": 24,
        "ext_pw_out_channel": 16,
        "depthwise_seperable_out_channel": 16,
        "conv_channels": 8,
    }
    return Checkpoint(
        config=lambda ids: {
            "model_type": "phi4mm",
            **TEXT,
            "mm_hidden_size": 16,
            "audio_token_index": ids["<|endoftext11|>"],
            "max_num_patches": 64,
            "min_num_patches": 16,
            "vision_config": {
                **SIGLIP,
                "model_type": "siglip2_vision_model",
                "num_hidden_layers": 2,
            },
            "audio_processor": {"config": audio},
        },
        special=["<|endoftext11|>"],
        marks={"image": "<|image_1|>"},
        processor={},
    )


def qwen3_omni_moe() -> Checkpoint:
    found = checkpoint("qwen3_omni_moe")

    def config(ids: dict[str, int]) -> dict[str, Any]:
        rope = {"rope_type": "mrope", "mrope_section": [2, 3, 3]}
        text = {
            **TEXT,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "rope_theta": 1e4,
            "rope_scaling": rope,
        }
        vision = {
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 16,
            "in_channels": 3,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        }
        audio = {
            "d_model": 16,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "num_mel_bins": 128,
            "output_dim": 32,
            "downsample_hidden_size": 8,
        }
        thinker = {
            "text_config": text,
            "vision_config": vision,
            "audio_config": audio,
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "audio_token_id": ids["<|audio_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "position_id_per_seconds": 13,
        }
        return {
            "model_type": "qwen3_omni_moe",
            "enable_audio_output": False,
            "thinker_config": thinker,
            "talker_config": {"text_config": text, "code_predictor_config": text},
        }

    found.config = config
    return found


def phi3_v() -> Checkpoint:
    smaller_phi3_v()
    found = checkpoint("phi3_v")
    found.config = lambda ids: {
        "model_type": "phi3_v",
        **TEXT,
        "vision_config": {"model_type": "phi3_v"},
    }
    return found


def gemma3n() -> Checkpoint:
    smaller_gemma3n()
    found = checkpoint("gemma3n")

    def config(ids: dict[str, int]) -> dict[str, Any]:
        text = {
            **TEXT,
            "model_type": "gemma3n_text",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "sliding_window": 64,
            "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 0,
            "intermediate_size": [48] * 4,
            "final_logit_softcapping": 30.0,
            "altup_num_inputs": 2,
        }
        audio = {
            "input_feat_size": 128,
            "hidden_size": 16,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "sscp_conv_channel_size": [8, 4],
            "vocab_size": 8,
            "vocab_offset": VOCAB - 8,
        }
        return {
            "model_type": "gemma3n",
            "image_token_id": ids["<image_soft_token>"],
            "audio_token_id": ids["<audio_soft_token>"],
            "text_config": text,
            "vision_config": {
                "model_type": "gemma3n_vision",
                "hidden_size": 32,
                "vocab_size": 8,
                "vocab_offset": VOCAB - 16,
            },
            "audio_config": audio,
            "vision_soft_tokens_per_image": 16,
            "audio_soft_tokens_per_image": 12,
        }

    found.config = config
    return found


def muse_glimmer() -> Checkpoint:
    return Checkpoint(
        config=lambda ids: {
            "model_type": "muse_glimmer",
            "image_token_id": ids["<|patch|>"],
            "video_token_id": ids["<|video|>"],
            "text_config": {
                "model_type": "muse_glimmer_text",
                **TEXT,
                "head_dim": 16,
                "sliding_window": 64,
            },
            "vision_config": {
                "model_type": "muse_glimmer_vision",
                "pos_emb_height": 8,
                "pos_emb_width": 8,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
            },
            "out_hidden_size": 64,
            "projector_hidden_size": 16,
        },
        special=["<|patch|>", "<|image_start|>", "<|image_end|>", "<|video|>"],
        marks={"image": "<|patch|>"},
        processor={},
        more={"processor_config.json": {"image_processor": {"max_image_tokens": 16}}},
    )


def step3p7() -> Checkpoint:
    special = ["<im_patch>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>"]
    return Checkpoint(
        config=lambda ids: {
            "model_type": "step3p7",
            "image_token_id": ids["<im_patch>"],
            "text_config": {
                **TEXT,
                "model_type": "step3p5",
                "num_attention_groups": 1,
                "moe_intermediate_size": 16,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "share_expert_dim": 16,
                "head_dim": 16,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention"],
                "moe_layers_enum": [1],
            },
            "vision_config": {"width": 16, "layers": 1, "heads": 2, "mlp_ratio": 1.5},
        },
        special=[*special, "<patch_newline>"],
        marks={"image": "<im_patch>"},
        processor={},
    )


def nemotron_h_nano_omni() -> Checkpoint:
    return Checkpoint(
        config=lambda ids: {
            "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
            "img_context_token_id": ids["<image>"],
            "llm_config": {
                **TEXT,
                "model_type": "nemotron_h",
                "hybrid_override_pattern": ["M", "*", "-"],
                "attention_bias": False,
                "mamba_num_heads": 2,
                "mamba_head_dim": 16,
                "mamba_proj_bias": False,
                "ssm_state_size": 16,
                "conv_kernel": 4,
                "n_groups": 1,
                "mlp_bias": False,
                "layer_norm_epsilon": 1e-5,
                "use_bias": False,
                "use_conv_bias": True,
                "head_dim": 16,
            },
            "vision_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 24,
                "image_size": 64,
                "max_resolution": 128,
            },
            "projector_hidden_size": 24,
            "vit_hidden_size": 16,
        },
        special=["<image>", "<img>", "</img>", "<video>", "<so_embedding>"],
        marks={"image": "<image>\n"},
        processor={
            "patch_size": 16,
            "min_num_patches": 16,
            "max_num_patches": 64,
            "norm_mean": [0.5, 0.5, 0.5],
            "norm_std": [0.5, 0.5, 0.5],
        },
    )


#: All that are written with weights.
ALL_CHECKPOINTS: dict[str, Callable[[], Checkpoint]] = {
    **CHECKPOINTS,
    **{
        make.__name__: make
        for make in (
            glm_ocr,
            glm4v_moe,
            paddleocr_vl,
            dots_ocr,
            internvl,
            llava_onevision,
            kimi_k25,
            mage_vl,
            minicpmv4_6,
            minicpmo,
            granite4_vision,
            deepseekocr,
            fastvlm,
            phi4mm,
            deepseekocr_2,
            indic_ocr,
            gemma4_unified,
            qwen3_omni_moe,
            phi3_v,
            gemma3n,
            muse_glimmer,
            nemotron_h_nano_omni,
        )
    },
}

#: Whose towers are slow in a test, as pictures are of one size: only their processors are written.
MORE_PROCESSORS: dict[str, Callable[[], Checkpoint]] = {"step3p7": step3p7}
