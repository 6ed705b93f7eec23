"""Families with one model each: Cohere, EXAONE, Granite, LFM2, MiniCPM, Nemotron, OLMo and more."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mlx_paged.gguf import formats
from mlx_paged.gguf.architectures import names
from mlx_paged.gguf.architectures.base import (
    Architecture,
    Config,
    Content,
    common,
    expert_size,
    layer_norm,
    rotated_part,
    shifted,
    window_layers,
)
from mlx_paged.gguf.architectures.llama import PERMUTED
from mlx_paged.gguf.metadata import Metadata
from mlx_paged.gguf.types import Tensor

_LAYER = "model.layers.{}"
_ROPE_FREQS = frozenset({"rope_freqs"})


# --- Cohere ---------------------------------------------------------------------------------------


def _cohere(meta: Metadata) -> Config:
    return common(
        meta,
        "cohere",
        hidden_act="silu",
        layer_norm_eps=layer_norm(meta),
        logit_scale=meta.number("logit_scale", 0.0625),
        use_qk_norm=meta.has_tensor("blk.0.attn_q_norm.weight"),
        tie_word_embeddings=True,
    )


def _cohere2(meta: Metadata) -> Config:
    return common(
        meta,
        "cohere2",
        hidden_act="silu",
        layer_norm_eps=layer_norm(meta),
        logit_scale=meta.number("logit_scale", 0.0625),
        sliding_window=meta.size("attention.sliding_window"),
        layer_types=window_layers(meta, 4),
        tie_word_embeddings=True,
    )


COHERE = Architecture(_cohere, {**names.LLAMA, **names.QK_NORMS})
COHERE2 = Architecture(_cohere2, names.LLAMA)


# --- Granite, MiniCPM -----------------------------------------------------------------------------


def _granite(meta: Metadata) -> Config:
    config = common(meta, "granite", hidden_act="silu", attention_bias=False, mlp_bias=False)
    scale = 1 / math.sqrt(config["head_dim"])
    return {
        **config,
        "logits_scaling": meta.number("logit_scale"),
        "attention_multiplier": meta.number("attention.scale", scale) or scale,
        "embedding_multiplier": meta.number("embedding_scale", 1.0) or 1.0,
        "residual_multiplier": meta.number("residual_scale", 1.0) or 1.0,
    }


def _granite_moe(meta: Metadata) -> Config:
    return {
        **_granite(meta),
        "model_type": "granitemoe",
        "num_local_experts": meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
    }


def _minicpm(meta: Metadata) -> Config:
    config = common(meta, "minicpm", hidden_act="silu")
    hidden, depth = config["hidden_size"], math.sqrt(config["num_hidden_layers"])
    return {
        **config,
        "scale_emb": meta.number("embedding_scale", 12.0),
        "scale_depth": meta.number("residual_scale", 1.4 / depth) * depth,
        "dim_model_base": hidden / (meta.number("logit_scale", 0.0) or hidden / 256),
    }


GRANITE = Architecture(_granite, names.LLAMA, PERMUTED, _ROPE_FREQS)
GRANITE_MOE = Architecture(
    _granite_moe,
    {**names.LLAMA, **names.experts("block_sparse_moe", gate="router.layer")},
    PERMUTED,
    _ROPE_FREQS,
)
MINICPM = Architecture(
    _minicpm,
    names.LLAMA,
    PERMUTED,
    frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short"}),
)


# --- OLMo -----------------------------------------------------------------------------------------


def _olmo2(meta: Metadata) -> Config:
    return common(meta, "olmo2", hidden_act="silu", attention_bias=False)


def _olmoe(meta: Metadata) -> Config:
    return common(
        meta,
        "olmoe",
        hidden_act="silu",
        num_experts=meta.size("expert_count"),
        num_experts_per_tok=meta.size("expert_used_count"),
        norm_topk_prob=False,
    )


#: Norms after attention and MLP only.
_POST_NORMS = {
    "post_attention_norm": f"{_LAYER}.post_attention_layernorm",
    "post_ffw_norm": f"{_LAYER}.post_feedforward_layernorm",
}
OLMO2 = Architecture(
    _olmo2,
    {**names.ENDS, **names.ATTENTION, **names.QK_NORMS, **names.MLP, **_POST_NORMS},
)
OLMOE = Architecture(_olmoe, {**names.LLAMA, **names.QK_NORMS, **names.experts()})


# --- EXAONE ---------------------------------------------------------------------------------------


def _exaone(meta: Metadata) -> Config:
    config = common(meta, "exaone", activation_function="silu")
    return {
        **config,
        "num_layers": config["num_hidden_layers"],
        "layer_norm_epsilon": config["rms_norm_eps"],
    }


def _exaone4(meta: Metadata) -> Config:
    config = common(meta, "exaone4", hidden_act="silu")
    window = meta.integer("attention.sliding_window", 0) or None
    kinds = window_layers(meta, 4) if window else ["full_attention"] * meta.num_layers
    config.setdefault("rope_scaling", None)
    return {**config, "sliding_window": window, "layer_types": kinds}


_BLOCK = "transformer.h.{}"
EXAONE = Architecture(
    _exaone,
    {
        "token_embd": "transformer.wte",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "attn_norm": f"{_BLOCK}.ln_1",
        "attn_q": f"{_BLOCK}.attn.attention.q_proj",
        "attn_k": f"{_BLOCK}.attn.attention.k_proj",
        "attn_v": f"{_BLOCK}.attn.attention.v_proj",
        "attn_output": f"{_BLOCK}.attn.attention.out_proj",
        "ffn_norm": f"{_BLOCK}.ln_2",
        "ffn_gate": f"{_BLOCK}.mlp.c_fc_0",
        "ffn_up": f"{_BLOCK}.mlp.c_fc_1",
        "ffn_down": f"{_BLOCK}.mlp.c_proj",
    },
    ignored=_ROPE_FREQS,
)
EXAONE4 = Architecture(
    _exaone4,
    {**names.ENDS, **names.ATTENTION, **names.QK_NORMS, **names.MLP, **_POST_NORMS},
    ignored=_ROPE_FREQS,
)


# --- Others ---------------------------------------------------------------------------------------


def _stablelm(meta: Metadata) -> Config:
    config = common(
        meta,
        "stablelm",
        hidden_act="silu",
        layer_norm_eps=layer_norm(meta),
        use_qkv_bias=meta.has_tensor("blk.0.attn_q.bias"),
        use_parallel_residual=not meta.has_tensor("blk.0.ffn_norm.weight"),
        qk_layernorm=False,
    )
    return {**config, "partial_rotary_factor": rotated_part(meta, config)}


def _starcoder2(meta: Metadata) -> Config:
    return common(
        meta,
        "starcoder2",
        hidden_act="gelu_pytorch_tanh",
        norm_epsilon=layer_norm(meta),
        use_bias=True,
        sliding_window=None,
    )


def _nemotron(meta: Metadata) -> Config:
    config = common(
        meta,
        "nemotron",
        hidden_act="relu2",
        norm_eps=layer_norm(meta),
        attention_bias=meta.has_tensor("blk.0.attn_q.bias"),
        mlp_bias=meta.has_tensor("blk.0.ffn_up.bias"),
    )
    return {**config, "partial_rotary_factor": rotated_part(meta, config)}


def _smollm3(meta: Metadata) -> Config:
    layers = meta.num_layers
    return common(
        meta,
        "smollm3",
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        no_rope_layers=[int((i + 1) % 4 != 0) for i in range(layers)],
        layer_types=["full_attention"] * layers,
    )


def _ernie4_5(meta: Metadata) -> Config:
    return common(meta, "ernie4_5", hidden_act="silu", use_bias=False)


def _seed_oss(meta: Metadata) -> Config:
    return common(
        meta,
        "seed_oss",
        hidden_act="silu",
        attention_bias=meta.has_tensor("blk.0.attn_q.bias"),
        attention_out_bias=meta.has_tensor("blk.0.attn_output.bias"),
        mlp_bias=False,
    )


def _hunyuan(meta: Metadata) -> Config:
    return common(meta, "hunyuan_v1_dense", hidden_act="silu", use_qk_norm=True)


def _lfm2(meta: Metadata) -> Config:
    kv_heads = meta.per_layer("attention.head_count_kv", meta.num_layers)
    attending = [heads for heads in kv_heads if heads]
    epsilon = meta.number("attention.layer_norm_rms_epsilon")
    config = common(meta.with_value("attention.head_count_kv", max(attending, default=1)), "lfm2")
    width = config["intermediate_size"]
    return {
        **config,
        "norm_eps": epsilon,
        "conv_bias": False,
        "conv_L_cache": meta.size("shortconv.l_cache"),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "full_attn_idxs": [i for i, heads in enumerate(kv_heads) if heads],
        "block_dim": config["hidden_size"],
        "block_ff_dim": width,
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    }


def _convolution(tensor: Tensor, name: str, meta: Metadata) -> Mapping[str, Content]:
    """Adds the input channel dimension, which is 1."""
    return {name: formats.values(tensor)[..., None]}


def _lfm2_moe(meta: Metadata) -> Config:
    return {
        **_lfm2(meta),
        "model_type": "lfm2_moe",
        "moe_intermediate_size": expert_size(meta),
        "num_experts": meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "num_dense_layers": meta.integer("leading_dense_block_count", 0),
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0) or 1.0,
    }


def _ernie4_5_moe(meta: Metadata) -> Config:
    return common(
        meta,
        "ernie4_5_moe",
        hidden_act="silu",
        use_bias=False,
        moe_num_experts=meta.size("expert_count"),
        moe_k=meta.size("expert_used_count"),
        moe_intermediate_size=expert_size(meta),
        moe_num_shared_experts=meta.integer("expert_shared_count", 0),
        moe_layer_start_index=meta.integer("leading_dense_block_count", 0),
        moe_layer_interval=meta.size("interleave_moe_layer_step", 1),
        moe_gate_act="softmax",
    )


STABLELM = Architecture(_stablelm, names.LLAMA)
STARCODER2 = Architecture(
    _starcoder2,
    {
        **names.ENDS,
        **names.ATTENTION,
        **names.NORMS,
        "ffn_up": f"{_LAYER}.mlp.c_fc",
        "ffn_down": f"{_LAYER}.mlp.c_proj",
    },
)
NEMOTRON = Architecture(
    _nemotron,
    names.LLAMA,
    # Only weights: their biases are as they were.
    {f"{norm}.weight": shifted for norm in ("output_norm", "attn_norm", "ffn_norm")},
)
SMOLLM3 = Architecture(_smollm3, names.LLAMA, PERMUTED, _ROPE_FREQS)
ERNIE4_5 = Architecture(_ernie4_5, names.LLAMA)
SEED_OSS = Architecture(
    _seed_oss,
    {
        **names.ENDS,
        **names.ATTENTION,
        **names.MLP,
        "attn_norm": f"{_LAYER}.input_layernorm",
        "post_attention_norm": f"{_LAYER}.post_attention_layernorm",
    },
)
HUNYUAN = Architecture(
    _hunyuan,
    {
        **names.LLAMA,
        "attn_q_norm": f"{_LAYER}.self_attn.query_layernorm",
        "attn_k_norm": f"{_LAYER}.self_attn.key_layernorm",
    },
)
_LFM2 = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
    **names.ATTENTION,
    "attn_output": f"{_LAYER}.self_attn.out_proj",
    "attn_q_norm": f"{_LAYER}.self_attn.q_layernorm",
    "attn_k_norm": f"{_LAYER}.self_attn.k_layernorm",
    "attn_norm": f"{_LAYER}.operator_norm",
    "ffn_norm": f"{_LAYER}.ffn_norm",
    "ffn_gate": f"{_LAYER}.feed_forward.w1",
    "ffn_up": f"{_LAYER}.feed_forward.w3",
    "ffn_down": f"{_LAYER}.feed_forward.w2",
    "shortconv.conv": f"{_LAYER}.conv.conv",
    "shortconv.in_proj": f"{_LAYER}.conv.in_proj",
    "shortconv.out_proj": f"{_LAYER}.conv.out_proj",
}
LFM2 = Architecture(_lfm2, _LFM2, {"shortconv.conv": _convolution})
LFM2_MOE = Architecture(
    _lfm2_moe,
    {
        **_LFM2,
        **names.experts("feed_forward"),
        "ffn_gate": f"{_LAYER}.feed_forward.gate_proj",
        "ffn_up": f"{_LAYER}.feed_forward.up_proj",
        "ffn_down": f"{_LAYER}.feed_forward.down_proj",
        "exp_probs_b.bias": f"{_LAYER}.feed_forward.expert_bias",
    },
    {"shortconv.conv": _convolution},
)
ERNIE4_5_MOE = Architecture(
    _ernie4_5_moe,
    {
        **names.LLAMA,
        **names.experts(),
        **names.shared_experts("mlp.shared_experts"),
        "exp_probs_b.bias": f"{_LAYER}.mlp.choice_bias",
    },
)
