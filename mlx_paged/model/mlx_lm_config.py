"""Writes a normalized config in the terms of mlx-lm's modules. Imports no mlx arrays.

transformers renames fields, and stores per layer what mlx-lm's modules take as a period. Fields
that a module needs under another name are derived here; a config that a module cannot express is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.config_normalization import normalize
from mlx_paged.model.families import module_of

Config = dict[str, Any]

#: Text models that transformers saves on their own, and the module that has them as a section.
_WRAPPED = {
    "gemma3n_text": "gemma3n",
    "qwen2_5_vl_text": "qwen2_vl",
    "qwen2_vl_text": "qwen2_vl",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "qwen3_vl_text": "qwen3_vl",
}


def mlx_lm_config(
    config: Mapping[str, Any], *, fill: bool = True, has_head: bool | None = None
) -> Config:
    """Returns the config to give to mlx-lm for a ``config.json``.

    Args:
        fill: See `normalize`.
        has_head: The files have weights of an output projection. Without them, the text model of a
            multimodal model has tied embeddings; transformers 4 and 5 read different fields for
            that.

    Raises:
        UnsupportedModelError: mlx-lm's module cannot express the config; it names the field.
    """
    found = normalize(config, fill=fill)
    if found.get("architectures") == ["BailingHybridForCausalLM"]:
        # transformers' name for the published Bailing MoE 3.
        found["architectures"] = ["BailingMoeV3ForCausalLM"]
    _write_section(found, module_of(found))
    for name in ("text_config", "llm_config", "language_config"):
        section = found.get(name)
        if isinstance(section, dict):
            # Some wrappers read the vocabulary's size next to the section.
            if found.get("vocab_size") is None and section.get("vocab_size") is not None:
                found["vocab_size"] = section["vocab_size"]
            if has_head is not None:
                section["tie_word_embeddings"] = not has_head
            _write_section(section, module_of(section) if "model_type" in section else "")
    wrapper = _WRAPPED.get(str(found.get("model_type")))
    if found.get("model_type") == "llama4_text" and found.get("num_local_experts", 0) > 0:
        wrapper = "llama4"  # mlx-lm's llama4_text has no experts.
    if wrapper is not None:
        found = {**found, "model_type": wrapper, "text_config": found}
    return found


def _write_section(section: Config, module: str) -> None:
    hidden, heads = section.get("hidden_size"), section.get("num_attention_heads")
    if section.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int):
        section["head_dim"] = hidden // max(heads, 1)
    write = _FIELDS.get(module)
    if write is not None:
        for name, value in write(section).items():
            section[name] = value
    if section.get("per_layer_config") and module not in _LAYERS_DIFFER:
        _refuse(section, "per_layer_config", "its layers to be alike", section["per_layer_config"])


_LAYERS_DIFFER = ("gemma4_text", "gemma4")


def _refuse(section: Mapping[str, Any], field: str, expected: str, given: Any) -> None:
    raise UnsupportedModelError(
        str(section.get("model_type")),
        f"mlx-lm's code of it needs {expected}, but config.json says {field}: {given!r}",
    )


def _missing(section: Mapping[str, Any], **values: Any) -> Config:
    """Returns those of the values that the section lacks."""
    return {name: value for name, value in values.items() if section.get(name) is None}


def _period(section: Mapping[str, Any]) -> Config:
    """``sliding_window_pattern``: every n-th layer sees all tokens."""
    kinds: Sequence[str] = section.get("layer_types") or ()
    if not kinds:
        return {}
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    period = full[0] + 1 if full else 0
    if not full or full != list(range(full[0], len(kinds), period)):
        _refuse(section, "layer_types", "every n-th layer to have full attention", list(kinds))
    return {"sliding_window_pattern": period}


def _letters(section: Mapping[str, Any]) -> Config:
    """Returns EXAONE 4's pattern, a letter per layer, or None if no layer has a window."""
    kinds = section.get("layer_types")
    if not section.get("sliding_window"):
        return {"sliding_window": None, "sliding_window_pattern": None}
    if not kinds:
        return {}
    return {
        "sliding_window_pattern": "".join("L" if k == "sliding_attention" else "G" for k in kinds)
    }


def _sparse_layers(section: Mapping[str, Any]) -> list[bool]:
    kinds = section.get("mlp_layer_types") or ()
    return [kind == "sparse" for kind in kinds]


def _granite_hybrid(section: Mapping[str, Any]) -> Config:
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    return {"layer_types": [names.get(k, k) for k in section.get("layer_types") or ()]}


def _gemma4(section: Mapping[str, Any]) -> Config:
    """Returns sizes of some layers, which transformers 5.24 stores for each of them."""
    layers: Mapping[str, Mapping[str, Any]] = section.get("per_layer_config") or {}
    if not layers:
        return {}
    kinds, num_layers = section.get("layer_types") or (), section["num_hidden_layers"]
    full = {i for i, kind in enumerate(kinds) if kind == "full_attention"}
    sharing = set(range(num_layers - section.get("num_kv_shared_layers", 0), num_layers))
    written: Config = {"global_head_dim": section["head_dim"]}
    fields = {
        "head_dim": ("global_head_dim", full),
        "num_key_value_heads": ("num_global_key_value_heads", full),
        "intermediate_size": ("use_double_wide_mlp", sharing),
    }
    for field in {name for given in layers.values() for name in given}:
        values = {int(i): given[field] for i, given in layers.items() if field in given}
        name, where = fields.get(field, ("", set()))
        if values.keys() != where or len(set(values.values())) != 1:
            _refuse(section, "per_layer_config", "layers of one kind to be alike", dict(layers))
        [value] = set(values.values())
        if name == "use_double_wide_mlp":
            if value != 2 * section["intermediate_size"]:
                _refuse(section, "per_layer_config", "MLPs to be twice as wide", dict(layers))
            value = True
        written[name] = value
    return written


def _mimo_v2_flash(section: Mapping[str, Any]) -> Config:
    kinds, sparse = section.get("layer_types") or (), _sparse_layers(section)
    return _missing(
        section,
        hybrid_layer_pattern=[int(kind == "sliding_attention") for kind in kinds],
        moe_layer_freq=[int(is_sparse) for is_sparse in sparse],
        layernorm_epsilon=section.get("rms_norm_eps"),
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    ) | {
        "n_shared_experts": section.get("n_shared_experts"),
        # The window of published files excludes the query; mlx-lm's includes it.
        "sliding_window_size": section.get("sliding_window") or section.get("sliding_window_size"),
    }


def _minimax(section: Mapping[str, Any]) -> Config:
    if section.get("model_type") == "minimax" and "linear_attention" in (
        section.get("layer_types") or ()
    ):
        _refuse(section, "layer_types", "MiniMax-M2's layers", section["layer_types"])
    rotated = section.get("partial_rotary_factor") or 1.0
    return _missing(
        section,
        shared_intermediate_size=0,
        rotary_dim=int((section.get("head_dim") or 0) * rotated),
    )


def _minicpm3(section: Mapping[str, Any]) -> Config:
    if section.get("rope_scaling"):
        return {}
    length = section.get("max_position_embeddings")
    plain = {"short_factor": 1.0, "long_factor": 1.0, "original_max_position_embeddings": length}
    return {"rope_scaling": {"type": "longrope", "rope_type": "longrope", **plain}}


def _plain_rope(section: Mapping[str, Any]) -> Config:
    """For modules that reject scalings; `rope_frequencies` applies those later."""
    scaling = section.get("rope_scaling")
    return {} if not scaling or "alpha" in scaling else {"rope_scaling": None}


def _deepseek_v2(section: Mapping[str, Any]) -> Config:
    """Its module reads a factor of YaRN for every type."""
    scaling = section.get("rope_scaling") or {}
    return {} if scaling.get("type") == "yarn" else {"rope_scaling": {"factor": 1.0}}


def _lfm2(section: Mapping[str, Any]) -> Config:
    return _missing(
        section,
        block_dim=section.get("hidden_size"),
        block_ff_dim=section.get("intermediate_size"),
    )


def _bailing_moe_v3(section: Mapping[str, Any]) -> Config:
    shared = section.get("num_shared_experts") or 1
    return _missing(
        section,
        max_position_embeddings=section.get("model_max_length"),
        moe_shared_expert_intermediate_size=shared * (section.get("moe_intermediate_size") or 0),
    ) | {"head_dim": section.get("linear_head_dim") or section.get("head_dim")}


_FIELDS: dict[str, Callable[[Config], Config]] = {
    "apertus": lambda s: _missing(s, mlp_bias=False, post_norm=False, qk_norm=True),
    "bailing_moe_v3": _bailing_moe_v3,
    "cohere2": _period,
    "deepseek_v2": _deepseek_v2,
    "exaone4": _letters,
    "exaone_moe": lambda s: _missing(s, is_moe_layer=_sparse_layers(s)),
    "gemma3_text": _period,
    "gemma4_text": _gemma4,
    "glm_moe_dsa": lambda s: _missing(
        s, topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1
    ),
    "gpt2": lambda s: _missing(s, n_ctx=s.get("n_positions")),
    "granitemoehybrid": _granite_hybrid,
    "hunyuan_v1_dense": _plain_rope,
    "internlm3": _plain_rope,
    "kimi_linear": lambda s: _missing(s, rope_theta=1e4),
    "lfm2": _lfm2,
    "longcat_flash": lambda s: _missing(
        s,
        attention_method="MLA",
        zero_expert_type="identity",
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
    ),
    "mamba2": lambda s: _missing(s, intermediate_size=s.get("expand", 2) * s["hidden_size"]),
    "mimo_v2_flash": _mimo_v2_flash,
    "minicpm3": _minicpm3,
    "minimax": _minimax,
    "nemotron": _plain_rope,
    "qwen2_moe": _plain_rope,
    "solar_open": lambda s: _missing(s, first_k_dense_replace=0),
}


def config_of(model: object) -> dict[str, Any]:
    """Returns the fields of a model's ``config.json`` that the model object still has."""
    model_type = str(getattr(model, "model_type", type(model).__name__))
    for base in type(model).__mro__:
        package, _, module = base.__module__.rpartition(".")
        if package == "mlx_lm.models":  # one module may run several model types
            model_type = module
            break
    args = getattr(model, "args", None)
    # `asdict` recurses: a multimodal model's text model has its own args.
    fields = asdict(args) if is_dataclass(args) and not isinstance(args, type) else {}
    return {**fields, "model_type": model_type}
