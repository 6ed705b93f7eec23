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
