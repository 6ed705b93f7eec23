"""A small configuration for every model module of mlx-lm, with the family's distinctive features.

Windows, chunks and sparse selections are much shorter than the tests' contexts, and every layer
type of a family is present. `BASE` provides missing fields.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

VOCAB_SIZE = 96
WINDOW = 12

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
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

ALTERNATING = ["sliding_attention", "full_attention"] * 2
SLIDING_FIRST = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
LINEAR_FIRST = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {**ROUTED, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
MLA = {**SHARED, **LATENT, "n_group": 2, "topk_group": 1}
YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
INDEXER = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 3,
}
LFM2 = {
    "norm_eps": 1e-5,
    "conv_bias": True,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
MAMBA2 = {
    "num_heads": 4,
    "head_dim": 32,
    "state_size": 16,
    "conv_kernel": 3,
    "n_groups": 2,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": [0.01, 10.0],
    "time_step_rank": "auto",
}
LLAMA4_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
}
GEMMA4 = {
    "num_hidden_layers": 6,
    "global_head_dim": 32,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 16,
    "sliding_window": WINDOW,
    "layer_types": [*ALTERNATING, "sliding_attention", "full_attention"],
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4},
    },
}
GEMMA3 = {
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 16,
    "num_key_value_heads": 1,
}
GEMMA3N = {
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 16,
    "sliding_window": WINDOW,
    "rope_local_base_freq": 1e3,
    "final_logit_softcapping": 30.0,
    "layer_types": ALTERNATING,
    "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    "altup_num_inputs": 2,
    "altup_coef_clip": 1.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}
LLAMA4 = {
    "attention_bias": False,
    "attention_chunk_size": 16,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 96,
    "num_experts_per_tok": 1,
    "num_local_experts": 2,
    "rope_scaling": None,
    "use_qk_norm": True,
    "floor_scale": 8,
}
KIMI_K3 = {
    "num_attention_heads": 2,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 2,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 2,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "first_k_dense_replace": 1,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    **LATENT,
}
MINIMAX_M3 = {
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 32,
    "rotary_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense", "sparse"] * 2,
    "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "index_local_blocks": 1,
}
MUSE_SPARK = {
    "sliding_window": WINDOW,
    "layer_types": SLIDING_FIRST,
    "layer_rope_theta": [100.0, 100.0, 100.0, 0],
    "rope_parameters": {"rope_theta": 100.0},
    "post_norm_eps": 1e-8,
    "final_logit_softcapping": 30.0,
    "output_multiplier": 1.0,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_hidden_size": 32,
    "moe_intermediate_size": 32,
}

# Wide enough for Hadamard blocks of 512.
HADAMARD = {**LINEAR, "hidden_size": 512, "intermediate_size": 512, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_num_key_heads": 4, "full_attention_interval": 2,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
            "num_hidden_layers": 2}  # fmt: skip


def text(**fields: Any) -> dict[str, Any]:
    """A multimodal wrapper around a language model."""
    return {"text_config": {**BASE, **fields}}


CONFIGS: dict[str, dict[str, Any]] = {
    "Klear": {
        **EXPERTS,
        "attention_bias": False,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 2,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
    },
    "afm7": {
        "hidden_dim": 64,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "afmoe": {**EXPERTS, "layer_types": SLIDING_FIRST, "sliding_window": WINDOW},
    "apertus": {"mlp_bias": True, "attention_bias": False, "post_norm": True, "qk_norm": True},
    "baichuan_m1": {"sliding_window": WINDOW, "sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {
        **EXPERTS,
        **LATENT,
        "num_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "layer_group_size": 2,
        "group_norm_size": 2,
        "routed_scaling_factor": 2.5,
    },
    "bailing_moe": {
        **EXPERTS,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "first_k_dense_replace": 2,
    },
    "bailing_moe_linear": {
        **EXPERTS,
        "num_key_value_heads": 4,
        "norm_topk_prob": True,
        "num_shared_experts": 1,
        "first_k_dense_replace": 0,
        "layer_group_size": 2,
        "group_norm_size": 1,
    },
    "bailing_moe_v3": {
        **EXPERTS,
        **LATENT,
        "moe_shared_expert_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": None,
    },
    "bitnet": {},
    "cohere": {},
    "cohere2": {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    "dbrx": {
        "d_model": 64,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "n_layers": 4,
        "n_heads": 4,
    },
    "deepseek": {"moe_intermediate_size": 32},
    "deepseek_v2": {**MLA, "rope_scaling": YARN},
    "deepseek_v3": {**MLA, "rope_scaling": YARN},
    "deepseek_v32": {**MLA, **INDEXER, "rope_scaling": YARN},
    "deepseek_v41": {},
    "dots1": {**SHARED, "first_k_dense_replace": 1},
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": {"use_bias": False, "moe_num_experts": 4},
    "exaone": {"num_layers": 4, "layer_norm_epsilon": 1e-5},
    "exaone4": {
        "rope_scaling": None,
        "sliding_window": WINDOW,
        "sliding_window_pattern": "LLGL",
    },
    "exaone_moe": {
        **EXPERTS,
        "num_shared_experts": 1,
        "sliding_window": WINDOW,
        "layer_types": SLIDING_FIRST,
        "is_moe_layer": [False, True, True, True],
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
        "mamba_d_conv": 3,
    },
    "gear": {
        "layer_types": ["sliding_attention", "conv_mixer", "full_attention", "conv_mixer"],
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "rope_local_base_freq": 1e3,
    },
    "gemma": {},
    "gemma2": {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "gemma3": text(model_type="gemma3_text", **GEMMA3),
    "gemma3_text": GEMMA3,
    "gemma3n": text(model_type="gemma3n", **GEMMA3N),
    "gemma4": text(model_type="gemma4_text", **GEMMA4),
    "gemma4_text": GEMMA4,
    "glm": {},
    "glm4": {"attention_bias": False, "partial_rotary_factor": 0.5},
    "glm4_moe": {
        **SHARED,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "rope_scaling": None,
        "use_qk_norm": True,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
    },
    "glm4_moe_lite": {**SHARED, **LATENT, "num_key_value_heads": 4},
    "glm_moe_dsa": {
        **MLA,
        **INDEXER,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "attention_bias": False,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "gpt2": {
        "n_ctx": 512,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 4,
        "n_positions": 512,
        "layer_norm_epsilon": 1e-5,
        "num_key_value_heads": 4,
    },
    "gpt_bigcode": {
        "n_embd": 64,
        "n_layer": 4,
        "n_inner": 96,
        "n_head": 4,
        "n_positions": 512,
        "layer_norm_epsilon": 1e-5,
        "num_key_value_heads": 1,
    },
    "gpt_neox": {"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.25},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ALTERNATING,
        "sliding_window": WINDOW,
    },
    "gptj": {"n_embd": 64, "n_positions": 512, "n_head": 4, "rotary_dim": 8, "n_layer": 4},
    "granite": {
        "logits_scaling": 1.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "granitemoe": {
        "logits_scaling": 1.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_bias": False,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "granitemoehybrid": {
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": False,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "helium": {"attention_bias": False, "mlp_bias": False},
    "hunyuan": {
        "attention_bias": False,
        "moe_topk": 2,
        "num_experts": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "hunyuan_v1_dense": {
        "rope_scaling": {
            "alpha": 1000.0,
            "factor": 1.0,
            "type": "dynamic",
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "internlm2": {},
    "internlm3": {},
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "kimi_k25": text(model_type="kimi_k25", **MLA),
    "kimi_k3": {"text_config": {**BASE, "model_type": "kimi_linear", **KIMI_K3}},
    "kimi_linear": {
        **LATENT,
        "linear_attn_config": {"num_heads": 4, "head_dim": 32, "kda_layers": [1, 2, 4]},
        "model_max_length": 512,
        "num_experts": 4,
        "moe_intermediate_size": 32,
    },
    "kimi_vl": text(model_type="kimi_vl", **MLA),
    "laguna": {
        **EXPERTS,
        "sliding_window": WINDOW,
        "partial_rotary_factor": 0.5,
        "shared_expert_intermediate_size": 32,
        "moe_routed_scaling_factor": 2.5,
        "moe_router_score_func": "sqrtsoftplus",
        "layer_types": SLIDING_FIRST,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_attention_heads_per_layer": [4, 4, 4, 4],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_slow": 1.0,
                "beta_fast": 32.0,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
            },
        },
    },
    "lfm2": LFM2,
    "lfm2-vl": text(model_type="lfm2", **LFM2),
    "lfm2_moe": {
        **LFM2,
        **EXPERTS,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "num_dense_layers": 2,
    },
    "lille-130m": {
        "block_size": 512,
        "n_layer": 4,
        "n_head": 4,
        "n_kv_heads": 2,
        "n_embd": 64,
        "layer_norm_eps": 1e-5,
    },
    "llama": {"layer_types": ALTERNATING, "sliding_window": WINDOW},
    "llama4": text(model_type="llama4", **LLAMA4),
    "llama4_text": {
        "intermediate_size_mlp": 96,
        "no_rope_layers": [0, 0, 1, 1],
        "use_qk_norm": True,
    },
    "longcat_flash": {
        **LATENT,
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "ffn_hidden_size": 96,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "num_layers": 2,
        "routed_scaling_factor": 1.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "attention_bias": False,
    },
    "longcat_flash_ngram": {
        **LATENT,
        "attention_method": "MLA",
        "ffn_hidden_size": 96,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "num_layers": 2,
        "routed_scaling_factor": 1.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "mamba": {
        "state_size": 16,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 8,
    },
    "mamba2": MAMBA2,
    "mellum": {
        **EXPERTS,
        "norm_topk_prob": True,
        "sliding_window": WINDOW,
        "layer_types": SLIDING_FIRST,
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 1e4},
            "full_attention": {"rope_theta": 1e6},
        },
    },
    "mimo": {},
    "mimo_v2_flash": {
        **ROUTED,
        "n_shared_experts": None,
        "routed_scaling_factor": None,
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 2,
        "topk_group": 1,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1e3,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1,
        "v_head_dim": 8,
        "swa_head_dim": 16,
        "swa_v_head_dim": 8,
        "partial_rotary_factor": 0.5,
        "attention_value_scale": 0.7,
    },
    "minicpm": {"dim_model_base": 64, "scale_depth": 1.0, "scale_emb": 1.0},
    "minicpm3": {
        **LATENT,
        "dim_model_base": 64,
        "scale_depth": 1.0,
        "scale_emb": 1.0,
        "rope_scaling": {
            "original_max_position_embeddings": 64,
            "short_factor": [1.0, 1.0, 1.0, 1.0],
            "long_factor": [1.0, 1.1, 1.2, 1.3],
        },
    },
    "minimax": {
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "shared_intermediate_size": 32,
        "rotary_dim": 8,
    },
    "minimax_m3_vl": text(model_type="minimax_m3_vl", **MINIMAX_M3),
    "ministral3": {
        "sliding_window": WINDOW,
        "layer_types": SLIDING_FIRST,
        "rope_parameters": LLAMA4_YARN,
    },
    "mistral3": text(model_type="llama"),
    "mistral4": {
        **MLA,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 0,
        "qk_head_dim": 24,
        "rope_scaling": LLAMA4_YARN,
        "rope_parameters": LLAMA4_YARN,
    },
    "mixtral": {"num_local_experts": 4},
    "muse_glimmer": {
        "sliding_window": WINDOW,
        "layer_types": SLIDING_FIRST,
        "layer_rope_theta": [100.0, 100.0, 100.0, 0],
    },
    "muse_spark": text(model_type="muse_spark_text", **MUSE_SPARK),
    "nanbeige": {"num_loops": 2},
    "nanochat": {},
    "nemotron": {"hidden_act": "gelu", "norm_eps": 1e-5},
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {
                    "n_heads_in_group": 2,
                    "no_op": i == 1,
                    "replace_with_linear": i == 2,
                },
                "ffn": {"ffn_mult": 1.0, "no_op": False, "replace_with_linear": False},
            }
            for i in range(4)
        ],
    },
    "nemotron_h": {
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 3,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": True,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "*", "M", "-"],
    },
    "olmo": {
        "d_model": 64,
        "n_layers": 4,
        "mlp_hidden_size": 96,
        "n_heads": 4,
        "embedding_size": VOCAB_SIZE,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW, "layer_types": SLIDING_FIRST},
    "olmo_hybrid": {
        **LINEAR,
        "linear_allow_neg_eigval": False,
        "attention_bias": False,
        "layer_types": LINEAR_FIRST,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "openelm": {
        "num_transformer_layers": 4,
        "model_dim": 64,
        "ffn_dim_divisor": 8,
        "num_query_heads": [2, 4, 4, 6],
        "num_kv_heads": [1, 2, 1, 2],
        "ffn_multipliers": [0.5, 1.0, 1.5, 2.0],
    },
    "phi": {},
    "phi3": {},
    "phi3small": {
        "vocab_size": 100352,  # the model writes to logits up to this id
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 96,
        "gegelu_limit": 1.0,
        "layer_norm_epsilon": 1e-5,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 2,
    },
    "phimoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
            "short_factor": [1.0] * 8,
            "long_mscale": 1.2,
            "short_mscale": 1.2,
            "original_max_position_embeddings": 4096,
        },
    },
    "phixtral": {
        "num_vocab": VOCAB_SIZE,
        "model_dim": 64,
        "num_heads": 4,
        "num_layers": 2,
        "rotary_dim": 8,
    },
    "pixtral": text(model_type="llama"),
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        "hidden_size_per_head": 16,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_num_heads": 4,
        "mamba_step": 2,
    },
    "plamo3": {"window_size": WINDOW, "sliding_window_pattern": 2},
    "prism_hadamard_qwen35": {
        "text_config": {**BASE, **HADAMARD},
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": path, "block": 512, "embedding": False, "dtype": "float16"}
            for path in (
                "model.layers.1.mlp.up_proj",
                "model.layers.1.self_attn.k_proj",
                "model.layers.1.self_attn.v_proj",
                "model.layers.0.linear_attn.in_proj_qkv",
            )
        ],
    },
    "qwen": {"kv_channels": 16},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen2_vl": text(model_type="qwen2"),
    "qwen3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3_5": text(model_type="qwen3_5_text", **LINEAR, full_attention_interval=2),
    "qwen3_5_moe": text(
        model_type="qwen3_5_moe_text",
        **LINEAR,
        **EXPERTS,
        full_attention_interval=2,
        shared_expert_intermediate_size=32,
    ),
    "qwen3_moe": {
        **EXPERTS,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "qwen3_next": {
        **LINEAR,
        **EXPERTS,
        "full_attention_interval": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [0],
        "partial_rotary_factor": 0.5,
    },
    "qwen3_vl": text(model_type="qwen3"),
    "qwen3_vl_moe": text(
        model_type="qwen3_moe",
        **EXPERTS,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    ),
    "recurrent_gemma": {
        "attention_bias": False,
        "conv1d_width": 3,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "num_key_value_heads": 1,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {
        "norm_eps": 1e-5,
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
    "seed_oss": {},
    "smollm3": {"layer_types": ["full_attention"] * 4, "no_rope_layers": [1, 1, 1, 0]},
    "solar_open": {**SHARED, "first_k_dense_replace": 1, "partial_rotary_factor": 1.0},
    "spark2_5": {
        "sliding_window": WINDOW,
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
            "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.25},
        },
        "layer_types": SLIDING_FIRST,
    },
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5},
    "starcoder2": {},
    "step3p5": {
        "num_attention_groups": 2,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0],
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
        "moe_layers_enum": "1,2,3",
    },
    "talkie": {},
    "telechat3": {},
    "youtu_llm": LATENT,
}


def config_of(module: str, *, window: int = WINDOW) -> dict[str, Any]:
    """The ``config.json`` of a module's small model.

    Args:
        window: Window of the layers that have one.
    """
    return _with_window({**BASE, "model_type": module, **CONFIGS[module]}, window)


def _with_window(config: dict[str, Any], window: int) -> dict[str, Any]:
    def value(name: str, given: Any) -> Any:
        if isinstance(given, dict):
            return _with_window(given, window)
        return window if "window" in name and given == WINDOW else given

    return {name: value(name, given) for name, given in config.items()}


def compiled_families(where: str) -> list[str]:
    """The families that docs/models.md lists as compiled as a whole, "on the CPU" or "on a GPU"."""
    text = (Path(__file__).parents[2] / "docs/models.md").read_text()
    _, listed = text.split(f"<!-- compiled {where} -->")
    return re.findall(r"`([^`]+)`", listed.partition("<!--")[0])
