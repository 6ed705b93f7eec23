"""DFlash heads: a few layers that draft a whole block of tokens in one forward pass.

Paper: "DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036). A block is the
newest token and a mask token for each draft. Its rows see each other, and the keys and values that
each layer computes from the model's hidden states at earlier positions. A mask's row has the logits
of the token at its position.

DFlash 2 adds convolutions over a block's rows around attention and MLP; DSpark starts to draft at
the newest token's row. Both choose a block's tokens one after another, see `chains.py`. File
formats are z-lab's and DeepSeek's, as mlx-vlm and vLLM read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.rope_utils import initialize_rope

from mlx_paged.errors import ModelLoadError
from mlx_paged.model.draft_heads.base import read_config, read_weights
from mlx_paged.model.draft_heads.chains import (
    CandidateSelector,
    Chain,
    MarkovHead,
    SelectorConfig,
)
from mlx_paged.model.loader import convert


@dataclass(frozen=True)
class DFlashConfig:
    """The config of a head.

    Attributes:
        max_drafts: Maximum drafts per block.
        mask_token_id: Placeholder for a draft.
        target_layer_ids: Layers of the model whose outputs it reads.
        windows: Window of each layer; None: all positions.
        drafts_from_newest: The first draft comes from the newest token's row instead of the first
            mask's, and so on.
        conv: DFlash 2's convolutions, or None.
        selector: DFlash 2's choice of candidates, or None.
        markov_rank: Rank of DSpark's transitions; 0: none.
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
    max_drafts: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    drafts_from_newest: bool = False
    conv: ConvConfig | None = None
    selector: SelectorConfig | None = None
    markov_rank: int = 0

    @classmethod
    def read(cls, path: Path) -> DFlashConfig:
        """Reads a head's directory; see `read_config`."""
        return read_config(path, "a DFlash or DSpark head", cls.of)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> DFlashConfig:
        """Reads a config.

        Raises:
            KeyError, TypeError, ValueError: It is incomplete, or of another kind.
        """
        own = {**config, **config.get("dflash_config", {})}
        for name, plain in (
            ("final_logit_softcapping", None),
            ("input_embedding_scale", 1.0),
            ("output_multiplier", 1.0),
            ("is_causal", False),
            ("causal", False),
            ("dflash_query_causal", False),
            ("attention_sink_bias", False),
            ("attention_bias", False),
            ("draft_vocab_size", own["vocab_size"]),
            ("hidden_act", "silu"),
            ("markov_head_type", "vanilla"),
        ):
            if own.get(name, plain) not in (plain, None):
                raise ValueError(f"{name} must be {plain} but is {own[name]}")
        rope = own.get("rope_parameters") or own.get("rope_scaling") or {}
        theta = rope["rope_theta"] if "rope_theta" in rope else own["rope_theta"]
        is_scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
        names = (
            *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "intermediate_size", "rms_norm_eps", "vocab_size"),
            *("max_position_embeddings", "mask_token_id"),
        )
        is_dspark = bool(own.get("markov_rank"))
        # DSpark's block sizes exclude the newest token, unless the config says otherwise.
        has_newest = not is_dspark or bool(own.get("dspark_bonus_anchor"))
        return cls(
            **{name: own[name] for name in names},
            rope_theta=float(theta),
            rope_scaling=rope if is_scaled else None,
            max_drafts=int(own["block_size"]) - has_newest,
            target_layer_ids=tuple(int(i) for i in own["target_layer_ids"]),
            windows=_windows(own),
            drafts_from_newest=is_dspark and bool(own.get("sample_from_anchor", True)),
            conv=ConvConfig.of(own) if own.get("conv_kernel_size") else None,
            selector=SelectorConfig.of(own) if own.get("selector_rank") else None,
            markov_rank=int(own.get("markov_rank") or 0),
        )

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """The target's layer ids whose inputs the head reads; see `Taps`."""
        return tuple(i + 1 for i in self.target_layer_ids)

    @property
    def chains(self) -> bool:
        """True if each draft depends on the previous one."""
        return self.selector is not None or self.markov_rank > 0


def _windows(own: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Returns the window of each layer."""
    num_layers = own["num_hidden_layers"]
    types = own.get("layer_types") or ["full_attention"] * num_layers
    window = own.get("swa_window_size") or own.get("sliding_window") or 0
    if len(types) != num_layers or set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types must be {num_layers} of full or sliding attention: {types}")
    if "sliding_attention" in types and not window:
        raise ValueError("sliding_window is missing")
    return tuple(None if kind == "full_attention" else int(window) for kind in types)


@dataclass(frozen=True)
class ConvConfig:
    """Convolutions over the rows of a block.

    Attributes:
        kernel_size: Rows that each one sees: itself and those before.
        group_size: Elements of a row that have the same kernel.
    """

    kernel_size: int
    group_size: int

    @classmethod
    def of(cls, own: Mapping[str, Any]) -> ConvConfig:
        """Reads a head's options.

        Raises:
            KeyError, TypeError, ValueError: They do not fit.
        """
        size, group = int(own["conv_kernel_size"]), int(own["conv_group_size"])
        if own["hidden_size"] % group:
            raise ValueError(f"conv_group_size must divide {own['hidden_size']} but is {group}")
        return cls(size, group)


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


class _Conv(nn.Module):  # type: ignore[misc]
    """Convolutions before and after attention or an MLP, with kernels computed from the input."""

    def __init__(self, size: int, config: ConvConfig) -> None:
        super().__init__()
        self._config = config
        num_groups = size // config.group_size
        self.base_kernel = mx.zeros((2, config.kernel_size, size))
        self.kernel_projection = nn.Linear(size, 2 * config.kernel_size * num_groups, bias=False)

    def kernels(self, x: mx.array) -> mx.array:
        """``[..., size]`` -> ``[rows, 2, kernel_size, groups, 1]``: before, and after."""
        found: mx.array = self.kernel_projection(x)
        return found.reshape(-1, 2, self._config.kernel_size, x.shape[-1] // self._group, 1)

    @property
    def _group(self) -> int:
        return self._config.group_size

    def __call__(self, x: mx.array, kernels: mx.array, position: mx.array, side: int) -> mx.array:
        """Convolves rows ``[..., size]``.

        Args:
            kernels: See `kernels`.
            place: ``[rows, 1, 1]``: number of rows before each one in its block.
            side: 0 before, 1 after.
        """
        rows = x.reshape(-1, x.shape[-1] // self._group, self._group)
        out = mx.zeros_like(rows)
        for back in range(self._config.kernel_size):
            seen = rows
            if back:
                nothing = mx.zeros_like(rows[:back])
                # A step may have fewer rows.
                shifted = mx.concatenate([nothing, rows], axis=0)[: rows.shape[0]]
                seen = mx.where(position >= back, shifted, mx.zeros_like(rows))
            base = self.base_kernel[side, back].reshape(rows.shape[1:]).astype(x.dtype)
            out = out + (base + kernels[:, side, back]) * seen
        return out.reshape(x.shape)


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = qwen3.MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._has_conv = config.conv is not None
        if config.conv is not None:
            self.attention_conv = _Conv(config.hidden_size, config.conv)
            self.mlp_conv = _Conv(config.hidden_size, config.conv)

    def __call__(
        self, x: mx.array, context: mx.array, mark: mx.array, mask: Any, cache: Any
    ) -> Any:
        position = -mark.reshape(-1, 1, 1)
        is_context = mark > 0

        def attend(normed: mx.array) -> mx.array:
            return self.self_attn(normed, mx.where(is_context, context, normed), mask, cache)

        x = x + self._convolved("attention_conv", self.input_layernorm(x), position, attend)
        normed = self.post_attention_layernorm(x)
        return x + self._convolved("mlp_conv", normed, position, self.mlp)

    def _convolved(
        self, name: str, x: mx.array, position: mx.array, inner: Callable[[mx.array], mx.array]
    ) -> mx.array:
        if not self._has_conv:
            return inner(x)
        conv = self[name]
        kernels = conv.kernels(x)
        out: mx.array = conv(inner(conv(x, kernels, position, 0)), kernels, position, 1)
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
        if config.selector is not None:
            self.candidate_selector = CandidateSelector(
                config.selector, config.vocab_size, config.hidden_size
            )
        if config.markov_rank:
            self.markov_head = MarkovHead(config.vocab_size, config.markov_rank)

    @property
    def chain(self) -> Chain | None:
        """Changes a draft's logits by the previous draft; None if drafts are independent."""
        return getattr(self, "candidate_selector", None) or getattr(self, "markov_head", None)

    def logits_of(self, states: mx.array) -> mx.array:
        """``[n, hidden_size]`` states after the last norm -> ``[n, vocab_size]``."""
        logits: mx.array = getattr(self.project, self._method)(states)
        return logits

    def make_cache(self) -> list[Any]:
        """mlx-lm's caches of its layers."""
        return [
            KVCache() if window is None else RotatingKVCache(max_size=window)
            for window in self.config.windows
        ]

    def attach(self, embed: nn.Module, project: nn.Module, method: str) -> None:
        """Shares the model's modules.

        Args:
            embed: Its input embeddings.
            project: The module that computes its logits.
            method: The method to call on `project`.
        """
        self.embed, self.project, self._method = embed, project, method

    def __call__(
        self, inputs: mx.array, cache: Any = None, features: mx.array | None = None
    ) -> mx.array:
        """``[B, L]`` tokens -> ``[B, L, vocab_size]`` logits.

        Args:
            features: ``[B * L, width + 1]``: the model's hidden states and 1, for a position of the
                context; for a row of a block, the last element is minus the number of the block's
                rows before it. None means zeros.
        """
        x = self.embed(inputs)
        if features is None:
            features = mx.zeros((inputs.size, self.fc.weight.shape[1] + 1), x.dtype)
        features = features.reshape(*inputs.shape, -1).astype(x.dtype)
        context = self.hidden_norm(self.fc(features[..., :-1]))
        mark = features[..., -1:]
        caches = cache or [None] * len(self.layers)
        for layer, own, window in zip(self.layers, caches, self.config.windows):
            mask = create_attention_mask(x, own, window_size=window)
            x = layer(x, context, mark, mask, own)
        return self.logits_of(self.norm(x))


def load_dflash(path: Path, config: DFlashConfig, dtype: str) -> DFlashHead:
    """Loads a head. The caller attaches it to its model.

    Args:
        path: A directory with safetensors files.
        config: See `DFlashConfig.read`.
        dtype: See `load`.

    Raises:
        ModelLoadError: It gives the reason.
    """
    try:
        head = DFlashHead(config)
        head.load_weights(list(_weights(path).items()))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(str(path), f"not a DFlash or DSpark head: {error}") from error
    convert(head, dtype, keeps_weights=True)
    return head


# Copies of the model's weights, and weights that score drafts.
_UNUSED = ("embed_tokens.", "lm_head.", "confidence_head.")


def _weights(path: Path) -> dict[str, mx.array]:
    """Returns the weights of a head by this module's names."""
    found = {}
    for name, weight in read_weights(path).items():
        name = name.removeprefix("model.")
        if name.endswith("_codebook"):
            name += ".weight"
        if not name.startswith(_UNUSED):
            found[name] = weight
    return found
