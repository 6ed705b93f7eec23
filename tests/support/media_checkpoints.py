"""Checkpoints of small multimodal models on disk, with tokenizers and processors of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from mlx_paged.model.media_families import package_of
from mlx_paged.model.multimodal_files import read_config
from support.media_models import package, vary

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }}{% else %}{{ MARKS[p['type']] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass
class Checkpoint:
    """What is written of one family.

    Attributes:
        config: Given the ids of special tokens.
        special: Special tokens besides those of the chat template.
        marks: What a template writes for an item of a kind.
        processor: ``preprocessor_config.json``.
        more: Other files.
        named: Attributes of the tokenizer.
    """

    config: Callable[[dict[str, int]], dict[str, Any]]
    special: list[str]
    marks: dict[str, str]
    processor: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)


def write(path: Path, checkpoint: Checkpoint, *, seed: int = 0, weights: bool = True) -> Path:
    """Writes a checkpoint with random weights, or one of a processor only."""
    path.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(path, checkpoint)
    config = checkpoint.config(ids)
    for name, content in {
        "config.json": config,
        "preprocessor_config.json": checkpoint.processor,
        **checkpoint.more,
    }.items():
        (path / name).write_text(json.dumps(content))
    # (Fields that it leaves out have transformers' defaults.)
    config = read_config(json.loads(json.dumps(config)))
    if not weights:
        return path
    m = package(package_of(config) or "")
    built = m.ModelConfig.from_dict(config)
    from mlx_vlm.utils import update_module_configs

    parts = ["text", "vision", "perceiver", "projector", "audio"]
    model = vary(m.Model(update_module_configs(built, m, config, parts)), seed)
    arrays = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), arrays, {"format": "mlx"})
    return path


def write_tokenizer(path: Path, checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes and special tokens; returns the ids of the latter."""
    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    special = ["<|im_start|>", "<|im_end|>", "<pad>", *checkpoint.special]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    marks = json.dumps(checkpoint.marks)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        chat_template=TEMPLATE.replace("MARKS", marks),
        **checkpoint.named,
    )
    fast.save_pretrained(path)
    return {token: tokenizer.token_to_id(token) for token in special}


# Bytes, and room for special tokens.
_VOCAB = 320
_TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": _VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}
_NORMALIZED = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_convert_rgb": True,
    "do_resize": True,
}


def smolvlm(*, splits: bool = True) -> Checkpoint:
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    special += [f"<row_{r}_col_{c}>" for r in range(1, 4) for c in range(1, 4)]
    size = {"longest_edge": 112 if splits else 56}
    return Checkpoint(
        config=lambda ids: {
            "model_type": "smolvlm",
            "image_token_id": ids["<image>"],
            "scale_factor": 2,
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": {
                "model_type": "smolvlm_vision",
                "num_hidden_layers": 1,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_attention_heads": 2,
                "image_size": 56,
                "patch_size": 14,
                "num_channels": 3,
            },
        },
        special=special,
        marks={"image": "<image>"},
        processor={
            "image_processor_type": "SmolVLMImageProcessor",
            "processor_class": "SmolVLMProcessor",
            "do_image_splitting": splits,
            "max_image_size": {"longest_edge": 56},
            "size": size,
            **_NORMALIZED,
        },
        more={"processor_config.json": {"image_seq_len": 4, "processor_class": "SmolVLMProcessor"}},
    )


def idefics3() -> Checkpoint:
    found = smolvlm()
    make = found.config
    found.config = lambda ids: {**make(ids), "model_type": "idefics3"}
    found.processor["image_processor_type"] = "Idefics3ImageProcessor"
    found.processor["processor_class"] = "Idefics3Processor"
    found.more["processor_config.json"]["processor_class"] = "Idefics3Processor"
    return found


_SIGLIP = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "num_channels": 3,
}


def llava() -> Checkpoint:
    return Checkpoint(
        config=lambda ids: {
            "model_type": "llava",
            "image_token_index": ids["<image>"],
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": {"model_type": "clip_vision_model", **_SIGLIP},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "vocab_size": _VOCAB,
        },
        special=["<image>"],
        marks={"image": "<image>\n"},
        processor={
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
            "do_center_crop": True,
            **_NORMALIZED,
        },
        more={
            "processor_config.json": {
                "processor_class": "LlavaProcessor",
                "patch_size": 14,
                "vision_feature_select_strategy": "default",
                "num_additional_image_tokens": 1,
            }
        },
    )


def gemma3() -> Checkpoint:
    return Checkpoint(
        config=lambda ids: {
            "model_type": "gemma3",
            "image_token_index": ids["<image_soft_token>"],
            "mm_tokens_per_image": 4,
            "text_config": {
                "model_type": "gemma3_text",
                **_TEXT,
                "head_dim": 16,
                "mm_tokens_per_image": 4,
                "sliding_window": 16,
                "sliding_window_pattern": 2,
            },
            "vision_config": {"model_type": "siglip_vision_model", **_SIGLIP},
            "hidden_size": 32,
            "pad_token_id": 0,
            "vocab_size": _VOCAB,
        },
        special=["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
        marks={"image": "<start_of_image>"},
        processor={
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "size": {"height": 56, "width": 56},
            "image_seq_length": 4,
            **_NORMALIZED,
        },
        more={
            "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 4}
        },
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    )


_QWEN_SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_QWEN_MARKS = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}


def _qwen(
    name: str, text: dict[str, Any], vision: dict[str, Any], patch: int, *, flat: bool
) -> Checkpoint:
    return Checkpoint(
        config=lambda ids: {
            "model_type": name,
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "image_token_index": ids["<|image_pad|>"],
            "video_token_index": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "vocab_size": _VOCAB,
            # (Older ones have the text model's fields at the top.)
            **(_TEXT | text | {"model_type": name} if flat else {"text_config": _TEXT | text}),
            "vision_config": {
                "model_type": name,
                "num_heads": 2,
                "patch_size": patch,
                "in_channels": 3,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                **vision,
            },
        },
        special=_QWEN_SPECIAL,
        marks=_QWEN_MARKS,
        processor={
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
            "patch_size": patch,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "min_pixels": 4 * patch * patch,
            "max_pixels": 64 * patch * patch,
            **_NORMALIZED,
        },
    )


_CHUNKED = {"type": "mrope", "mrope_section": [2, 3, 3]}


def qwen2_vl() -> Checkpoint:
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "image_size": 56}
    text = {"model_type": "qwen2_vl", "rope_scaling": _CHUNKED}
    return _qwen("qwen2_vl", text, vision, 14, flat=True)


def qwen2_5_vl() -> Checkpoint:
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "out_hidden_size": 32,
        "image_size": 56,
        "fullatt_block_indexes": [0],
        "window_size": 28,
        "tokens_per_second": 2,
    }
    return _qwen(
        "qwen2_5_vl", {"model_type": "qwen2_5_vl", "rope_scaling": _CHUNKED}, vision, 14, flat=True
    )


def qwen3_vl() -> Checkpoint:
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    rope = {"rope_type": "mrope", "mrope_section": [2, 3, 3]}
    text = {"model_type": "qwen3_vl_text", "head_dim": 16, "rope_theta": 1e4, "rope_scaling": rope}
    return _qwen("qwen3_vl", text, vision, 16, flat=False)


def qwen3_5() -> Checkpoint:
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    }
    text = {
        "model_type": "qwen3_5_text",
        "head_dim": 16,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
        "rope_parameters": {
            "type": "default",
            "mrope_section": [1, 1, 0],
            "rope_theta": 10000,
            "partial_rotary_factor": 0.25,
        },
    }
    return _qwen("qwen3_5", text, vision, 16, flat=False)


def _mistral(name: str, *, merge: int) -> Checkpoint:
    text = {"model_type": "mistral", **_TEXT, "head_dim": 16, "rope_theta": 10000.0}
    return Checkpoint(
        config=lambda ids: {
            "model_type": name,
            "image_token_index": ids["[IMG]"],
            "text_config": {**text, "rope_parameters": {"rope_theta": 10000.0}},
            "vision_config": {**_SIGLIP, "model_type": "pixtral", "head_dim": 8}
            | {"image_size": 112, "rope_theta": 10000.0},
            "vocab_size": _VOCAB,
            "spatial_merge_size": merge,
        },
        special=["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        marks={"image": "[IMG]"},
        processor={
            "image_processor_type": "PixtralImageProcessor",
            "processor_class": "PixtralProcessor",
            "size": {"longest_edge": 112},
            "patch_size": {"height": 14, "width": 14},
            **_NORMALIZED,
        },
        more={
            "processor_config.json": {
                "processor_class": "PixtralProcessor",
                "patch_size": 14,
                "spatial_merge_size": merge,
            }
        },
    )


def pixtral() -> Checkpoint:
    return _mistral("pixtral", merge=1)


def mistral3() -> Checkpoint:
    return _mistral("mistral3", merge=2)


def paligemma() -> Checkpoint:
    return Checkpoint(
        config=lambda ids: {
            "model_type": "paligemma",
            "image_token_index": ids["<image>"],
            "text_config": {"model_type": "gemma", **_TEXT, "head_dim": 16},
            "vision_config": {"model_type": "siglip_vision_model", **_SIGLIP, "projection_dim": 32},
            "hidden_size": 32,
            "pad_token_id": ids["<pad>"],
            "vocab_size": _VOCAB,
        },
        special=["<image>", "<bos>"],
        marks={"image": "<image>"},
        processor={
            "image_processor_type": "SiglipImageProcessor",
            "processor_class": "PaliGemmaProcessor",
            "size": {"height": 56, "width": 56},
            "image_seq_length": 16,
            **_NORMALIZED,
        },
        named={"image_token": "<image>", "bos_token": "<bos>"},
    )


def gemma4() -> Checkpoint:
    special = ["<|image|>", "<|boi|>", "<|eoi|>", "<|audio|>", "<|boa|>", "<|eoa|>", "<|video|>"]
    return Checkpoint(
        config=lambda ids: {
            "model_type": "gemma4",
            "image_token_id": ids["<|image|>"],
            "audio_token_id": ids["<|audio|>"],
            "video_token_id": ids["<|video|>"],
            "text_config": {
                "model_type": "gemma4_text",
                **_TEXT,
                "head_dim": 16,
                "global_head_dim": 16,
                "vocab_size_per_layer_input": _VOCAB,
                "hidden_size_per_layer_input": 8,
                "num_kv_shared_layers": 0,
                "sliding_window": 64,
                "sliding_window_pattern": 2,
                "use_bidirectional_attention": None,
            },
            "vision_config": {
                "model_type": "gemma4_vision",
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "intermediate_size": 24,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "patch_size": 16,
                "pooling_kernel_size": 3,
                "default_output_length": 70,
                "position_embedding_size": 64,
            },
            "audio_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "subsampling_conv_channels": [8, 4],
                "output_proj_dims": 16,
            },
            "hidden_size": 32,
            "vocab_size": _VOCAB,
        },
        special=special,
        marks={"image": "<|image|>", "audio": "<|audio|>", "video": "<|video|>"},
        processor={
            "image_processor_type": "Gemma4ImageProcessor",
            "processor_class": "Gemma4Processor",
            "patch_size": 16,
            "max_soft_tokens": 70,
            "pooling_kernel_size": 3,
        },
        more={
            "processor_config.json": {
                "processor_class": "Gemma4Processor",
                "image_processor": {"max_soft_tokens": 70},
                "feature_extractor": {
                    "feature_extractor_type": "Gemma4AudioFeatureExtractor",
                    "sampling_rate": 16000,
                },
            }
        },
        named={
            "image_token": "<|image|>",
            "boi_token": "<|boi|>",
            "eoi_token": "<|eoi|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|boa|>",
            "eoa_token": "<|eoa|>",
        },
    )


def kimi_vl() -> Checkpoint:
    return Checkpoint(
        config=lambda ids: {
            "model_type": "kimi_vl",
            "media_placeholder_token_id": ids["<|media_pad|>"],
            "text_config": {
                "model_type": "deepseek_v3",
                **_TEXT,
                "num_key_value_heads": 2,
                "moe_intermediate_size": 16,
                "n_shared_experts": 1,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "kv_lora_rank": 16,
                "q_lora_rank": None,
                "qk_rope_head_dim": 16,
                "v_head_dim": 16,
                "qk_nope_head_dim": 16,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
            },
            "vision_config": {
                "model_type": "moonvit",
                "depth": 1,
                "hidden_size": 16,
                "embed_dim": 16,
                "num_heads": 2,
                "intermediate_size": 24,
                "patch_size": 14,
                "init_pos_emb_height": 8,
                "init_pos_emb_width": 8,
            },
            "vocab_size": _VOCAB,
        },
        special=["<|media_pad|>", "<|media_start|>", "<|media_end|>"],
        marks={"image": "<|media_start|><|media_pad|><|media_end|>"},
        processor={"image_processor_type": "KimiVLImageProcessor", "patch_size": 14},
    )


def glm4v() -> Checkpoint:
    special = ["<|begin_of_image|>", "<|image|>", "<|end_of_image|>"]
    special += ["<|begin_of_video|>", "<|video|>", "<|end_of_video|>"]
    return Checkpoint(
        config=lambda ids: {
            "model_type": "glm4v",
            "image_token_id": ids["<|image|>"],
            "video_token_id": ids["<|video|>"],
            "image_token_index": ids["<|image|>"],
            "video_token_index": ids["<|video|>"],
            "vision_start_token_id": ids["<|begin_of_image|>"],
            "vision_end_token_id": ids["<|end_of_image|>"],
            "vocab_size": _VOCAB,
            "text_config": {
                "model_type": "glm4v_text",
                **_TEXT,
                "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
                "pad_token_id": 0,
                "eos_token_id": [ids["<|im_end|>"]],
            },
            "vision_config": {
                "model_type": "glm4v",
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "out_hidden_size": 32,
                "image_size": 112,
                "patch_size": 14,
                "in_channels": 3,
            },
        },
        special=special,
        marks={"image": "<|begin_of_image|><|image|><|end_of_image|>"},
        processor={
            "image_processor_type": "Glm4vImageProcessor",
            "processor_class": "Glm4vProcessor",
            "size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 112 * 112},
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            **_NORMALIZED,
        },
    )


def lfm2_vl() -> Checkpoint:
    special = ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
    special += [f"<|img_row_{r}_col_{c}|>" for r in range(1, 4) for c in range(1, 4)]
    return Checkpoint(
        config=lambda ids: {
            "model_type": "lfm2-vl",
            "image_token_id": ids["<image>"],
            "text_config": {
                **_TEXT,
                "model_type": "lfm2",
                "layer_types": ["conv", "full_attention"],
                "num_heads": 2,
                "block_dim": 32,
                "conv_dim": 32,
                "conv_dim_out": 32,
                "block_multiple_of": 8,
            },
            "vision_config": {
                "model_type": "lfm2_vl",
                **_SIGLIP,
                "patch_size": 16,
                "num_patches": 64,
            },
            "projector_hidden_size": 32,
            "vocab_size": _VOCAB,
        },
        special=special,
        marks={"image": "<image>"},
        processor={
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "processor_class": "Lfm2VlProcessor",
            "encoder_patch_size": 16,
            "min_image_tokens": 4,
            "max_image_tokens": 16,
            "tile_size": 64,
            "downsample_factor": 2,
            **_NORMALIZED,
        },
        named={
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail": "<|img_thumbnail|>",
        },
    )


def idefics2() -> Checkpoint:
    return Checkpoint(
        config=lambda ids: {
            "model_type": "idefics2",
            "image_token_id": ids["<image>"],
            "text_config": {"model_type": "mistral", **_TEXT},
            "vision_config": {**_SIGLIP, "model_type": "idefics2"},
            "perceiver_config": {
                "model_type": "idefics2",
                "num_key_value_heads": 1,
                "resampler_depth": 1,
                "resampler_head_dim": 8,
                "resampler_n_heads": 2,
                "resampler_n_latents": 6,
            },
            "vocab_size": _VOCAB,
        },
        special=["<image>", "<fake_token_around_image>", "<end_of_utterance>"],
        marks={"image": "<image>"},
        processor={
            "image_processor_type": "Idefics2ImageProcessor",
            "processor_class": "Idefics2Processor",
            "size": {"longest_edge": 56, "shortest_edge": 28},
            "do_image_splitting": False,
            **_NORMALIZED,
        },
        more={"processor_config.json": {"image_seq_len": 6}},
    )


def internvl_chat() -> Checkpoint:
    return Checkpoint(
        config=lambda ids: {
            "model_type": "internvl_chat",
            "image_token_index": ids["<IMG_CONTEXT>"],
            "text_config": {"model_type": "qwen2", **_TEXT},
            "vision_config": {**_SIGLIP, "model_type": "intern_vit_6b", "image_size": 56},
            "vocab_size": _VOCAB,
        },
        special=["<IMG_CONTEXT>", "<img>", "</img>", "<image>"],
        marks={"image": "<image>\n"},
        processor={},
    )


def llama4() -> Checkpoint:
    special = ["<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>"]
    special += ["<|tile_x_separator|>", "<|tile_y_separator|>"]
    return Checkpoint(
        config=lambda ids: {
            "model_type": "llama4",
            "image_token_index": ids["<|patch|>"],
            "text_config": {
                "model_type": "llama4_text",
                **_TEXT,
                "head_dim": 16,
                "intermediate_size_mlp": 48,
                "num_local_experts": 4,
                "attention_chunk_size": 64,
                "interleave_moe_layer_step": 2,
                "no_rope_layers": [1, 1],
            },
            "vision_config": {
                **_SIGLIP,
                "model_type": "llama4_vision_model",
                "initializer_range": 0.02,
                "norm_eps": 1e-5,
                "pixel_shuffle_ratio": 0.5,
                "projector_dropout": 0.0,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
                "rope_theta": 10000,
                "vision_feature_layer": -1,
                "vision_feature_select_strategy": "default",
                "vision_output_dim": 32,
                "intermediate_size": 64,
            },
        },
        special=special,
        marks={"image": "<|image|>"},
        processor={"size": {"height": 56, "width": 56}, "max_patches": 1},
    )


def aya_vision() -> Checkpoint:
    special = ["<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>"]
    special += ["<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL"]
    return Checkpoint(
        config=lambda ids: {
            "model_type": "aya_vision",
            "image_token_index": ids["<|IMG_PATCH|>"],
            "text_config": {
                "model_type": "cohere2",
                **_TEXT,
                "head_dim": 16,
                "sliding_window": 64,
                "sliding_window_pattern": 2,
            },
            "vision_config": {"model_type": "siglip_vision_model", **_SIGLIP},
            "alignment_intermediate_size": 32,
        },
        special=special,
        marks={"image": "<image>"},
        processor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "processor_class": "AyaVisionProcessor",
            "size": {"height": 56, "width": 56},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
            **_NORMALIZED,
        },
        more={
            "processor_config.json": {
                "processor_class": "AyaVisionProcessor",
                "patch_size": 14,
                "img_size": 56,
                "downsample_factor": 2,
                "image_token": "<image>",
            }
        },
    )


def deepseek_vl() -> Checkpoint:
    """Of the processor and the tokenizer: the model is LLaVA's."""
    return Checkpoint(
        config=lambda ids: {"model_type": "deepseek_vl"},
        special=["<image_placeholder>"],
        marks={"image": "<image_placeholder>"},
        processor={
            "image_processor_type": "DeepseekVLImageProcessor",
            "processor_class": "DeepseekVLProcessor",
            "size": {"height": 56, "width": 56},
            **_NORMALIZED,
        },
        more={"processor_config.json": {"num_image_tokens": 16}},
        named={"image_token": "<image_placeholder>"},
    )


def deepseek_vl_v2() -> Checkpoint:
    return Checkpoint(
        config=lambda ids: {
            "model_type": "deepseek_vl_v2",
            "image_token_index": ids["<image>"],
            "language_config": {
                "model_type": "deepseek_v2",
                **_TEXT,
                "num_key_value_heads": 2,
                "moe_intermediate_size": 16,
                "n_shared_experts": 1,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "kv_lora_rank": 16,
                "q_lora_rank": None,
                "qk_rope_head_dim": 16,
                "v_head_dim": 16,
                "qk_nope_head_dim": 16,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
            },
            "vision_config": {
                "model_type": "vision",
                "layers": 1,
                "width": 16,
                "intermediate_size": 24,
                "num_attention_heads": 2,
                "image_size": 64,
                "patch_size": 16,
            },
            "projector_config": {"input_dim": 16, "n_embed": 32},
            "vocab_size": _VOCAB,
        },
        special=["<image>", "<bos>"],
        marks={"image": "<image>\n"},
        processor={},
        more={
            "processor_config.json": {
                "candidate_resolutions": [[64, 64], [128, 64], [64, 128]],
                "patch_size": 16,
                "downsample_ratio": 2,
                "pad_token": "<pad>",
            }
        },
        named={"bos_token": "<bos>"},
    )


def molmo() -> Checkpoint:
    return Checkpoint(
        config=lambda ids: {
            "model_type": "molmo",
            "text_config": {
                "d_model": 32,
                "n_heads": 2,
                "n_kv_heads": 1,
                "n_layers": 2,
                "mlp_hidden_size": 48,
                "vocab_size": _VOCAB,
                "embedding_size": _VOCAB,
                "additional_vocab_size": 16,
            },
            "vision_config": {
                "image_default_input_size": [56, 56],
                "hidden_size": 48,
                "image_emb_dim": 16,
                "image_num_heads": 2,
                "image_num_key_value_heads": 2,
                "image_num_layers": 2,
                "image_head_dim": 8,
                "image_mlp_dim": 24,
                "image_num_pos": 17,
                "d_model": 32,
                "vit_layers": [-1, -2],
            },
        },
        special=["<im_patch>", "<im_col>", "<im_start>", "<im_end>"],
        marks={"image": "<|image|>"},
        processor={
            "max_crops": 2,
            "overlap_margins": [0, 0],
            "base_image_input_size": [56, 56],
            "image_token_length_w": 2,
            "image_token_length_h": 2,
            "image_patch_size": 14,
        },
    )


def llava_next() -> Checkpoint:
    found = llava()
    make = found.config
    found.config = lambda ids: {**make(ids), "model_type": "llava_next"}
    found.processor |= {
        "image_processor_type": "LlavaNextImageProcessor",
        "processor_class": "LlavaNextProcessor",
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]],
    }
    return found


def llava_bunny() -> Checkpoint:
    return Checkpoint(
        config=lambda ids: {
            "model_type": "llava-qwen2",
            "auto_map": {},
            **_TEXT,
            "mm_hidden_size": 16,
            "text_config": {"model_type": "qwen2", **_TEXT},
            "vision_config": {**_SIGLIP, "model_type": "siglip_vision_model", "image_size": 378},
        },
        special=[],
        marks={"image": "<image>\\n"},
        processor={},
    )


def gemma3n() -> Checkpoint:
    special = ["<image_soft_token>", "<start_of_image>", "<end_of_image>"]
    special += ["<audio_soft_token>", "<start_of_audio>", "<end_of_audio>"]
    return Checkpoint(
        config=lambda ids: {
            "model_type": "gemma3n",
            "image_token_id": ids["<image_soft_token>"],
            "audio_token_id": ids["<audio_soft_token>"],
            "vision_config": {},
        },
        special=special,
        marks={"image": "<image_soft_token>", "audio": "<audio_soft_token>"},
        processor={
            "image_processor_type": "SiglipImageProcessor",
            "feature_extractor_type": "Gemma3nAudioFeatureExtractor",
            "processor_class": "Gemma3nProcessor",
            "size": {"height": 56, "width": 56},
            **_NORMALIZED,
        },
        more={"processor_config.json": {"image_seq_length": 16, "audio_seq_length": 12}},
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "audio_token": "<audio_soft_token>",
            "boa_token": "<start_of_audio>",
            "eoa_token": "<end_of_audio>",
        },
    )


def phi3_v() -> Checkpoint:
    return Checkpoint(
        config=lambda ids: {"model_type": "phi3_v"},
        special=[],
        marks={"image": "<|image_1|>"},
        processor={"num_crops": 2, "num_img_tokens": 144},
    )


def qwen3_omni_moe() -> Checkpoint:
    special = [*_QWEN_SPECIAL, "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"]
    return Checkpoint(
        config=lambda ids: {
            "model_type": "qwen3_omni_moe",
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "audio_token_id": ids["<|audio_pad|>"],
            "position_id_per_seconds": 13,
        },
        special=special,
        marks={**_QWEN_MARKS, "audio": "<|audio_start|><|audio_pad|><|audio_end|>"},
        processor={
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 128,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "min_pixels": 4 * 256,
            "max_pixels": 64 * 256,
            **_NORMALIZED,
        },
        named={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "audio_token": "<|audio_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
    )


#: Families whose models are too large for a test: only their processors are written.
PROCESSORS: dict[str, Callable[[], Checkpoint]] = {
    make.__name__: make for make in (gemma3n, phi3_v, qwen3_omni_moe)
}

CHECKPOINTS: dict[str, Callable[[], Checkpoint]] = {
    make.__name__: make
    for make in (
        smolvlm,
        idefics3,
        llava,
        gemma3,
        qwen2_vl,
        qwen2_5_vl,
        qwen3_vl,
        qwen3_5,
        pixtral,
        mistral3,
        paligemma,
        gemma4,
        kimi_vl,
        glm4v,
        lfm2_vl,
        idefics2,
        internvl_chat,
        llama4,
        aya_vision,
        deepseek_vl_v2,
        molmo,
        llava_next,
        llava_bunny,
    )
}
