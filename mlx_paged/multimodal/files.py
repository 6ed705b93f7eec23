"""Converts configs and weights of multimodal checkpoints to the names of mlx-vlm's code.

Checkpoints name one thing in several ways: transformers 5 saves RoPE, sections and weights under
other names than transformers 4, and omits the defaults of its own classes. mlx-vlm's classes have
their own defaults, which are those of one published checkpoint.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_paged.content import KINDS
from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.config_normalization import normalize
from mlx_paged.multimodal import deepseek_vl
from mlx_paged.multimodal.packages import package_of

# mlx-vlm's functions are replaced while a checkpoint is loaded.
_loading = threading.Lock()


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a ``config.json`` with transformers' defaults, under mlx-vlm's names.

    Raises:
        UnsupportedModelError: mlx-vlm's model of the family cannot express it.
    """
    found = normalize(config)
    package = package_of(found) or ""
    _spell_placeholders(found)
    for holder in (found, *(found.get(name) for name in _HOLDERS)):
        if isinstance(holder, dict):
            _spell_sections(holder, package)
    change = _CHANGES.get(package)
    if change is not None:
        change(found)
    if found.get("model_type") in deepseek_vl.TYPES:
        deepseek_vl.as_llava(found)
    return found


# Sections of configs, and those that contain such sections.
_TEXTS = ("text_config", "language_config", "llm_config", "code_predictor_config")
_TOWERS = ("vision_config", "audio_config")
_HOLDERS = ("thinker_config", "talker_config")


def _spell_sections(holder: dict[str, Any], package: str) -> None:
    for name in _TEXTS:
        if isinstance(holder.get(name), dict):
            _spell_text(holder[name], package)
    for name in _TOWERS:
        if isinstance(holder.get(name), dict):
            _spell_head_dim(holder[name])


def _spell_placeholders(config: dict[str, Any]) -> None:
    for kind in KINDS:
        names = (f"{kind}_token_id", f"{kind}_token_index")
        token = next((config[name] for name in names if isinstance(config.get(name), int)), None)
        for name in names:
            if token is not None and config.get(name) is None:
                config[name] = token


def _spell_head_dim(section: dict[str, Any]) -> None:
    """Sets `head_dim`, for which packages have different defaults."""
    heads = section.get("num_attention_heads")
    width = section.get("hidden_size")
    if section.get("head_dim") is None and heads and width and "kv_lora_rank" not in section:
        section["head_dim"] = width // heads


def _spell_text(section: dict[str, Any], package: str) -> None:
    _spell_head_dim(section)
    kinds = section.get("layer_types")
    if not kinds:
        return
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    # Older code knows only a period, whose last layer has full attention.
    period = full[0] + 1 if full else len(kinds) + 1
    if full != list(range(period - 1, len(kinds), period)):
        if package in _PERIODIC:
            raise UnsupportedModelError(
                package,
                f"mlx-vlm's code needs full attention in every n-th layer, and layer_types has it "
                f"in layers {full}",
            )
        return
    for name in ("sliding_window_pattern", "full_attention_interval"):
        section[name] = period


# Packages whose layers follow a period, regardless of `layer_types`.
_PERIODIC = frozenset(
    ("aya_vision", "gemma3", "qwen3_5", "qwen3_5_moe", "minicpmv4_6", "indic_ocr")
)


def _flatten(config: dict[str, Any]) -> None:
    """Copies the text model's fields to the top, where transformers 4 had them."""
    text = config.get("text_config")
    if isinstance(text, dict):
        own = {name: value for name, value in text.items() if name != "model_type"}
        config |= {name: value for name, value in own.items() if value is not None}
    config["vision_config"]["model_type"] = config["model_type"]


def _name_vision(config: dict[str, Any]) -> None:
    config["vision_config"]["model_type"] = config["model_type"]


def _gemma3(config: dict[str, Any]) -> None:
    text = config["text_config"]
    # Features are divided by the root of one size and multiplied by that of the other.
    config["hidden_size"] = text["hidden_size"]
    config.setdefault("mm_tokens_per_image", 256)
    text["mm_tokens_per_image"] = config["mm_tokens_per_image"]
    if text.get("rope_theta") is not None:
        text["rope_global_base_freq"] = text["rope_theta"]


def _gemma4(config: dict[str, Any]) -> None:
    text = config["text_config"]
    for field, other in (
        ("global_head_dim", "head_dim"),
        ("num_global_key_value_heads", "num_key_value_heads"),
    ):
        if text.get(field) is None and "per_layer_config" in text:
            layers = (text["per_layer_config"] or {}).values()
            found = {layer[other] for layer in layers if other in layer}
            if len(found) > 1:
                reason = f"its full attention layers differ in {other}: {sorted(found)}"
                raise UnsupportedModelError("gemma4", reason)
            if found or field == "global_head_dim":
                text[field] = found.pop() if found else text[other]


def _glm(config: dict[str, Any]) -> None:
    text = config["text_config"]
    ends = config.get("eos_token_id", text.get("eos_token_id"))
    text["eos_token_id"] = config["eos_token_id"] = [] if ends is None else ends


def _glm4v_moe(config: dict[str, Any]) -> None:
    _glm(config)
    config["text_config"].setdefault("use_qk_norm", False)


def _glm_ocr(config: dict[str, Any]) -> None:
    from mlx_vlm.models.glm_ocr.config import TextConfig, VisionConfig

    for name, made in (("text_config", TextConfig), ("vision_config", VisionConfig)):
        known = {field.name for field in fields(made)}
        config[name] = {field: v for field, v in config[name].items() if field in known}


def _lfm2(config: dict[str, Any]) -> None:
    text = config["text_config"]
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        text.setdefault(name, text["hidden_size"])
    text.setdefault("num_heads", text["num_attention_heads"])


def _llama4(config: dict[str, Any]) -> None:
    config["vision_config"].setdefault("vision_feature_layer", -1)


def _gemma4_unified(config: dict[str, Any]) -> None:
    _gemma4(config)
    vision = config.get("vision_config")
    if isinstance(vision, dict) and "pooling_kernel_size" in vision and "patch_size" in vision:
        vision.setdefault("model_patch_size", vision["patch_size"] * vision["pooling_kernel_size"])


# Fields of Kimi K2.5's encoder: mlx-vlm's, those of its published code, transformers'.
_KIMI_TOWER = (
    ("depth", "vt_num_hidden_layers", "num_hidden_layers"),
    ("embed_dim", "vt_hidden_size", "hidden_size"),
    ("hidden_size", "vt_hidden_size", "hidden_size"),
    ("num_heads", "vt_num_attention_heads", "num_attention_heads"),
    ("intermediate_size", "vt_intermediate_size", "intermediate_size"),
    ("init_pos_emb_height", "init_pos_emb_height", "pos_emb_height"),
    ("init_pos_emb_width", "init_pos_emb_width", "pos_emb_width"),
)


def _kimi_k25(config: dict[str, Any]) -> None:
    vision = config["vision_config"]
    if vision.get("model_type") == "moonvit":  # as converted by mlx-vlm
        return
    named = {
        ours: next((vision[name] for name in (published, theirs) if vision.get(name)), None)
        for ours, published, theirs in _KIMI_TOWER
    }
    vision |= {name: value for name, value in named.items() if value is not None}
    vision["model_type"] = "moonvit"
    if config.get("media_placeholder_token_id") is None and "image_token_id" in config:
        config["media_placeholder_token_id"] = config["image_token_id"]


def _nemotron_omni(config: dict[str, Any]) -> None:
    config.setdefault("ps_version", "v2")  # transformers has no other.
    text, vision = config.get("text_config"), config.get("vision_config")
    if isinstance(text, dict) and text.get("layers_block_type"):
        names = {"linear_attention": "mamba", "full_attention": "attention"}
        text["layers_block_type"] = [names.get(kind, kind) for kind in text["layers_block_type"]]
    if isinstance(vision, dict) and "max_img_size" in vision:
        vision["max_resolution"] = vision["max_img_size"]
        vision.setdefault("intermediate_size", int(vision["hidden_size"] * vision["mlp_ratio"]))
        first, others = vision["num_cls_tokens"], vision["num_registers"]
        teachers = [{"name": str(i)} for i in range(first)]
        vision.setdefault("args", {"teachers": teachers, "register_multiple": first + others})
    for ours, theirs in (
        ("img_context_token_id", "image_token_id"),
        ("video_context_token_id", "video_token_id"),
        ("vit_hidden_size", "vision_hidden_size"),
    ):
        if config.get(ours) is None and config.get(theirs) is not None:
            config[ours] = config[theirs]


def _pixtral(config: dict[str, Any]) -> None:
    config["model_type"] = "pixtral"


_CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "paddleocr_vl"), _flatten),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _name_vision),
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4_unified,
    "kimi_k25": _kimi_k25,
    "glm4v": _glm,
    "glm4v_moe": _glm4v_moe,
    "glm_ocr": _glm_ocr,
    "lfm2_vl": _lfm2,
    "llama4": _llama4,
    "nemotron_h_nano_omni": _nemotron_omni,
    "pixtral": _pixtral,
}


@contextlib.contextmanager
def as_published(path: Path) -> Iterator[dict[str, Any]]:
    """Makes mlx-vlm read a checkpoint's files under the names of its code; yields the config.

    It replaces mlx-vlm's functions meanwhile, for one checkpoint at a time.
    """
    from mlx_vlm import utils

    load_config, load_weights = utils.load_config, utils.load_model_weights
    load_file = utils._load_safetensors
    config = read_config(load_config(path))

    def config_of(*args: Any, **options: Any) -> dict[str, Any]:
        return deepcopy(config)

    def file_of(name: str) -> dict[str, Any]:
        weights: dict[str, Any] = load_file(name)
        if config.get("published_type") in deepseek_vl.TYPES:
            weights = deepseek_vl.llava_weights(weights)
        renamed = _RENAMED.get(package_of(config) or "", ())
        for old, new in renamed:
            weights = {key.replace(old, new): value for key, value in weights.items()}
        weights = _folded_scales(weights)
        return {key: _laid_out(key, value, config) for key, value in weights.items()}

    def weights_of(
        model: Any, config: Any, weights: dict[str, Any], *rest: Any, **more: Any
    ) -> Any:
        parameters = dict(tree_flatten(model.parameters()))
        weights = _tied(_known(weights, parameters), parameters)
        weights |= _unused(model, weights, parameters)
        return load_weights(model, config, weights, *rest, **more)

    replaced: dict[str, Any] = {
        "load_config": config_of,
        "load_model_weights": weights_of,
        "_load_safetensors": file_of,
    }
    with _loading:
        before = {name: getattr(utils, name) for name in replaced}
        vars(utils).update(replaced)
        try:
            yield config
        finally:
            vars(utils).update(before)


# Names that transformers 5 writes and reads, and published files do not have.
_RENAMED = {
    "kimi_k25": (
        ("language_model.model.blocks.", "language_model.model.layers."),
        ("model.mm_projector.", "mm_projector."),
    )
}


# Scales of a block of RADIO's encoder, and the modules whose outputs they scale.
_SCALED = {"layer_scale1.lambda1": "attn.proj", "layer_scale2.lambda1": "mlp.fc2"}


def _folded_scales(weights: dict[str, Any]) -> dict[str, Any]:
    """Folds the scales of RADIO's blocks, which mlx-vlm lacks, into the scaled weights.

    transformers saves each with the weights that it scales.
    """
    found = dict(weights)
    for name, scale in weights.items():
        end = next((end for end in _SCALED if name.endswith(f".{end}")), None)
        base = "" if end is None else name.removesuffix(end) + _SCALED[end]
        if end is not None and f"{base}.weight" in weights:
            found[f"{base}.weight"] = weights[f"{base}.weight"] * scale[:, None]
            found[f"{base}.bias"] = weights[f"{base}.bias"] * scale
            del found[name]
    return found


def _laid_out(name: str, value: Any, config: Mapping[str, Any]) -> Any:
    """Returns a weight in transformers 4's layout: experts of Qwen 3 VL have input rows first."""
    if config.get("model_type") != "qwen3_vl_moe" or ".experts." not in name:
        return value
    text = config["text_config"]
    width, inner = text["hidden_size"], text["moe_intermediate_size"]
    if name.endswith("gate_up_proj"):
        rows, columns = width, 2 * inner
    elif name.endswith("down_proj"):
        rows, columns = inner, width
    else:
        return value
    is_new = str(config.get("transformers_version", "4")).split(".")[0] >= "5"
    if tuple(value.shape[1:]) == (columns, rows) and (rows != columns or is_new):
        return value.swapaxes(1, 2)
    return value


def _known(weights: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """Renames weights that the model does not expect by `_ALIASES`, if it expects the new name."""
    found = {}
    for name, value in weights.items():
        if name not in expected:
            others = (name.replace(old, new, 1) for old, new in _ALIASES if old in name)
            name = next((other for other in others if other in expected), name)
        found[name] = value
    return found


def _tied(weights: dict[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """Adds an output projection that the file leaves out, because it is the embedding."""
    head, embedding = "language_model.lm_head.", "language_model.model.embed_tokens."
    if f"{head}weight" in expected and f"{head}weight" not in weights:
        for part in ("weight", "scales", "biases"):
            if f"{embedding}{part}" in weights:
                weights[f"{head}{part}"] = weights[f"{embedding}{part}"]
    return weights


def _unused(model: Any, weights: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """Returns stand-ins for weights that mlx-vlm requires but never reads, so transformers 5 omits
    them: RADIO's preprocessing, and K and V projections of Gemma 3n's layers that share others'."""
    found = {
        name: value
        for name, value in expected.items()
        if ".input_conditioner." in name and name not in weights
    }
    language = getattr(getattr(model, "language_model", None), "model", None)
    first = getattr(language, "first_kv_shared_layer_idx", None)
    if first is None:
        return found
    for name, value in expected.items():
        layer = re.search(r"\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.", name)
        if layer and int(layer[1]) >= first and name not in weights:
            other = weights.get(name.replace(f".layers.{layer[1]}.", ".layers.0."), value)
            found[name] = mx.zeros(value.shape, other.dtype)
    return found


# Modules that some versions have and others lack: (old name, new name).
_ALIASES = (
    ("vision_tower.", "vision_tower.vision_model."),
    ("vision_tower.vision_model.", "vision_tower."),
    ("vision_model.", "vision_model.vision_model."),
)
