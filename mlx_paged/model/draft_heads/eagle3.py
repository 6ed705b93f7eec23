"""EAGLE-3 heads, in the file formats of SafeAILab, NVIDIA, vLLM and its speculators.

Paper: "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(arXiv 2503.01840). `fc` projects the inputs of three layers of the model to one feature. The first
layer attends over the embedding of the next token and this feature, concatenated; later ones, if
any, are ordinary. Logits cover a smaller vocabulary: `d2t` has the offset from each of its tokens
to the model's.

A head's layers are Llama's or Qwen3's, for any model. Newer heads normalize the joined states, and
feed back their own states after the last norm instead of before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen3
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_paged.errors import ModelLoadError
from mlx_paged.model.draft_heads.base import read_config, read_weights
from mlx_paged.model.taps import FINAL

# The only supported values of these options in NVIDIA's heads.
_USUAL_OPTIONS = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


@dataclass(frozen=True)
class Eagle3Config:
    """The config of a head.

    Attributes:
        layer: Options of its layers, by Llama's names.
        target_hidden_size: Size of each of the joined hidden states.
        num_features: Number of joined hidden states.
        draft_vocab_size: Size of its vocabulary.
        norm_before_residual: Adds the normalized feature to the attention's output, not the
            feature.
        norm_before_fc: Normalizes the joined states.
        fc_norm: Normalizes each of the joined states separately.
        norm_output: Feeds back its states after the last norm, not before it.
        norms_queries: Normalizes queries and keys, like Qwen3.
        layer_ids: Layers of the model whose inputs it reads; None: the defaults.
    """

    layer: llama.ModelArgs
    target_hidden_size: int
    draft_vocab_size: int
    num_features: int = 3
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norms_queries: bool = False
    layer_ids: tuple[int, ...] | None = None

    @classmethod
    def read(cls, path: Path) -> Eagle3Config:
        """Reads a head's directory; see `read_config`."""
        return read_config(path, "an EAGLE-3 head", cls.of)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Eagle3Config:
        """Reads a ``config.json``.

        Raises:
            KeyError, TypeError, ValueError: It is incomplete, or of another kind of head.
        """
        nested = config.get("transformer_layer_config")
        own = {**config, **nested} if isinstance(nested, Mapping) else dict(config)
        is_speculators = isinstance(nested, Mapping)
        kind = own.get("model_type") if is_speculators else "llama"  # otherwise it names the model
        more = own.get("eagle_config")
        more = more if isinstance(more, Mapping) else {}
        for name, given, allowed in (
            ("speculators_model_type", own.get("speculators_model_type", "eagle3"), ("eagle3",)),
            ("transformer_layer_config.model_type", kind, ("llama", "qwen3")),
            ("hidden_act", own.get("hidden_act", "silu"), ("silu",)),
            *(
                (f"eagle_config.{name}", more.get(name, usual), (usual,))
                for name, usual in _USUAL_OPTIONS.items()
            ),
        ):
            if given not in allowed:
                raise ValueError(
                    f"{name} must be {' or '.join(map(repr, allowed))} but is {given!r}"
                )
        ids = own.get("eagle_aux_hidden_state_layer_ids") or more.get(
            "eagle_aux_hidden_state_layer_ids"
        )
        layer = _layer_options(own)

        def option(name: str, default: bool = False) -> bool:
            return bool(own.get(name, more.get(name, default)))

        return cls(
            layer=layer,
            target_hidden_size=int(own.get("target_hidden_size") or layer.hidden_size),
            draft_vocab_size=int(own.get("draft_vocab_size") or layer.vocab_size),
            num_features=len(ids) if ids else 3,
            norm_before_residual=option("norm_before_residual", is_speculators),
            norm_before_fc=option("norm_before_fc"),
            fc_norm=option("fc_norm"),
            norm_output=option("norm_output"),
            norms_queries=kind == "qwen3",
            layer_ids=tuple(int(i) for i in ids) if ids else None,
        )

    def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns the target's layer ids whose inputs the head reads; see `Taps`."""
        return self.layer_ids or (2, num_layers // 2, num_layers - 3)


def _layer_options(own: Mapping[str, Any]) -> llama.ModelArgs:
    """Returns Llama's options of a head's layers, with those of newer transformers in their old
    places."""
    known = {field.name for field in fields(llama.ModelArgs)}
    options = {key: value for key, value in own.items() if key in known} | {"model_type": "llama"}
    rope = own.get("rope_parameters")
    if isinstance(rope, Mapping):
        options.setdefault("rope_theta", rope.get("rope_theta", llama.ModelArgs.rope_theta))
        if options.get("rope_scaling") is None:
            options["rope_scaling"] = dict(rope)
    if own.get("use_sliding_window") is False or not own.get("sliding_window"):
        options.pop("layer_types", None)  # All layers use full attention.
    layer = llama.ModelArgs(**options)
    types = layer.layer_types = list(layer.layer_types or ())[: layer.num_hidden_layers]
    if set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types must be full or sliding attention but is {types}")
    return layer


def _attention(config: Eagle3Config) -> nn.Module:
    if not config.norms_queries:
        return llama.Attention(config.layer)
    given = asdict(config.layer)
    given["head_dim"] = given["head_dim"] or given["hidden_size"] // given["num_attention_heads"]
    known = {field.name for field in fields(qwen3.ModelArgs)}
    return qwen3.Attention(qwen3.ModelArgs(**{k: v for k, v in given.items() if k in known}))


class _Layer(llama.TransformerBlock):  # type: ignore[misc]
    """A layer after the first."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config.layer)
        self.self_attn = _attention(config)


class _FirstLayer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        args = config.layer
        self._norm_before_residual = config.norm_before_residual
        self.self_attn = _attention(config)
        for name in ("q_proj", "k_proj", "v_proj"):
            width = self.self_attn[name].weight.shape[0]
            bias = args.attention_bias and not config.norms_queries
            wide = nn.Linear(2 * args.hidden_size, width, bias=bias)
            setattr(self.self_attn, name, wide)
        self.mlp = llama.MLP(args)
        self.hidden_norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, embeds: mx.array, hidden: mx.array, mask: Any, cache: Any) -> mx.array:
        normed = self.hidden_norm(hidden)
        both = mx.concatenate([self.input_layernorm(embeds), normed], axis=-1)
        residual = normed if self._norm_before_residual else hidden
        hidden = residual + self.self_attn(both, mask, cache)
        out: mx.array = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(nn.Module):  # type: ignore[misc]
    """The head as a model: tokens and features -> logits of its own vocabulary.

    Attributes:
        embed_tokens: The model's own, unless the checkpoint has one.
    """

    def __init__(self, config: Eagle3Config, embed_tokens: nn.Module) -> None:
        super().__init__()
        args = config.layer
        self.model_type = "eagle3"
        self.config = config
        self.embed_tokens = embed_tokens
        width = config.num_features * config.target_hidden_size
        self.fc = nn.Linear(width, args.hidden_size, bias=False)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(width, eps=args.rms_norm_eps)
        if config.fc_norm:
            sizes = [config.target_hidden_size] * config.num_features
            self.fc_norm = [nn.RMSNorm(size, eps=args.rms_norm_eps) for size in sizes]
        rest = [_Layer(config) for _ in range(args.num_hidden_layers - 1)]
        self.layers = [_FirstLayer(config), *rest]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.lm_head = nn.Linear(args.hidden_size, config.draft_vocab_size, bias=False)
        self._method = "__call__"

    def share_output(self, module: nn.Module, method: str) -> None:
        """Computes its logits with a module of the model.

        Args:
            method: The method to call on that module.
        """
        self.lm_head, self._method = module, method

    @property
    def feedback_layer(self) -> int:
        """The layer id of its own states that the next draft reads; see `Taps`."""
        return FINAL if self.config.norm_output else len(self.layers)

    def make_cache(self) -> list[Any]:
        """mlx-lm's caches of its layers."""
        layer = self.config.layer
        return [
            RotatingKVCache(max_size=layer.sliding_window) if is_sliding else KVCache()
            for is_sliding in self._are_sliding
        ]

    @property
    def _are_sliding(self) -> list[bool]:
        return [kind == "sliding_attention" for kind in self.config.layer.layer_types]

    def _joined(self, states: mx.array) -> mx.array:
        """Projects joined states of the model to a feature."""
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        if self.config.fc_norm:
            parts = mx.split(states, self.config.num_features, axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts)]
            states = mx.concatenate(normed, axis=-1)
        feature: mx.array = self.fc(states)
        return feature

    def __call__(
        self, inputs: mx.array, cache: Any = None, features: mx.array | None = None
    ) -> mx.array:
        """``[B, L]`` tokens -> ``[B, L, draft_vocab_size]`` logits.

        Args:
            features: ``[B * L, num_features, target_hidden_size]``: states of the model, or
                ``[B * L, hidden_size]``: states of this head's own last layer. None means zeros.
        """
        embeds = self.embed_tokens(inputs)
        size = self.config.layer.hidden_size
        if features is None:
            hidden = mx.zeros((*inputs.shape, size), embeds.dtype)
        else:
            hidden = features.reshape(*inputs.shape, -1)
            if features.ndim == 3:  # Not by size: joined states may be as wide as the head's own.
                hidden = self._joined(hidden)
        hidden = hidden.astype(embeds.dtype)
        cache = cache or [None] * len(self.layers)
        window = self.config.layer.sliding_window
        given: tuple[mx.array, ...] = (embeds, hidden)
        layer: Any
        for layer, own, is_sliding in zip(self.layers, cache, self._are_sliding):
            mask = create_attention_mask(hidden, own, window_size=window if is_sliding else None)
            hidden = layer(*given, mask, own)
            given = (hidden,)
        logits: mx.array = getattr(self.lm_head, self._method)(self.norm(hidden))
        return logits


def load_eagle3(
    path: Path,
    config: Eagle3Config,
    embed_tokens: nn.Module,
    output: tuple[nn.Module, str] | None = None,
) -> tuple[Eagle3Head, mx.array | None]:
    """Loads a head.

    Args:
        path: A directory with safetensors files.
        config: See `Eagle3Config.read`.
        embed_tokens: The model's input embeddings.
        output: The module, and its method, that compute the model's logits, for a head without its
            own output projection.

    Returns:
        The head, and ``[draft_vocab_size]`` int32: the model's token of each of its own; None if
        the vocabularies are the same.

    Raises:
        ModelLoadError: It gives the reason.
    """
    try:
        weights = _weights(path)
        if any(name.endswith("self_attn.q_norm.weight") for name in weights):
            config = replace(config, norms_queries=True)
        head = Eagle3Head(config, embed_tokens)
        distances = weights.pop("d2t", None)
        weights.pop("t2d", None)
        has_embeddings = "embed_tokens.weight" in weights
        head.embed_tokens = nn.Identity()
        if has_embeddings:
            head.embed_tokens = nn.Embedding(*weights["embed_tokens.weight"].shape)
        shares_output = "lm_head.weight" not in weights
        if shares_output:
            head.lm_head = nn.Identity()
        head.load_weights(list(weights.items()))
        if not has_embeddings:
            head.embed_tokens = embed_tokens
        if shares_output:
            if config.layer.tie_word_embeddings and has_embeddings:
                output = head.embed_tokens, "as_linear"
            if output is None or config.draft_vocab_size != config.layer.vocab_size:
                raise ValueError("lm_head.weight is missing")
            head.share_output(*output)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(str(path), f"it is no EAGLE-3 head: {error}") from error
    if distances is None:
        return head, None
    tokens = mx.arange(len(distances)) + distances.astype(mx.int32)
    return head, tokens.astype(mx.int32)


def _weights(path: Path) -> dict[str, mx.array]:
    """Returns the weights of a head by this module's names."""
    found = {}
    for name, weight in read_weights(path).items():
        name = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        if not name.endswith("rotary_emb.inv_freq"):
            found[name] = weight
    return found
