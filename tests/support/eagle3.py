"""EAGLE-3 heads of random weights in SafeAILab's file format, and a reference in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from support.models import VOCAB_SIZE

Array = np.ndarray
HIDDEN, HEADS, KV_HEADS, DIM, MLP, DRAFT_VOCAB = 64, 4, 2, 16, 96, 60
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "intermediate_size": MLP,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": DRAFT_VOCAB,
    "hidden_act": "silu",
}


def make_eagle3(
    path: Path,
    *,
    seed: int = 0,
    nested: dict[str, Any] | None = None,
    has_output: bool = True,
    **fields: Any,
) -> dict[str, Array]:
    """Writes a head; returns its weights.

    Args:
        nested: Fields of ``transformer_layer_config``, for the format of vLLM's speculators.
        has_output: False leaves the output projection to the model.
    """
    rng = np.random.default_rng(seed)
    num_features = len(fields.get("eagle_aux_hidden_state_layer_ids", range(3)))
    shapes = {
        "fc.weight": (HIDDEN, num_features * HIDDEN),
        "midlayer.self_attn.q_proj.weight": (HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (KV_HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (KV_HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": (MLP, HIDDEN),
        "midlayer.mlp.up_proj.weight": (MLP, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, MLP),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
    }
    weights = {
        name: (rng.standard_normal(shape) * 2 / np.sqrt(shape[1])).astype(np.float32)
        for name, shape in shapes.items()
    }
    for name in (
        "midlayer.hidden_norm.weight",
        "midlayer.input_layernorm.weight",
        "midlayer.post_attention_layernorm.weight",
        "norm.weight",
    ):
        weights[name] = (1 + 0.2 * rng.standard_normal(HIDDEN)).astype(np.float32)
    more = {
        "input_norm.weight": num_features * HIDDEN if fields.get("norm_before_fc") else 0,
        **{
            f"fc_norm.{i}.weight": HIDDEN if fields.get("fc_norm") else 0
            for i in range(num_features)
        },
    }
    if nested is not None and nested.get("model_type") == "qwen3":
        more |= {f"midlayer.self_attn.{name}_norm.weight": DIM for name in "qk"}
    for name, size in more.items():
        if size:
            weights[name] = (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)
    tokens = np.sort(rng.permutation(VOCAB_SIZE)[:DRAFT_VOCAB])
    if has_output:
        weights["d2t"] = (tokens - np.arange(DRAFT_VOCAB)).astype(np.int64)
        weights["t2d"] = np.isin(np.arange(VOCAB_SIZE), tokens)
    else:
        del weights["lm_head.weight"]
        fields["draft_vocab_size"] = None
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {**CONFIG, **fields}
    if nested is not None:
        layer = {**CONFIG, **nested}
        layer["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
        own = {"draft_vocab_size": layer.pop("draft_vocab_size"), **fields}
        config = {"speculators_model_type": "eagle3", **own, "transformer_layer_config": layer}
    (path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(path / "model.safetensors"), {name: mx.array(w) for name, w in weights.items()}
    )
    return weights


def _norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * weight


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def _rope(x: Array, theta: float) -> Array:
    """``[length, heads, dim]``, at positions from 0: halves are rotated against each other."""
    length, _, dim = x.shape
    angles = np.arange(length)[:, None] * theta ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., : dim // 2], x[..., dim // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attention(q: Array, k: Array, v: Array, window: int | None) -> Array:
    """Causal, over all rows or the last `window`: ``[length, heads, dim]`` each."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    is_seen = np.tri(len(q), dtype=bool)
    if window is not None:
        is_seen &= ~np.tri(len(q), k=-window, dtype=bool)
    scores = np.where(is_seen, scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probabilities = scores / scores.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", probabilities, v).reshape(len(q), -1)


class Reference:
    """The head in float64, over whole sequences.

    Args:
        weights: Of `make_eagle3`.
        embeddings: ``[vocab_size, hidden_size]``, the model's.
        output: ``[vocab_size, hidden_size]``, the model's, for a head without its own.
    """

    def __init__(
        self,
        weights: dict[str, Array],
        embeddings: Array,
        *,
        norm_before_residual: bool = False,
        norm_output: bool = False,
        rope_theta: float = 10000.0,
        window: int | None = None,
        output: Array | None = None,
    ) -> None:
        self._weights = {name: w.astype(np.float64) for name, w in weights.items()}
        self._tokens = np.arange(len(embeddings))
        if "d2t" in weights:
            self._tokens = np.arange(DRAFT_VOCAB) + weights["d2t"]
        elif output is not None:
            self._weights["lm_head.weight"] = output.astype(np.float64)
        self._embeddings = embeddings.astype(np.float64)
        self._norm_before_residual = norm_before_residual
        self._norm_output = norm_output
        self._rope_theta = rope_theta
        self._window = window

    def features(self, states: Array) -> Array:
        """``[length, 3 * hidden_size]`` states of the model -> ``[length, hidden_size]``."""
        w, states = self._weights, states.astype(np.float64)
        if "input_norm.weight" in w:
            states = _norm(states, w["input_norm.weight"])
        if "fc_norm.0.weight" in w:
            parts = np.split(states, 3, axis=-1)
            normed = [_norm(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)]
            states = np.concatenate(normed, axis=-1)
        return states @ w["fc.weight"].T

    def __call__(self, tokens: Sequence[int], features: Array) -> tuple[Array, Array]:
        """The last row's ``[vocab_size]`` logits and ``[hidden_size]`` states.

        Args:
            tokens: The token after each position.
            features: ``[len(tokens), hidden_size]``.
        """
        w, length = self._weights, len(tokens)
        layer = {name.removeprefix("midlayer."): x for name, x in w.items()}
        normed = _norm(features, layer["hidden_norm.weight"])
        embeds = _norm(self._embeddings[list(tokens)], layer["input_layernorm.weight"])
        both = np.concatenate([embeds, normed], axis=-1)
        q, k, v = (both @ layer[f"self_attn.{n}_proj.weight"].T for n in "qkv")
        q, k, v = (x.reshape(length, -1, DIM) for x in (q, k, v))
        if "self_attn.q_norm.weight" in layer:
            q = _norm(q, layer["self_attn.q_norm.weight"])
            k = _norm(k, layer["self_attn.k_norm.weight"])
        q, k = _rope(q, self._rope_theta), _rope(k, self._rope_theta)
        out = _attention(q, k, v, self._window) @ layer["self_attn.o_proj.weight"].T
        hidden = (normed if self._norm_before_residual else features) + out
        x = _norm(hidden, layer["post_attention_layernorm.weight"])
        up = x @ layer["mlp.up_proj.weight"].T
        gated = _silu(x @ layer["mlp.gate_proj.weight"].T) * up
        hidden = hidden + gated @ layer["mlp.down_proj.weight"].T
        logits = np.full(len(self._embeddings), -np.inf)
        normed = _norm(hidden[-1], w["norm.weight"])
        logits[self._tokens] = normed @ w["lm_head.weight"].T
        return logits, normed if self._norm_output else hidden[-1]

    def drafts(
        self,
        tokens: Sequence[int],
        states: Array,
        choose: Callable[[Array, int], int],
        count: int,
    ) -> list[int]:
        """Returns the head's drafts after known tokens.

        Args:
            states: ``[len(tokens) - 1, 3 * hidden_size]`` states of the model.
            choose: From logits and a position to a token.
        """
        features, known, found = self.features(states), list(tokens[1:]), []
        for number in range(count):
            logits, hidden = self(known, features)
            found.append(choose(logits, len(tokens) + number))
            known.append(found[-1])
            features = np.concatenate([features, hidden[None]])
        return found


class _Recorder:
    """Stands for a layer, and keeps its input."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.found = np.zeros(0)

    def __call__(self, x: mx.array, *args: Any, **options: Any) -> Any:
        self.found = np.array(x[0].astype(mx.float32))
        return self.layer(x, *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def states_of(model: nn.Module, tokens: Sequence[int], places: Sequence[int]) -> Array:
    """``[len(tokens), len(places) * hidden_size]``: inputs of some layers of an mlx-lm model."""
    layers = model.model.layers
    own = list(layers)
    layers[:] = recorders = [_Recorder(layer) for layer in own]
    try:
        mx.eval(model(mx.array([list(tokens)])))
    finally:
        layers[:] = own
    return np.concatenate([recorders[place].found for place in places], axis=-1)
