"""Small models of the architectures that GGUF files are read of, for `gguf_files`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from support.gguf_files import VOCAB_SIZE, Case, Values, permute_llama

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
KEYS: dict[str, Any] = {
    "block_count": 3,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "rope.dimension_count": 16,
    "rope.freq_base": 1e4,
    "vocab_size": VOCAB_SIZE,
}


def case(
    architecture: str,
    model_type: str,
    config: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Case:
    """A case with the fields that most families share; None as a value removes a key."""
    keys = {**KEYS, **(metadata or {})}
    keys = {name: value for name, value in keys.items() if value is not None}
    return Case(architecture, {**BASE, "model_type": model_type, **(config or {})}, keys, **fields)


def plus_one(*ends: str) -> Any:
    """A change that adds one to the weights of norms."""

    def change(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Values:
        return {
            name: values + 1 if name.endswith(tuple(f"{end}.weight" for end in ends)) else values
        }

    return change


def llama3_factors(config: Mapping[str, Any]) -> np.ndarray:
    """The factors of Llama 3's wavelengths, as the converter computes them."""
    scaling, dim = config["rope_scaling"], config["head_dim"]
    wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    old, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for wavelength in wavelengths:
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def split_latent(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Values:
    """The converter's change to DeepSeek's matrices of keys and values."""
    if not name.endswith(".attn_kv_b.weight"):
        return {name: values}
    parts = values.reshape(config["num_attention_heads"], -1, values.shape[-1])
    keys, rest = np.split(parts, [config["qk_nope_head_dim"]], axis=1)
    return {
        name.replace("attn_kv_b", "attn_k_b"): np.ascontiguousarray(keys.swapaxes(1, 2)),
        name.replace("attn_kv_b", "attn_v_b"): np.ascontiguousarray(rest),
    }


def squeezed(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Values:
    """The converter's change to LFM2's convolutions."""
    return {name: values[..., 0] if name.endswith("shortconv.conv.weight") else values}


def tiled(values: np.ndarray, config: Mapping[str, Any], axis: int = 0) -> np.ndarray:
    """llama.cpp's order of value heads: the first of every key head, then the second."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    moved = np.moveaxis(values, axis, 0)
    parts = moved.reshape(keys, heads // keys, -1, *moved.shape[1:]).swapaxes(0, 1)
    return np.ascontiguousarray(np.moveaxis(parts.reshape(moved.shape), 0, axis))


def linear_attention(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Values:
    """The converter's changes to Qwen 3.5's linear attention."""
    kind = name.split(".")[2] if name.startswith("blk.") else ""
    first = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if kind in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_dt"):
        values = tiled(values, config)
    elif kind == "ssm_a":
        values = -np.exp(tiled(values, config))
    elif kind in ("attn_qkv", "ssm_conv1d"):
        values = np.concatenate([values[:first], tiled(values[first:], config)])
        values = values[..., 0] if kind == "ssm_conv1d" else values
    elif kind == "ssm_out":
        values = tiled(values, config, axis=1)
    return {name: values}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
WINDOW = 6
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_BIAS = (
    r"model\.layers\.(\d+)\.mlp\.gate\.e_score_correction_bias",
    r"blk.\1.exp_probs_b.bias",
)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERT_KEYS = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
ROUTED_KEYS = {
    **EXPERT_KEYS,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
LATENT_KEYS = {
    **ROUTED_KEYS,
    "attention.q_lora_rank": 24,
    "attention.kv_lora_rank": 16,
    "attention.key_length": 24,
    "attention.value_length": 16,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 12,
    "attention.head_count_kv": 1,
    "rope.dimension_count": 8,
}
LAYER_NORM_KEYS = {
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": None,
}
_GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 96,
    "sliding_window": WINDOW,
    "layer_types": ALTERNATING,
    "rope_theta": 150000,
}
_GPT_OSS_KEYS = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 96,
    "attention.sliding_window": WINDOW,
    "rope.freq_base": 150000.0,
}
_SINKS = ((r"model\.layers\.(\d+)\.self_attn\.sinks", r"blk.\1.attn_sinks.weight"),)
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_QWEN35 = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
}
_QWEN35_KEYS = {
    "block_count": 4,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
    "full_attention_interval": 2,
}
_Q = r"language_model\.model\.layers\.(\d+)\."
_QWEN35_NAMES = (
    (r"language_model\.model\.embed_tokens", "token_embd"),
    (r"language_model\.model\.norm", "output_norm"),
    (r"language_model\.lm_head", "output"),
    (_Q + r"input_layernorm", r"blk.\1.attn_norm"),
    (_Q + r"post_attention_layernorm", r"blk.\1.post_attention_norm"),
    (_Q + r"self_attn\.([qkv])_proj", r"blk.\1.attn_\2"),
    (_Q + r"self_attn\.o_proj", r"blk.\1.attn_output"),
    (_Q + r"self_attn\.([qk])_norm", r"blk.\1.attn_\2_norm"),
    (_Q + r"linear_attn\.in_proj_qkv", r"blk.\1.attn_qkv"),
    (_Q + r"linear_attn\.in_proj_z", r"blk.\1.attn_gate"),
    (_Q + r"linear_attn\.in_proj_a", r"blk.\1.ssm_alpha"),
    (_Q + r"linear_attn\.in_proj_b", r"blk.\1.ssm_beta"),
    (_Q + r"linear_attn\.conv1d", r"blk.\1.ssm_conv1d"),
    (_Q + r"linear_attn\.norm", r"blk.\1.ssm_norm"),
    (_Q + r"linear_attn\.out_proj", r"blk.\1.ssm_out"),
    (_Q + r"linear_attn\.A_log", r"blk.\1.ssm_a"),
    (_Q + r"linear_attn\.dt_bias", r"blk.\1.ssm_dt.bias"),
    (_Q + r"mlp\.(gate|up|down)_proj", r"blk.\1.ffn_\2"),
    (_Q + r"mlp\.gate", r"blk.\1.ffn_gate_inp"),
    (_Q + r"mlp\.shared_expert\.(gate|up|down)_proj", r"blk.\1.ffn_\2_shexp"),
    (_Q + r"mlp\.shared_expert_gate", r"blk.\1.ffn_gate_inp_shexp"),
)
_LLAMA3 = {"rope_scaling": LLAMA3}
_ERNIE = {
    "use_bias": False,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_interval": 1,
}
_ERNIE_KEYS = {
    **EXPERT_KEYS,
    "expert_shared_count": 2,
    "expert_shared_feed_forward_length": 64,
    "leading_dense_block_count": 1,
    "interleave_moe_layer_step": 1,
}
_LFM2 = {
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": True,
}
_LFM2_KEYS = {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3}
_LFM2_NORM = ((r"model\.embedding_norm", "token_embd_norm"),)

LLAMA = case("llama", "llama", change=permute_llama)
CASES: dict[str, Case] = {
    "llama": LLAMA,
    "llama, tied, with biases": case(
        "llama",
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True},
        change=permute_llama,
    ),
    "llama 3.1": case(
        "llama",
        "llama",
        _LLAMA3,
        change=permute_llama,
        extra={"rope_freqs.weight": llama3_factors({**BASE, **_LLAMA3})},
    ),
    "llama, linear": case(
        "llama",
        "llama",
        {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
        change=permute_llama,
    ),
    "mistral3": case(
        "mistral3",
        "ministral3",
        {
            "layer_types": ["full_attention"] * 3,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 8,
                "rope_theta": 1e4,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        {
            **YARN_KEYS,
            "rope.scaling.original_context_length": 8,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
            "attention.temperature_scale": 0.1,
        },
        change=permute_llama,
    ),
    "mistral3, plain": case(
        "mistral3",
        "ministral3",
        {
            "layer_types": ["full_attention"] * 3,
            "rope_parameters": {
                "rope_type": "default",
                "original_max_position_embeddings": 512,
                "rope_theta": 1e4,
                "llama_4_scaling_beta": 0.0,
            },
        },
        change=permute_llama,
    ),
    "mixtral": case(
        "llama",
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"expert_count": 4, "expert_used_count": 2},
        change=permute_llama,
    ),
    "qwen2": case("qwen2", "qwen2", {"head_dim": None}),
    "qwen2moe": case(
        "qwen2moe",
        "qwen2_moe",
        {**EXPERTS, "shared_expert_intermediate_size": 48, "head_dim": None},
        {**EXPERT_KEYS, "expert_shared_feed_forward_length": 48},
    ),
    "qwen3": case(
        "qwen3",
        "qwen3",
        {"head_dim": 32},
        {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32},
    ),
    "qwen3, yarn": case("qwen3", "qwen3", {"rope_scaling": YARN}, YARN_KEYS),
    "qwen35": case(
        "qwen35",
        "qwen3_5_text",
        _QWEN35,
        _QWEN35_KEYS,
        rename=_QWEN35_NAMES,
        change=linear_attention,
    ),
    "qwen35moe": case(
        "qwen35moe",
        "qwen3_5_moe_text",
        {
            **_QWEN35,
            **EXPERTS,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": True,
        },
        {**_QWEN35_KEYS, **EXPERT_KEYS, "expert_shared_feed_forward_length": 48},
        rename=_QWEN35_NAMES,
        change=linear_attention,
    ),
    "qwen3moe": case(
        "qwen3moe",
        "qwen3_moe",
        {**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
        EXPERT_KEYS,
    ),
    "gemma": case("gemma", "gemma", _GEMMA, change=plus_one("norm")),
    "gemma2": case(
        "gemma2",
        "gemma2",
        {
            **_GEMMA,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
        },
        {
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
            "attention.sliding_window": WINDOW,
        },
        change=plus_one("norm"),
    ),
    "gemma3": case(
        "gemma3",
        "gemma3_text",
        {
            **_GEMMA,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        {"block_count": 7, "attention.sliding_window": WINDOW, "rope.freq_base": 1e6},
        change=plus_one("norm"),
    ),
    "phi2": case(
        "phi2",
        "phi",
        {
            "partial_rotary_factor": 0.5,
            "layer_norm_eps": 1e-5,
            "num_key_value_heads": 4,
            "head_dim": None,
        },
        {**LAYER_NORM_KEYS, "rope.dimension_count": 8, "attention.head_count_kv": 4},
    ),
    "phi3": case("phi3", "phi3", {"head_dim": None}, {"rope.scaling.original_context_length": 512}),
    "phi3, long": case(
        "phi3",
        "phi3",
        {
            "head_dim": None,
            "original_max_position_embeddings": 64,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0 + i / 8 for i in range(8)],
                "long_factor": [2.0 + i for i in range(8)],
            },
        },
        {
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(8) / np.log(64))),
        },
        extra={
            "rope_factors_long.weight": np.arange(2, 10, dtype=np.float32),
            "rope_factors_short.weight": 1 + np.arange(8, dtype=np.float32) / 8,
        },
    ),
    "gpt-oss": case("gpt-oss", "gpt_oss", _GPT_OSS, _GPT_OSS_KEYS, rename=_SINKS),
    "gpt-oss, yarn": case(
        "gpt-oss",
        "gpt_oss",
        {**_GPT_OSS, "rope_scaling": {**YARN, "factor": 32.0, "truncate": False}},
        {**_GPT_OSS_KEYS, **YARN_KEYS, "rope.scaling.factor": 32.0},
        rename=_SINKS,
    ),
    "gpt2": case(
        "gpt2",
        "gpt2",
        {
            "n_ctx": 512,
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 3,
            "n_positions": 512,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        {
            **LAYER_NORM_KEYS,
            "feed_forward_length": 256,
            "attention.head_count_kv": 4,
        },
        rename=(
            (r"model\.wte", "token_embd"),
            (r"model\.wpe", "position_embd"),
            (r"model\.ln_f", "output_norm"),
            (r"model\.h\.(\d+)\.ln_1", r"blk.\1.attn_norm"),
            (r"model\.h\.(\d+)\.ln_2", r"blk.\1.ffn_norm"),
            (r"model\.h\.(\d+)\.attn\.c_attn", r"blk.\1.attn_qkv"),
            (r"model\.h\.(\d+)\.attn\.c_proj", r"blk.\1.attn_output"),
            (r"model\.h\.(\d+)\.mlp\.c_fc", r"blk.\1.ffn_up"),
            (r"model\.h\.(\d+)\.mlp\.c_proj", r"blk.\1.ffn_down"),
        ),
    ),
    "deepseek2": case(
        "deepseek2",
        "deepseek_v2",
        {
            **ROUTED,
            **LATENT,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        {
            **LATENT_KEYS,
            **YARN_KEYS,
            "expert_gating_func": 1,
            "expert_weights_norm": False,
            "rope.scaling.yarn_log_multiplier": 0.0707,
        },
        change=split_latent,
    ),
    "deepseek2, whole": case(
        "deepseek2",
        "deepseek_v2",
        {**ROUTED, **LATENT, "topk_method": "greedy", "norm_topk_prob": False},
        {
            **LATENT_KEYS,
            "attention.head_count_kv": 4,
            "attention.key_length_mla": None,
            "attention.value_length_mla": None,
            "attention.value_length": 12,
            "expert_gating_func": 1,
            "expert_weights_norm": False,
        },
    ),
    "deepseek3": case(
        "deepseek2",
        "deepseek_v3",
        {**ROUTED, **LATENT, "n_group": 2, "topk_group": 1},
        {**LATENT_KEYS, "expert_group_count": 2, "expert_group_used_count": 1},
        rename=(
            _BIAS,
            (r"model\.layers\.(\d+)\.self_attn\.embed_q", r"blk.\1.attn_k_b"),
            (r"model\.layers\.(\d+)\.self_attn\.unembed_out", r"blk.\1.attn_v_b"),
        ),
    ),
    "dots1": case(
        "dots1",
        "dots1",
        {**ROUTED, "num_key_value_heads": 4},
        {**ROUTED_KEYS, "attention.head_count_kv": 4},
        rename=(_BIAS,),
    ),
    "glm4": case(
        "glm4",
        "glm4",
        {"attention_bias": True, "partial_rotary_factor": 0.5},
        {"rope.dimension_count": 8},
    ),
    "glm4moe": case(
        "glm4moe",
        "glm4_moe",
        {
            **ROUTED,
            "use_qk_norm": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "rope_scaling": None,
        },
        {**ROUTED_KEYS, "rope.dimension_count": 8},
        rename=(_BIAS,),
        table="GLM4_MOE",
    ),
    "stablelm": case(
        "stablelm",
        "stablelm",
        {
            "use_qkv_bias": True,
            "partial_rotary_factor": 0.5,
            "layer_norm_eps": 1e-5,
            "head_dim": None,
        },
        {**LAYER_NORM_KEYS, "rope.dimension_count": 8, "use_parallel_residual": False},
    ),
    "starcoder2": case(
        "starcoder2",
        "starcoder2",
        {"norm_epsilon": 1e-5, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
        LAYER_NORM_KEYS,
    ),
    "command-r": case(
        "command-r",
        "cohere",
        {"layer_norm_eps": 1e-5, "logit_scale": 0.25, "tie_word_embeddings": True},
        {**LAYER_NORM_KEYS, "logit_scale": 0.25},
        table="COMMAND_R",
    ),
    "cohere2": case(
        "cohere2",
        "cohere2",
        {
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.25,
            "tie_word_embeddings": True,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 4,
            "num_hidden_layers": 5,
        },
        {
            **LAYER_NORM_KEYS,
            "logit_scale": 0.25,
            "attention.sliding_window": WINDOW,
            "block_count": 5,
        },
    ),
    "olmo2": case("olmo2", "olmo2"),
    "olmoe": case(
        "olmoe",
        "olmoe",
        {**EXPERTS, "num_key_value_heads": 4},
        {**EXPERT_KEYS, "expert_feed_forward_length": 96, "attention.head_count_kv": 4},
    ),
    "granite": case(
        "granite",
        "granite",
        {
            "logits_scaling": 2.0,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_bias": False,
            "mlp_bias": False,
        },
        {
            "logit_scale": 2.0,
            "attention.scale": 0.2,
            "embedding_scale": 3.0,
            "residual_scale": 0.5,
        },
        change=permute_llama,
    ),
    "granitemoe": case(
        "granitemoe",
        "granitemoe",
        {
            "logits_scaling": 2.0,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_bias": False,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        {
            "logit_scale": 2.0,
            "attention.scale": 0.2,
            "embedding_scale": 3.0,
            "residual_scale": 0.5,
            **EXPERT_KEYS,
            "expert_feed_forward_length": 96,
        },
        change=permute_llama,
        table="GRANITE_MOE",
    ),
    "minicpm": case(
        "minicpm",
        "minicpm",
        {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 3.0},
        {
            "embedding_scale": 3.0,
            "residual_scale": 1.4 / 3**0.5,
            "logit_scale": 64 / 32,
        },
        change=permute_llama,
    ),
    "exaone": case(
        "exaone",
        "exaone",
        {"num_layers": 3, "layer_norm_epsilon": 1e-5, **_LLAMA3},
        extra={"rope_freqs.weight": llama3_factors({**BASE, **_LLAMA3})},
    ),
    "exaone4": case(
        "exaone4",
        "exaone4",
        {"rope_scaling": None, "sliding_window": None, "sliding_window_pattern": None},
    ),
    "nemotron": case(
        "nemotron",
        "nemotron",
        {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        {**LAYER_NORM_KEYS, "rope.dimension_count": 8},
        change=plus_one("norm"),
    ),
    "smollm3": case(
        "smollm3",
        "smollm3",
        {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]},
        {"block_count": 5},
        change=permute_llama,
    ),
    "ernie4_5": case("ernie4_5", "ernie4_5", {"use_bias": False}),
    "seed_oss": case("seed_oss", "seed_oss", {"attention_bias": True}),
    "hunyuan-dense": case("hunyuan-dense", "hunyuan_v1_dense", {"use_qk_norm": True}),
    "ernie4_5-moe": case("ernie4_5-moe", "ernie4_5_moe", _ERNIE, _ERNIE_KEYS, table="ERNIE4_5_MOE"),
    "ernie4_5-moe, with choice bias": case(
        "ernie4_5-moe",
        "ernie4_5_moe",
        {**_ERNIE, "moe_use_aux_free": True},
        _ERNIE_KEYS,
        rename=((r"model\.layers\.(\d+)\.mlp\.choice_bias", r"blk.\1.exp_probs_b.bias"),),
        table="ERNIE4_5_MOE",
    ),
    "lfm2": case("lfm2", "lfm2", _LFM2, _LFM2_KEYS, rename=_LFM2_NORM, change=squeezed),
    "lfm2moe": case(
        "lfm2moe",
        "lfm2_moe",
        {
            **_LFM2,
            **EXPERTS,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "num_dense_layers": 1,
        },
        {
            **_LFM2_KEYS,
            **EXPERT_KEYS,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
        rename=(
            *_LFM2_NORM,
            (r"model\.layers\.(\d+)\.feed_forward\.expert_bias", r"blk.\1.exp_probs_b.bias"),
            (r"model\.layers\.(\d+)\.feed_forward\.(gate|up|down)_proj", r"blk.\1.ffn_\2"),
        ),
        change=squeezed,
        table="LFM2MOE",
    ),
}

#: Cases that llama.cpp computes in another way on purpose.
UNLIKE_LLAMA_CPP = {
    # It rounds the limits of YaRN's ramp, which the published model does not.
    "gpt-oss, yarn",
}
