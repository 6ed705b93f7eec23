"""Runs DeepSeek-VL (the first) as a LLaVA: a SigLIP encoder, two projection layers, a Llama.

Its checkpoints have two forms: the published one (``multi_modality``, whose encoder has timm's
names), and transformers' (``deepseek_vl``). Both are read as mlx-vlm's LLaVA, whose modules compute
the same. The 7B model has a second encoder (SAM) and is not served.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_paged.model.config_normalization import normalize

#: Names of configs.
TYPES = ("deepseek_vl", "multi_modality")
# The tower that the published form names: "siglip_large_patch16_384" in timm's code.
_TOWER = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "patch_size": 16,
    "image_size": 384,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu",
}
_IMAGE_TOKEN = 100015
_MARK = "<image_placeholder>"


def as_llava(config: dict[str, Any]) -> None:
    """Changes a config into one of LLaVA."""
    if config.get("model_type") == "multi_modality":
        given = config["vision_config"]
        size = (given.get("params") or {}).get("image_size", _TOWER["image_size"])
        known = {name: given[name] for name in _TOWER if name in given and name != "model_type"}
        config["vision_config"] = {**_TOWER, "image_size": size, **known}
        config["text_config"] = normalize(config.pop("language_config"))
        config.setdefault("image_token_id", config.get("image_token_index", _IMAGE_TOKEN))
        config["image_token_index"] = config["image_token_id"]
    config["published_type"] = config["model_type"]
    config |= {
        "model_type": "llava",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "projector_hidden_act": "gelu",
    }
    config["vocab_size"] = config["text_config"]["vocab_size"]


def processor(path: Path) -> Any:
    """Transformers' processor, from the files of either form."""
    from transformers import AutoTokenizer
    from transformers.models.deepseek_vl import image_processing_pil_deepseek_vl as images
    from transformers.models.deepseek_vl.processing_deepseek_vl import DeepseekVLProcessor

    settings: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (path / name).is_file():
            found = json.loads((path / name).read_text())
            settings |= {**found, **(found.get("image_processor") or {})}
    if "image_size" in settings:
        settings["size"] = {"height": settings["image_size"], "width": settings["image_size"]}
    fields = ("size", "image_mean", "image_std", "min_size", "rescale_factor", "do_normalize")
    given = {name: settings[name] for name in fields if settings.get(name) is not None}
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    mark = settings.get("image_tag") or settings.get("image_token")
    tokenizer.image_token = mark or getattr(tokenizer, "image_token", None) or _MARK
    made = images.DeepseekVLImageProcessorPil(**given)
    count = settings.get("num_image_tokens", 576)
    template = path / "chat_template.json"
    chat = json.loads(template.read_text())["chat_template"] if template.is_file() else None
    return DeepseekVLProcessor(made, tokenizer, chat_template=chat, num_image_tokens=count)


_NAMES = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.vision_model\.", "vision_tower.vision_model."),
    (r"^model\.aligner\.linear([12])\.", r"multi_modal_projector.linear_\1."),
    (r"^aligner\.layers\.0\.", "multi_modal_projector.linear_1."),
    (r"^aligner\.layers\.2\.", "multi_modal_projector.linear_2."),
    (r"^vision_model\.vision_tower\.patch_embed\.proj\.", "{tower}embeddings.patch_embedding."),
    (r"^vision_model\.vision_tower\.pos_embed$", "{tower}embeddings.position_embedding.weight"),
    (r"^vision_model\.vision_tower\.norm\.", "{tower}post_layernorm."),
    (r"^vision_model\.vision_tower\.blocks\.(\d+)\.norm([12])\.", r"{layer}layer_norm\2."),
    (r"^vision_model\.vision_tower\.blocks\.(\d+)\.attn\.proj\.", r"{layer}self_attn.out_proj."),
    (r"^vision_model\.vision_tower\.blocks\.(\d+)\.mlp\.", r"{layer}mlp."),
)
_TOWER_NAME = "vision_tower.vision_model."
_LAYER_NAME = _TOWER_NAME + r"encoder.layers.\1."
_QKV = re.compile(r"^vision_model\.vision_tower\.blocks\.(\d+)\.attn\.qkv\.(.+)$")
# Weights of the pooled output, which nothing reads.
_UNUSED = re.compile(r"^(model\.)?vision_model\.(vision_tower\.attn_pool|head)\.")


def llava_weights(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Weights of either form under LLaVA's names."""
    found: dict[str, Any] = {}
    for name, value in weights.items():
        if _UNUSED.match(name):
            continue
        joined = _QKV.match(name)
        if joined:
            third = value.shape[0] // 3
            prefix = f"{_TOWER_NAME}encoder.layers.{joined.group(1)}.self_attn."
            for i, part in enumerate("qkv"):
                rows = value[i * third : (i + 1) * third]
                found[f"{prefix}{part}_proj.{joined.group(2)}"] = rows
            continue
        for pattern, new in _NAMES:
            new = new.replace("{tower}", _TOWER_NAME).replace("{layer}", _LAYER_NAME)
            name, count = re.subn(pattern, new, name)
            if count:
                break
        if name.endswith("position_embedding.weight") and value.ndim == 3:
            value = value[0]
        found[name] = value
    return found
