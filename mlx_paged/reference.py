"""The oracle: the native operations in float64 NumPy, written only from their contracts.

`mlx-paged doctor`, `mlx-paged bench kernels` and the tests compare against it. It does not use MLX.

The token at position p of a sequence is in block ``table[p // block_size]`` at offset
``p % block_size``. The query rows of a step are the last ``query_len`` tokens of each sequence,
concatenated. A row sees all tokens up to and including itself. With bounds, it also sees every
token from its first bound through its last. A token that a row does not see may be NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

# Maximum error of a row relative to the row's norm, by dtype.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


def relative_errors(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Returns the error of each row along axis 0, relative to the row's norm. NaN counts as
    infinite.

    Args:
        actual: Same shape as `expected`.
    """
    flat = (len(expected), int(np.prod(expected.shape[1:])))
    errors = np.linalg.norm((actual - expected).reshape(flat), axis=1)
    norms = np.linalg.norm(expected.reshape(flat), axis=1)
    return np.nan_to_num(errors / np.maximum(norms, 1e-30), nan=np.inf, posinf=np.inf)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest row error; infinite for a wrong shape."""
    if actual.shape != expected.shape:
        return math.inf
    return float(np.max(relative_errors(actual, expected), initial=0.0))


# --- Pools ----------------------------------------------------------------------------------------


def write_kv(pool: np.ndarray, rows: np.ndarray, slots: Sequence[int]) -> np.ndarray:
    """Returns a copy of `pool` with row i at slot ``slots[i]``; -1 skips the row."""
    written = pool.copy()
    for row, slot in zip(rows, slots):
        if slot != -1:
            written[slot // pool.shape[1], slot % pool.shape[1]] = row
    return written


def copy_blocks(pool: np.ndarray, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns a copy of `pool` with each block ``src`` copied to ``dst``."""
    copied = pool.copy()
    for src, dst in pairs:
        copied[dst] = pool[src]
    return copied


def tokens_of(pool: np.ndarray, table: Sequence[int], context_len: int) -> np.ndarray:
    """Returns a sequence's tokens in order, ``[context_len, num_kv_heads, head_dim]``."""
    block_size = pool.shape[1]
    tokens = [pool[table[p // block_size], p % block_size] for p in range(context_len)]
    return np.stack(tokens) if tokens else pool[:0, 0]


def gather_kv(
    pool: np.ndarray,
    tables: Sequence[Sequence[int]],
    context_lens: Sequence[int],
    max_context_len: int,
) -> np.ndarray:
    """``[num_seqs, num_kv_heads, max_context_len, head_dim]``, zero past each context."""
    dense = np.zeros((len(tables), pool.shape[2], max_context_len, pool.shape[3]), pool.dtype)
    for i, (table, context_len) in enumerate(zip(tables, context_lens)):
        length = min(context_len, max_context_len)
        dense[i, :, :length] = tokens_of(pool, table, length).swapaxes(0, 1)
    return dense


# --- Attention ------------------------------------------------------------------------------------


def paged_attention(
    queries: np.ndarray,
    key_pool: np.ndarray,
    value_pool: np.ndarray,
    tables: Sequence[Sequence[int]],
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    bounds: np.ndarray | None = None,
    **options: Any,
) -> np.ndarray:
    """``[num_rows, num_q_heads, value_dim]`` float64.

    Args:
        queries: ``[num_rows, num_q_heads, key_dim]``.
        bounds: ``[2, num_rows]``.
        options: Those of `attention`.
    """
    parts = [np.zeros((0, queries.shape[1], value_pool.shape[3]))]
    row = 0
    for table, context_len, query_len in zip(tables, context_lens, query_lens):
        rows = slice(row, row + query_len)
        parts.append(
            attention(
                queries[rows],
                tokens_of(key_pool, table, context_len),
                tokens_of(value_pool, table, context_len),
                bounds=None if bounds is None else bounds[:, rows],
                **options,
            )
        )
        row += query_len
    return np.concatenate(parts)


def attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    bounds: np.ndarray | None = None,
) -> np.ndarray:
    """``[num_rows, num_q_heads, value_dim]`` float64 for the last `num_rows` tokens of a sequence.

    Args:
        queries: ``[num_rows, num_q_heads, key_dim]``.
        keys: ``[context_len, num_kv_heads, key_dim]``; values likewise.
    """
    num_rows, context_len = len(queries), len(keys)
    if num_rows == 0:
        return np.zeros((0, queries.shape[1], values.shape[2]))
    position = np.arange(context_len - num_rows, context_len)[:, None]
    token = np.arange(context_len)
    seen = token <= position
    if window is not None:
        seen &= token > position - window
    if bounds is not None:
        seen |= (token >= bounds[0][:, None]) & (token <= bounds[1][:, None])
    used = seen.any(axis=0)
    token, seen, keys, values = token[used], seen[:, used], keys[used], values[used]
    queries, keys, values = (a.astype(np.float64) for a in (queries, keys, values))
    group = queries.shape[1] // keys.shape[1]
    out = np.empty((num_rows, queries.shape[1], values.shape[2]))
    for head in range(queries.shape[1]):
        scores = scale * (queries[:, head] @ keys[:, head // group].T)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if alibi_slopes is not None:
            scores = scores + np.float64(alibi_slopes[head]) * (token - position)
        scores = np.where(seen, scores, -np.inf)
        if sinks is not None:
            sink = np.full((num_rows, 1), np.float64(sinks[head]))
            scores = np.concatenate([scores, sink], axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[:, head] = _mixed(weights[:, : len(values)], values[:, head // group], seen)
    return out


def _mixed(weights: np.ndarray, values: np.ndarray, seen: np.ndarray) -> np.ndarray:
    if np.isfinite(values).all():
        return weights @ values
    # One row at a time: 0 times a NaN that only another row sees would be NaN.
    return np.stack([row[mine] @ values[mine] for row, mine in zip(weights, seen)])


# --- Layers ---------------------------------------------------------------------------------------


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotates dim i with dim i + dim / 2; `cos` and `sin` have half of the last axis of `x`."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm over the last axis."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def lora(
    base: np.ndarray, x: np.ndarray, adapters: Sequence[int], a: np.ndarray, b: np.ndarray
) -> np.ndarray:
    """See `ops.lora`."""
    out = base.copy()
    for i, adapter in enumerate(adapters):
        if 0 <= adapter < len(a):
            out[i] += (x[i] @ a[adapter].T) @ b[adapter]
    return out


def expert_lora(
    base: np.ndarray,
    x: np.ndarray,
    adapters: Sequence[int],
    experts: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
) -> np.ndarray:
    """See `ops.expert_lora`; for rows of ``[num_rows, top_k, 1, n]``."""
    out = base.copy()
    for row, adapter in enumerate(adapters):
        for i, expert in enumerate(experts[row]):
            if 0 <= adapter < len(a) and 0 <= expert < a.shape[1]:
                vector = x[row, i % x.shape[1], 0]
                out[row, i, 0] += (vector @ a[adapter, expert].T) @ b[adapter, expert]
    return out


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    """Layer norm over the last axis."""
    centered = x - x.mean(axis=-1, keepdims=True)
    return rms_norm(centered, weight, eps) + bias


def silu_mul(gate: np.ndarray, x: np.ndarray) -> np.ndarray:
    """``gate * sigmoid(gate) * x``."""
    return gate / (1 + np.exp(-gate)) * x


def gelu(x: np.ndarray, approximation: str = "none") -> np.ndarray:
    """GELU with the approximations of `ops.gelu`: "none", "tanh" or "fast"."""
    if approximation == "tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    if approximation == "fast":
        return x / (1 + np.exp(-1.702 * x))
    return x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))) / 2


def clipped_swiglu(gate: np.ndarray, x: np.ndarray, *, alpha: float, limit: float) -> np.ndarray:
    """gpt-oss's SwiGLU: clips the gate from above, and `x` on both sides."""
    gate = np.minimum(gate, limit)
    return gate / (1 + np.exp(-alpha * gate)) * (np.clip(x, -limit, limit) + 1)


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | float = 0.0) -> np.ndarray:
    """``x @ weight.T + bias`` with ``[..., k]`` and ``[n, k]``."""
    return x @ weight.T + bias


# --- Sampling -------------------------------------------------------------------------------------


def draw_tokens(scaled: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns the token of each row with the largest sum of its logit and Gumbel noise.

    Args:
        scaled: ``[num_rows, vocab_size]``; -inf is not drawn.
        keys: ``[num_rows, 2]`` uint32, of Threefry-2x32 with 20 rounds.
    """
    size = scaled.shape[1]
    pair_stride = size - size // 2
    first = np.arange(pair_stride, dtype=np.uint32)
    second = np.where(first < size // 2, first + np.uint32(pair_stride), np.uint32(0))
    key = [*keys.T[:, :, None], keys[:, :1] ^ keys[:, 1:] ^ np.uint32(0x1BD11BDA)]
    first, second = first + key[0], second + key[1]
    for i in range(1, 6):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[(i - 1) % 2]:
            first = first + second
            second = (second << np.uint32(turn) | second >> np.uint32(32 - turn)) ^ first
        first = first + key[i % 3]
        second = second + key[(i + 1) % 3] + np.uint32(i)
    bits = np.concatenate([first, second[:, : size // 2]], axis=1)
    uniform = np.minimum(bits.astype(np.float32) / np.float32(2**32), np.float32(1 - 2**-24))
    with np.errstate(divide="ignore"):
        noise = -np.log(-np.log(uniform.astype(np.float64)))
    return np.argmax(scaled + noise, axis=1)
