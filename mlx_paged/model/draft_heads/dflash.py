"""DFlash heads: a few layers that draft a whole block of tokens at once.

Paper: "DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036). A block is the
newest token and a mask token for each draft. Its rows see each other, and keys and values that each
layer makes of the model's hidden states at earlier positions. The logits at a mask's position are
those of the token there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.rope_utils import initialize_rope

from mlx_paged.errors import ModelLoadError
from mlx_paged.model.draft_heads.base import read_weights
from mlx_paged.model.loader import convert


@dataclass(frozen=True)
class DFlashConfig:
    """The config of a head.

    Attributes:
        block_size: Rows of a block: the newest token, and the most drafts.
        mask_token_id: Stands for a draft.
        target_layer_ids: Layers of the model whose outputs it reads.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    vocab_size: int
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: Mapping[str, Any] | None
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]

    @classmethod
    def read(cls, path: Path) -> DFlashConfig:
        """Reads a head's ``config.json``.

        Raises:
            ModelLoadError: It cannot be read, is incomplete, or is that of something else.
        """
        try:
            config = json.loads((path / "config.json").read_text())
            return cls.of(config)
        except (AttributeError, OSError, KeyError, TypeError, ValueError) as error:
            reason = f"its config.json is not that of a DFlash head: {error!r}"
            raise ModelLoadError(str(path), reason) from error

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> DFlashConfig:
        """Reads a config.

        Raises:
            KeyError, TypeError, ValueError: It is incomplete, or of another kind.
        """
        own = {**config, **config["dflash_config"]}
        for name in ("conv_kernel_size", "selector_rank"):
            if own.get(name):
                raise ValueError(f"{name} belongs to DFlash 2, which is not supported")
        for name, plain in (
            ("final_logit_softcapping", None),
            ("input_embedding_scale", 1.0),
            ("output_multiplier", 1.0),
            ("is_causal", False),
        ):
            if own.get(name, plain) not in (plain, None):
                raise ValueError(f"{name} must be {plain} but is {own[name]}")
        if set(own.get("layer_types") or ["full_attention"]) != {"full_attention"}:
            raise ValueError(f"layer_types must be full_attention but are {own['layer_types']}")
        rope = own.get("rope_parameters") or own.get("rope_scaling") or {}
        theta = rope["rope_theta"] if "rope_theta" in rope else own["rope_theta"]
        is_scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
        names = (
            *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "intermediate_size", "rms_norm_eps", "vocab_size"),
            *("max_position_embeddings", "block_size", "mask_token_id"),
        )
        return cls(
            **{name: own[name] for name in names},
            rope_theta=float(theta),
            rope_scaling=rope if is_scaled else None,
            target_layer_ids=tuple(int(i) for i in own["target_layer_ids"]),
        )

    @property
    def places(self) -> tuple[int, ...]:
        """The layers of a model whose inputs the head reads."""
        return tuple(i + 1 for i in self.target_layer_ids)


class _Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        dim, head_dim = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scale = head_dim**-0.5
        self.q_proj = nn.Linear(dim, self.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, self.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, self.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * head_dim, dim, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.rope = initialize_rope(
            head_dim,
            config.rope_theta,
            False,
            None if config.rope_scaling is None else dict(config.rope_scaling),
            config.max_position_embeddings,
        )

    def __call__(self, x: mx.array, source: mx.array, mask: Any, cache: Any) -> mx.array:
        batch, length, _ = x.shape
        queries = self.q_proj(x).reshape(batch, length, self.num_heads, -1)
        keys = self.k_proj(source).reshape(batch, length, self.num_kv_heads, -1)
        values = self.v_proj(source).reshape(batch, length, self.num_kv_heads, -1)
        queries = self.q_norm(queries).transpose(0, 2, 1, 3)
        keys = self.k_norm(keys).transpose(0, 2, 1, 3)
        values = values.transpose(0, 2, 1, 3)
        offset = 0 if cache is None else cache.offset
        queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        out = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = qwen3.MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(
        self, x: mx.array, context: mx.array, is_context: mx.array, mask: Any, cache: Any
    ) -> mx.array:
        normed = self.input_layernorm(x)
        source = mx.where(is_context, context, normed)
        hidden = x + self.self_attn(normed, source, mask, cache)
        out: mx.array = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class DFlashHead(nn.Module):  # type: ignore[misc]
    """The head as a model. See `attach`."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.model_type = "DFlash"
        self.config = config
        width = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [_Layer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def attach(self, embed: nn.Module, project: nn.Module, method: str) -> None:
        """Shares the model's modules.

        Args:
            embed: Its input embeddings.
            project: The module that makes its logits.
            method: That module's method which does.
        """
        self.embed, self.project, self._method = embed, project, method

    def __call__(
        self, inputs: mx.array, cache: Any = None, features: mx.array | None = None
    ) -> mx.array:
        """``[B, L]`` tokens -> ``[B, L, vocab_size]`` logits of the tokens at these positions.

        Args:
            features: ``[B * L, width + 1]``: the model's hidden states and 1, for a position of the
                context; zeros for a row of a block. None stands for zeros.
        """
        x = self.embed(inputs)
        if features is None:
            features = mx.zeros((inputs.size, self.fc.weight.shape[1] + 1), x.dtype)
        features = features.reshape(*inputs.shape, -1).astype(x.dtype)
        context = self.hidden_norm(self.fc(features[..., :-1]))
        is_context = features[..., -1:] > 0
        caches = cache or [None] * len(self.layers)
        mask = create_attention_mask(x, caches[0])
        for layer, own in zip(self.layers, caches):
            x = layer(x, context, is_context, mask, own)
        logits: mx.array = getattr(self.project, self._method)(self.norm(x))
        return logits


def load_dflash(path: Path, config: DFlashConfig, dtype: str) -> DFlashHead:
    """Loads a head, to be attached to its model.

    Args:
        path: A directory with safetensors files.
        config: See `DFlashConfig.read`.
        dtype: See `load`.

    Raises:
        ModelLoadError: It gives the reason.
    """
    try:
        head = DFlashHead(config)
        head.load_weights(list(read_weights(path).items()))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(str(path), f"it is no DFlash head: {error}") from error
    convert(head, dtype, keeps_weights=True)
    return head
