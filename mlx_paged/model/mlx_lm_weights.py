"""Renames weights that transformers saves otherwise than mlx-lm's modules expect.

mlx-lm's `sanitize` methods know the files that a family was published with. transformers 5 renames
some weights when it saves a model, and can store all experts of a layer as one array. `renaming`
gives a model class that reads those files too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_paged.model.patches import overridden

Weights = dict[str, mx.array]


def renaming(model_class: type[nn.Module]) -> type[nn.Module]:
    """The class with a `sanitize` that takes transformers' names first."""
    sanitize: Any = getattr(model_class, "sanitize", None)
    rename = _RENAMED.get(model_class.__module__.rpartition(".")[2])

    def of_transformers(self: nn.Module, weights: Weights) -> Any:
        weights = _stacked(self, weights)
        if rename is not None:
            weights = rename(self, weights)
        return weights if sanitize is None else sanitize(self, weights)

    return overridden(model_class, "sanitize", of_transformers)


_FUSED = re.compile(r"(.*)\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj)$")
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


def _stacked(model: Any, weights: Weights) -> Weights:
    """Experts as the module has them, where its `sanitize` knows only the other form.

    ``[num_experts, 2 * intermediate, hidden]`` of gates and up projections in one array is split.
    """
    module = type(model).__module__.rpartition(".")[2]
    names = {name for name, _ in tree_flatten(model.parameters())}

    def place(prefix: str, name: str) -> str | None:
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
        target = match and place(match[1], match[2].replace("gate_up", "gate"))
        if match is None or target is None:
            found[key] = weight
        elif match[2] == "gate_up_proj":
            gate, up = mx.split(weight, 2, axis=-2)
            found[target] = gate
            found[target.replace("gate_proj", "up_proj")] = up
        else:
            found[target] = weight
    if module in _READS_FUSED_ONLY:
        experts: dict[str, dict[int, str]] = {}
        for key in found:
            if (match := _EXPERT.match(key)) and (target := place(match[1], match[3])):
                experts.setdefault(target, {})[int(match[2])] = key
        for target, keys in experts.items():
            found[target] = mx.stack([found.pop(keys[i]) for i in range(len(keys))])
    return found


# Modules whose `sanitize` splits experts in one array, or has them in another layout.
_READS_FUSED = frozenset({"gemma4", "gemma4_text", "gpt_oss", "llama4", "qwen3_5_moe"})
_READS_FUSED_ONLY = frozenset({"qwen3_5_moe", "qwen3_vl_moe"})


def _bailing_moe_v3(model: Any, weights: Weights) -> Weights:
    names = {name for name, _ in tree_flatten(model.parameters())}

    def renamed(name: str) -> str:
        other = name.replace(".attention.dense.", ".attention.o_proj.")
        return other if other in names and name not in names else name

    return {renamed(name): weight for name, weight in weights.items()}


def _ernie4_5_moe(model: Any, weights: Weights) -> Weights:
    """Keeps the bias for the choice of experts, which mlx-lm's `sanitize` drops."""
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
    """Multiplies what mlx-lm's `sanitize` leaves out when it folds multipliers into weights."""
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
    """A text model that was saved by itself, without the weights that layers with others' keys have
    and do not use."""
    if any(name.startswith("model.language_model.") for name in weights):
        return weights
    found = {name.replace("model.", "model.language_model.", 1): w for name, w in weights.items()}
    first_shared = model.model.language_model.first_kv_shared_layer_idx
    for name, weight in tree_flatten(model.parameters()):
        layer = re.search(r"layers\.(\d+)\.self_attn\.[kv]_", name)
        if layer and int(layer[1]) >= first_shared and name not in found:
            found[name] = mx.zeros_like(weight)
    return found


def _gpt2(model: Any, weights: Weights) -> Weights:
    return {name.removeprefix("transformer."): weight for name, weight in weights.items()}


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


def _kimi_linear(model: Any, weights: Weights) -> Weights:
    dense = re.compile(r"\.block_sparse_moe\.(gate|up|down)_proj\.")
    return {dense.sub(r".mlp.\1_proj.", name): weight for name, weight in weights.items()}


def _llama4(model: Any, weights: Weights) -> Weights:
    """(A text model that was saved by itself)"""
    if any(name.startswith("language_model.") for name in weights):
        return weights
    return {f"language_model.{name}": weight for name, weight in weights.items()}


def _longcat_flash(model: Any, weights: Weights) -> Weights:
    """Drops the arrays of experts that do nothing, which transformers saves in part."""
    number = re.compile(r"\.mlp\.experts\.(\d+)\.")
    return {
        name: weight
        for name, weight in weights.items()
        if not (match := number.search(name)) or int(match[1]) < model.args.n_routed_experts
    }


_NANOCHAT = {
    "model.embed_tokens": "transformer.wte",
    "model.layers.": "transformer.h.",
    ".self_attn.q_proj": ".attn.c_q",
    ".self_attn.k_proj": ".attn.c_k",
    ".self_attn.v_proj": ".attn.c_v",
    ".self_attn.o_proj": ".attn.c_proj",
    ".mlp.fc1": ".mlp.c_fc",
    ".mlp.fc2": ".mlp.c_proj",
}


def _nanochat(model: Any, weights: Weights) -> Weights:
    found: Weights = {}
    for name, weight in weights.items():
        for theirs, ours in _NANOCHAT.items():
            name = name.replace(theirs, ours)
        found[name] = weight
    return found


def _olmo_hybrid(model: Any, weights: Weights) -> Weights:
    """Norms of linear layers; and convolutions, which transformers saves in three equal parts."""
    found = {
        name.replace("attention_layer_norm", "input_layernorm").replace(
            "feedforward_layer_norm", "post_attention_layernorm"
        ): weight
        for name, weight in weights.items()
    }
    parts = ("q_conv1d", "k_conv1d", "v_conv1d")
    args = model.args
    keys = args.linear_num_key_heads * args.linear_key_head_dim
    for name in [name for name in found if name.endswith(".q_conv1d.weight")]:
        names = [name.replace("q_conv1d", part) for part in parts]
        if found[name].shape[0] == keys:
            continue
        whole = mx.concatenate([found[each] for each in names])
        found.update(zip(names, mx.split(whole, [keys, 2 * keys])))
    return found


_RENAMED: dict[str, Callable[[Any, Weights], Weights]] = {
    "bailing_moe_v3": _bailing_moe_v3,
    "ernie4_5_moe": _ernie4_5_moe,
    "falcon_h1": _falcon_h1,
    "gemma3n": _gemma3n,
    "gpt2": _gpt2,
    "gpt_oss": _gpt_oss,
    "kimi_linear": _kimi_linear,
    "llama4": _llama4,
    "longcat_flash": _longcat_flash,
    "nanochat": _nanochat,
    "olmo_hybrid": _olmo_hybrid,
}
