"""mlx-lm's Metal-only layers in plain MLX, so that their families run on any device.

Both sides of a comparison use them, so tests compare the cache and not the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn


def _norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    return mx.fast.rms_norm(x.astype(mx.float32), weight, eps)


def qk_norm(
    qkvg: mx.array,
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    eps: float,
    query_scale: float,
) -> list[mx.array]:
    """Normalized and scaled queries, and normalized keys: ``[B, L, heads, head_dim]`` each."""
    heads = qkvg.reshape(*qkvg.shape[:-1], -1, head_dim)
    q, k = heads[..., :n_heads, :], heads[..., n_heads : n_heads + n_kv_heads, :]
    return [_norm(q, None, eps) * query_scale, _norm(k, None, eps)]


def qk_norm_rope(qkvg: mx.array, *, rope_base: float, offset: Any, **norms: Any) -> list[mx.array]:
    """`qk_norm` followed by RoPE; an array of offsets has one per sequence."""

    def rotate(x: mx.array) -> mx.array:
        turned = mx.fast.rope(
            x.swapaxes(1, 2),
            norms["head_dim"],
            traditional=True,
            base=rope_base,
            scale=1.0,
            offset=offset,
        )
        return turned.swapaxes(1, 2)

    return [rotate(x) for x in qk_norm(qkvg, **norms)]


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    """Normalizes and gates ``[B, H, L, D]``; returns ``[B, L, H * D]``."""
    x = _norm(x, None, eps).swapaxes(1, 2)
    return x.reshape(gate.shape) * mx.sigmoid(gate)


def expert_routing(
    logits: mx.array,
    expert_bias: mx.array,
    *,
    top_k: int,
    multiplier: float,
    score_eps: float,
    route_scale: float,
) -> list[mx.array]:
    """The best experts of each token and their weights."""
    scores = mx.sigmoid(logits * multiplier)
    best = mx.argpartition(-(scores + expert_bias), kth=top_k - 1, axis=-1)[..., :top_k]
    chosen = mx.take_along_axis(scores, best, axis=-1)
    return [best, chosen / (chosen.sum(-1, keepdims=True) + score_eps) * route_scale]


def post_expert_norm_combine(
    experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float
) -> mx.array:
    """The weighted sum of normalized expert outputs."""
    return (_norm(experts * norm_weight, None, eps) * weights[..., None]).sum(-2)


def norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: nn.RMSNorm | None,
) -> tuple[mx.array, mx.array | None]:
    """The residual stream with a branch added, and its norm for the next branch."""
    if post_weight is not None:
        branch = branch * post_weight
    stream = alpha * stream + beta * _norm(branch, None, post_eps)
    return stream, None if next_norm is None else next_norm(stream)


_STAND_INS: dict[str, dict[str, Any]] = {
    "bitnet": {"BitLinear": nn.Linear},
    "muse_spark": {
        function.__name__: function
        for function in (
            qk_norm,
            qk_norm_rope,
            rms_norm_sigmoid_gate,
            expert_routing,
            post_expert_norm_combine,
            norm_add_norm,
        )
    },
}


@contextmanager
def standing_in(module: str) -> Iterator[None]:
    """Replaces the Metal-only layers of a family; does nothing for other families."""
    if module not in _STAND_INS:
        yield
        return
    with mock.patch.multiple(f"mlx_lm.models.{module}", **_STAND_INS[module]):
        yield
