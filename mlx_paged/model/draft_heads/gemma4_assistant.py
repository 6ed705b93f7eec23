"""Gemma 4's assistants: small models that attend to the keys and values of the large one.

An assistant has no cache. Each of its layers reads the cache of the model's last layer of the same
kind that has one, and every draft is made at the position of the newest token. The input is that
token's embedding and the model's last hidden state, concatenated; later drafts take the previous
draft and the assistant's own state, projected back. The format is that of Google's files, as
transformers reads them (``gemma4_assistant``). A window ends at the newest token, which has no key
yet, as in vLLM and mlx-vlm; transformers sees two keys more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text

from mlx_paged.errors import ModelLoadError
from mlx_paged.model.caches import KVHandle, KVPools
from mlx_paged.model.draft_heads.base import read_config, read_weights
from mlx_paged.model.loader import convert
from mlx_paged.model.mlx_lm_config import mlx_lm_config
from mlx_paged.model.rope_frequencies import conform_rope

_MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


@dataclass(frozen=True)
class AssistantConfig:
    """The config of an assistant.

    Attributes:
        layer: Options of its layers.
        backbone_hidden_size: Size of the model's hidden states.
        num_centroids: Number of groups of its vocabulary; 0 if it scores all tokens.
        top_centroids: Number of groups whose tokens it scores.
    """

    layer: gemma4_text.ModelArgs
    backbone_hidden_size: int
    num_centroids: int = 0
    top_centroids: int = 0

    @classmethod
    def read(cls, path: Path) -> AssistantConfig:
        """Reads a head's directory; see `read_config`."""
        return read_config(path, "a Gemma 4 assistant", cls.of)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> AssistantConfig:
        """Reads a config.

        Raises:
            KeyError, TypeError, ValueError: It is incomplete, or of another kind.
        """
        num_layers = config["text_config"]["num_hidden_layers"]
        shared = {"model_type": "gemma4_text", "num_kv_shared_layers": num_layers}
        text = mlx_lm_config({**config["text_config"], **shared})
        for name, plain in (
            ("hidden_size_per_layer_input", 0),
            ("enable_moe_block", False),
            ("use_double_wide_mlp", False),
        ):
            if text.get(name) not in (plain, None):
                raise ValueError(f"text_config.{name} must be {plain} but is {text[name]}")
        if not config.get("tie_word_embeddings", True):
            raise ValueError("tie_word_embeddings must be true but is false")
        known = {field.name for field in fields(gemma4_text.ModelArgs)}
        options = {name: value for name, value in text.items() if name in known}
        options |= {"use_double_wide_mlp": False, "enable_moe_block": False}
        options["hidden_size_per_layer_input"] = 0
        is_ordered = bool(config.get("use_ordered_embeddings"))
        return cls(
            gemma4_text.ModelArgs(**options),
            int(config["backbone_hidden_size"]),
            int(config["num_centroids"]) if is_ordered else 0,
            int(config["centroid_intermediate_top_k"]) if is_ordered else 0,
        )


def is_assistant(path: Path) -> bool:
    """True if a directory has a Gemma 4 assistant."""
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") in _MODEL_TYPES


class Target:
    """The embeddings and attention caches of the model that an assistant drafts for.

    Args:
        model: An mlx-lm model, or one that holds a Gemma 4 text model.
        caches: Returns its attention caches, in the order of its layers.

    Raises:
        ValueError: It holds none.
    """

    def __init__(self, model: nn.Module, caches: Callable[[], Sequence[KVPools]]) -> None:
        found = [m for _, m in model.named_modules() if hasattr(m, "previous_kvs")]
        if len(found) != 1:
            raise ValueError("an assistant is for a Gemma 4 model")
        self._inner: Any = found[0]
        self.hidden_size = int(self._inner.config.hidden_size)
        self._caches = caches

    @property
    def caches(self) -> dict[str, KVPools]:
        """The cache that layers of one kind read, see `PagedModel.reading_step`."""
        return {
            layer.layer_type: _without_newest(cache)
            for layer, cache in zip(self._inner.layers, self._caches())
        }

    def embed(self, tokens: mx.array) -> mx.array:
        """``[n]`` int32 -> ``[n, hidden_size]``, scaled like the model's input."""
        embeds: mx.array = self._inner.embed_tokens(tokens)
        return embeds * self._inner.embed_scale


def _without_newest(cache: Any) -> Any:
    """Returns a view of a cache whose window counts a token that is not in it."""
    if cache.spec.window is None:
        return cache
    view = copy(cache)
    view.spec = replace(cache.spec, window=cache.spec.window - 1)
    view.keys, view.values = KVHandle(view), KVHandle(view)
    return view


class _Inner(nn.Module):  # type: ignore[misc]
    def __init__(self, args: gemma4_text.ModelArgs) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [gemma4_text.DecoderLayer(args, i) for i in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)


class _Centroids(nn.Module):  # type: ignore[misc]
    """Chooses the tokens to score: those of the most likely groups."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.centroids = nn.Linear(config.layer.hidden_size, config.num_centroids, bias=False)
        self.token_ordering = mx.zeros((config.layer.vocab_size,), dtype=mx.int32)
        self._shape = config.num_centroids, config.layer.vocab_size // config.num_centroids
        self._top = config.top_centroids

    def __call__(self, states: mx.array, logits: mx.array) -> mx.array:
        """``[n, vocab_size]`` logits -> the same, with tokens of all other groups masked."""
        best = mx.argpartition(self.centroids(states), -self._top, axis=-1)[:, -self._top :]
        tokens = self.token_ordering.reshape(self._shape)[best].reshape(len(states), -1)
        scores = mx.take_along_axis(logits, tokens, axis=-1)
        impossible = mx.full(logits.shape, -mx.inf, logits.dtype)
        return mx.put_along_axis(impossible, tokens, scores, axis=-1)


class Assistant(nn.Module):  # type: ignore[misc]
    """A Gemma 4 assistant."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        args, width = config.layer, config.backbone_hidden_size
        self.config = config
        self.model = _Inner(args)
        self.pre_projection = nn.Linear(2 * width, args.hidden_size, bias=False)
        self.post_projection = nn.Linear(args.hidden_size, width, bias=False)
        if config.num_centroids:
            self.masked_embedding = _Centroids(config)

    def __call__(
        self,
        embeds: mx.array,
        states: mx.array,
        positions: mx.array,
        caches: Mapping[str, KVPools],
    ) -> tuple[mx.array, mx.array]:
        """Makes one draft for each sequence, within a step of the model (`PagedModel.reading`).

        Args:
            embeds: ``[n, backbone_hidden_size]``: of the token before each draft.
            states: ``[n, backbone_hidden_size]``: the model's, or those that the last call
                returned.
            positions: ``[n]`` int32: of the newest tokens.
            caches: The model's caches, see `Target`.

        Returns:
            ``[n, vocab_size]`` logits and the states for the next draft.
        """
        x = self.pre_projection(mx.concatenate([embeds, states], axis=-1))[:, None]
        for layer in self.model.layers:
            cache: Any = caches[layer.layer_type]
            x, _, _ = layer(x, shared_kv=cache.keys_and_values(), offset=positions)
        hidden = self.model.norm(x)[:, 0]
        logits = self.model.embed_tokens.as_linear(hidden)
        if self.config.num_centroids:
            logits = self.masked_embedding(hidden, logits)
        return logits, self.post_projection(hidden)


def load_assistant(path: Path, config: AssistantConfig, dtype: str) -> Assistant:
    """Loads an assistant.

    Args:
        path: A directory with safetensors files.
        config: See `AssistantConfig.read`.
        dtype: See `load`.

    Raises:
        ModelLoadError: It gives the reason.
    """
    try:
        assistant = Assistant(config)
        weights = read_weights(path)
        weights.pop("lm_head.weight", None)  # tied
        order = weights.get("masked_embedding.token_ordering")
        if order is not None:
            weights["masked_embedding.token_ordering"] = order.astype(mx.int32)
        assistant.load_weights(list(weights.items()))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(str(path), f"not a Gemma 4 assistant: {error}") from error
    options = vars(config.layer)
    conform_rope(assistant.model, options, part=None)
    convert(assistant, dtype, keeps_weights=True)
    assistant.eval()
    return assistant
