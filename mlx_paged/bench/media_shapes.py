"""Multimodal checkpoints with random weights, in the shapes of published models: no download."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from mlx_paged import extension  # noqa: F401  (its BLAS has to come before mlx.core)

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel


class Shape(StrEnum):
    """The published model whose shape a random model has."""

    SMOLVLM_256M = "smolvlm-256m"
    QWEN2_VL_2B = "qwen2-vl-2b"


_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }}{% else %}{{ MARKS[p['type']] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_PIXELS = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "do_convert_rgb": True,
    "do_resize": True,
}
# CLIP's values, which Qwen2-VL's processor shares.
_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


@dataclass(frozen=True)
class _Recipe:
    """The parameters of a shape.

    Attributes:
        package: The mlx-vlm package.
        vocab_size: Vocabulary size of model and tokenizer.
        special: Special tokens in addition to the chat template's.
        marks: Text that the template writes for an item, by kind.
        config: Makes the configuration from the special tokens' ids and the number of layers (None:
            all).
        files: Other files of the checkpoint.
    """

    package: str
    vocab_size: int
    special: list[str]
    marks: dict[str, str]
    config: Callable[[dict[str, int], int | None], dict[str, Any]]
    files: dict[str, Any]


def _fewer(all_layers: int, of_tower: int, wanted: int | None) -> tuple[int, int]:
    """Numbers of layers of the language model and of its tower, in the original proportion."""
    if wanted is None:
        return all_layers, of_tower
    return wanted, max(1, round(of_tower * wanted / all_layers))


def _smolvlm(ids: dict[str, int], num_layers: int | None) -> dict[str, Any]:
    layers, tower = _fewer(30, 12, num_layers)
    return {
        "model_type": "smolvlm",
        "image_token_id": ids["<image>"],
        "scale_factor": 4,
        "vocab_size": 49280,
        "eos_token_id": [ids["<|im_end|>"]],
        "text_config": {
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": layers,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 49280,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "max_position_embeddings": 8192,
        },
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": tower,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
            "num_channels": 3,
        },
    }


def _qwen2_vl(ids: dict[str, int], num_layers: int | None) -> dict[str, Any]:
    layers, tower = _fewer(28, 32, num_layers)
    return {
        "model_type": "qwen2_vl",
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "eos_token_id": [ids["<|im_end|>"]],
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": layers,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "vision_config": {
            "model_type": "qwen2_vl",
            "depth": tower,
            "embed_dim": 1280,
            "hidden_size": 1536,
            "num_heads": 16,
            "mlp_ratio": 4,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


_RECIPES = {
    Shape.SMOLVLM_256M: _Recipe(
        "smolvlm",
        49280,
        ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"],
        {"image": "<image>"},
        _smolvlm,
        {
            "preprocessor_config.json": {
                "image_processor_type": "SmolVLMImageProcessor",
                "processor_class": "SmolVLMProcessor",
                # One tile of 64 rows, regardless of the image size.
                "do_image_splitting": False,
                "max_image_size": {"longest_edge": 512},
                "size": {"longest_edge": 512},
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
                **_PIXELS,
            },
            "processor_config.json": {"image_seq_len": 64, "processor_class": "SmolVLMProcessor"},
        },
    ),
    Shape.QWEN2_VL_2B: _Recipe(
        "qwen2_vl",
        151936,
        ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
        {
            "image": "<|vision_start|><|image_pad|><|vision_end|>",
            "video": "<|vision_start|><|video_pad|><|vision_end|>",
        },
        _qwen2_vl,
        {
            "preprocessor_config.json": {
                "image_processor_type": "Qwen2VLImageProcessor",
                "processor_class": "Qwen2VLProcessor",
                "patch_size": 14,
                "temporal_patch_size": 2,
                "merge_size": 2,
                "min_pixels": 56 * 56,
                "max_pixels": 28 * 28 * 1280,
                **_CLIP,
                **_PIXELS,
            },
        },
    ),
}


def write_checkpoint(
    folder: Path, shape: Shape, *, num_layers: int | None = None, dtype: str = "bfloat16"
) -> Path:
    """Writes a checkpoint; its tokenizer encodes texts as bytes.

    Args:
        num_layers: Layers of the language model; the tower shrinks in proportion. None: all.
        dtype: Dtype of the weights.
    """
    recipe = _RECIPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    config = recipe.config(_write_tokenizer(folder, recipe), num_layers)
    for name, content in {"config.json": config, **recipe.files}.items():
        (folder / name).write_text(json.dumps(content))
    # A copy, because packages write defaults into the configuration they get.
    model = _random_model(recipe.package, json.loads(json.dumps(config)))
    kind = getattr(mx, dtype)
    weights = {}
    for name, array in tree_flatten(model.parameters()):
        weights[name] = array.astype(kind)
        mx.eval(weights[name])  # one at a time, because the random numbers are float32
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def _random_model(package: str, config: dict[str, Any]) -> Any:
    from mlx_vlm.utils import update_module_configs

    module = importlib.import_module(f"mlx_vlm.models.{package}")
    built = module.ModelConfig.from_dict(config)
    parts = ["text", "vision", "perceiver", "projector", "audio"]
    mx.random.seed(0)
    return module.Model(update_module_configs(built, module, config, parts))


def _write_tokenizer(folder: Path, recipe: _Recipe) -> dict[str, int]:
    """Writes the tokenizer; returns the ids of the special tokens."""
    from transformers import PreTrainedTokenizerFast

    special = ["<|im_start|>", "<|im_end|>", "<pad>", *recipe.special]
    # A model with random weights samples any id, so every id needs a text, even ids that no text
    # encodes to.
    letters = sorted(ByteLevel.alphabet())
    words = [f"w{i}" for i in range(recipe.vocab_size - len(letters) - len(special))]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate([*letters, *words])}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        chat_template=_TEMPLATE.replace("MARKS", json.dumps(recipe.marks)),
    )
    fast.save_pretrained(folder)
    return dict(zip(special, map(int, fast.convert_tokens_to_ids(special))))
