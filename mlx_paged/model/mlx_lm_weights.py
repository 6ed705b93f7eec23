"""Renames weights that transformers saves under other names than mlx-lm's modules expect.

mlx-lm's `sanitize` methods know the files that a family was published with. transformers 5 renames
some weights when it saves a model, and can store all experts of a layer as one array. `renaming`
returns a model class that reads those files, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_paged.model.overrides import overridden

Weights = dict[str, mx.array]


def renaming(model_class: type[nn.Module]) -> type[nn.Module]:
    """Returns the class with a `sanitize` that takes transformers' names first."""
    sanitize: Any = getattr(model_class, "sanitize", None)
    module = model_class.__module__.rpartition(".")[2]
    rename = _RENAMED.get(module)
    substitutions = [(re.compile(theirs), ours) for theirs, ours in _NAMES.get(module, ())]

    def renamed(name: str) -> str:
        for theirs, ours in substitutions:
            name = theirs.sub(ours, name)
        return name

    def of_transformers(self: nn.Module, weights: Weights) -> Any:
        weights = {renamed(name): weight for name, weight in weights.items()}
        if rename is not None:
            weights = rename(self, weights)
        weights = _stacked(self, weights)
        return weights if sanitize is None else sanitize(self, weights)

    return overridden(model_class, "sanitize", of_transformers)


_FUSED = re.compile(r"(.*)\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj)$")
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


def _stacked(model: Any, weights: Weights) -> Weights:
    """Converts experts to the module's form, if its `sanitize` knows only the other form.

    It splits ``[num_experts, 2 * intermediate, hidden]`` of gates and up projections in one array.
    """
    module = type(model).__module__.rpartition(".")[2]
    names = {name for name, _ in tree_flatten(model.parameters())}

    def target_name(prefix: str, name: str) -> str | None:
        for base in (
            prefix,
            prefix.replace(".mlp", ".block_sparse_moe"),
            f"language_model.{prefix}",
        ):
            for inner in ("switch_mlp", "switch_glu", "experts"):
                if f"{base}.{inner}.{name}.weight" in names:
                    return f"{base}.{inner}.{name}.weight"
        return None

    found: Weights = {}
    for key, weight in weights.items():
        match = None if module in _READS_FUSED else _FUSED.match(key)
        target = match and target_name(match[1], match[2].replace("gate_up", "gate"))
        if match is None or target is None:
            found[key] = weight
            continue
        parts = {match[2]: weight}
        if match[2] == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), mx.split(weight, 2, axis=-2)))
        for part, array in parts.items():
            if module in _READS_SINGLE:
                for i in range(array.shape[0]):
                    found[f"{match[1]}.experts.{i}.{part}.weight"] = array[i]
            else:
                found[target.replace("gate_proj", part)] = array
    if module in _READS_FUSED_ONLY:
        experts: dict[str, dict[int, str]] = {}
        for key in found:
            if (match := _EXPERT.match(key)) and (target := target_name(match[1], match[3])):
                experts.setdefault(target, {})[int(match[2])] = key
        for target, keys in experts.items():
            found[target] = mx.stack([found.pop(keys[i]) for i in range(len(keys))])
    return found


# Modules whose `sanitize` splits experts in one array, or stores them in another layout.
_READS_FUSED = frozenset({"gemma4", "gemma4_text", "gpt_oss", "llama4", "qwen3_5_moe"})
# Modules whose `sanitize` does nothing for a file without separate experts.
_READS_SINGLE = frozenset({"qwen3_next"})
_READS_FUSED_ONLY = frozenset({"qwen3_5_moe", "qwen3_vl_moe"})


def _split_conv(model: Any, weights: Weights) -> Weights:
    """One convolution over queries, keys and values, of equal sizes, as one for each."""
    found: Weights = {}
    for name, weight in weights.items():
        if name.endswith("attn.conv1d.weight") or name.endswith("attention.conv1d.weight"):
            parts = zip(("q_conv1d", "k_conv1d", "v_conv1d"), mx.split(weight, 3))
            found.update({name.replace("conv1d", part): array for part, array in parts})
        else:
            found[name] = weight
    return found


def _bailing_moe_v3(model: Any, weights: Weights) -> Weights:
    weights = _split_conv(model, weights)
    names = {name for name, _ in tree_flatten(model.parameters())}

    def renamed(name: str) -> str:
        output = re.compile(r"\.attention\.(dense|o_proj)\.")
        forms = [output.sub(f".attention.{form}.", name) for form in ("dense", "o_proj")]
        return next((form for form in forms if form in names), name)

    return {renamed(name): weight for name, weight in weights.items()}


def _without_mtp(model: Any, weights: Weights) -> Weights:
    """Drops the layer for multi-token prediction, for any number of layers.

    mlx-lm's `sanitize` expects it behind the 61 layers of DeepSeek V3.
    """
    behind = f"model.layers.{model.args.num_hidden_layers}."
    return {name: weight for name, weight in weights.items() if not name.startswith(behind)}


def _mellum(model: Any, weights: Weights) -> Weights:
    """Drops the head for multi-token prediction, which mlx-lm's `sanitize` keeps."""
    return {name: weight for name, weight in weights.items() if not name.startswith("mtp.")}


def _ernie4_5_moe(model: Any, weights: Weights) -> Weights:
    """Keeps the bias for choosing experts, which mlx-lm's `sanitize` drops."""
    suffix = "moe_statics.e_score_correction_bias"
    found: Weights = {}
    for name, weight in weights.items():
        if name.endswith(suffix):
            name = name.removesuffix(suffix) + "choice_bias"
            weight = weight.reshape(-1)
            mlp = model.layers[int(name.split(".")[2])].mlp
            mlp.choice_bias = mx.zeros_like(weight)
        found[name] = weight
    return found


def _falcon_h1(model: Any, weights: Weights) -> Weights:
    """Applies a multiplier that mlx-lm's `sanitize` misses when it folds multipliers."""
    conv = weights.get("model.layers.0.mamba.conv1d.weight")
    if conv is None or conv.shape[-1] <= conv.shape[1]:  # folded already
        return weights
    factors = {
        "k_proj.weight": model.args.key_multiplier,
        "v_proj.weight": model.args.attention_in_multiplier,
    }
    return {
        name: weight * next((f for end, f in factors.items() if name.endswith(end)), 1.0)
        for name, weight in weights.items()
    }


def _gemma3n(model: Any, weights: Weights) -> Weights:
    """Returns a text model that was saved on its own. Drops unused weights of layers that share the
    keys of other layers."""
    if any(name.startswith("model.language_model.") for name in weights):
        return weights
    found = {name.replace("model.", "model.language_model.", 1): w for name, w in weights.items()}
    first_shared = model.model.language_model.first_kv_shared_layer_idx
    for name, weight in tree_flatten(model.parameters()):
        layer = re.search(r"layers\.(\d+)\.self_attn\.[kv]_", name)
        if layer and int(layer[1]) >= first_shared and name not in found:
            found[name] = mx.zeros_like(weight)
    return found


def _gpt_oss(model: Any, weights: Weights) -> Weights:
    """Experts in 16 or 32 bits, ``[num_experts, in, out]``; gates and up projections alternate."""
    if not any(name.endswith(".experts.gate_up_proj") for name in weights):
        return weights
    found: Weights = {}
    for name, weight in weights.items():
        if name.endswith(".experts.gate_up_proj"):
            base, rows = name.removesuffix("gate_up_proj"), weight.swapaxes(-1, -2)
            found[f"{base}gate_proj.weight"] = mx.contiguous(rows[..., ::2, :])
            found[f"{base}up_proj.weight"] = mx.contiguous(rows[..., 1::2, :])
        elif name.endswith(".experts.gate_up_proj_bias"):
            base = name.removesuffix("gate_up_proj_bias")
            found[f"{base}gate_proj.bias"] = mx.contiguous(weight[..., ::2])
            found[f"{base}up_proj.bias"] = mx.contiguous(weight[..., 1::2])
        elif name.endswith(".experts.down_proj"):
            found[f"{name}.weight"] = mx.contiguous(weight.swapaxes(-1, -2))
        elif name.endswith(".experts.down_proj_bias"):
            found[name.replace("_bias", ".bias")] = weight
        else:
            found[name] = weight
    return found


def _llama4(model: Any, weights: Weights) -> Weights:
    """Returns a text model that was saved on its own."""
    if any(name.startswith("language_model.") for name in weights):
        return weights
    return {f"language_model.{name}": weight for name, weight in weights.items()}


def _longcat_flash(model: Any, weights: Weights) -> Weights:
    """Drops the arrays of no-op experts, which transformers saves in part."""
    number = re.compile(r"\.mlp\.experts\.(\d+)\.")
    return {
        name: weight[: model.args.n_routed_experts] if name.endswith("gate_up_proj") else weight
        for name, weight in weights.items()
        if not (match := number.search(name)) or int(match[1]) < model.args.n_routed_experts
    }


def _olmo_hybrid(model: Any, weights: Weights) -> Weights:
    """Convolutions of linear layers, which transformers saves in one or in three equal parts."""
    parts = ("q_conv1d", "k_conv1d", "v_conv1d")
    keys = model.args.linear_num_key_heads * model.args.linear_key_head_dim
    found = dict(weights)
    for name in weights:
        if name.endswith(".linear_attn.conv1d.weight"):
            names = [name.replace("conv1d", part) for part in parts]
            whole = found.pop(name)
        elif name.endswith(".q_conv1d.weight") and weights[name].shape[0] != keys:
            names = [name.replace("q_conv1d", part) for part in parts]
            whole = mx.concatenate([weights[each] for each in names])
        else:
            continue
        found.update(zip(names, mx.split(whole, [keys, 2 * keys])))
    return found


#: By module: transformers' names as a regular expression, and mlx-lm's.
_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "bailing_moe_v3": (
        (r"^model\.embed_tokens\.", "model.word_embeddings."),
        (r"\.self_attn\.(forget_gate\.)?", ".attention."),
        (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.gate.expert_bias"),
    ),
    "ernie4_5_moe": ((r"\.gate\.moe_statics\.", ".moe_statics."),),
    "exaone": (
        (r"^model\.embed_tokens\.", "transformer.wte."),
        (r"^model\.norm\.", "transformer.ln_f."),
        (r"^model\.layers\.", "transformer.h."),
        (r"\.self_attn\.o_proj\.", ".attn.attention.out_proj."),
        (r"\.self_attn\.", ".attn.attention."),
        (r"\.input_layernorm\.", ".ln_1."),
        (r"\.post_attention_layernorm\.", ".ln_2."),
        (r"\.mlp\.gate_proj\.", ".mlp.c_fc_0."),
        (r"\.mlp\.up_proj\.", ".mlp.c_fc_1."),
        (r"\.mlp\.down_proj\.", ".mlp.c_proj."),
    ),
    "gpt2": ((r"^transformer\.", ""),),
    "gpt_neox": ((r"^lm_head\.", "embed_out."),),
    "granitemoe": ((r"\.router\.weight$", ".router.layer.weight"),),
    "granitemoehybrid": ((r"\.router\.weight$", ".router.layer.weight"),),
    "kimi_linear": (
        (r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj."),
        (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.e_score_correction_bias"),
        (r"\.self_attn\.forget_gate\.", ".self_attn."),
    ),
    "laguna": (
        (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
        (r"\.mlp\.gate\.weight$", ".mlp.gate.proj.weight"),
    ),
    "mimo_v2_flash": ((r"\.self_attn\.sinks$", ".self_attn.attention_sink_bias"),),
    "minimax": ((r"\.mlp\.(gate\.|e_score_correction_bias)", r".block_sparse_moe.\1"),),
    "mixtral": ((r"\.mlp\.gate\.", ".block_sparse_moe.gate."),),
    "nanochat": (
        (r"^model\.embed_tokens\.", "transformer.wte."),
        (r"^model\.layers\.", "transformer.h."),
        (r"\.self_attn\.([qkv])_proj\.", r".attn.c_\1."),
        (r"\.self_attn\.o_proj\.", ".attn.c_proj."),
        (r"\.mlp\.fc1\.", ".mlp.c_fc."),
        (r"\.mlp\.fc2\.", ".mlp.c_proj."),
    ),
    "nemotron_h": (
        (r"^model\.", "backbone."),
        (r"\.mixer\.experts\.up_proj$", ".mixer.switch_mlp.fc1.weight"),
        (r"\.mixer\.experts\.down_proj$", ".mixer.switch_mlp.fc2.weight"),
    ),
    "olmo_hybrid": (
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    ),
    "phimoe": ((r"\.mlp\.router\.", ".block_sparse_moe.gate."),),
}
_RENAMED: dict[str, Callable[[Any, Weights], Weights]] = {
    "bailing_moe_v3": _bailing_moe_v3,
    "deepseek_v3": _without_mtp,
    "ernie4_5_moe": _ernie4_5_moe,
    "falcon_h1": _falcon_h1,
    "gemma3n": _gemma3n,
    "gpt_oss": _gpt_oss,
    "kimi_linear": _split_conv,
    "llama4": _llama4,
    "longcat_flash": _longcat_flash,
    "mellum": _mellum,
    "olmo_hybrid": _olmo_hybrid,
}
