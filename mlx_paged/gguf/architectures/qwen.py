"""Qwen 2 and 3, dense and as mixtures of experts."""

from __future__ import annotations

from mlx_paged.gguf.architectures import names
from mlx_paged.gguf.architectures.base import (
    Architecture,
    Config,
    common,
    expert_size,
    reshaped,
)
from mlx_paged.gguf.metadata import Metadata


def _experts(meta: Metadata) -> Config:
    return {
        "num_experts": meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "moe_intermediate_size": expert_size(meta),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2(meta: Metadata) -> Config:
    return common(meta, "qwen2", hidden_act="silu", use_sliding_window=False)


def _qwen2_moe(meta: Metadata) -> Config:
    return common(
        meta,
        "qwen2_moe",
        hidden_act="silu",
        use_sliding_window=False,
        norm_topk_prob=False,
        shared_expert_intermediate_size=meta.size(
            "expert_shared_feed_forward_length", meta.size("feed_forward_length", None)
        ),
        **_experts(meta),
    )


def _qwen3(meta: Metadata) -> Config:
    return common(
        meta,
        "qwen3",
        hidden_act="silu",
        use_sliding_window=False,
        attention_bias=meta.has_tensor("blk.0.attn_q.bias"),
    )


def _qwen3_moe(meta: Metadata) -> Config:
    config = common(
        meta,
        "qwen3_moe",
        hidden_act="silu",
        use_sliding_window=False,
        norm_topk_prob=True,
        **_experts(meta),
    )
    config.setdefault("intermediate_size", config["moe_intermediate_size"])
    return config


QWEN2 = Architecture(_qwen2, names.LLAMA)
QWEN2_MOE = Architecture(
    _qwen2_moe,
    {
        **names.LLAMA,
        **names.experts(),
        **names.shared_experts("mlp.shared_expert"),
        "ffn_gate_inp_shexp": "model.layers.{}.mlp.shared_expert_gate",
    },
    # The gate is one row, which files hold as a vector.
    {"ffn_gate_inp_shexp": reshaped(1, -1)},
)
QWEN3 = Architecture(_qwen3, {**names.LLAMA, **names.QK_NORMS})
QWEN3_MOE = Architecture(_qwen3_moe, {**names.LLAMA, **names.QK_NORMS, **names.experts()})
