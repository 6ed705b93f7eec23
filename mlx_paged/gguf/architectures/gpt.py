"""OpenAI's models: GPT-2 and gpt-oss."""

from __future__ import annotations

from mlx_paged.gguf.architectures import names
from mlx_paged.gguf.architectures.base import (
    Architecture,
    Config,
    common,
    expert_size,
    layer_norm,
    window_layers,
)
from mlx_paged.gguf.metadata import Metadata

_LAYER = "model.layers.{}"
_BLOCK = "model.h.{}"


def _gpt2(meta: Metadata) -> Config:
    config = common(meta, "gpt2", layer_norm_epsilon=layer_norm(meta))
    return {
        **config,
        "n_embd": config["hidden_size"],
        "n_head": config["num_attention_heads"],
        "n_layer": config["num_hidden_layers"],
        "n_ctx": config["max_position_embeddings"],
        "n_positions": config["max_position_embeddings"],
        "n_inner": config.get("intermediate_size"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }


def _gpt_oss(meta: Metadata) -> Config:
    config = common(meta, "gpt_oss", hidden_act="silu", intermediate_size=expert_size(meta))
    if "rope_scaling" in config:
        config["rope_scaling"]["truncate"] = False
    return {
        **config,
        "num_local_experts": meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "sliding_window": meta.size("attention.sliding_window"),
        "layer_types": window_layers(meta, 2),
        "attention_bias": True,
    }


GPT2 = Architecture(
    _gpt2,
    {
        "token_embd": "model.wte",
        "position_embd": "model.wpe",
        "output_norm": "model.ln_f",
        "output": "lm_head",
        "attn_norm": f"{_BLOCK}.ln_1",
        "attn_qkv": f"{_BLOCK}.attn.c_attn",
        "attn_output": f"{_BLOCK}.attn.c_proj",
        "ffn_norm": f"{_BLOCK}.ln_2",
        "ffn_up": f"{_BLOCK}.mlp.c_fc",
        "ffn_down": f"{_BLOCK}.mlp.c_proj",
    },
)
GPT_OSS = Architecture(
    _gpt_oss,
    {
        **names.ENDS,
        **names.ATTENTION,
        **names.experts(stacked="experts", gate="router"),
        "attn_norm": f"{_LAYER}.input_layernorm",
        "post_attention_norm": f"{_LAYER}.post_attention_layernorm",
        "attn_sinks.weight": f"{_LAYER}.self_attn.sinks",
    },
    is_wide=True,
)
