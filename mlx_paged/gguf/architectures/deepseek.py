"""DeepSeek 2 and 3, whose latent attention GGUF calls one architecture, and dots.llm1."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mlx_paged.gguf import formats
from mlx_paged.gguf.architectures import names
from mlx_paged.gguf.architectures.base import (
    Architecture,
    Config,
    Content,
    common,
    expert_size,
)
from mlx_paged.gguf.errors import GGUFError
from mlx_paged.gguf.metadata import Metadata
from mlx_paged.gguf.types import Tensor

_LAYER = "model.layers.{}"
_SIGMOID = 2  # of `expert_gating_func`


def routing(meta: Metadata) -> Config:
    """Returns the fields that say how experts are chosen."""
    groups = meta.integer("expert_group_count", 0)
    return {
        "n_routed_experts": meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "n_shared_experts": meta.integer("expert_shared_count", 0),
        "moe_intermediate_size": expert_size(meta),
        "first_k_dense_replace": meta.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": meta.flag("expert_weights_norm", False),
        "n_group": groups or 1,
        "topk_group": meta.integer("expert_group_used_count", 0) or 1,
        "moe_layer_freq": 1,
    }


def _is_sigmoid(meta: Metadata) -> bool:
    return bool(meta.integer("expert_gating_func", 1) == _SIGMOID)


def _latent(meta: Metadata, model_type: str) -> Config:
    rotated = meta.size("rope.dimension_count")
    whole = meta.size("attention.key_length_mla", meta.size("attention.key_length", None))
    value = meta.size("attention.value_length_mla", meta.size("attention.value_length", None))
    if whole is None or value is None or whole <= rotated:
        raise GGUFError(f"its metadata {meta.key('attention.key_length')} fits no latent attention")
    config = common(meta, model_type, hidden_act="silu", **routing(meta))
    if "rope_scaling" in config:
        # llama.cpp stores a tenth of it.
        scale = 10 * meta.number("rope.scaling.yarn_log_multiplier", 0.0)
        config["rope_scaling"] |= {"mscale": scale or 1.0, "mscale_all_dim": scale}
    return {
        **config,
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rotated,
        "q_lora_rank": meta.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": meta.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": whole - rotated,
        "v_head_dim": value,
        "attention_bias": False,
    }


def _v2(meta: Metadata) -> Config:
    config = _latent(meta, "deepseek_v2")
    method = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    return {**config, "topk_method": method, "scoring_func": "softmax"}


def _v3(meta: Metadata) -> Config:
    return {**_latent(meta, "deepseek_v3"), "topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def _joined(tensor: Tensor, name: str, meta: Metadata) -> Mapping[str, Content]:
    """Makes one matrix of the parts for keys and values, which newer files split."""
    keys = formats.values(meta.file.tensor(tensor.name.replace("attn_v_b", "attn_k_b")))
    values = formats.values(tensor)
    if keys.ndim != 3 or values.ndim != 3:
        raise GGUFError(f"its tensor {tensor.name!r} must have 3 dimensions")
    rows = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return {name: rows.reshape(-1, rows.shape[-1])}


def _parted(tensor: Tensor, name: str, meta: Metadata) -> Mapping[str, Content]:
    """Splits the matrix for keys and values, which older files have as one."""
    heads = meta.same("attention.head_count", meta.num_layers)
    rotated = meta.size("rope.dimension_count")
    keys = meta.size("attention.key_length_mla", meta.size("attention.key_length", None)) - rotated
    rows = formats.values(tensor)
    rows = rows.reshape(heads, -1, rows.shape[-1])
    base = name.removesuffix("embed_q.weight")
    return {
        name: np.ascontiguousarray(rows[:, :keys].swapaxes(1, 2)),
        f"{base}unembed_out.weight": np.ascontiguousarray(rows[:, keys:]),
    }


_LATENT = {
    **names.LLAMA,
    **names.experts(),
    **names.shared_experts("mlp.shared_experts"),
    "attn_q_a": f"{_LAYER}.self_attn.q_a_proj",
    "attn_q_a_norm": f"{_LAYER}.self_attn.q_a_layernorm",
    "attn_q_b": f"{_LAYER}.self_attn.q_b_proj",
    "attn_kv_a_mqa": f"{_LAYER}.self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": f"{_LAYER}.self_attn.kv_a_layernorm",
    "exp_probs_b.bias": f"{_LAYER}.mlp.gate.e_score_correction_bias",
}
V2 = Architecture(
    _v2,
    {
        **_LATENT,
        "attn_kv_b": f"{_LAYER}.self_attn.kv_b_proj",
        "attn_v_b": f"{_LAYER}.self_attn.kv_b_proj",
    },
    {"attn_v_b": _joined},
    ignored=frozenset({"attn_k_b"}),
)
V3 = Architecture(
    _v3,
    {
        **_LATENT,
        "attn_k_b": f"{_LAYER}.self_attn.embed_q",
        "attn_v_b": f"{_LAYER}.self_attn.unembed_out",
        "attn_kv_b": f"{_LAYER}.self_attn.embed_q",
    },
    {"attn_kv_b": _parted},
)


def deepseek2(meta: Metadata) -> Architecture:
    """Returns version 2 or 3, which score experts in different ways."""
    return V3 if _is_sigmoid(meta) else V2


def _dots1(meta: Metadata) -> Config:
    return {
        **common(meta, "dots1", hidden_act="silu", **routing(meta)),
        "scoring_func": "noaux_tc",
        "topk_method": "noaux_tc",
    }


DOTS1 = Architecture(
    _dots1,
    {
        **names.LLAMA,
        **names.QK_NORMS,
        **names.experts(stacked="experts"),
        **names.shared_experts("mlp.shared_experts"),
        "exp_probs_b.bias": f"{_LAYER}.mlp.gate.e_score_correction_bias",
    },
)
