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


def write(path: Path, checkpoint: Checkpoint, *, seed: int = 0) -> Path:
    """Writes a checkpoint with random weights."""
    path.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(path, checkpoint)
    config = checkpoint.config(ids)
    for name, content in {
        "config.json": config,
        "preprocessor_config.json": checkpoint.processor,
        **checkpoint.more,
    }.items():
        (path / name).write_text(json.dumps(content))
    # Packages write defaults into what they are given.
    config = json.loads(json.dumps(config))
    m = package(config["model_type"])
    built = m.ModelConfig.from_dict(config)
    from mlx_vlm.utils import update_module_configs

    parts = ["text", "vision", "perceiver", "projector", "audio"]
    model = vary(m.Model(update_module_configs(built, m, config, parts)), seed)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
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


CHECKPOINTS: dict[str, Callable[[], Checkpoint]] = {
    make.__name__: make
    for make in (smolvlm, idefics3, llava, gemma3, qwen2_vl, qwen2_5_vl, qwen3_vl)
}
