"""MTP heads: the multi-token prediction layers in checkpoints of some families.

A head normalizes the embedding of the next token and the model's last hidden state, projects both
to one state, and runs one or a few decoder layers of the model. Embeddings and output projection
are the model's. mlx-lm drops the head's weights, so they are read from the checkpoint's files
again, and go through the `sanitize` of a model that has only the head's layers.

Paper: "DeepSeek-V3 Technical Report", section 2.2 (arXiv 2412.19437).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, KVCache
from safetensors import safe_open

from mlx_paged.errors import ModelLoadError
from mlx_paged.model.deviations import conform
from mlx_paged.model.draft_heads.mtp_formats import FORMATS, REFUSED, MtpFormat
from mlx_paged.model.families import module_of
from mlx_paged.model.loader import convert, model_classes
from mlx_paged.model.taps import FINAL

Weights = dict[str, mx.array]

# Names of the head's own weights in `sanitize`. Qwen's adds 1 to weights whose names end like the
# norms of a layer.
_OWN = {
    "embed_norm": "embed_norm.input_layernorm.weight",
    "hidden_norm": "hidden_norm.input_layernorm.weight",
    "projection": "projection.weight",
    "norm": "own.model.norm.weight",
    "output": "shared_head.head.weight",
}


class MtpHead(nn.Module):  # type: ignore[misc]
    """The head as a model: tokens and features -> logits. See `attach`.

    Args:
        layers: Decoder layers of the model's family.
        make_cache: Makes mlx-lm's caches of the layers with attention.
        eps: Epsilon of its norms.
        model_type: Model type of the model.
    """

    def __init__(
        self,
        mtp_format: MtpFormat,
        layers: Sequence[nn.Module],
        make_cache: Callable[[], list[Any]],
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
        self.layers = list(layers)
        if mtp_format.norm is not None:
            self.norm = nn.RMSNorm(hidden_size, eps=eps)
        self._format = mtp_format
        self._make_cache = make_cache
        self._windows = [getattr(cache, "max_size", None) for cache in make_cache()]

    def attach(
        self, embed: nn.Module, project: nn.Module, method: str, norm: Callable[[], nn.Module]
    ) -> None:
        """Shares the model's modules.

        Args:
            embed: Its input embeddings.
            project: The module that computes its logits.
            method: The method to call on `project`.
            norm: Returns the model's last norm; only called for a head without its own.
        """
        self.embed, self.project, self._method = embed, project, method
        if self._format.norm is None:
            self.norm = norm()

    def tapped_layer(self, num_layers: int) -> int:
        """Returns the layer id that it taps in a model of `num_layers` layers; see `Taps`."""
        return FINAL if self._format.reads_normed else num_layers

    @property
    def feedback_layer(self) -> int:
        """The layer id of its own states that the next draft reads; see `Taps`."""
        return FINAL if self._format.returns_normed else len(self.layers)

    def make_cache(self) -> list[Any]:
        """mlx-lm's caches of its layers."""
        return self._make_cache()

    def __call__(
        self, inputs: mx.array, cache: Any = None, features: mx.array | None = None
    ) -> mx.array:
        """``[B, L]`` tokens -> ``[B, L, vocab_size]`` logits.

        Args:
            features: ``[B * L, hidden_size]``: the model's last hidden states, or this head's. None
                means zeros.
        """
        embeds = self.embed(inputs)
        hidden = mx.zeros_like(embeds) if features is None else features.reshape(embeds.shape)
        both = [self.embed_norm(embeds), self.hidden_norm(hidden.astype(embeds.dtype))]
        x = mx.concatenate(both[::-1] if self._format.hidden_first else both, axis=-1)
        x = self.projection(x)
        caches = iter(zip(cache or [None] * len(self._windows), self._windows))
        for layer in self.layers:
            own = mask = None
            if _attends(layer):
                own, window = next(caches)
                # A layer with an indexer has two caches. The second holds the indexer's keys.
                first = own[0] if isinstance(own, CacheList) else own
                mask = create_attention_mask(x, first, window_size=window, return_array=True)
            x = layer(x, mask=mask, cache=own)
        logits: mx.array = getattr(self.project, self._method)(self.norm(x))
        return logits


def _attends(layer: nn.Module) -> bool:
    """False for Nemotron's layers with only experts or an MLP."""
    return getattr(layer, "block_type", "*") == "*"


def has_mtp(path: Path, config: Mapping[str, Any]) -> bool:
    """True if a checkpoint's files have weights of a head of a known kind.

    Args:
        path, config: See `load_mtp`.
    """
    module = module_of(config)
    if module not in FORMATS:
        return False
    prefix = _prefix(FORMATS[module], config)
    for file in _files(path, lambda name: _rest(name, prefix) is not None):
        with safe_open(str(file), framework="numpy") as weights:
            names = weights.keys()  # The file itself is not iterable.
            if any(_rest(name, prefix) is not None for name in names):
                return True
    return False


def load_mtp_heads(
    path: Path, config: Mapping[str, Any], dtype: str
) -> list[tuple[MtpHead, nn.Module | None]]:
    """Loads the head of a checkpoint, or all heads if each reads the previous one's states.

    See `load_mtp`.
    """
    heads = [load_mtp(path, config, dtype)]
    while FORMATS[module_of(config)].chains:
        # A further head is the first one of a model with one more layer.
        config = {**config, "num_hidden_layers": config["num_hidden_layers"] + 1}
        if not has_mtp(path, config):
            break
        heads.append(load_mtp(path, config, dtype))
    return heads


def load_mtp(path: Path, config: Mapping[str, Any], dtype: str) -> tuple[MtpHead, nn.Module | None]:
    """Loads the head of a checkpoint.

    Args:
        path: The checkpoint's directory, or one with only the head's weights.
        config: The model's config, as `LoadedModel` has it.
        dtype: See `load`.

    Returns:
        The head, not yet attached to the model, and its own output projection if it has one.

    Raises:
        ModelLoadError: It gives the reason.
    """
    module = module_of(config)
    if module in REFUSED:
        reason = f"the MTP head of {module!r} is not supported: {REFUSED[module]}"
        raise ModelLoadError(str(path), reason)
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
    prefix = _prefix(mtp_format, config)
    weights, is_converted = _read(path, prefix)
    if not weights:
        raise ValueError(
            f"it has no weights {prefix}*, which conversions to MLX drop; name a directory that "
            "has them as speculative_config.model"
        )
    shell, own_config = _shell(config, mtp_format)
    layers, make_cache = shell.layers, getattr(shell, "make_cache", None)
    if mtp_format.layer_of is not None:
        layers, make_cache = [mtp_format.layer_of(layer) for layer in layers], None
    mtp_format = _numbered(mtp_format, len(layers))
    named = {_name(mtp_format, name): weight for name, weight in weights.items()}
    if not is_converted:
        if mtp_format.published_by is not None:
            named[mtp_format.published_by] = mx.zeros((1, 1, 2))
        named = shell.sanitize(named)
    head = MtpHead(
        mtp_format,
        layers,
        make_cache or (lambda: [KVCache() for _ in layers]),
        hidden_size=text["hidden_size"],
        eps=next(text[name] for name in _EPSILONS if name in text),
        model_type=module_of(config),
    )
    found, output = _sorted_out(named, mtp_format)
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


def _prefix(mtp_format: MtpFormat, config: Mapping[str, Any]) -> str:
    """Returns the prefix of a head's weights, with the number of the model's layers."""
    text = config.get("text_config", config)
    return mtp_format.prefix.format(text.get("num_hidden_layers", text.get("num_layers")))


_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layernorm_epsilon")


def _sorted_out(named: Weights, mtp_format: MtpFormat) -> tuple[Weights, mx.array | None]:
    """Returns the weights by the names of `MtpHead`, and the output projection's if there is one.

    Args:
        named: Weights, by the names that `sanitize` gave them.
    """
    found: Weights = {}
    own_names = {theirs: ours for ours, theirs in _OWN.items()}
    layers = mtp_format.model_layer
    prefix = "layers.0." if layers.endswith(".0.") else "layers."
    for name, weight in named.items():
        name = name.removeprefix("language_model.")
        if name.startswith(layers):
            found[prefix + name.removeprefix(layers)] = weight
        elif name in own_names:
            found[f"{own_names[name]}.weight"] = weight
    output = found.pop("output.weight", None)
    return found, output


def _shell(config: Mapping[str, Any], mtp_format: MtpFormat) -> tuple[Any, dict[str, Any]]:
    """Returns a model with only the head's layers, without weights, and its config."""
    own = deepcopy(dict(config))
    for section in (own, own.get("text_config", {})):
        if "hidden_size" in section:
            section.update(mtp_format.fields(section))
    model_class, args_class = model_classes(own)
    return model_class(args_class.from_dict(own)), own


def _numbered(mtp_format: MtpFormat, num_layers: int) -> MtpFormat:
    """Returns the format with the number of the head's last layer."""
    if mtp_format.norm is None:
        return mtp_format
    return replace(mtp_format, norm=mtp_format.norm.format(num_layers - 1))


def _name(mtp_format: MtpFormat, name: str) -> str:
    """Returns the name of a weight of the head in `sanitize`."""
    module, _, kind = name.rpartition(".")
    for ours, seen in _OWN.items():
        if module == getattr(mtp_format, ours):
            return seen if kind == "weight" else seen.removesuffix("weight") + kind
    if name.startswith("embed_tokens."):
        return name  # The model's, once more.
    name = name.removeprefix(mtp_format.layer)
    for theirs, own in mtp_format.layer_names:
        name = name.replace(theirs, own)
    return mtp_format.model_layer + name


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
    """Returns a checkpoint's weights with a prefix, by the rest of their names, and True if MLX
    wrote its files."""
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
    """Returns the name after the prefix, which may follow the name of a model's text part."""
    for wrapper in ("", "language_model.", "model.language_model.", "model."):
        if name.startswith(wrapper + prefix):
            return name[len(wrapper) + len(prefix) :]
    return None


def _files(path: Path, is_wanted: Callable[[str], bool]) -> list[Path]:
    """Returns the files that hold any of the wanted weights."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(path.glob("*.safetensors"))
    weight_map = json.loads(index.read_text())["weight_map"]
    return [
        path / file for file in sorted({f for name, f in weight_map.items() if is_wanted(name)})
    ]
