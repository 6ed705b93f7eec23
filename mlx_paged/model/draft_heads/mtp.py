"""MTP heads: the layer for multi-token prediction that checkpoints of some families have.

A head normalizes the embedding of the next token and the model's last hidden state, projects both
to one, and runs one decoder layer of the model. Embeddings and output projection are the model's.
mlx-lm drops its weights, so they are read from the checkpoint's files again, and go through the
`sanitize` of a model with this one layer.

Paper: "DeepSeek-V3 Technical Report", section 2.2 (arXiv 2412.19437).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from safetensors import safe_open

from mlx_paged.errors import ModelLoadError
from mlx_paged.model.deviations import conform
from mlx_paged.model.families import module_of
from mlx_paged.model.loader import convert, model_classes
from mlx_paged.model.taps import FINAL

Weights = dict[str, mx.array]


@dataclass(frozen=True)
class MtpFormat:
    """How a family stores its head.

    Attributes:
        prefix: Before all names of its weights; "{}" stands for the number of layers.
        embed_norm, hidden_norm, projection, norm: Names of its own weights.
        layer: Prefix of its decoder layer's weights, after `prefix`.
        hidden_first: The projection takes the hidden state first, then the embedding.
        returns_normed: Its own state for the next draft is taken after the last norm.
    """

    prefix: str
    embed_norm: str
    hidden_norm: str
    projection: str
    norm: str
    layer: str = ""
    hidden_first: bool = False
    returns_normed: bool = False


_DEEPSEEK = MtpFormat("model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
_QWEN = MtpFormat(
    "mtp.",
    "pre_fc_norm_embedding",
    "pre_fc_norm_hidden",
    "fc",
    "norm",
    layer="layers.0.",
    returns_normed=True,
)
_MIMO = MtpFormat(
    "model.mtp_layers.0.",
    "token_layernorm",
    "hidden_layernorm",
    "input_proj",
    "final_layernorm",
    hidden_first=True,
    returns_normed=True,
)
#: By mlx-lm's module.
FORMATS: dict[str, MtpFormat] = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "mimo": _MIMO,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_next": _QWEN,
}
# Makes the one layer of a model what a head's layer is: with full attention, and experts if any.
_ONE_LAYER = {
    "num_hidden_layers": 1,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 0,
    "full_attention_interval": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "layer_types": ["full_attention"],
}
# Names under which `sanitize` sees the head's own weights. Qwen's adds 1 to those that end as the
# norms of a layer do.
_OWN = {
    "embed_norm": "embed_norm.input_layernorm.weight",
    "hidden_norm": "hidden_norm.input_layernorm.weight",
    "projection": "projection.weight",
    "norm": "own.model.norm.weight",
}


class MtpHead(nn.Module):  # type: ignore[misc]
    """The head as a model: tokens and features -> logits. See `attach`.

    Args:
        layer: A decoder layer of the model's family.
        eps: Of its norms.
        model_type: The model's.
    """

    def __init__(
        self,
        mtp_format: MtpFormat,
        layer: nn.Module,
        *,
        hidden_size: int,
        eps: float,
        model_type: str,
    ) -> None:
        super().__init__()
        self.model_type = f"{model_type} MTP"
        self.embed_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.projection = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(hidden_size, eps=eps)
        self._format = mtp_format

    def attach(self, embed: nn.Module, project: nn.Module, method: str = "__call__") -> None:
        """Shares the model's modules.

        Args:
            embed: Its input embeddings.
            project: The module that makes its logits.
            method: That module's method which does.
        """
        self.embed, self.project, self._method = embed, project, method

    @property
    def returned_place(self) -> int:
        """The place of its own states for the next draft, see `Taps`."""
        return FINAL if self._format.returns_normed else len(self.layers)

    def __call__(
        self, inputs: mx.array, cache: Any = None, features: mx.array | None = None
    ) -> mx.array:
        """``[B, L]`` tokens -> ``[B, L, vocab_size]`` logits.

        Args:
            features: ``[B * L, hidden_size]``: the model's last hidden states, or this head's. None
                stands for zeros.
        """
        embeds = self.embed(inputs)
        hidden = mx.zeros_like(embeds) if features is None else features.reshape(embeds.shape)
        both = [self.embed_norm(embeds), self.hidden_norm(hidden.astype(embeds.dtype))]
        x = mx.concatenate(both[::-1] if self._format.hidden_first else both, axis=-1)
        cache = cache or [None]
        x = self.projection(x)
        x = self.layers[0](x, create_attention_mask(x, cache[0], return_array=True), cache[0])
        logits: mx.array = getattr(self.project, self._method)(self.norm(x))
        return logits


def has_mtp(path: Path, config: Mapping[str, Any]) -> bool:
    """True if a checkpoint's files have weights of a head of a known kind.

    Args:
        path, config: See `load_mtp`.
    """
    module = module_of(config)
    if module not in FORMATS:
        return False
    text = config.get("text_config", config)
    prefix = FORMATS[module].prefix.format(text["num_hidden_layers"])
    for file in _files(path, lambda name: _rest(name, prefix) is not None):
        with safe_open(str(file), framework="numpy") as weights:
            names = weights.keys()  # The file itself is no iterable.
            if any(_rest(name, prefix) is not None for name in names):
                return True
    return False


def load_mtp(path: Path, config: Mapping[str, Any], dtype: str) -> tuple[MtpHead, nn.Module | None]:
    """Loads the head of a checkpoint.

    Args:
        path: The checkpoint's directory, or one with only the head's weights.
        config: The model's config, as `LoadedModel` has it.
        dtype: See `load`.

    Returns:
        The head, to be attached to the model, and its own output projection if it has one.

    Raises:
        ModelLoadError: It gives the reason.
    """
    module = module_of(config)
    if module not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise ModelLoadError(str(path), f"no MTP heads are known of {module!r}, only of {known}")
    try:
        return _load(path, config, FORMATS[module], dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(str(path), f"its MTP head cannot be read: {error}") from error


def _load(
    path: Path, config: Mapping[str, Any], mtp_format: MtpFormat, dtype: str
) -> tuple[MtpHead, nn.Module | None]:
    text = config.get("text_config", config)
    prefix = mtp_format.prefix.format(text["num_hidden_layers"])
    weights, is_converted = _read(path, prefix)
    if not weights:
        raise ValueError(
            f"it has no weights {prefix}*, which conversions to MLX drop; name a directory that "
            "has them as speculative_config.model"
        )
    shell, own_config = _shell(config)
    named = {_name(mtp_format, name): weight for name, weight in weights.items()}
    if not is_converted:
        # Qwen's `sanitize` tells by a convolution that it reads a published checkpoint.
        named["model.layers.0.linear_attn.conv1d.weight"] = mx.zeros((1, 1, 2))
        named = shell.sanitize(named)
    head = MtpHead(
        mtp_format,
        shell.layers[0],
        hidden_size=text["hidden_size"],
        eps=text["rms_norm_eps"],
        model_type=module_of(config),
    )
    found: Weights = {}
    output: mx.array | None = None
    for name, weight in named.items():
        name = name.removeprefix("language_model.")
        if name.endswith("shared_head.head.weight"):
            output = weight
        elif name.startswith("model.layers.0.") and "conv1d" not in name:
            found["layers.0." + name.removeprefix("model.layers.0.")] = weight
        else:
            for ours, theirs in _OWN.items():
                if name == theirs:
                    found[f"{ours}.weight"] = weight
    _quantize(head, found, own_config)
    head.load_weights(list(found.items()))
    conform(shell, own_config, own_config)
    head.eval()
    convert(head, dtype, keeps_weights=True)
    own = None
    if output is not None:
        own = nn.Linear(output.shape[1], output.shape[0], bias=False)
        own.weight = output
        convert(own, dtype, keeps_weights=True)
    return head, own


def _shell(config: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A model with one layer, whose weights are not made, and its config."""
    own = deepcopy(dict(config))
    for section in (own, own.get("text_config", {})):
        if "num_hidden_layers" in section:
            section.update(_ONE_LAYER)
    model_class, args_class = model_classes(own)
    return model_class(args_class.from_dict(own)), own


def _name(mtp_format: MtpFormat, name: str) -> str:
    """The name under which `sanitize` sees a weight of the head."""
    module, _, kind = name.rpartition(".")
    for ours, seen in _OWN.items():
        if module == getattr(mtp_format, ours):
            return seen if kind == "weight" else seen.removesuffix("weight") + kind
    if name.startswith(("embed_tokens.", "shared_head.")):
        return name
    return "model.layers.0." + name.removeprefix(mtp_format.layer)


def _quantize(head: MtpHead, weights: Weights, config: Mapping[str, Any]) -> None:
    """Quantizes the modules whose weights are quantized."""
    options = config.get("quantization")
    if not options or not any(name.endswith(".scales") for name in weights):
        return

    def is_quantized(path: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and f"{path}.scales" in weights

    nn.quantize(
        head,
        group_size=options["group_size"],
        bits=options["bits"],
        mode=options.get("mode", "affine"),
        class_predicate=is_quantized,
    )


def _read(path: Path, prefix: str) -> tuple[Weights, bool]:
    """Returns a checkpoint's weights with a prefix, by the rest of their names, and whether its
    files were written by MLX."""
    found: Weights = {}
    is_converted = False
    for file in _files(path, lambda name: _rest(name, prefix) is not None):
        loaded: Any = mx.load(str(file), return_metadata=True)
        weights, metadata = loaded
        is_converted |= metadata.get("format") == "mlx"
        for name, weight in weights.items():
            rest = _rest(name, prefix)
            if rest is not None:
                found[rest] = weight
    return found, is_converted


def _rest(name: str, prefix: str) -> str | None:
    """What follows the prefix, which may itself follow the name of a model's text part."""
    for wrapper in ("", "language_model.", "model.language_model.", "model."):
        if name.startswith(wrapper + prefix):
            return name[len(wrapper) + len(prefix) :]
    return None


def _files(path: Path, is_wanted: Callable[[str], bool]) -> list[Path]:
    """The files that hold any of the wanted weights."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(path.glob("*.safetensors"))
    places = json.loads(index.read_text())["weight_map"]
    return [path / file for file in sorted({f for name, f in places.items() if is_wanted(name)})]
