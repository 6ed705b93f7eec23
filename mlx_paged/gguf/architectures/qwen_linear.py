"""Qwen 3.5, dense and as a mixture of experts: most layers have linear attention.

llama.cpp numbers the value heads of linear attention in another order. Several belong to one key
head; mlx-lm keeps those of a key head together, and llama.cpp has the first of every key head, then
the second of every key head, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mlx_paged.gguf import formats
from mlx_paged.gguf.architectures import names
from mlx_paged.gguf.architectures.base import (
    Architecture,
    Config,
    Content,
    Edit,
    Regrouped,
    common,
    expert_size,
    reshaped,
    rotated_part,
)
from mlx_paged.gguf.errors import GGUFError
from mlx_paged.gguf.metadata import Metadata
from mlx_paged.gguf.types import Tensor

_PREFIX = "language_model."
_LAYER = f"{_PREFIX}model.layers.{{}}"
_LINEAR = f"{_LAYER}.linear_attn"


def _qwen35(meta: Metadata, model_type: str = "qwen3_5_text") -> Config:
    config = common(meta, model_type, hidden_act="silu", attention_bias=False)
    part = rotated_part(meta, config)
    layers, interval = config["num_hidden_layers"], meta.size("full_attention_interval", 4)
    key_dim, keys, values = _heads(meta)
    scaling = config.pop("rope_scaling", None) or {"rope_type": "default"}
    return {
        **config,
        "partial_rotary_factor": part,
        "rope_parameters": {
            **scaling,
            "rope_theta": config["rope_theta"],
            "partial_rotary_factor": part,
        },
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": meta.size("ssm.inner_size") // values,
        "linear_conv_kernel_dim": meta.size("ssm.conv_kernel"),
        "full_attention_interval": interval,
        "layer_types": [
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)
        ],
    }


def _qwen35_moe(meta: Metadata) -> Config:
    return {
        **_qwen35(meta, "qwen3_5_moe_text"),
        "num_experts": meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "moe_intermediate_size": expert_size(meta),
        "shared_expert_intermediate_size": meta.size("expert_shared_feed_forward_length"),
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }


def _heads(meta: Metadata) -> tuple[int, int, int]:
    """Returns the key head size and the numbers of key heads and value heads."""
    keys, values = meta.size("ssm.group_count"), meta.size("ssm.time_step_rank")
    if values % keys:
        raise GGUFError(f"its metadata says {keys} key heads for {values} value heads")
    return meta.size("ssm.state_size"), keys, values


def _regrouped(rows: np.ndarray, keys: int, values: int) -> np.ndarray:
    """Puts the rows of value heads in mlx-lm's order."""
    if len(rows) % values:
        raise GGUFError(f"{len(rows)} rows do not belong to {values} value heads")
    parts = rows.reshape(values // keys, keys, len(rows) // values, *rows.shape[1:])
    return parts.swapaxes(0, 1).reshape(rows.shape)


def _rows(has_keys: bool = False) -> Edit:
    """Returns an edit for a matrix with a row for each element of the value heads.

    Args:
        has_keys: Rows of queries and keys come before them.
    """

    def edit(tensor: Tensor, name: str, meta: Metadata) -> Mapping[str, Content]:
        size, keys, values = _heads(meta)
        first = 2 * size * keys if has_keys else 0
        rows = np.concatenate([tensor.rows[:first], _regrouped(tensor.rows[first:], keys, values)])
        return {name: tensor.with_rows(rows)}

    return edit


def _columns(tensor: Tensor, name: str, meta: Metadata) -> Mapping[str, Content]:
    _, keys, values = _heads(meta)
    if tensor.columns % values:
        raise GGUFError(f"its tensor {tensor.name!r} has no columns for {values} value heads")
    return {name: Regrouped(tensor, values // keys, keys)}


def _convolution(tensor: Tensor, name: str, meta: Metadata) -> Mapping[str, Content]:
    size, keys, values = _heads(meta)
    found, first = formats.values(tensor), 2 * size * keys
    found = np.concatenate([found[:first], _regrouped(found[first:], keys, values)])
    return {name: found[..., None]}


def _vector(tensor: Tensor, name: str, meta: Metadata) -> Mapping[str, Content]:
    _, keys, values = _heads(meta)
    return {name: _regrouped(formats.values(tensor).reshape(-1), keys, values)}


def _decay(tensor: Tensor, name: str, meta: Metadata) -> Mapping[str, Content]:
    """Undoes llama.cpp's ``-exp(A_log)``."""
    _, keys, values = _heads(meta)
    found = formats.values(tensor).reshape(-1)
    if not (found < 0).all():
        raise GGUFError(f"its tensor {tensor.name!r} must be negative")
    return {name: np.log(-_regrouped(found, keys, values))}


_NAMES = {
    **{stem: f"{_PREFIX}{path}" for stem, path in {**names.LLAMA, **names.QK_NORMS}.items()},
    "post_attention_norm": f"{_LAYER}.post_attention_layernorm",
    "attn_qkv": f"{_LINEAR}.in_proj_qkv",
    "attn_gate": f"{_LINEAR}.in_proj_z",
    "ssm_alpha": f"{_LINEAR}.in_proj_a",
    "ssm_beta": f"{_LINEAR}.in_proj_b",
    "ssm_conv1d": f"{_LINEAR}.conv1d",
    "ssm_norm": f"{_LINEAR}.norm",
    "ssm_out": f"{_LINEAR}.out_proj",
    "ssm_a": f"{_LINEAR}.A_log",
    "ssm_dt.bias": f"{_LINEAR}.dt_bias",
}
_EDITS: dict[str, Edit] = {
    "attn_qkv": _rows(has_keys=True),
    "attn_gate": _rows(),
    "ssm_alpha": _rows(),
    "ssm_beta": _rows(),
    "ssm_conv1d": _convolution,
    "ssm_out": _columns,
    "ssm_a": _decay,
    "ssm_dt.bias": _vector,
}
QWEN35 = Architecture(_qwen35, _NAMES, _EDITS)
QWEN35_MOE = Architecture(
    _qwen35_moe,
    {
        **_NAMES,
        **{
            stem: f"{_PREFIX}{path}"
            for stem, path in {
                **names.experts(),
                **names.shared_experts("mlp.shared_expert"),
                "ffn_gate_inp_shexp": "model.layers.{}.mlp.shared_expert_gate",
            }.items()
        },
    },
    {**_EDITS, "ffn_gate_inp_shexp": reshaped(1, -1)},
)
