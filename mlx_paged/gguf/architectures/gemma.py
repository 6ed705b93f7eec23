"""Gemma 1 to 3."""

from __future__ import annotations

from mlx_paged.gguf.architectures import names
from mlx_paged.gguf.architectures.base import (
    Architecture,
    Config,
    common,
    shifted,
    window_layers,
)
from mlx_paged.gguf.metadata import Metadata

_LAYER = "model.layers.{}"
#: Norms before and after attention and MLP, in place of two before them.
FOUR_NORMS = {
    "ffn_norm": f"{_LAYER}.pre_feedforward_layernorm",
    "post_attention_norm": f"{_LAYER}.post_attention_layernorm",
    "post_ffw_norm": f"{_LAYER}.post_feedforward_layernorm",
}
_NORMS = (
    *("output_norm", "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"),
    *("attn_q_norm", "attn_k_norm"),
)
_SHIFTED = dict.fromkeys(_NORMS, shifted)


def _common(meta: Metadata, model_type: str) -> Config:
    return common(
        meta, model_type, hidden_activation="gelu_pytorch_tanh", hidden_act="gelu_pytorch_tanh"
    )


def _scalar(meta: Metadata, config: Config, layers_of_27b: int) -> int:
    """The square of the scores' divisor, which files do not say: the 27B models have their own."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma2(meta: Metadata) -> Config:
    config = _common(meta, "gemma2")
    return {
        **config,
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _scalar(meta, config, 46),
        "sliding_window": meta.size("attention.sliding_window", 4096),
        "layer_types": window_layers(meta, 2),
    }


def _gemma3(meta: Metadata) -> Config:
    config = _common(meta, "gemma3_text")
    window = meta.integer("attention.sliding_window", 0)
    full = ["full_attention"] * config["num_hidden_layers"]
    return {
        **config,
        "rope_theta": meta.number("rope.freq_base", 1e6),
        "query_pre_attn_scalar": _scalar(meta, config, 62),
        "rope_local_base_freq": meta.number("rope.freq_base_swa", 10000.0),
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": window_layers(meta, 6) if window else full,
    }


GEMMA = Architecture(lambda meta: _common(meta, "gemma"), names.LLAMA, edits=_SHIFTED, is_wide=True)
GEMMA2 = Architecture(_gemma2, {**names.LLAMA, **FOUR_NORMS}, edits=_SHIFTED, is_wide=True)
GEMMA3 = Architecture(
    _gemma3,
    {**names.LLAMA, **names.QK_NORMS, **FOUR_NORMS},
    edits=_SHIFTED,
    is_wide=True,
)
