"""Checkpoints of further small multimodal models, as rows like those of `media_checkpoint_table`.

Three families already have a row for their processor there; this file adds their models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from support.media_checkpoint_table import GONE, TEXT, VOCAB, Fields, Only, fields_of, merged
from support.media_checkpoints import CHECKPOINTS, Checkpoint, checkpoint, made_of
from support.media_models import smaller_gemma3n, smaller_phi3_v
from support.more_media_models import smaller_deepseekocr_2, smaller_fastvlm, smaller_sam

# fmt: off
# Family: (row that it starts from, here or there, differences).
ROWS: dict[str, tuple[str, Fields]] = {
    # mlx-vlm rejects glm4v's rope_scaling in some families.
    "glm_ocr": ("glm4v", {
        "config": {"model_type": "glm_ocr", "text_config": {"model_type": "glm_ocr_text",
            "rope_scaling": GONE, "head_dim": 16, "rope_parameters": {"mrope_section": [2, 3, 3],
            "partial_rotary_factor": 1.0, "rope_theta": 10000.0, "rope_type": "default"}},
            "vision_config": {"model_type": "glm_ocr_vision"}},
        "processor": {"image_processor_type": "Glm46VImageProcessor",
            "processor_class": "Glm46VProcessor", "size": {"longest_edge": 25088}},
    }),
    "glm4v_moe": ("glm_ocr", {
        "config": {"model_type": "glm4v_moe", "text_config": {"model_type": "glm4v_moe_text",
            "rope_parameters": GONE, "attention_bias": True, "first_k_dense_replace": 1,
            "moe_intermediate_size": 16, "n_group": 1, "n_routed_experts": 4,
            "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 2,
            "partial_rotary_factor": 0.5, "rope_scaling": {"mrope_section": [2, 1, 1],
            "type": "default"}, "rope_theta": 10000.0, "routed_scaling_factor": 1.0,
            "topk_group": 1, "use_qk_norm": False}, "vision_config": {"model_type": "glm4v_moe"}},
        "processor": {"processor_class": "Glm4vMoeProcessor"},
    }),
    "paddleocr_vl": ("base", {
        "config": {"model_type": "paddleocr_vl", "text_config": GONE, "head_dim": 16,
            "hidden_size": 1024, "image_token_id": "id of <|IMAGE_PLACEHOLDER|>",
            "intermediate_size": 48, "max_position_embeddings": 2048, "num_attention_heads": 2,
            "num_hidden_layers": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default",
            "type": "default"}, "rope_theta": 10000.0, "use_bias": False,
            "vision_config": {"model_type": "paddleocr_vl", "spatial_merge_size": 2},
            "vision_end_token_id": "id of <|IMAGE_END|>",
            "vision_start_token_id": "id of <|IMAGE_START|>"},
        "special": ["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"],
        "marks": {"image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"},
        "processor": {"image_processor_type": "PaddleOCRVLImageProcessor",
            "processor_class": "PaddleOCRVLProcessor", "max_pixels": 12544, "merge_size": 2,
            "min_pixels": 1568, "patch_size": 14, "temporal_patch_size": 1},
    }),
    "dots_ocr": ("base", {
        "config": {"model_type": "dots_ocr", "text_config": GONE, "hidden_size": 32,
            "image_token_id": "id of <|imgpad|>", "intermediate_size": 48,
            "max_position_embeddings": 2048, "num_attention_heads": 2, "num_hidden_layers": 2,
            "num_key_value_heads": 1, "rms_norm_eps": 1e-05,
            "vision_config": {"model_type": "dots_vit", "embed_dim": 16, "hidden_size": 32,
            "spatial_merge_size": 2, "temporal_patch_size": 1}},
        "special": ["<|imgpad|>", "<|img|>", "<|endofimg|>"],
        "marks": {"image": "<|img|><|imgpad|><|endofimg|>"},
        "processor": {"image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor", "max_pixels": 12544, "merge_size": 2,
            "min_pixels": 784, "patch_size": 14, "temporal_patch_size": 1},
    }),
    "internvl": ("base", {
        "config": {"model_type": "internvl", "vocab_size": GONE,
            "image_token_id": "id of <IMG_CONTEXT>", "max_dynamic_patch": 4,
            "text_config": {"model_type": "qwen3", "head_dim": 16, "rope_theta": 10000.0,
            "tie_word_embeddings": False}, "vision_config": {"model_type": "internvl_vision",
            "image_size": [56, 56], "patch_size": [14, 14]}},
        "special": ["<IMG_CONTEXT>", "<img>", "</img>", "<image>"],
        "marks": {"image": "<IMG_CONTEXT>\n"},
        "processor": Only({}),
        "more": {"processor_config.json": {"image_seq_length": 4}},
    }),
    "llava_onevision": ("base", {
        "config": {"model_type": "llava_onevision", "image_grid_pinpoints": [[56, 112], [112, 56],
            [112, 112], [168, 56], [56, 168]], "image_token_index": "id of <image>",
            "text_config": {"model_type": "qwen2"}, "video_token_index": 0,
            "vision_config": {"model_type": "siglip_vision_model"}, "vision_feature_layer": -1},
        "marks": {"image": "<image>\n"},
        "processor": {"image_processor_type": "LlavaOnevisionImageProcessor",
            "processor_class": "LlavaOnevisionProcessor", "image_grid_pinpoints": [[56, 112], [112,
            56], [112, 112], [168, 56], [56, 168]], "size": {"height": 56, "width": 56}},
        "more": {"processor_config.json": {"processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 16, "vision_feature_select_strategy": "full"}},
    }),
    "kimi_k25": ("kimi_vl", {
        "config": {"model_type": "kimi_k25"},
        "processor": Only({"media_proc_cfg": {"in_patch_limit": 64, "patch_size": 14}}),
    }),
    "mage_vl": ("base", {
        "config": {"model_type": "mage_vl", "vocab_size": GONE,
            "image_token_id": "id of <|image_pad|>", "text_config": {"model_type": "qwen3",
            "head_dim": 16}, "video_token_id": "id of <|video_pad|>",
            "vision_config": {"model_type": "mage_vl_vision", "hidden_size": 64,
            "out_hidden_size": 32, "patch_size": 16, "text_hidden_size": 32}},
        "special": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
        "marks": {"image": "<|vision_start|><|image_pad|><|vision_end|>"},
        "processor": {"image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "MageVLProcessor", "max_pixels": 16384, "merge_size": 2,
            "min_pixels": 1024, "patch_size": 16, "temporal_patch_size": 1},
    }),
    "minicpmv4_6": ("base", {
        "config": {"model_type": "minicpmv4_6", "insert_layer_id": 0,
            "text_config": {"model_type": "qwen3_5_text", "full_attention_interval": 2,
            "head_dim": 16, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16,
            "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_value_head_dim": 16,
            "rope_parameters": {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25,
            "rope_theta": 10000, "type": "default"}},
            "vision_config": {"model_type": "minicpmv4_6_vision"}},
        "special": ["<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>",
            "<unk>", "<|image_pad|>", "<|video_pad|>"],
        "marks": {"image": "<|image_pad|>"},
        "processor": Only({"image_processor_type": "MiniCPMV4_6ImageProcessor",
            "image_feature_size": 4, "max_slice_nums": 4, "patch_size": 14,
            "scale_resolution": 56}),
        "named": {"unk_token": "<unk>"},
    }),
    "minicpmo": ("base", {
        "config": {"model_type": "minicpmo", "text_config": GONE, "head_dim": 16,
            "hidden_size": 32, "init_audio": False, "init_tts": False, "intermediate_size": 48,
            "max_position_embeddings": 2048, "num_attention_heads": 2, "num_hidden_layers": 2,
            "num_key_value_heads": 1, "query_num": 4, "rms_norm_eps": 1e-05,
            "rope_scaling": {"mrope_section": [4, 2, 2], "type": "default"}, "rope_theta": 10000.0,
            "vision_config": {"model_type": "siglip_vision_model"}},
        "special": ["<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>",
            "<unk>", "<|audio_start|>", "<|audio_end|>", "<|spk_bos|>", "<|spk_eos|>",
            "<|tts_bos|>", "<|tts_eos|>", "<|listen|>"],
        "marks": {"image": "<image>./</image>"},
        "processor": Only({"image_processor_type": "MiniCPMVImageProcessor",
            "feature_extractor_type": "WhisperFeatureExtractor", "image_feature_size": 4,
            "patch_size": 14, "scale_resolution": 56}),
        "named": {"unk_token": "<unk>"},
    }),
    "granite4_vision": ("base", {
        "config": {"model_type": "granite4_vision", "deepstack_layer_map": [[-1, 0]],
            "downsample_rate": "2/4", "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112],
            [168, 56], [56, 168]], "image_token_index": "id of <image>",
            "spatial_target_layers": [1], "text_config": {"model_type": "granitemoehybrid",
            "shared_intermediate_size": 48}, "vision_config": {"model_type": "siglip_vision_model",
            "hidden_size": 64}, "vision_feature_select_strategy": "full"},
        "marks": {"image": "<image>\n"},
        "processor": {"image_processor_type": "LlavaNextImageProcessor",
            "processor_class": "LlavaNextProcessor", "crop_size": {"height": 56, "width": 56},
            "do_center_crop": True, "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112],
            [168, 56], [56, 168]], "size": {"height": 56, "width": 56}},
        "more": {"processor_config.json": {"downsample_rate": "2/4", "patch_size": 14,
            "vision_feature_select_strategy": "full"}},
    }),
    # An untiled image of 16 x 16 rows with an end per line. Token 0 is the published bos.
    "deepseekocr": ("deepseek_vl_v2", {
        "config": {"model_type": "deepseekocr", "vocab_size": GONE,
            "language_config": {"kv_lora_rank": 32, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0},
            "projector_config": {"input_dim": 32, "projector_type": "linear"},
            "vision_config": {"image_size": GONE, "patch_size": GONE, "width": GONE,
            "hidden_size": 16}},
        "special": ["<image>"],
        "more": {"processor_config.json": {"candidate_resolutions": [[1024, 1024]],
            "downsample_ratio": 4}},
        "named": {"bos_token": "!"},
    }),
    "fastvlm": ("base", {
        "config": {"model_type": "llava_qwen2", "vocab_size": GONE, "mm_hidden_size": 64,
            "text_config": {"model_type": "llava_qwen2"},
            "vision_config": Only({"model_type": "llava_qwen2", "projection_dim": 16})},
        "special": [],
        "marks": {"image": "<image>\n"},
        "processor": Only({"image_processor_type": "CLIPImageProcessor",
            "crop_size": {"height": 256, "width": 256}, "size": {"shortest_edge": 256}}),
    }),
    "phi4mm": ("base", {
        "config": {"model_type": "phi4mm", "text_config": GONE,
            "audio_processor": {"config": {"attention_dim": 16, "attention_heads": 2,
            "conv_channels": 8, "depthwise_seperable_out_channel": 16, "ext_pw_out_channel": 16,
            "linear_units": 24, "num_blocks": 1}}, "audio_token_index": "id of <|endoftext11|>",
            "hidden_size": 32, "intermediate_size": 48, "max_num_patches": 64,
            "max_position_embeddings": 2048, "min_num_patches": 16, "mm_hidden_size": 16,
            "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 1,
            "rms_norm_eps": 1e-05, "vision_config": {"model_type": "siglip2_vision_model",
            "num_hidden_layers": 2}},
        "special": ["<|endoftext11|>"],
        "marks": {"image": "<|image_1|>"},
        "processor": Only({}),
    }),
    "deepseekocr_2": ("deepseekocr", {
        "config": {"model_type": "deepseekocr_2", "vision_config": Only({"model_type": "vision"})},
    }),
    "indic_ocr": ("qwen3_5", {
        "config": {"model_type": "indic_ocr"},
    }),
    "gemma4_unified": ("base", {
        "config": {"model_type": "gemma4_unified", "audio_config": {"audio_embed_dim": 640,
            "output_proj_dims": 640}, "audio_token_id": "id of <|audio|>", "hidden_size": 32,
            "image_token_id": "id of <|image|>",
            "text_config": {"model_type": "gemma4_unified_text", "attention_k_eq_v": True,
            "global_head_dim": 16, "head_dim": 16, "hidden_size_per_layer_input": 0,
            "num_global_key_value_heads": 1, "num_kv_shared_layers": 0, "sliding_window": 64,
            "sliding_window_pattern": 2, "use_bidirectional_attention": None,
            "vocab_size_per_layer_input": 320}, "video_token_id": "id of <|video|>",
            "vision_config": Only({"model_type": "gemma4_unified_vision", "mm_embed_dim": 16,
            "mm_posemb_size": 32, "model_patch_size": 12, "num_soft_tokens": 70,
            "output_proj_dims": 16, "patch_size": 4, "pooling_kernel_size": 3})},
        "special": ["<|image|>", "<|boi|>", "<|eoi|>", "<|audio|>", "<|boa|>", "<|eoa|>",
            "<|video|>"],
        "marks": {"audio": "<|audio|>", "image": "<|image|>", "video": "<|video|>"},
        "processor": Only({"image_processor": {"max_soft_tokens": 70, "model_patch_size": 12,
            "patch_size": 4, "pooling_kernel_size": 3}}),
        "more": {"processor_config.json": {"image_processor": {"max_soft_tokens": 70,
            "model_patch_size": 12, "patch_size": 4, "pooling_kernel_size": 3}}},
        "named": {"audio_token": "<|audio|>", "boa_token": "<|boa|>", "boi_token": "<|boi|>",
            "eoa_token": "<|eoa|>", "eoi_token": "<|eoi|>", "image_token": "<|image|>"},
    }),
    "muse_glimmer": ("base", {
        "config": {"model_type": "muse_glimmer", "vocab_size": GONE,
            "image_token_id": "id of <|patch|>", "out_hidden_size": 64,
            "projector_hidden_size": 16, "text_config": {"model_type": "muse_glimmer_text",
            "head_dim": 16, "sliding_window": 64}, "video_token_id": "id of <|video|>",
            "vision_config": {"model_type": "muse_glimmer_vision", "image_size": GONE,
            "patch_size": GONE, "num_channels": GONE, "pos_emb_height": 8, "pos_emb_width": 8}},
        "special": ["<|patch|>", "<|image_start|>", "<|image_end|>", "<|video|>"],
        "marks": {"image": "<|patch|>"},
        "processor": Only({}),
        "more": {"processor_config.json": {"image_processor": {"max_image_tokens": 16}}},
    }),
    "nemotron_h_nano_omni": ("base", {
        "config": {"model_type": "NemotronH_Nano_Omni_Reasoning_V3", "vocab_size": GONE,
            "text_config": GONE, "img_context_token_id": "id of <image>",
            "llm_config": {"model_type": "nemotron_h", "attention_bias": False, "conv_kernel": 4,
            "head_dim": 16, "hidden_size": 32, "hybrid_override_pattern": ["M", "*", "-"],
            "intermediate_size": 48, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 16,
            "mamba_num_heads": 2, "mamba_proj_bias": False, "max_position_embeddings": 2048,
            "mlp_bias": False, "n_groups": 1, "num_attention_heads": 2, "num_hidden_layers": 2,
            "num_key_value_heads": 1, "rms_norm_eps": 1e-05, "ssm_state_size": 16,
            "use_bias": False, "use_conv_bias": True, "vocab_size": 320},
            "projector_hidden_size": 24, "vision_config": {"patch_size": GONE,
            "num_channels": GONE, "image_size": 64, "max_resolution": 128}, "vit_hidden_size": 16},
        "special": ["<image>", "<img>", "</img>", "<video>", "<so_embedding>"],
        "marks": {"image": "<image>\n"},
        "processor": Only({"max_num_patches": 64, "min_num_patches": 16, "norm_mean": [0.5, 0.5,
            0.5], "norm_std": [0.5, 0.5, 0.5], "patch_size": 16}),
    }),
    "step3p7": ("base", {
        "config": {"model_type": "step3p7", "vocab_size": GONE,
            "image_token_id": "id of <im_patch>", "text_config": {"model_type": "step3p5",
            "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"],
            "moe_intermediate_size": 16, "moe_layers_enum": [1], "moe_num_experts": 4,
            "moe_top_k": 2, "num_attention_groups": 1, "share_expert_dim": 16,
            "sliding_window": 64}, "vision_config": Only({"heads": 2, "layers": 1,
            "mlp_ratio": 1.5, "width": 16})},
        "special": ["<im_patch>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>",
            "<patch_newline>"],
        "marks": {"image": "<im_patch>"},
        "processor": Only({}),
    }),
}
# fmt: on

# Shrinks modules of mlx-vlm whose sizes are not in a config.
SMALLER: dict[str, tuple[Callable[[], None], ...]] = {
    "deepseekocr": (partial(smaller_sam, stride=64),),
    "deepseekocr_2": (partial(smaller_deepseekocr_2, stride=64), partial(smaller_sam, stride=64)),
    "fastvlm": (smaller_fastvlm,),
}


def _fields_of(name: str) -> Fields:
    if name not in ROWS:
        return fields_of(name)
    start, differences = ROWS[name]
    return merged(_fields_of(start), differences)


def more_of(name: str) -> Checkpoint:
    """A row of this table, which the caller may modify."""
    for make_smaller in SMALLER.get(name, ()):
        make_smaller()
    return made_of(_fields_of(name))


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


#: Families with only a processor: their images have one size, so towers are slow in a test.
MORE_PROCESSORS: dict[str, Callable[[], Checkpoint]] = {"step3p7": partial(more_of, "step3p7")}

#: All families that are written with weights.
ALL_CHECKPOINTS: dict[str, Callable[[], Checkpoint]] = {
    **CHECKPOINTS,
    **{name: partial(more_of, name) for name in ROWS if name not in MORE_PROCESSORS},
    **{make.__name__: make for make in (qwen3_omni_moe, phi3_v, gemma3n)},
}
