"""Small models with several layer types, and mlx-lm's dense answers for them."""

from __future__ import annotations

from functools import cache
from typing import Any

from support.models import embedded, tiny_config
from support.parity import family_model
from support.plain import plain_caches

# isort: split
import mlx.core as mx
import mlx.nn as nn

from mlx_paged import LLM
from mlx_paged.model.loader import LoadedModel

WINDOW = 20
CHUNK = 16
_SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
}
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": tiny_config("mistral", **_SLIDING),
    "gemma3": tiny_config("gemma3_text", sliding_window=WINDOW, sliding_window_pattern=3),
    "gpt-oss": tiny_config(
        "gpt_oss", **_SLIDING, num_local_experts=4, num_experts_per_tok=2, rope_scaling=None
    ),
    "llama4": tiny_config(
        "llama4",
        text_config=tiny_config(
            "llama4",
            intermediate_size_mlp=96,
            num_hidden_layers=8,
            attention_bias=False,
            attention_chunk_size=CHUNK,
            interleave_moe_layer_step=2,
            num_experts_per_tok=1,
            num_local_experts=2,
            rope_scaling=None,
            use_qk_norm=True,
        ),
    ),
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": tiny_config(
        "qwen3_next",
        tied=False,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=3,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        full_attention_interval=2,
        decoder_sparse_step=1,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[0],
        partial_rotary_factor=0.5,
    ),
    "nemotron_h": tiny_config(
        "nemotron_h",
        attention_bias=False,
        mamba_num_heads=4,
        mamba_head_dim=32,
        mamba_proj_bias=False,
        ssm_state_size=16,
        conv_kernel=3,
        n_groups=2,
        mlp_bias=False,
        layer_norm_epsilon=1e-5,
        use_bias=True,
        use_conv_bias=True,
        hybrid_override_pattern=["M", "*", "M", "-"],
    ),
    "lfm2": tiny_config(
        "lfm2",
        norm_eps=1e-5,
        conv_bias=True,
        conv_L_cache=3,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        block_dim=64,
        block_ff_dim=96,
        block_multiple_of=8,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
    ),
    "mamba2": tiny_config(
        "mamba2",
        num_heads=4,
        head_dim=32,
        state_size=16,
        conv_kernel=3,
        n_groups=2,
        layer_norm_epsilon=1e-5,
        use_bias=False,
        use_conv_bias=True,
        time_step_limit=[0.01, 10.0],
        time_step_rank="auto",
    ),
    "recurrent_gemma": tiny_config(
        "recurrent_gemma",
        attention_bias=False,
        conv1d_width=3,
        logits_soft_cap=30.0,
        attention_window_size=WINDOW,
        num_key_value_heads=1,
        block_types=["recurrent", "recurrent", "attention"],
    ),
}
GROUPED = {**WINDOWED, **HYBRIDS}


@cache
def _model(name: str) -> nn.Module:
    return family_model(GROUPED[name])


def loaded(name: str) -> LoadedModel:
    """Makes a model for one engine."""
    model = family_model(GROUPED[name])
    return LoadedModel(model, embedded().tokenizer, GROUPED[name], name)


def engine_of(name: str, **options: Any) -> LLM:
    """Makes an engine; by default with blocks of 8 and steps of 24 tokens."""
    defaults = {"block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    defaults |= {"num_gpu_blocks_override": 120, "typical_context_len": 100}
    return LLM(loaded(name), **{**defaults, **options})


def dense_answer(name: str, prompt: list[int], num_tokens: int) -> list[int]:
    """The greedy answer with mlx-lm's own caches, past any end token."""
    return list(_dense_answer(name, tuple(prompt), num_tokens))


@cache
def _dense_answer(name: str, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    model = _model(name)
    caches = plain_caches(model)
    tokens, answer = list(prompt), []
    for _ in range(num_tokens):
        tokens = [int(mx.argmax(model(mx.array([tokens]), cache=caches)[0, -1]).item())]
        answer += tokens
    return tuple(answer)
