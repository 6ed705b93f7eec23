"""DFlash heads with random weights in their file format, and a dense reference in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from support.models import VOCAB_SIZE

Array = np.ndarray
HIDDEN, HEADS, KV_HEADS, DIM, MLP, LAYERS = 64, 4, 2, 16, 96, 2
MASK = VOCAB_SIZE - 1
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "intermediate_size": MLP,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB_SIZE,
    "num_target_layers": 8,
    "block_size": 5,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]},
}


def make_dflash(path: Path, *, seed: int = 0, **fields: Any) -> dict[str, Array]:
    """Writes a head; returns its weights."""
    rng = np.random.default_rng(seed)
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN)}
    norms = {"hidden_norm.weight": HIDDEN, "norm.weight": HIDDEN}
    for layer in range(LAYERS):
        own = f"layers.{layer}."
        shapes |= {
            f"{own}self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
            f"{own}self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
            f"{own}self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
            f"{own}self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
            f"{own}mlp.gate_proj.weight": (MLP, HIDDEN),
            f"{own}mlp.up_proj.weight": (MLP, HIDDEN),
            f"{own}mlp.down_proj.weight": (HIDDEN, MLP),
        }
        norms |= {
            f"{own}input_layernorm.weight": HIDDEN,
            f"{own}post_attention_layernorm.weight": HIDDEN,
            f"{own}self_attn.q_norm.weight": DIM,
            f"{own}self_attn.k_norm.weight": DIM,
        }
    weights = {
        name: (rng.standard_normal(shape) * 2 / np.sqrt(shape[1])).astype(np.float32)
        for name, shape in shapes.items()
    }
    for name, size in norms.items():
        weights[name] = (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    mx.save_safetensors(
        str(path / "model.safetensors"), {name: mx.array(w) for name, w in weights.items()}
    )
    return weights


def _norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weight


def _rope(x: Array, positions: Array) -> Array:
    """``[length, heads, dim]``: halves are rotated against each other."""
    dim = x.shape[-1]
    angles = positions[:, None] * 10000.0 ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., : dim // 2], x[..., dim // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Reference:
    """The head in float64, over whole sequences.

    Args:
        weights: Of `make_dflash`.
        embeddings, output: ``[vocab_size, hidden_size]``, the model's.
    """

    def __init__(self, weights: dict[str, Array], embeddings: Array, output: Array) -> None:
        self._weights = {name: w.astype(np.float64) for name, w in weights.items()}
        self._embeddings = embeddings.astype(np.float64)
        self._output = output.astype(np.float64)

    def drafts(
        self,
        tokens: Sequence[int],
        states: Array,
        choose: Callable[[Array, int], int],
        count: int,
    ) -> list[int]:
        """What the head drafts after known tokens, in one block.

        Args:
            states: ``[len(tokens) - 1, 3 * hidden_size]`` states of the model.
            choose: From logits and a position to a token.
        """
        w = self._weights
        context = _norm(states.astype(np.float64) @ w["fc.weight"].T, w["hidden_norm.weight"])
        x = self._embeddings[[tokens[-1], *[MASK] * count]]
        positions = np.arange(len(context) + len(x))
        for layer in range(LAYERS):
            own = {n.removeprefix(f"layers.{layer}."): v for n, v in w.items()}
            normed = _norm(x, own["input_layernorm.weight"])
            both = np.concatenate([context, normed])
            q = (normed @ own["self_attn.q_proj.weight"].T).reshape(-1, HEADS, DIM)
            k = (both @ own["self_attn.k_proj.weight"].T).reshape(-1, KV_HEADS, DIM)
            v = (both @ own["self_attn.v_proj.weight"].T).reshape(-1, KV_HEADS, DIM)
            q = _rope(_norm(q, own["self_attn.q_norm.weight"]), positions[len(context) :])
            k = _rope(_norm(k, own["self_attn.k_norm.weight"]), positions)
            k, v = (np.repeat(each, HEADS // KV_HEADS, axis=1) for each in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(DIM)
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            probabilities = scores / scores.sum(axis=-1, keepdims=True)
            out = np.einsum("hqk,khd->qhd", probabilities, v).reshape(len(x), -1)
            x = x + out @ own["self_attn.o_proj.weight"].T
            normed = _norm(x, own["post_attention_layernorm.weight"])
            gate = normed @ own["mlp.gate_proj.weight"].T
            gated = gate / (1 + np.exp(-gate)) * (normed @ own["mlp.up_proj.weight"].T)
            x = x + gated @ own["mlp.down_proj.weight"].T
        logits = _norm(x[1:], w["norm.weight"]) @ self._output.T
        return [choose(row, len(tokens) + i) for i, row in enumerate(logits)]
