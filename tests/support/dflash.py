"""DFlash and DSpark heads with random weights in their file formats, and a dense reference in
float64."""

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
TAPS, GROUP, RANK, TOP_K, WINDOW = 2, 16, 8, 6, 12
SECOND: dict[str, Any] = {
    "dflash_config": {
        **CONFIG["dflash_config"],
        "conv_kernel_size": TAPS,
        "conv_group_size": GROUP,
        "selector_rank": RANK,
        "selector_top_k": TOP_K,
    },
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "is_causal": False,
}
DSPARK: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 4,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "dflash_config": {**CONFIG["dflash_config"], "projector_type": "dspark"},
}


def make_dflash(path: Path, *, seed: int = 0, **fields: Any) -> dict[str, Array]:
    """Writes a head; returns its weights.

    Args:
        fields: Of its config, such as `SECOND` or `DSPARK`.
    """
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 3 * HIDDEN)}
    has_conv = "conv_kernel_size" in fields.get("dflash_config", {})
    if has_conv:
        shapes |= {
            "candidate_selector.predecessor_codebook": (VOCAB_SIZE, RANK),
            "candidate_selector.successor_codebook": (VOCAB_SIZE, RANK),
            "candidate_selector.hidden_projection.weight": (RANK, HIDDEN),
        }
    if fields.get("markov_rank"):
        shapes |= {
            "markov_head.markov_w1.weight": (VOCAB_SIZE, RANK),
            "markov_head.markov_w2.weight": (VOCAB_SIZE, RANK),
            "confidence_head.proj.weight": (1, HIDDEN + RANK),
            "embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
        }
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
        if has_conv:
            for conv in (f"{own}attention_conv.", f"{own}mlp_conv."):
                shapes[f"{conv}base_kernel"] = (2, TAPS, HIDDEN)
                shapes[f"{conv}kernel_projection.weight"] = (2 * TAPS * HIDDEN // GROUP, HIDDEN)
        norms |= {
            f"{own}input_layernorm.weight": HIDDEN,
            f"{own}post_attention_layernorm.weight": HIDDEN,
            f"{own}self_attn.q_norm.weight": DIM,
            f"{own}self_attn.k_norm.weight": DIM,
        }
    weights = {
        name: (rng.standard_normal(shape) * 2 / np.sqrt(shape[-1])).astype(np.float32)
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


def _convolved(x: Array, kernels: Array, base: Array) -> Array:
    """Convolves a block's rows ``[length, hidden_size]``.

    Args:
        kernels: ``[length, taps, groups]``: what is added to the base for each group.
        base: ``[taps, hidden_size]``.
    """
    out = np.zeros_like(x)
    for row in range(len(x)):
        for back in range(min(TAPS, row + 1)):
            kernel = base[back] + np.repeat(kernels[row, back], GROUP)
            out[row] += kernel * x[row - back]
    return out


class Reference:
    """The head in float64, over whole sequences.

    Args:
        weights: Of `make_dflash`.
        embeddings, output: ``[vocab_size, hidden_size]``, the model's.
        windows: Window of each layer; None: all positions.
    """

    def __init__(
        self,
        weights: dict[str, Array],
        embeddings: Array,
        output: Array,
        windows: Sequence[int | None] = (None,) * LAYERS,
    ) -> None:
        self._weights = {name: w.astype(np.float64) for name, w in weights.items()}
        self._embeddings = embeddings.astype(np.float64)
        self._output = output.astype(np.float64)
        self._windows = windows

    def drafts(
        self,
        tokens: Sequence[int],
        states: Array,
        choose: Callable[[Array, int], int],
        count: int,
    ) -> list[int]:
        """Returns the head's drafts after known tokens, in one block.

        Args:
            states: ``[len(tokens) - 1, 3 * hidden_size]`` states of the model.
            choose: From logits and a position to a token.
        """
        w = self._weights
        context = _norm(states.astype(np.float64) @ w["fc.weight"].T, w["hidden_norm.weight"])
        begins_at_newest = "markov_head.markov_w1.weight" in w
        num_masks = count - begins_at_newest
        x = self._embeddings[[tokens[-1], *[MASK] * num_masks]]
        for layer in range(LAYERS):
            own = {n.removeprefix(f"layers.{layer}."): v for n, v in w.items()}
            window = self._windows[layer]
            x = self._around(
                own,
                "attention_conv",
                x,
                _norm(x, own["input_layernorm.weight"]),
                lambda h: _attention(own, h, context, window),  # noqa: B023
            )
            x = self._around(
                own,
                "mlp_conv",
                x,
                _norm(x, own["post_attention_layernorm.weight"]),
                lambda h: _mlp(own, h),  # noqa: B023
            )
        states = _norm(x, w["norm.weight"])[0 if begins_at_newest else 1 :]
        found, before = [], tokens[-1]
        for number, state in enumerate(states):
            logits = self._chained(self._output @ state, state, before)
            found.append(before := choose(logits, len(tokens) + number))
        return found

    def _around(
        self,
        own: dict[str, Array],
        conv: str,
        x: Array,
        normed: Array,
        inner: Callable[[Array], Array],
    ) -> Array:
        if f"{conv}.base_kernel" not in own:
            return x + inner(normed)
        kernels = normed @ own[f"{conv}.kernel_projection.weight"].T
        before, after = kernels.reshape(len(x), 2, TAPS, HIDDEN // GROUP).transpose(1, 0, 2, 3)
        base = own[f"{conv}.base_kernel"]
        return x + _convolved(inner(_convolved(normed, before, base[0])), after, base[1])

    def _chained(self, logits: Array, state: Array, before: int) -> Array:
        w = self._weights
        if "markov_head.markov_w1.weight" in w:
            first, second = (w[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
            return logits + second @ first[before]
        name = "candidate_selector."
        if f"{name}predecessor_codebook" not in w:
            return logits
        form = w[f"{name}predecessor_codebook"][before]
        form = form * (w[f"{name}hidden_projection.weight"] @ state)
        found = np.full(len(logits), -np.inf)
        for token in np.argsort(logits)[-TOP_K:]:
            found[token] = logits[token] + form @ w[f"{name}successor_codebook"][token]
        return found


def _attention(own: dict[str, Array], x: Array, context: Array, window: int | None) -> Array:
    """A block attends to itself, and to the context up to its window."""
    both = np.concatenate([context, x])
    positions = np.arange(len(both))
    q = (x @ own["self_attn.q_proj.weight"].T).reshape(-1, HEADS, DIM)
    k = (both @ own["self_attn.k_proj.weight"].T).reshape(-1, KV_HEADS, DIM)
    v = (both @ own["self_attn.v_proj.weight"].T).reshape(-1, KV_HEADS, DIM)
    q = _rope(_norm(q, own["self_attn.q_norm.weight"]), positions[len(context) :])
    k = _rope(_norm(k, own["self_attn.k_norm.weight"]), positions)
    k, v = (np.repeat(each, HEADS // KV_HEADS, axis=1) for each in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(DIM)
    if window is not None:
        behind = positions[len(context) :, None] - positions
        scores = np.where(behind < window, scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probabilities = scores / scores.sum(axis=-1, keepdims=True)
    out = np.einsum("hqk,khd->qhd", probabilities, v).reshape(len(x), -1)
    return out @ own["self_attn.o_proj.weight"].T


def _mlp(own: dict[str, Array], x: Array) -> Array:
    gate = x @ own["mlp.gate_proj.weight"].T
    gated = gate / (1 + np.exp(-gate)) * (x @ own["mlp.up_proj.weight"].T)
    return gated @ own["mlp.down_proj.weight"].T
