"""EAGLE-3 heads for Llama, in the file formats of SafeAILab, vLLM and its speculators.

Paper: "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(arXiv 2503.01840). `fc` joins the inputs of three layers of the model to one feature. The first
layer attends over the embedding of the next token and this feature, side by side; later ones, if
any, are Llama's own. Logits are those of a smaller vocabulary: `d2t` has the distance from each of
its tokens to the model's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask

from mlx_paged.errors import ModelLoadError
from mlx_paged.model.draft_heads.base import read_weights


@dataclass(frozen=True)
class Eagle3Config:
    """The config of a head.

    Attributes:
        layer: Llama's options of its layers.
        target_hidden_size: Size of each of the joined hidden states.
        num_features: Number of these.
        draft_vocab_size: Tokens of its logits.
        norm_before_residual: Adds the normed feature to the attention's output, not the feature.
        layer_ids: Layers of the model whose inputs it reads; None: the defaults.
    """

    layer: llama.ModelArgs
    target_hidden_size: int
    draft_vocab_size: int
    num_features: int = 3
    norm_before_residual: bool = False
    layer_ids: tuple[int, ...] | None = None

    @classmethod
    def read(cls, path: Path) -> Eagle3Config:
        """Reads a head's ``config.json``.

        Raises:
            ModelLoadError: It cannot be read, is incomplete, or is that of something else.
        """
        try:
            config = json.loads((path / "config.json").read_text())
            if not isinstance(config, dict):
                raise ValueError("it is no JSON object")
            return cls.of(config)
        except (OSError, KeyError, TypeError, ValueError) as error:
            reason = f"its config.json is not that of an EAGLE-3 head for Llama: {error}"
            raise ModelLoadError(str(path), reason) from error

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Eagle3Config:
        """Reads a ``config.json``.

        Raises:
            KeyError, TypeError, ValueError: It is incomplete, or of another kind of head.
        """
        nested = config.get("transformer_layer_config")
        own = {**config, **nested} if isinstance(nested, Mapping) else dict(config)
        own["model_type"] = "llama"
        own.pop("layer_types", None)  # Its layers see everything.
        if own.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act must be 'silu' but is {own['hidden_act']!r}")
        known = {field.name for field in fields(llama.ModelArgs)}
        layer = llama.ModelArgs(**{k: v for k, v in own.items() if k in known})
        more = own.get("eagle_config")
        more = more if isinstance(more, Mapping) else {}
        ids = own.get("eagle_aux_hidden_state_layer_ids") or more.get(
            "eagle_aux_hidden_state_layer_ids"
        )
        if more.get("use_aux_hidden_state") is False:
            raise ValueError("eagle_config.use_aux_hidden_state must be true but is false")
        is_speculators = isinstance(nested, Mapping)
        return cls(
            layer=layer,
            target_hidden_size=int(own.get("target_hidden_size") or layer.hidden_size),
            draft_vocab_size=int(own.get("draft_vocab_size") or layer.vocab_size),
            num_features=len(ids) if ids else 3,
            norm_before_residual=bool(own.get("norm_before_residual", is_speculators)),
            layer_ids=tuple(int(i) for i in ids) if ids else None,
        )

    def places(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a model whose inputs the head reads."""
        return self.layer_ids or (2, num_layers // 2, num_layers - 3)


class _FirstLayer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        args = config.layer
        self._norm_before_residual = config.norm_before_residual
        self.self_attn = llama.Attention(args)
        for name in ("q_proj", "k_proj", "v_proj"):
            width = self.self_attn[name].weight.shape[0]
            wide = nn.Linear(2 * args.hidden_size, width, bias=args.attention_bias)
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
        rest = [llama.TransformerBlock(args) for _ in range(args.num_hidden_layers - 1)]
        self.layers = [_FirstLayer(config), *rest]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.lm_head = nn.Linear(args.hidden_size, config.draft_vocab_size, bias=False)

    def __call__(
        self, inputs: mx.array, cache: Any = None, features: mx.array | None = None
    ) -> mx.array:
        """``[B, L]`` tokens -> ``[B, L, draft_vocab_size]`` logits.

        Args:
            features: ``[B * L, width]``: joined states of the model, or states of this head's own
                last layer. None stands for zeros.
        """
        embeds = self.embed_tokens(inputs)
        size = self.config.layer.hidden_size
        if features is None:
            hidden = mx.zeros((*inputs.shape, size), embeds.dtype)
        else:
            hidden = features.reshape(*inputs.shape, -1)
            # A model with three states of this size in all cannot be told from the head itself.
            if hidden.shape[-1] != size:
                hidden = self.fc(hidden)
        hidden = hidden.astype(embeds.dtype)
        cache = cache or [None] * len(self.layers)
        mask = create_attention_mask(hidden, cache[0])
        hidden = self.layers[0](embeds, hidden, mask, cache[0])
        for layer, own in zip(self.layers[1:], cache[1:]):
            hidden = layer(hidden, mask, own)
        logits: mx.array = self.lm_head(self.norm(hidden))
        return logits


def load_eagle3(
    path: Path, config: Eagle3Config, embed_tokens: nn.Module
) -> tuple[Eagle3Head, mx.array | None]:
    """Loads a head.

    Args:
        path: A directory with safetensors files.
        config: See `Eagle3Config.read`.
        embed_tokens: The model's input embeddings.

    Returns:
        The head, and ``[draft_vocab_size]`` int32: the model's token of each of its own; None if
        the vocabularies are the same.

    Raises:
        ModelLoadError: It gives the reason.
    """
    try:
        head = Eagle3Head(config, embed_tokens)
        weights = _weights(path)
        distances = weights.pop("d2t", None)
        weights.pop("t2d", None)
        if "embed_tokens.weight" in weights:
            shape = weights["embed_tokens.weight"].shape
            head.embed_tokens = nn.Embedding(*shape)
            head.load_weights(list(weights.items()))
        else:
            own = head.embed_tokens
            head.embed_tokens = nn.Identity()
            head.load_weights(list(weights.items()))
            head.embed_tokens = own
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(str(path), f"it is no EAGLE-3 head for Llama: {error}") from error
    if distances is None:
        return head, None
    tokens = mx.arange(len(distances)) + distances.astype(mx.int32)
    return head, tokens.astype(mx.int32)


def _weights(path: Path) -> dict[str, mx.array]:
    """The weights of a head by this module's names."""
    found = {}
    for name, weight in read_weights(path).items():
        name = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        if not name.endswith("rotary_emb.inv_freq"):
            found[name] = weight
    return found
