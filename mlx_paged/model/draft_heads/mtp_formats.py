"""MtpFormat: each family's format of its head for multi-token prediction.

`mtp.py` reads and runs the heads. The names are from published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Fields = Mapping[str, Any]

# Gives the only layer of a model full attention and the family's experts, like a head's layer.
_ONE_LAYER = {
    "num_hidden_layers": 1,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 0,
    "full_attention_interval": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "layer_types": ["full_attention"],
}


def _one_layer(config: Fields) -> dict[str, Any]:
    return _ONE_LAYER


@dataclass(frozen=True)
class MtpFormat:
    """A family's format of its head.

    Attributes:
        prefix: Prefix of all its weights; "{}" is replaced by the number of layers.
        embed_norm, hidden_norm, projection: Names of its own weights.
        norm: Name of its last norm, with "{}" for the number of its last layer; None if it uses the
            model's norm.
        layer: Prefix of its decoder layers' weights, after `prefix`.
        layer_names: Maps names in its layers to names in the model's.
        output: Name of its own output projection, which not every head has.
        hidden_first: The projection takes the hidden state first, then the embedding.
        reads_normed: It reads the model's states after the model's last norm.
        returns_normed: Its state for the next draft is taken after its last norm.
        fields: Maps the model's config to the fields that differ for the head's layers.
        layer_of: Makes its layer from the model's, if they differ; it has one cache.
        model_layer: Prefix of a layer's weights in the model.
        chains: A checkpoint has a head for each draft, numbered after the model's layers; each head
            reads the previous one's states.
        published_by: A weight by which `sanitize` recognizes a published checkpoint; it belongs to
            no layer, and the head does not need it.
    """

    prefix: str
    embed_norm: str
    hidden_norm: str
    projection: str
    norm: str | None
    layer: str = ""
    layer_names: tuple[tuple[str, str], ...] = ()
    output: str = "shared_head.head"
    hidden_first: bool = False
    reads_normed: bool = True
    returns_normed: bool = False
    fields: Callable[[Fields], Fields] = _one_layer
    layer_of: Callable[[Any], nn.Module] | None = None
    model_layer: str = "model.layers.0."
    chains: bool = False
    published_by: str | None = None


def _ernie_fields(config: Fields) -> Fields:
    return {**_ONE_LAYER, "moe_layer_start_index": 1}  # Its layer has no experts.


def _exaone_fields(config: Fields) -> Fields:
    """Its layer is of the first layer's type, unless the config names one."""
    own = (config.get("mtp_layer_types") or config["layer_types"])[0]
    # A layer has RoPE if it has a window, or if no layer of the model has one.
    types = [own, *config["layer_types"]]
    return {**_ONE_LAYER, "layer_types": types, "is_moe_layer": [False]}


def _mellum_fields(config: Fields) -> Fields:
    own = (config.get("mtp_layer_types") or ["sliding_attention"])[0]
    mlp = (config.get("mtp_mlp_layer_types") or ["sparse"])[0]
    types = {"layer_types": [own, *config["layer_types"]], "mlp_layer_types": [mlp]}
    return {**_ONE_LAYER, **types}


def _mimo_v2_fields(config: Fields) -> Fields:
    # The second entry of the pattern is there only because the model looks for the other kind.
    return {**_ONE_LAYER, "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0]}


def _longcat_fields(config: Fields) -> Fields:
    return {**_ONE_LAYER, "num_layers": 1}


class _WithoutExperts(nn.Module):  # type: ignore[misc]
    """The first half of a LongCat layer, used by LongCat's head: an attention and an MLP.

    Args:
        layer: The whole layer, which has two of each under the same names, and experts.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.self_attn = layer.self_attn[:1]
        self.mlps = layer.mlps[:1]
        self.input_layernorm = layer.input_layernorm[:1]
        self.post_attention_layernorm = layer.post_attention_layernorm[:1]

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """``[B, L, hidden_size]`` -> the same shape."""
        x = x + self.self_attn[0](self.input_layernorm[0](x), mask=mask, cache=cache)
        out: mx.array = x + self.mlps[0](self.post_attention_layernorm[0](x))
        return out


_NEMOTRON_KINDS = {"*": "*", "E": "E", "-": "-", "attention": "*", "full_attention": "*"}
_NEMOTRON_KINDS |= {"moe": "E", "mlp": "-"}


def _nemotron_fields(config: Fields) -> Fields:
    """Its layers: those of the config, attention and experts by default.

    Raises:
        ValueError: Layers of other kinds.
    """
    given = config.get("mtp_hybrid_override_pattern") or config.get("mtp_layers_block_type")
    kinds = [_NEMOTRON_KINDS.get(kind) for kind in given or "*E"]
    if None in kinds or kinds.count("*") < 1:
        raise ValueError(f"its layers must be attention, experts and MLPs but are {given}")
    pattern = {"hybrid_override_pattern": kinds, "num_hidden_layers": len(kinds)}
    return {**pattern, "layers_block_type": None, "layer_types": None}


_STEP_LISTS = (
    "layer_types",
    "rope_theta",
    "partial_rotary_factors",
    "swiglu_limits",
    "swiglu_limits_shared",
)


def _step_fields(config: Fields) -> Fields:
    """Returns the head's fields: the config's lists have its layer after the model's.

    Raises:
        ValueError: A list has no entry for it.
    """
    number = config["num_hidden_layers"]
    lists = {name: config[name] for name in _STEP_LISTS if isinstance(config.get(name), list)}
    for name in ("layer_types", *lists):
        if len(lists.get(name, ())) <= number:
            given = config.get(name)
            raise ValueError(f"{name} must name its layer, number {number}, but is {given}")
    own = {name: [given[number]] for name, given in lists.items()}
    has_experts = str(number) in str(config.get("moe_layers_enum")).split(",")
    return {**_ONE_LAYER, **own, "moe_layers_enum": "0" if has_experts else None}


_DEEPSEEK = MtpFormat("model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
_BAILING = replace(_DEEPSEEK, norm="final_layernorm", returns_normed=True)
_MELLUM = MtpFormat(
    "mtp.",
    "pre_fc_norm_embedding",
    "pre_fc_norm_hidden",
    "fc",
    "norm",
    layer="layers.0.",
    returns_normed=True,
    fields=_mellum_fields,
)
_QWEN = replace(_MELLUM, fields=_one_layer, published_by="published.conv1d.weight")
_MIMO = MtpFormat(
    "model.mtp_layers.0.",
    "token_layernorm",
    "hidden_layernorm",
    "input_proj",
    "final_layernorm",
    hidden_first=True,
    returns_normed=True,
)
_MIMO_V2 = MtpFormat(
    "model.mtp.layers.0.",
    "enorm",
    "hnorm",
    "eh_proj",
    "final_layernorm",
    layer_names=(("pre_mlp_layernorm.", "post_attention_layernorm."),),
    returns_normed=True,
    fields=_mimo_v2_fields,
)
_ERNIE = MtpFormat(
    "model.mtp_",
    "emb_norm.0",
    "hidden_norm.0",
    "linear_proj.0",
    None,
    layer="block.0.",
    returns_normed=True,
    fields=_ernie_fields,
)
_NEMOTRON = MtpFormat(
    "mtp.",
    "layers.0.enorm",
    "layers.0.hnorm",
    "layers.0.eh_proj",
    "layers.{}.final_layernorm",
    layer="layers.",
    returns_normed=True,
    fields=_nemotron_fields,
    model_layer="backbone.layers.",
)
_LONGCAT = MtpFormat(
    "model.mtp.",
    "layers.0.enorm.m",
    "layers.0.hnorm.m",
    "layers.0.eh_proj",
    "norm",
    layer="layers.0.",
    layer_names=(
        ("self_attn.", "self_attn.0."),
        ("transformer_layer.mlp.", "mlps.0."),
        ("input_layernorm.", "input_layernorm.0."),
        ("post_attention_layernorm.", "post_attention_layernorm.0."),
    ),
    returns_normed=True,
    fields=_longcat_fields,
    layer_of=_WithoutExperts,
)
_STEP = replace(
    _DEEPSEEK,
    norm="transformer.shared_head.norm",
    output="transformer.shared_head.output",
    reads_normed=False,
    fields=_step_fields,
    chains=True,
    published_by="published.share_expert.weight",
)
#: By mlx-lm's module.
FORMATS: dict[str, MtpFormat] = {
    "bailing_moe_v3": _BAILING,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "ernie4_5_moe": _ERNIE,
    "exaone_moe": replace(_MELLUM, fields=_exaone_fields),
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "longcat_flash": _LONGCAT,
    "mellum": _MELLUM,
    "mimo": _MIMO,
    "mimo_v2_flash": _MIMO_V2,
    "nemotron_h": _NEMOTRON,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_next": _QWEN,
    "step3p5": _STEP,
}
#: Families whose heads are refused, and why.
REFUSED: dict[str, str] = {
    "bailing_hybrid": "its layer has not been compared with a reference, unlike bailing_moe_v3's",
    "kimi_k3": "its published checkpoint has none (num_nextn_predict_layers is 0)",
}
