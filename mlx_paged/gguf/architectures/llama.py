"""Llama, Mistral and Mixtral, which GGUF calls one architecture."""

from __future__ import annotations

from mlx_paged.gguf.architectures import names
from mlx_paged.gguf.architectures.base import Architecture, Config, common, unpermuted
from mlx_paged.gguf.metadata import Metadata

#: Both orders of rows are llama.cpp's.
PERMUTED = {
    "attn_q": unpermuted("attention.head_count"),
    "attn_k": unpermuted("attention.head_count_kv"),
}


def _config(meta: Metadata) -> Config:
    return common(
        meta,
        "llama",
        hidden_act="silu",
        attention_bias=meta.has_tensor("blk.0.attn_q.bias"),
        mlp_bias=meta.has_tensor("blk.0.ffn_up.bias"),
    )


def _mixtral(meta: Metadata) -> Config:
    return common(
        meta,
        "mixtral",
        hidden_act="silu",
        num_local_experts=meta.size("expert_count"),
        num_experts_per_tok=meta.size("expert_used_count"),
    )


def _ministral3(meta: Metadata) -> Config:
    config = common(meta, "ministral3", hidden_act="silu")
    beta = meta.number("attention.temperature_scale", 0.0)
    scaling = config.pop("rope_scaling", None) or {"rope_type": "default"}
    if scaling["rope_type"] == "yarn":
        scale = meta.number("rope.scaling.yarn_log_multiplier", 0.0)
        scaling |= {"mscale": 1.0, "mscale_all_dim": scale}
    layers = config["num_hidden_layers"]
    return {
        **config,
        "layer_types": ["full_attention"] * layers,
        "rope_parameters": {
            "original_max_position_embeddings": config["max_position_embeddings"],
            **scaling,
            "rope_theta": config["rope_theta"],
            "llama_4_scaling_beta": beta,
        },
    }


LLAMA = Architecture(_config, names.LLAMA, PERMUTED, ignored=frozenset({"rope_freqs"}))
MIXTRAL = Architecture(
    _mixtral,
    {**names.LLAMA, **names.experts("block_sparse_moe")},
    PERMUTED,
    ignored=frozenset({"rope_freqs"}),
)


def llama(meta: Metadata) -> Architecture:
    """Returns the dense model or the mixture of experts."""
    return MIXTRAL if meta.integer("expert_count", 0) else LLAMA


MINISTRAL3 = Architecture(_ministral3, names.LLAMA, PERMUTED)
