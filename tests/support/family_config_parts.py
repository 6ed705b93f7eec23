"""Parts that configurations of several families share, see `family_configs`."""

from __future__ import annotations

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
