"""Deviations of mlx-lm's models from transformers' code, and their corrections during loading.

The table names each deviation with the affected mlx-lm. `tests/model/test_deviations.py` loads each
model without its correction and fails if it no longer deviates, so that a newer mlx-lm is compared
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.config_normalization import reference_of
from mlx_paged.model.overrides import overridden
from mlx_paged.model.rope_frequencies import conform_rope, wavelengths_of
from mlx_paged.model.windows import install_windows

#: Versions that the table applies to.
MLX_LM, TRANSFORMERS = "0.32.2", "5.24.0"


@dataclass(frozen=True)
class Deviation:
    """One deviation, and its correction.

    Attributes:
        modules: Modules of mlx-lm.
        what: Behavior of mlx-lm.
        shown_by: A model of `tests/support/reference_configs.py` that deviates.
        mend: Changes a text model, given its config as `mlx_lm_config` wrote it and transformers'
            reading of it (None if there is none). It returns True if a change was needed.
    """

    modules: tuple[str, ...]
    what: str
    shown_by: str
    mend: Callable[[Any, Mapping[str, Any], Any], bool]


# Modules that rotate whole heads, or the same part in all layers, regardless of the config, with
# the part that transformers rotates by default.
_PARTIAL = {"glm": 1.0, "mimo_v2_flash": 0.334}


def _rope(model: Any, config: Mapping[str, Any], reference: Any) -> bool:
    if reference is None:
        return False
    return bool(conform_rope(model, config, part=_PARTIAL.get(_module(model))))


# Models whose layers all have the window of their config.
_ALL_WINDOWED = frozenset(
    {"ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2"}
)


def _windows(model: Any, config: Mapping[str, Any], reference: Any) -> bool:
    window = getattr(reference, "sliding_window", None)
    if not window:
        return False
    kinds = getattr(reference, "layer_types", None)
    if kinds:
        windows = [window if kind == "sliding_attention" else None for kind in kinds]
    else:
        windows = [window if config["model_type"] in _ALL_WINDOWED else None for _ in model.layers]
    if not any(windows):
        return False
    install_windows(model, windows)
    return True


def _override(module: nn.Module, method: str, function: Callable[..., Any]) -> None:
    module.__class__ = overridden(type(module), method, function)


_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "gelu_fast": nn.gelu_approx,
    "relu": nn.relu,
    "relu2": nn.relu2,
    "silu": nn.silu,
}
# Modules whose MLPs use another GELU than the config says: the MLP's first layers (a gate and its
# counterpart), its last layer, and the GELU that it uses.
_MLPS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "gemma": (("gate_proj", "up_proj"), "down_proj", "gelu"),
    "gpt_bigcode": (("c_fc",), "c_proj", "gelu"),
    "gpt_neox": (("dense_h_to_4h",), "dense_4h_to_h", "gelu_pytorch_tanh"),
    "starcoder2": (("c_fc",), "c_proj", "gelu"),
}


def _activation(model: Any, config: Mapping[str, Any], reference: Any) -> bool:
    first, last, theirs = _MLPS[_module(model)]
    name = next(
        (
            getattr(reference, field)
            for field in ("hidden_activation", "hidden_act", "activation_function")
            if getattr(reference, field, None)
        ),
        theirs,
    )
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            str(config.get("model_type")),
            f"hidden_act must be one of {', '.join(_ACTIVATIONS)} but config.json says {name!r}",
        )
    activate = _ACTIVATIONS[name]
    if activate is _ACTIVATIONS[theirs]:
        return False

    def call(self: Any, x: mx.array) -> mx.array:
        hidden = activate(self[first[0]](x))
        for gated in first[1:]:
            hidden = hidden * self[gated](x)
        return self[last](hidden)

    for layer in model.layers:
        _override(layer.mlp, "__call__", call)
    return True


_ACTIVATION_FIELDS = ("hidden_activation", "hidden_act", "activation_function", "mlp_hidden_act")
_SYNONYMS = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}


def _require_activation(model: Any, config: Mapping[str, Any], reference: Any) -> None:
    """Refuses an activation that the module does not read, where the family has another.

    Raises:
        UnsupportedModelError: The message names the field.
    """
    arguments = getattr(getattr(model, "args", None), "__dict__", {})
    for field in _ACTIVATION_FIELDS:
        given, usual = getattr(reference, field, None), getattr(type(reference), field, None)
        if field in arguments or not isinstance(given, str) or not isinstance(usual, str):
            continue
        if _SYNONYMS.get(given, given) != _SYNONYMS.get(usual, usual):
            raise UnsupportedModelError(
                str(config.get("model_type")),
                f"mlx-lm's code of it has the activation {usual!r}, but config.json says "
                f"{field}: {given!r}",
            )


def _expert_groups(model: Any, config: Mapping[str, Any], reference: Any) -> bool:
    """Excludes experts of other groups, even if a bias makes all scores of a group negative."""

    def choose(self: Any, x: mx.array) -> tuple[mx.array, mx.array]:
        scores = mx.sigmoid((x @ self.weight.T).astype(mx.float32))
        biased = mx.unflatten(scores + self.e_score_correction_bias, -1, (self.n_group, -1))
        of_groups = mx.topk(biased, 2, axis=-1).sum(axis=-1, keepdims=True)
        num_out = self.n_group - self.topk_group
        out = mx.argpartition(of_groups, kth=num_out - 1, axis=-2)[..., :num_out, :]
        biased = mx.put_along_axis(biased, out, mx.array(-mx.inf), axis=-2).flatten(-2)
        chosen = mx.argpartition(-biased, kth=self.top_k - 1, axis=-1)[..., : self.top_k]
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        if self.top_k > 1 and self.norm_topk_prob:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return chosen, weights * self.routed_scaling_factor

    changed = False
    for _, module in model.named_modules():
        if type(module).__qualname__ == "MoEGate" and module.n_group > module.topk_group:
            _override(module, "__call__", choose)
            changed = True
    return changed


def _tied_head(model: Any, config: Mapping[str, Any], reference: Any) -> bool:
    """MiniCPM 3 divides the input of its head, even if the head is the embedding."""
    if not model.args.tie_word_embeddings:
        return False
    scale = model.args.dim_model_base / model.args.hidden_size

    def call(self: Any, inputs: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return self.model.embed_tokens.as_linear(self.model(inputs, mask, cache) * scale)

    _override(model, "__call__", call)
    return True


def _choice_bias(model: Any, config: Mapping[str, Any], reference: Any) -> bool:
    """ERNIE 4.5's bias for choosing experts, which `mlx_lm_weights` keeps."""

    def call(self: Any, x: mx.array) -> mx.array:
        gates = self.gate_act(self.gate(x).astype(mx.float32))
        biased = gates + self.choice_bias
        chosen = mx.argpartition(-biased, kth=self.k - 1, axis=-1)[..., : self.k]
        scores = mx.take_along_axis(gates, chosen, axis=-1)
        scores = scores / mx.maximum(scores.sum(axis=-1, keepdims=True), 1e-12)
        found = (self.switch_mlp(x, chosen) * scores[..., None]).sum(axis=-2).astype(x.dtype)
        return found if self.shared_experts is None else found + self.shared_experts(x)

    changed = False
    for layer in model.layers:
        if "choice_bias" in layer.mlp:
            _override(layer.mlp, "__call__", call)
            changed = True
    return changed


def _router_weights(model: Any, config: Mapping[str, Any], reference: Any) -> bool:
    """Jamba weights its chosen experts by their share of all, so that the sum is below 1."""

    def call(self: Any, x: mx.array) -> mx.array:
        shares = mx.softmax(self.router(x), axis=-1, precise=True)
        num = self.num_experts_per_tok
        chosen = mx.argpartition(-shares, kth=num - 1, axis=-1)[..., :num]
        weights = mx.take_along_axis(shares, chosen, axis=-1)
        return (self.switch_mlp(x, chosen) * weights[..., None]).sum(axis=-2)

    changed = False
    for _, module in model.named_modules():
        if type(module).__qualname__ == "JambaSparseMoeBlock":
            _override(module, "__call__", call)
            changed = True
    return changed


def _grouped_norm(model: Any, config: Mapping[str, Any], reference: Any) -> bool:
    """Mamba 2's gated norm over each group of heads."""
    groups = int(config.get("n_groups") or 1)
    if groups == 1:
        return False

    def call(self: Any, hidden: mx.array, gate: mx.array | None = None) -> mx.array:
        if gate is not None:
            hidden = nn.silu(gate) * hidden
        hidden = mx.unflatten(hidden, -1, (groups, -1))
        return self.weight * mx.fast.rms_norm(hidden, None, self.eps).flatten(-2)

    for layer in model.layers:
        _override(layer.mixer.norm, "__call__", call)
    return True


def _falcon_norm(model: Any, config: Mapping[str, Any], reference: Any) -> bool:
    """Falcon H1's gated norm over each group of heads."""
    groups = model.args.mamba_n_groups
    if groups == 1 or not model.args.mamba_rms_norm:
        return False

    def call(self: Any, hidden: mx.array, gate: mx.array | None = None) -> mx.array:
        if gate is not None and not self.norm_before_gate:
            hidden = nn.silu(gate) * hidden
        hidden = mx.unflatten(hidden, -1, (groups, -1))
        hidden = self.weight * mx.fast.rms_norm(hidden, None, self.variance_epsilon).flatten(-2)
        return nn.silu(gate) * hidden if gate is not None and self.norm_before_gate else hidden

    for layer in model.layers:
        _override(layer.mamba.norm, "__call__", call)
    return True


def _min_time_step(model: Any, config: Mapping[str, Any], reference: Any) -> bool:
    """Nemotron H's time steps are at least `time_step_min`."""
    minimum = config.get("time_step_min")
    if minimum is None:
        return False
    for layer in model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = (float(minimum), float("inf"))
    return True


def _norm_epsilon(model: Any, config: Mapping[str, Any], reference: Any) -> bool:
    """nanochat's norms and RoPE are functions of its module, with their own constants."""
    rope = config.get("rope_parameters") or {"rope_theta": model.args.rope_theta}
    wavelengths, scale = wavelengths_of(rope, 2 * model.layers[0].attn._rope_freqs.size, config)
    if scale != 1.0:
        raise UnsupportedModelError(
            str(config.get("model_type")),
            f"its rope_parameters must not scale attention, but config.json says {rope!r}",
        )
    for layer in model.layers:
        layer.attn._rope_freqs = mx.array(-wavelengths, mx.float32)
    epsilon = float(config.get("rms_norm_eps") or 1e-6)
    cap = float(config.get("final_logit_softcapping") or 15.0)

    def rms_norm(x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, None, epsilon)

    def softcap(logits: mx.array) -> mx.array:
        return cap * mx.tanh(logits / cap)

    for module in (
        model,
        model.transformer,
        *model.layers,
        *(layer.attn for layer in model.layers),
    ):
        forward: Any = type(module).__call__
        names = {**forward.__globals__, "rms_norm": rms_norm, "softcap": softcap}
        function = FunctionType(forward.__code__, names, "__call__", forward.__defaults__)
        _override(module, "__call__", function)
    return True


def _indexer_norm(model: Any, config: Mapping[str, Any], reference: Any) -> bool:
    for layer in model.layers:
        layer.self_attn.indexer.k_norm.eps = 1e-6
    return True


def _elsewhere(model: Any, config: Mapping[str, Any], reference: Any) -> bool:
    """Already corrected by `mlx_lm_config` or `mlx_lm_weights`."""
    return False


DEVIATIONS: tuple[Deviation, ...] = (
    Deviation(
        ("every module",),
        "ignores RoPE scaling, or some of its fields (attention_factor, truncate, mscale without "
        "mscale_all_dim, partial heads in glm)",
        "gpt_oss",
        _rope,
    ),
    Deviation(
        (
            "dots1",
            "gemma2",
            "llama",
            "mixtral",
            "phi3",
            "phimoe",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "smollm3",
            "starcoder2",
        ),
        "ignores sliding_window: all layers see all tokens",
        "gemma2",
        _windows,
    ),
    Deviation(
        ("gemma", "gpt_bigcode", "gpt_neox", "starcoder2"),
        "uses the exact GELU where the config asks for its approximation, or the reverse",
        "gemma",
        _activation,
    ),
    Deviation(
        (
            "deepseek_v3",
            "deepseek_v32",
            "exaone_moe",
            "glm4_moe",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "mimo_v2_flash",
            "nemotron_h",
        ),
        "scores experts of groups that are not selected as 0, which beats a negative bias",
        "deepseek_v3",
        _expert_groups,
    ),
    Deviation(
        ("minicpm3",),
        "does not divide the hidden states for a tied head",
        "minicpm3",
        _tied_head,
    ),
    Deviation(
        ("ernie4_5_moe",),
        "drops the bias for the choice of experts",
        "ernie4_5_moe",
        _choice_bias,
    ),
    Deviation(
        ("jamba",),
        "normalizes the weights of the chosen experts",
        "jamba",
        _router_weights,
    ),
    Deviation(
        ("mamba2",), "applies the gated norm over all groups at once", "mamba2", _grouped_norm
    ),
    Deviation(
        ("falcon_h1",),
        "applies the gated norm over all groups at once",
        "falcon_h1-norm",
        _falcon_norm,
    ),
    Deviation(
        ("falcon_h1",),
        "does not fold key_multiplier and the values' attention_in_multiplier into weights",
        "falcon_h1",
        _elsewhere,
    ),
    Deviation(("mimo_v2_flash",), "counts windows without the query", "mimo_v2_flash", _elsewhere),
    Deviation(
        ("nemotron_h",), "allows time steps below time_step_min", "nemotron_h", _min_time_step
    ),
    Deviation(
        ("nanochat",),
        "fixes the norms' epsilon at 1e-5 and the logits' soft cap at 15",
        "nanochat",
        _norm_epsilon,
    ),
    Deviation(
        ("deepseek_v32", "glm_moe_dsa"),
        "uses an epsilon of 1e-5 instead of 1e-6 in the norm of the indexer's keys",
        "deepseek_v32",
        _indexer_norm,
    ),
)


def conform(model: nn.Module, config: Mapping[str, Any], file: Mapping[str, Any]) -> None:
    """Makes a loaded model of mlx-lm compute the same as transformers' code.

    Args:
        config: The config written by `mlx_lm_config`.
        file: The original ``config.json``.

    Raises:
        UnsupportedModelError: The config needs something that the model cannot compute.
    """
    inner, section, reference = _read(model, config, file)
    module = _module(inner)
    if reference is not None and module not in _MLPS:
        _require_activation(inner, section, reference)
    for deviation in DEVIATIONS:
        if module in deviation.modules or deviation.modules == ("every module",):
            changed = deviation.mend(inner, section, reference)
            if changed and deviation.mend is _windows and inner is not model:
                # Wrappers make the caches of their text model.
                _override(model, "make_cache", lambda self: _text_model(self).make_cache())


def conform_positions(model: nn.Module, config: Mapping[str, Any], file: Mapping[str, Any]) -> None:
    """The same for RoPE alone: the model's modules rotate as its config says, in place.

    Args:
        config: The config written by `normalize`.
    """
    _rope(*_read(model, config, file))


def _read(
    model: nn.Module, config: Mapping[str, Any], file: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any], Any]:
    """Returns the text model, its part of the config, and transformers' reading of that part."""
    inner, section, reference = _text_model(model), config, reference_of(file)
    text = config.get("text_config")
    if inner is not model and isinstance(text, Mapping):
        section = text
        found = getattr(reference, "text_config", None)
        given = file.get("text_config")
        if found is None and isinstance(given, Mapping):
            found = reference_of(given)
        reference = reference if given is None else found
    return inner, section, reference


def _text_model(model: Any) -> Any:
    """Returns the model itself, or the text model that a wrapper holds."""
    for holder in (model, getattr(model, "model", None)):
        inner = getattr(holder, "language_model", None)
        if inner is not None:
            return inner
    return model


def _module(model: Any) -> str:
    return type(model).__module__.rpartition(".")[2]
