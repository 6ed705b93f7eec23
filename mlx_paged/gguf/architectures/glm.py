"""GLM 4: dense, and as a mixture of experts."""

from __future__ import annotations

from mlx_paged.gguf.architectures import names
from mlx_paged.gguf.architectures.base import Architecture, Config, common, rotated_part
from mlx_paged.gguf.architectures.deepseek import routing
from mlx_paged.gguf.metadata import Metadata

_LAYER = "model.layers.{}"


def _glm4(meta: Metadata) -> Config:
    config = common(
        meta,
        "glm4",
        hidden_act="silu",
        attention_bias=meta.has_tensor("blk.0.attn_q.bias"),
    )
    return {**config, "partial_rotary_factor": rotated_part(meta, config)}


def _glm4_moe(meta: Metadata) -> Config:
    config = common(
        meta,
        "glm4_moe",
        hidden_act="silu",
        attention_bias=meta.has_tensor("blk.0.attn_q.bias"),
        use_qk_norm=meta.has_tensor("blk.0.attn_q_norm.weight"),
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        **routing(meta),
    )
    config.setdefault("rope_scaling", None)
    return {**config, "partial_rotary_factor": rotated_part(meta, config)}


GLM4 = Architecture(
    _glm4,
    {
        **names.LLAMA,
        "ffn_up": f"{_LAYER}.mlp.gate_up_proj",
        "post_attention_norm": f"{_LAYER}.post_self_attn_layernorm",
        "post_ffw_norm": f"{_LAYER}.post_mlp_layernorm",
    },
)
GLM4_MOE = Architecture(
    _glm4_moe,
    {
        **names.LLAMA,
        **names.QK_NORMS,
        **names.experts(),
        **names.shared_experts("mlp.shared_experts"),
        "post_attention_norm": f"{_LAYER}.post_attention_layernorm",
        "exp_probs_b.bias": f"{_LAYER}.mlp.gate.e_score_correction_bias",
    },
)
