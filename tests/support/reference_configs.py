"""Small configs of transformers' text families, shaped like the published ones.

Windows, chunks, and the lengths where RoPE scaling begins are shorter than the contexts of
`tests/model/test_reference_families.py`. `BASE` provides missing fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from support.family_config_parts import ALTERNATING, LINEAR_FIRST, SLIDING_FIRST, VOCAB_SIZE, WINDOW

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e5,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
DEEPSEEK_YARN = {**YARN, "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.707}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0],
    "original_max_position_embeddings": 16,
}


def plain(theta: float = 1e4, **fields: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **fields}


@dataclass(frozen=True)
class Reference:
    """A transformers family.

    Attributes:
        model_type: transformers' name for it.
        config: Fields in addition to `BASE`.
        text: Fields of ``text_config``, in addition to `BASE`, which is then not in `config`.
        vision: Fields of ``vision_config``. The tower's weights are not saved.
        architecture: transformers' class; None: the one for causal language models.
        bare: Omit `BASE`.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] | None = None
    vision: dict[str, Any] | None = None
    architecture: str | None = None
    bare: bool = False


HEAD = {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {**ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
}
MLA = {**SHARED, **LATENT, "n_group": 2, "topk_group": 1, "norm_topk_prob": True}
# With few heads, many scores would be exactly zero, and the choice among them arbitrary.
INDEXER = {"index_head_dim": 16, "index_n_heads": 32, "index_topk": 8}
GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 4.0,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 3,
}
GEMMA3N = {
    "num_hidden_layers": 7,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "layer_types": [*SLIDING_FIRST, "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "intermediate_size": [96] * 7,
    "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0],
    "laurel_rank": 8,
    **HEAD,
}
GEMMA4 = {
    "num_hidden_layers": 6,
    "global_head_dim": 32,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "layer_types": [*ALTERNATING, "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "final_logit_softcapping": 30.0,
    **HEAD,
}

#: Families by name; a suffix distinguishes variants of one family.
REFERENCES: dict[str, Reference] = {
    "afmoe": Reference(
        "afmoe", {**EXPERTS, **HEAD, "num_dense_layers": 1, "sliding_window": WINDOW}
    ),
    "apertus": Reference("apertus", {"rope_parameters": LLAMA3}),
    "bailing_hybrid": Reference(
        "bailing_hybrid",
        {
            **LATENT,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 32,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "num_expert_group": 2,
            "topk_group": 1,
            "layer_group_size": 2,
            "head_dim": 16,
        },
    ),
    "bitnet": Reference("bitnet", {"rope_parameters": plain(5e5)}),
    "cohere": Reference("cohere", {"use_qk_norm": True, "rope_parameters": plain(75e3)}),
    "cohere2": Reference(
        "cohere2", {"sliding_window": WINDOW, **HEAD, "layer_types": SLIDING_FIRST}
    ),
    "dbrx": Reference(
        "dbrx",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 4,
            "max_seq_len": 512,
            "vocab_size": VOCAB_SIZE,
            "ffn_config": {
                "ffn_hidden_size": 64,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "hidden_size": 64,
            },
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 5e5},
            "rope_parameters": plain(5e5),
        },
        bare=True,
    ),
    "deepseek_v2": Reference(
        "deepseek_v2",
        {
            **MLA,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 2.0,
            "norm_topk_prob": False,
            "rope_parameters": DEEPSEEK_YARN,
        },
    ),
    "deepseek_v3": Reference(
        "deepseek_v3", {**MLA, "routed_scaling_factor": 2.5, "rope_parameters": DEEPSEEK_YARN}
    ),
    "deepseek_v32": Reference("deepseek_v32", {**MLA, **INDEXER, "rope_parameters": DEEPSEEK_YARN}),
    "dots1": Reference(
        "dots1",
        {
            **SHARED,
            **HEAD,
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "ernie4_5": Reference("ernie4_5", {**HEAD, "rope_parameters": plain(5e5)}),
    "ernie4_5_moe": Reference(
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "rope_parameters": plain(5e5),
        },
    ),
    "exaone": Reference("exaone", {"rope_parameters": LLAMA3}),
    "exaone4": Reference(
        "exaone4",
        {"sliding_window": WINDOW, "sliding_window_pattern": 4, "rope_parameters": LLAMA3},
    ),
    "exaone_moe": Reference(
        "exaone_moe",
        {
            **EXPERTS,
            "num_shared_experts": 1,
            "sliding_window": WINDOW,
            "layer_types": SLIDING_FIRST,
            **HEAD,
        },
    ),
    "falcon_h1": Reference(
        "falcon_h1",
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "mamba_chunk_size": 8,
            "key_multiplier": 0.5,
            "attention_out_multiplier": 0.9,
            "lm_head_multiplier": 0.2,
            "embedding_multiplier": 5.0,
            "ssm_multipliers": [0.3, 0.2, 0.5, 0.7, 0.4],
            "mlp_multipliers": [0.8, 0.3],
        },
    ),
    "falcon_h1-norm": Reference(
        "falcon_h1",
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 8,
            "mamba_rms_norm": True,
            "attention_in_multiplier": 0.7,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.5,
        },
    ),
    "gemma": Reference("gemma", {**HEAD}),
    "gemma2": Reference("gemma2", {**HEAD, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}),
    "gemma3_text": Reference(
        "gemma3_text",
        {
            **HEAD,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": LINEAR_ROPE | {"rope_theta": 1e6},
                "sliding_attention": plain(),
            },
        },
    ),
    "gemma3n_text": Reference("gemma3n_text", GEMMA3N, architecture="Gemma3nForCausalLM"),
    "gemma4_text": Reference("gemma4_text", GEMMA4),
    "glm": Reference("glm", {**HEAD, "attention_bias": True}),
    "glm4": Reference("glm4", {**HEAD, "attention_bias": True}),
    "glm4_moe": Reference(
        "glm4_moe",
        {
            **SHARED,
            **HEAD,
            "n_group": 2,
            "topk_group": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": plain(1e6, partial_rotary_factor=0.5),
        },
    ),
    "glm4_moe_lite": Reference(
        "glm4_moe_lite",
        {**SHARED, **LATENT, "routed_scaling_factor": 1.8, "rope_parameters": plain(1e6)},
    ),
    "glm_moe_dsa": Reference("glm_moe_dsa", {**MLA, **INDEXER, "rope_parameters": plain(1e6)}),
    "gpt2": Reference(
        "gpt2",
        {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 512, "vocab_size": VOCAB_SIZE},
        bare=True,
    ),
    "gpt_bigcode": Reference(
        "gpt_bigcode",
        {
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 4,
            "n_positions": 512,
            "vocab_size": VOCAB_SIZE,
            "n_inner": 96,
        },
        bare=True,
    ),
    "gpt_neox": Reference(
        "gpt_neox",
        {
            "rotary_pct": 0.25,
            "rotary_emb_base": 10000,
            "use_parallel_residual": True,
            "intermediate_size": 256,
        },
    ),
    "gpt_oss": Reference(
        "gpt_oss",
        {
            **HEAD,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ALTERNATING,
            "sliding_window": WINDOW,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "gptj": Reference(
        "gptj",
        {
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 4,
            "n_positions": 512,
            "rotary_dim": 8,
            "vocab_size": VOCAB_SIZE,
        },
        bare=True,
    ),
    "granite": Reference("granite", {**GRANITE, "rope_parameters": plain(1e7)}),
    "granitemoe": Reference(
        "granitemoe",
        {
            **GRANITE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": plain(1e5),
        },
    ),
    "granitemoehybrid": Reference(
        "granitemoehybrid",
        {
            **GRANITE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "layer_types": ["mamba", "attention"] * 2,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
            "position_embedding_type": "rope",
        },
    ),
    "helium": Reference("helium", {**HEAD, "rope_parameters": plain(1e5)}),
    "hunyuan_v1_dense": Reference(
        "hunyuan_v1_dense",
        {
            **HEAD,
            "rope_parameters": {
                "rope_type": "dynamic",
                "alpha": 1000.0,
                "factor": 1.0,
                "rope_theta": 1e4,
            },
        },
    ),
    "internlm3": Reference(
        "internlm3",
        {
            **HEAD,
            "qkv_bias": False,
            "rope_parameters": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 5e6},
        },
    ),
    "jamba": Reference(
        "jamba",
        {
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_state": 16,
            "num_experts": 4,
            "use_mamba_kernels": False,
        },
    ),
    "kimi_linear": Reference(
        "kimi_linear",
        {
            **LATENT,
            "q_lora_rank": None,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "num_shared_experts": 1,
            "linear_attn_config": {
                "num_heads": 4,
                "head_dim": 32,
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "laguna": Reference(
        "laguna",
        {
            **EXPERTS,
            **HEAD,
            "sliding_window": WINDOW,
            "shared_expert_intermediate_size": 32,
            "layer_types": SLIDING_FIRST,
        },
    ),
    "lfm2": Reference(
        "lfm2",
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "block_auto_adjust_ff_dim": False,
            "rope_parameters": plain(1e6),
        },
    ),
    "lfm2_moe": Reference(
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention"] * 2,
            **EXPERTS,
            "num_dense_layers": 2,
            "rope_parameters": plain(1e6),
        },
    ),
    "llama": Reference("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": Reference(
        "llama", {"rope_parameters": LINEAR_ROPE, "attention_bias": True, "mlp_bias": True}
    ),
    "llama-yarn": Reference("llama", {"rope_parameters": YARN}),
    "llama-dynamic": Reference(
        "llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    ),
    "mistral": Reference("mistral", {"sliding_window": WINDOW, **HEAD}),
    "llama4_text": Reference(
        "llama4_text",
        {
            **HEAD,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16,
            "floor_scale": 8,
            "rope_parameters": LLAMA3,
        },
    ),
    "longcat_flash": Reference(
        "longcat_flash",
        {
            **LATENT,
            "num_layers": 2,
            "num_hidden_layers": 4,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "head_dim": 8,
        },
    ),
    "mamba": Reference(
        "mamba",
        {"hidden_size": 64, "num_hidden_layers": 4, "state_size": 16, "vocab_size": VOCAB_SIZE},
        bare=True,
    ),
    "falcon_mamba": Reference(
        "falcon_mamba",
        {"hidden_size": 64, "num_hidden_layers": 4, "state_size": 16, "vocab_size": VOCAB_SIZE},
        bare=True,
    ),
    "mamba2": Reference(
        "mamba2",
        {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_heads": 4,
            "head_dim": 32,
            "state_size": 16,
            "n_groups": 2,
            "chunk_size": 8,
            "vocab_size": VOCAB_SIZE,
        },
        bare=True,
    ),
    "mellum": Reference(
        "mellum", {**EXPERTS, **HEAD, "sliding_window": WINDOW, "layer_types": SLIDING_FIRST}
    ),
    "mimo_v2_flash": Reference(
        "mimo_v2_flash",
        {
            **ROUTED,
            "head_dim": 24,
            "v_head_dim": 16,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 24,
            "swa_v_head_dim": 16,
            "sliding_window": WINDOW,
        },
    ),
    "minicpm3": Reference(
        "minicpm3",
        {**LATENT, "v_head_dim": 16, "dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 12.0},
    ),
    "minimax": Reference(
        "minimax",
        {**HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": LINEAR_FIRST},
    ),
    "minimax_m2": Reference(
        "minimax_m2",
        {
            **HEAD,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 8,
            "use_qk_norm": True,
        },
    ),
    "ministral3": Reference(
        "ministral3",
        {
            **HEAD,
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "mixtral": Reference("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "nanochat": Reference("nanochat", {}),
    "nemotron": Reference("nemotron", {**HEAD}),
    "nemotron_h": Reference(
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "mamba", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 8,
            **ROUTED,
            "moe_shared_expert_intermediate_size": 32,
            "n_shared_experts": 1,
            "head_dim": 16,
        },
    ),
    "olmo": Reference("olmo", {"clip_qkv": 8.0}),
    "olmo2": Reference("olmo2", {"rope_parameters": plain(5e5)}),
    "olmo3": Reference(
        "olmo3",
        {
            "sliding_window": WINDOW,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": plain(1e5)},
        },
    ),
    "olmo_hybrid": Reference("olmo_hybrid", {**DELTA, "layer_types": LINEAR_FIRST}),
    "olmoe": Reference("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "phi": Reference("phi", {}),
    "phi3": Reference("phi3", {}),
    "phi3-longrope": Reference(
        "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}
    ),
    "phi3-short": Reference(
        "phi3",
        {
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 512},
            "original_max_position_embeddings": 512,
        },
    ),
    "phi3-window": Reference("phi3", {"sliding_window": WINDOW}),
    "phimoe": Reference(
        "phimoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ),
    "qwen2": Reference("qwen2", {"rope_parameters": plain(1e6), "tie_word_embeddings": True}),
    "qwen2-window": Reference(
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    ),
    "qwen2_moe": Reference("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3": Reference("qwen3", {**HEAD, "rope_parameters": YARN}),
    "qwen3_5_text": Reference("qwen3_5_text", {**HEAD, **DELTA, "layer_types": LINEAR_FIRST}),
    "qwen3_5_moe_text": Reference(
        "qwen3_5_moe_text",
        {
            **HEAD,
            **DELTA,
            **EXPERTS,
            "shared_expert_intermediate_size": 32,
            "layer_types": LINEAR_FIRST,
        },
    ),
    "qwen3_moe": Reference("qwen3_moe", {**HEAD, **EXPERTS, "norm_topk_prob": True}),
    "qwen3_next": Reference(
        "qwen3_next",
        {
            **HEAD,
            **DELTA,
            **EXPERTS,
            "shared_expert_intermediate_size": 32,
            "layer_types": LINEAR_FIRST,
        },
    ),
    "recurrent_gemma": Reference(
        "recurrent_gemma",
        {
            "attention_window_size": WINDOW,
            "num_key_value_heads": 1,
            "lru_width": 64,
            "num_hidden_layers": 3,
        },
    ),
    "seed_oss": Reference("seed_oss", {**HEAD, "rope_parameters": plain(1e7)}),
    "smollm3": Reference("smollm3", {"rope_parameters": plain(5e6), "no_rope_layer_interval": 4}),
    "solar_open": Reference(
        "solar_open", {**ROUTED, "n_shared_experts": 1, **HEAD, "n_group": 1, "topk_group": 1}
    ),
    "stablelm": Reference("stablelm", {"use_qkv_bias": True}),
    "starcoder2": Reference("starcoder2", {"sliding_window": None}),
    "starcoder2-window": Reference("starcoder2", {"sliding_window": WINDOW}),
}

_TOWER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
}
_MROPE = {"rope_parameters": plain(1e6, mrope_section=[2, 3, 3])}
#: Multimodal models without their towers: configs have a text section.
TEXT_OF_MULTIMODAL: dict[str, Reference] = {
    "gemma3": Reference(
        "gemma3",
        text={**HEAD, "sliding_window": WINDOW, "num_hidden_layers": 6},
        vision={**_TOWER, "intermediate_size": 32, "patch_size": 14, "image_size": 28},
        architecture="Gemma3ForConditionalGeneration",
    ),
    "gemma4": Reference(
        "gemma4",
        text={**GEMMA4, "pad_token_id": 0},
        vision={**_TOWER, "intermediate_size": 32, "head_dim": 16},
        architecture="Gemma4ForConditionalGeneration",
    ),
    "mistral3": Reference(
        "mistral3",
        text={**HEAD, "model_type": "mistral", "sliding_window": WINDOW},
        vision={**_TOWER, "model_type": "pixtral", "intermediate_size": 32, "head_dim": 16,
                "patch_size": 14, "image_size": 28},
        architecture="Mistral3ForConditionalGeneration",
    ),
    "qwen2_vl": Reference(
        "qwen2_vl",
        text=_MROPE,
        vision={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
        architecture="Qwen2VLForConditionalGeneration",
    ),
    "qwen3_5": Reference(
        "qwen3_5",
        text=REFERENCES["qwen3_5_text"].config,
        vision=_QWEN_TOWER,
        architecture="Qwen3_5ForConditionalGeneration",
    ),
    "qwen3_vl": Reference(
        "qwen3_vl",
        text={**HEAD, **_MROPE},
        vision={**_QWEN_TOWER, "deepstack_visual_indexes": []},
        architecture="Qwen3VLForConditionalGeneration",
    ),
}  # fmt: skip

# Families to test with other types of RoPE scaling: the plain module, partial rotation, one scaling
# per layer type, latent attention, and families' own modules.
_SCALED = (
    "dbrx", "deepseek_v2", "deepseek_v3", "exaone", "falcon_h1", "gemma3_text", "glm", "gpt_neox",
    "hunyuan_v1_dense", "internlm3", "laguna", "mimo_v2_flash", "nemotron", "phi", "qwen2_moe",
)  # fmt: skip
_SCALINGS = {
    "linear": LINEAR_ROPE,
    "llama3": LLAMA3,
    "yarn": {**YARN, "attention_factor": 1.3},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
}
_LAYER_TYPES = ("gemma3_text", "laguna", "mimo_v2_flash")
_PARTS = {
    "glm": 0.5,
    "gpt_neox": 0.25,
    "laguna": 0.5,
    "mimo_v2_flash": 0.334,
    "nemotron": 0.5,
    "phi": 0.5,
}


def scaled_references() -> dict[str, Reference]:
    """Every family of `_SCALED` with every type of scaling."""
    found = {}
    for family in _SCALED:
        for kind, scaling in _SCALINGS.items():
            rope = {
                **scaling,
                **({"partial_rotary_factor": _PARTS[family]} if family in _PARTS else {}),
            }
            if family in _LAYER_TYPES:
                # 0.5 instead of full attention's: 12 of a head's 24 dims.
                part = {"partial_rotary_factor": 0.5} if family == "mimo_v2_flash" else {}
                rope = {"full_attention": rope, "sliding_attention": plain(1e4, **part)}
            given = REFERENCES[family]
            found[f"{family}-{kind}"] = replace(
                given, config={**given.config, "rope_parameters": rope}
            )
    return found
