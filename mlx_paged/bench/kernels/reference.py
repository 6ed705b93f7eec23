"""Expected results of the ops, in float64 NumPy, written from their contracts alone."""

from __future__ import annotations

import numpy as np

from mlx_paged.errors import MlxPagedError

# Largest error of a row, relative to the row's norm.
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}


class WrongResultError(MlxPagedError, AssertionError):
    """An op gave a wrong result: there is nothing to time.

    Attributes:
        case: op and shape.
        reason: what differs, and by how much.
    """

    def __init__(self, case: object, reason: str) -> None:
        super().__init__(f"{case} gave a wrong result: {reason}")
        self.case = case
        self.reason = reason


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest error of a row (all axes but the first), relative to the row's norm.

    NaN, or a wrong shape, is an infinite error.
    """
    if actual.shape != expected.shape:
        return float("inf")
    flat = (len(expected), -1)
    errors = np.linalg.norm((actual - expected).reshape(flat), axis=1)
    norms = np.linalg.norm(expected.reshape(flat), axis=1)
    worst = np.max(errors / np.maximum(norms, 1e-30), initial=0.0)
    return float("inf") if np.isnan(worst) else float(worst)


def attention(
    queries: np.ndarray,  # [rows, num_q_heads, dim] float64: of one sequence's last tokens
    keys: np.ndarray,  # [context, kv_heads, dim] float64
    values: np.ndarray,  # [context, kv_heads, dim] float64
    *,
    scale: float,
    window: int | None,
) -> np.ndarray:
    """``[rows, num_q_heads, dim]``: each row over the tokens up to and including itself."""
    rows, num_q_heads, _ = queries.shape
    context, kv_heads, dim = values.shape
    group = num_q_heads // kv_heads
    position = np.arange(context - rows, context)[:, None]
    token = np.arange(context)[None]
    seen = token <= position
    if window is not None:
        seen &= token > position - window
    out = np.empty((rows, num_q_heads, dim))
    for head in range(num_q_heads):
        kv = head // group
        scores = np.where(seen, scale * (queries[:, head] @ keys[:, kv].T), -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = (weights / weights.sum(axis=1, keepdims=True)) @ values[:, kv]
    return out


def rope(x: np.ndarray, positions: np.ndarray, base: float) -> np.ndarray:
    """``[rows, heads, dim]``: dim i turns with dim i + dim / 2."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * base ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [
            first * np.cos(angles) - second * np.sin(angles),
            first * np.sin(angles) + second * np.cos(angles),
        ],
        axis=-1,
    )


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Over the last axis."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def silu_mul(gate: np.ndarray, x: np.ndarray) -> np.ndarray:
    """``gate * sigmoid(gate) * x``."""
    return gate / (1 + np.exp(-gate)) * x
