"""Checkpoints of small multimodal models as a table of a base row and each family's differences.

Differences are merged recursively into the row they refer to. ``"id of <image>"`` in a config
becomes the id of that special token.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

Fields = dict[str, Any]

GONE = object()  # marks a field that a family lacks


class Only(dict[str, Any]):
    """Replaces the base row's dictionary instead of merging into it."""


VOCAB = 320  # bytes and special tokens
TEXT: Fields = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}
SIGLIP: Fields = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "num_channels": 3,
}
NORMALIZED: Fields = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_convert_rgb": True,
    "do_resize": True,
}
BASE: Fields = {
    "config": {"vocab_size": VOCAB, "text_config": TEXT, "vision_config": SIGLIP},
    "special": ["<image>"],
    "marks": {"image": "<image>"},
    "processor": NORMALIZED,
    "more": {},
    "named": {},
}


def merged(base: Fields, differences: Fields) -> Fields:
    """A copy of `base` with a row's differences."""
    found = deepcopy(base)
    for name, value in differences.items():
        if value is GONE:
            del found[name]
        elif isinstance(value, Only):
            found[name] = deepcopy(dict(value))
        elif isinstance(value, dict) and isinstance(found.get(name), dict):
            found[name] = merged(found[name], value)
        else:
            found[name] = deepcopy(value)
    return found


def fields_of(name: str) -> Fields:
    """The fields of a family's `Checkpoint`; token ids are still names."""
    if name == "base":
        return deepcopy(BASE)
    start, differences = TABLE[name]
    return merged(fields_of(start), differences)


def with_ids(value: Any, ids: dict[str, int]) -> Any:
    """A config with ids in place of the names of special tokens."""
    if isinstance(value, dict):
        return {name: with_ids(field, ids) for name, field in value.items()}
    if isinstance(value, list):
        return [with_ids(field, ids) for field in value]
    if isinstance(value, str) and value.startswith("id of "):
        return ids[value.removeprefix("id of ")]
    return value


# fmt: off
# Family: (row that it starts from, differences).
TABLE: dict[str, tuple[str, Fields]] = {
    "smolvlm": ("base", {
        "config": {"model_type": "smolvlm", "vocab_size": GONE, "image_token_id": "id of <image>",
            "scale_factor": 2, "text_config": {"model_type": "llama"},
            "vision_config": {"model_type": "smolvlm_vision"}},
        "special": ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
            "<row_1_col_1>", "<row_1_col_2>", "<row_1_col_3>", "<row_2_col_1>", "<row_2_col_2>",
            "<row_2_col_3>", "<row_3_col_1>", "<row_3_col_2>", "<row_3_col_3>"],
        "processor": {"image_processor_type": "SmolVLMImageProcessor",
            "processor_class": "SmolVLMProcessor", "do_image_splitting": True,
            "max_image_size": {"longest_edge": 56}, "size": {"longest_edge": 112}},
        "more": {"processor_config.json": {"processor_class": "SmolVLMProcessor",
            "image_seq_len": 4}},
    }),
    "idefics3": ("smolvlm", {
        "config": {"model_type": "idefics3"},
        "processor": {"image_processor_type": "Idefics3ImageProcessor",
            "processor_class": "Idefics3Processor"},
        "more": {"processor_config.json": {"processor_class": "Idefics3Processor"}},
    }),
    "llava": ("base", {
        "config": {"model_type": "llava", "image_token_index": "id of <image>",
            "text_config": {"model_type": "llama"},
            "vision_config": {"model_type": "clip_vision_model"}, "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default"},
        "marks": {"image": "<image>\n"},
        "processor": {"image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor", "crop_size": {"height": 56, "width": 56},
            "do_center_crop": True, "size": {"shortest_edge": 56}},
        "more": {"processor_config.json": {"processor_class": "LlavaProcessor",
            "num_additional_image_tokens": 1, "patch_size": 14,
            "vision_feature_select_strategy": "default"}},
    }),
    "gemma3": ("base", {
        "config": {"model_type": "gemma3", "hidden_size": 32,
            "image_token_index": "id of <image_soft_token>", "mm_tokens_per_image": 4,
            "pad_token_id": 0, "text_config": {"model_type": "gemma3_text", "head_dim": 16,
            "mm_tokens_per_image": 4, "sliding_window": 16, "sliding_window_pattern": 2},
            "vision_config": {"model_type": "siglip_vision_model"}},
        "special": ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
        "marks": {"image": "<start_of_image>"},
        "processor": {"image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor", "image_seq_length": 4, "size": {"height": 56,
            "width": 56}},
        "more": {"processor_config.json": {"processor_class": "Gemma3Processor",
            "image_seq_length": 4}},
        "named": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>"},
    }),
    # Older Qwen models have the text model's fields at the top level.
    "qwen2_vl": ("base", {
        "config": {"model_type": "qwen2_vl", "text_config": GONE, "hidden_size": 32,
            "image_token_id": "id of <|image_pad|>", "image_token_index": "id of <|image_pad|>",
            "intermediate_size": 48, "max_position_embeddings": 2048, "num_attention_heads": 2,
            "num_hidden_layers": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": {"mrope_section": [2, 3, 3], "type": "mrope"},
            "video_token_id": "id of <|video_pad|>", "video_token_index": "id of <|video_pad|>",
            "vision_config": Only({"model_type": "qwen2_vl", "depth": 1, "embed_dim": 16,
            "hidden_size": 32, "image_size": 56, "in_channels": 3, "num_heads": 2,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}),
            "vision_end_token_id": "id of <|vision_end|>",
            "vision_start_token_id": "id of <|vision_start|>"},
        "special": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
        "marks": {"image": "<|vision_start|><|image_pad|><|vision_end|>",
            "video": "<|vision_start|><|video_pad|><|vision_end|>"},
        "processor": {"image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor", "max_pixels": 12544, "merge_size": 2,
            "min_pixels": 784, "patch_size": 14, "temporal_patch_size": 2},
    }),
    "qwen2_5_vl": ("qwen2_vl", {
        "config": {"model_type": "qwen2_5_vl", "vision_config": {"model_type": "qwen2_5_vl",
            "embed_dim": GONE, "fullatt_block_indexes": [0], "hidden_size": 16,
            "intermediate_size": 24, "out_hidden_size": 32, "tokens_per_second": 2,
            "window_size": 28}},
    }),
    "qwen3_vl": ("base", {
        "config": {"model_type": "qwen3_vl", "image_token_id": "id of <|image_pad|>",
            "image_token_index": "id of <|image_pad|>",
            "text_config": {"model_type": "qwen3_vl_text", "head_dim": 16,
            "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "mrope"},
            "rope_theta": 10000.0}, "video_token_id": "id of <|video_pad|>",
            "video_token_index": "id of <|video_pad|>",
            "vision_config": Only({"model_type": "qwen3_vl", "deepstack_visual_indexes": [0],
            "depth": 2, "hidden_size": 16, "in_channels": 3, "intermediate_size": 24,
            "num_heads": 2, "num_position_embeddings": 16, "out_hidden_size": 32, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2}),
            "vision_end_token_id": "id of <|vision_end|>",
            "vision_start_token_id": "id of <|vision_start|>"},
        "special": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
        "marks": {"image": "<|vision_start|><|image_pad|><|vision_end|>",
            "video": "<|vision_start|><|video_pad|><|vision_end|>"},
        "processor": {"image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor", "max_pixels": 16384, "merge_size": 2,
            "min_pixels": 1024, "patch_size": 16, "temporal_patch_size": 2},
    }),
    "qwen3_5": ("qwen3_vl", {
        "config": {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text",
            "rope_scaling": GONE, "rope_theta": GONE, "full_attention_interval": 2,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 1,
            "linear_num_value_heads": 2, "linear_value_head_dim": 16,
            "rope_parameters": {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25,
            "rope_theta": 10000, "type": "default"}}, "vision_config": {"model_type": "qwen3_5",
            "deepstack_visual_indexes": [], "depth": 1}},
    }),
    "pixtral": ("base", {
        "config": {"model_type": "pixtral", "image_token_index": "id of [IMG]",
            "spatial_merge_size": 1, "text_config": {"model_type": "mistral", "head_dim": 16,
            "rope_parameters": {"rope_theta": 10000.0}, "rope_theta": 10000.0},
            "vision_config": {"model_type": "pixtral", "head_dim": 8, "image_size": 112,
            "rope_theta": 10000.0}},
        "special": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        "marks": {"image": "[IMG]"},
        "processor": {"image_processor_type": "PixtralImageProcessor",
            "processor_class": "PixtralProcessor", "patch_size": {"height": 14, "width": 14},
            "size": {"longest_edge": 112}},
        "more": {"processor_config.json": {"processor_class": "PixtralProcessor", "patch_size": 14,
            "spatial_merge_size": 1}},
    }),
    "mistral3": ("pixtral", {
        "config": {"model_type": "mistral3", "spatial_merge_size": 2},
        "more": {"processor_config.json": {"spatial_merge_size": 2}},
    }),
    "paligemma": ("base", {
        "config": {"model_type": "paligemma", "hidden_size": 32,
            "image_token_index": "id of <image>", "pad_token_id": "id of <pad>",
            "text_config": {"model_type": "gemma", "head_dim": 16},
            "vision_config": {"model_type": "siglip_vision_model", "projection_dim": 32}},
        "special": ["<image>", "<bos>"],
        "processor": {"image_processor_type": "SiglipImageProcessor",
            "processor_class": "PaliGemmaProcessor", "image_seq_length": 16, "size": {"height": 56,
            "width": 56}},
        "named": {"bos_token": "<bos>", "image_token": "<image>"},
    }),
    "gemma4": ("base", {
        "config": {"model_type": "gemma4", "audio_config": {"hidden_size": 16,
            "num_attention_heads": 2, "num_hidden_layers": 1, "output_proj_dims": 16,
            "subsampling_conv_channels": [8, 4]}, "audio_token_id": "id of <|audio|>",
            "hidden_size": 32, "image_token_id": "id of <|image|>",
            "text_config": {"model_type": "gemma4_text", "global_head_dim": 16, "head_dim": 16,
            "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "sliding_window": 64,
            "sliding_window_pattern": 2, "use_bidirectional_attention": None,
            "vocab_size_per_layer_input": 320}, "video_token_id": "id of <|video|>",
            "vision_config": {"model_type": "gemma4_vision", "image_size": GONE,
            "num_channels": GONE, "default_output_length": 70, "head_dim": 8,
            "num_key_value_heads": 2, "patch_size": 16, "pooling_kernel_size": 3,
            "position_embedding_size": 64}},
        "special": ["<|image|>", "<|boi|>", "<|eoi|>", "<|audio|>", "<|boa|>", "<|eoa|>",
            "<|video|>"],
        "marks": {"audio": "<|audio|>", "image": "<|image|>", "video": "<|video|>"},
        "processor": Only({"image_processor_type": "Gemma4ImageProcessor",
            "processor_class": "Gemma4Processor", "max_soft_tokens": 70, "patch_size": 16,
            "pooling_kernel_size": 3}),
        "more": {"processor_config.json": {"processor_class": "Gemma4Processor",
            "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor",
            "sampling_rate": 16000}, "image_processor": {"max_soft_tokens": 70}}},
        "named": {"audio_token": "<|audio|>", "boa_token": "<|boa|>", "boi_token": "<|boi|>",
            "eoa_token": "<|eoa|>", "eoi_token": "<|eoi|>", "image_token": "<|image|>"},
    }),
    "kimi_vl": ("base", {
        "config": {"model_type": "kimi_vl", "media_placeholder_token_id": "id of <|media_pad|>",
            "text_config": {"model_type": "deepseek_v3", "first_k_dense_replace": 1,
            "kv_lora_rank": 16, "moe_intermediate_size": 16, "n_group": 1, "n_routed_experts": 4,
            "n_shared_experts": 1, "num_experts_per_tok": 2, "num_key_value_heads": 2,
            "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "topk_group": 1,
            "v_head_dim": 16}, "vision_config": Only({"model_type": "moonvit", "depth": 1,
            "embed_dim": 16, "hidden_size": 16, "init_pos_emb_height": 8, "init_pos_emb_width": 8,
            "intermediate_size": 24, "num_heads": 2, "patch_size": 14})},
        "special": ["<|media_pad|>", "<|media_start|>", "<|media_end|>"],
        "marks": {"image": "<|media_start|><|media_pad|><|media_end|>"},
        "processor": Only({"image_processor_type": "KimiVLImageProcessor", "patch_size": 14}),
    }),
    "glm4v": ("base", {
        "config": {"model_type": "glm4v", "image_token_id": "id of <|image|>",
            "image_token_index": "id of <|image|>", "text_config": {"model_type": "glm4v_text",
            "eos_token_id": ["id of <|im_end|>"], "pad_token_id": 0,
            "rope_scaling": {"mrope_section": [2, 1, 1], "rope_type": "default"}},
            "video_token_id": "id of <|video|>", "video_token_index": "id of <|video|>",
            "vision_config": {"model_type": "glm4v", "num_hidden_layers": GONE,
            "num_attention_heads": GONE, "num_channels": GONE, "depth": 1, "image_size": 112,
            "in_channels": 3, "num_heads": 2, "out_hidden_size": 32},
            "vision_end_token_id": "id of <|end_of_image|>",
            "vision_start_token_id": "id of <|begin_of_image|>"},
        "special": ["<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|begin_of_video|>",
            "<|video|>", "<|end_of_video|>"],
        "marks": {"image": "<|begin_of_image|><|image|><|end_of_image|>"},
        "processor": {"image_processor_type": "Glm4vImageProcessor",
            "processor_class": "Glm4vProcessor", "merge_size": 2, "patch_size": 14,
            "size": {"longest_edge": 12544, "shortest_edge": 3136}, "temporal_patch_size": 2},
    }),
    "lfm2_vl": ("base", {
        "config": {"model_type": "lfm2-vl", "image_token_id": "id of <image>",
            "projector_hidden_size": 32, "text_config": {"model_type": "lfm2", "block_dim": 32,
            "block_multiple_of": 8, "conv_dim": 32, "conv_dim_out": 32, "layer_types": ["conv",
            "full_attention"], "num_heads": 2}, "vision_config": {"model_type": "lfm2_vl",
            "num_patches": 64, "patch_size": 16}},
        "special": ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
            "<|img_row_1_col_1|>", "<|img_row_1_col_2|>", "<|img_row_1_col_3|>",
            "<|img_row_2_col_1|>", "<|img_row_2_col_2|>", "<|img_row_2_col_3|>",
            "<|img_row_3_col_1|>", "<|img_row_3_col_2|>", "<|img_row_3_col_3|>"],
        "processor": {"image_processor_type": "Lfm2VlImageProcessorFast",
            "processor_class": "Lfm2VlProcessor", "downsample_factor": 2, "encoder_patch_size": 16,
            "max_image_tokens": 16, "min_image_tokens": 4, "tile_size": 64},
        "named": {"image_end_token": "<|image_end|>", "image_start_token": "<|image_start|>",
            "image_thumbnail": "<|img_thumbnail|>", "image_token": "<image>"},
    }),
    "idefics2": ("base", {
        "config": {"model_type": "idefics2", "image_token_id": "id of <image>",
            "perceiver_config": {"model_type": "idefics2", "num_key_value_heads": 1,
            "resampler_depth": 1, "resampler_head_dim": 8, "resampler_n_heads": 2,
            "resampler_n_latents": 6}, "text_config": {"model_type": "mistral"},
            "vision_config": {"model_type": "idefics2"}},
        "special": ["<image>", "<fake_token_around_image>", "<end_of_utterance>"],
        "processor": {"image_processor_type": "Idefics2ImageProcessor",
            "processor_class": "Idefics2Processor", "do_image_splitting": False,
            "size": {"longest_edge": 56, "shortest_edge": 28}},
        "more": {"processor_config.json": {"image_seq_len": 6}},
    }),
    "internvl_chat": ("base", {
        "config": {"model_type": "internvl_chat", "image_token_index": "id of <IMG_CONTEXT>",
            "text_config": {"model_type": "qwen2"},
            "vision_config": {"model_type": "intern_vit_6b"}},
        "special": ["<IMG_CONTEXT>", "<img>", "</img>", "<image>"],
        "marks": {"image": "<image>\n"},
        "processor": Only({}),
    }),
    "llama4": ("base", {
        "config": {"model_type": "llama4", "vocab_size": GONE,
            "image_token_index": "id of <|patch|>", "text_config": {"model_type": "llama4_text",
            "attention_chunk_size": 64, "head_dim": 16, "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 48, "no_rope_layers": [1, 1], "num_local_experts": 4},
            "vision_config": {"model_type": "llama4_vision_model", "initializer_range": 0.02,
            "intermediate_size": 64, "norm_eps": 1e-05, "pixel_shuffle_ratio": 0.5,
            "projector_dropout": 0.0, "projector_input_dim": 32, "projector_output_dim": 32,
            "rope_theta": 10000, "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default", "vision_output_dim": 32}},
        "special": ["<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>",
            "<|tile_x_separator|>", "<|tile_y_separator|>"],
        "marks": {"image": "<|image|>"},
        "processor": Only({"max_patches": 1, "size": {"height": 56, "width": 56}}),
    }),
    "aya_vision": ("base", {
        "config": {"model_type": "aya_vision", "vocab_size": GONE,
            "alignment_intermediate_size": 32, "image_token_index": "id of <|IMG_PATCH|>",
            "text_config": {"model_type": "cohere2", "head_dim": 16, "sliding_window": 64,
            "sliding_window_pattern": 2}, "vision_config": {"model_type": "siglip_vision_model"}},
        "special": ["<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>",
            "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL"],
        "processor": {"image_processor_type": "GotOcr2ImageProcessor",
            "processor_class": "AyaVisionProcessor", "crop_to_patches": True, "max_patches": 4,
            "min_patches": 1, "size": {"height": 56, "width": 56}},
        "more": {"processor_config.json": {"processor_class": "AyaVisionProcessor",
            "downsample_factor": 2, "image_token": "<image>", "img_size": 56, "patch_size": 14}},
    }),
    # Only processor and tokenizer: the model is LLaVA's.
    "deepseek_vl": ("base", {
        "config": Only({"model_type": "deepseek_vl"}),
        "special": ["<image_placeholder>"],
        "marks": {"image": "<image_placeholder>"},
        "processor": {"image_processor_type": "DeepseekVLImageProcessor",
            "processor_class": "DeepseekVLProcessor", "size": {"height": 56, "width": 56}},
        "more": {"processor_config.json": {"num_image_tokens": 16}},
        "named": {"image_token": "<image_placeholder>"},
    }),
    "deepseek_vl_v2": ("base", {
        "config": {"model_type": "deepseek_vl_v2", "text_config": GONE,
            "image_token_index": "id of <image>", "language_config": {"model_type": "deepseek_v2",
            "first_k_dense_replace": 1, "hidden_size": 32, "intermediate_size": 48,
            "kv_lora_rank": 16, "max_position_embeddings": 2048, "moe_intermediate_size": 16,
            "n_group": 1, "n_routed_experts": 4, "n_shared_experts": 1, "num_attention_heads": 2,
            "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_key_value_heads": 2,
            "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
            "rms_norm_eps": 1e-05, "topk_group": 1, "v_head_dim": 16, "vocab_size": 320},
            "projector_config": {"input_dim": 16, "n_embed": 32},
            "vision_config": Only({"model_type": "vision", "image_size": 64,
            "intermediate_size": 24, "layers": 1, "num_attention_heads": 2, "patch_size": 16,
            "width": 16})},
        "special": ["<image>", "<bos>"],
        "marks": {"image": "<image>\n"},
        "processor": Only({}),
        "more": {"processor_config.json": {"candidate_resolutions": [[64, 64], [128, 64], [64,
            128]], "downsample_ratio": 2, "pad_token": "<pad>", "patch_size": 16}},
        "named": {"bos_token": "<bos>"},
    }),
    "molmo": ("base", {
        "config": Only({"model_type": "molmo", "text_config": {"additional_vocab_size": 16,
            "d_model": 32, "embedding_size": 320, "mlp_hidden_size": 48, "n_heads": 2,
            "n_kv_heads": 1, "n_layers": 2, "vocab_size": 320}, "vision_config": {"d_model": 32,
            "hidden_size": 48, "image_default_input_size": [56, 56], "image_emb_dim": 16,
            "image_head_dim": 8, "image_mlp_dim": 24, "image_num_heads": 2,
            "image_num_key_value_heads": 2, "image_num_layers": 2, "image_num_pos": 17,
            "vit_layers": [-1, -2]}}),
        "special": ["<im_patch>", "<im_col>", "<im_start>", "<im_end>"],
        "marks": {"image": "<|image|>"},
        "processor": Only({"base_image_input_size": [56, 56], "image_patch_size": 14,
            "image_token_length_h": 2, "image_token_length_w": 2, "max_crops": 2,
            "overlap_margins": [0, 0]}),
    }),
    "llava_next": ("llava", {
        "config": {"model_type": "llava_next"},
        "processor": {"image_processor_type": "LlavaNextImageProcessor",
            "processor_class": "LlavaNextProcessor", "image_grid_pinpoints": [[56, 112], [112, 56],
            [112, 112], [168, 56], [56, 168]]},
    }),
    "llava_bunny": ("base", {
        "config": {"model_type": "llava-qwen2", "auto_map": {}, "hidden_size": 32,
            "intermediate_size": 48, "max_position_embeddings": 2048, "mm_hidden_size": 16,
            "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 1,
            "rms_norm_eps": 1e-05, "text_config": {"model_type": "qwen2"},
            "vision_config": {"model_type": "siglip_vision_model", "image_size": 378}},
        "special": [],
        "marks": {"image": "<image>\\n"},
        "processor": Only({}),
    }),
    "gemma3n": ("base", {
        "config": Only({"model_type": "gemma3n", "audio_token_id": "id of <audio_soft_token>",
            "image_token_id": "id of <image_soft_token>", "vision_config": {}}),
        "special": ["<image_soft_token>", "<start_of_image>", "<end_of_image>",
            "<audio_soft_token>", "<start_of_audio>", "<end_of_audio>"],
        "marks": {"audio": "<audio_soft_token>", "image": "<image_soft_token>"},
        "processor": {"image_processor_type": "SiglipImageProcessor",
            "processor_class": "Gemma3nProcessor",
            "feature_extractor_type": "Gemma3nAudioFeatureExtractor", "size": {"height": 56,
            "width": 56}},
        "more": {"processor_config.json": {"audio_seq_length": 12, "image_seq_length": 16}},
        "named": {"audio_token": "<audio_soft_token>", "boa_token": "<start_of_audio>",
            "boi_token": "<start_of_image>", "eoa_token": "<end_of_audio>",
            "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    }),
    "phi3_v": ("base", {
        "config": Only({"model_type": "phi3_v"}),
        "special": [],
        "marks": {"image": "<|image_1|>"},
        "processor": Only({"num_crops": 2, "num_img_tokens": 144}),
    }),
    "qwen3_omni_moe": ("base", {
        "config": Only({"model_type": "qwen3_omni_moe", "audio_token_id": "id of <|audio_pad|>",
            "image_token_id": "id of <|image_pad|>", "position_id_per_seconds": 13,
            "video_token_id": "id of <|video_pad|>"}),
        "special": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
            "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"],
        "marks": {"audio": "<|audio_start|><|audio_pad|><|audio_end|>",
            "image": "<|vision_start|><|image_pad|><|vision_end|>",
            "video": "<|vision_start|><|video_pad|><|vision_end|>"},
        "processor": {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128,
            "max_pixels": 16384, "merge_size": 2, "min_pixels": 1024, "patch_size": 16,
            "temporal_patch_size": 2},
        "named": {"audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>",
            "audio_token": "<|audio_pad|>", "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>"},
    }),
}
# fmt: on
