"""Phi 2 to 4."""

from __future__ import annotations

from mlx_paged.gguf.architectures import names
from mlx_paged.gguf.architectures.base import (
    Architecture,
    Config,
    common,
    key_rows,
    layer_norm,
    query_rows,
    rotated_part,
    split_rows,
)
from mlx_paged.gguf.metadata import Metadata

_LAYER = "model.layers.{}"


def _phi2(meta: Metadata) -> Config:
    config = common(meta, "phi", hidden_act="gelu_new", layer_norm_eps=layer_norm(meta))
    return {**config, "partial_rotary_factor": rotated_part(meta, config)}


def _phi3(meta: Metadata) -> Config:
    config = common(meta, "phi3", hidden_act="silu")
    return {
        **config,
        "partial_rotary_factor": rotated_part(meta, config),
        "original_max_position_embeddings": meta.size(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
        "sliding_window": meta.integer("attention.sliding_window", 0) or None,
    }


PHI2 = Architecture(
    _phi2,
    {
        **names.ENDS,
        **names.ATTENTION,
        "output_norm": "model.final_layernorm",
        "attn_output": f"{_LAYER}.self_attn.dense",
        "attn_qkv": f"{_LAYER}.self_attn.qkv_proj",
        "attn_norm": f"{_LAYER}.input_layernorm",
        "ffn_up": f"{_LAYER}.mlp.fc1",
        "ffn_down": f"{_LAYER}.mlp.fc2",
    },
    {"attn_qkv": split_rows(("q_proj", query_rows), ("k_proj", key_rows), ("v_proj", key_rows))},
)
PHI3 = Architecture(
    _phi3,
    {
        **names.ENDS,
        **names.NORMS,
        "attn_qkv": f"{_LAYER}.self_attn.qkv_proj",
        "attn_output": f"{_LAYER}.self_attn.o_proj",
        "ffn_up": f"{_LAYER}.mlp.gate_up_proj",
        "ffn_down": f"{_LAYER}.mlp.down_proj",
    },
    ignored=frozenset({"rope_factors_long", "rope_factors_short"}),
)
