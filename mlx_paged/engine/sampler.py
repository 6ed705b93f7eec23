"""Chooses the next token of every row, in one vectorised computation."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.engine.sampling.filters import apply_filters
from mlx_paged.engine.sampling.rows import SamplingRow

# A temperature this low is greedy, as in vLLM: dividing by it may overflow, and changes nothing
# otherwise.
_GREEDY_BELOW = 1e-5

__all__ = ["SamplingRow", "sample"]


def sample(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """Chooses a token for each row: temperature, then min-p, top-k and top-p, then the draw.

    Greedy rows cost an argmax; only the others are scaled, filtered and drawn.

    Args:
        logits: ``[num_rows, vocab_size]``, edited (`sampling.edits`).
        rows: one for each row of `logits`.

    Returns:
        ``[num_rows]`` int32 token ids.
    """
    temperature = np.array([row.temperature for row in rows], dtype=np.float32)
    drawn = [i for i, t in enumerate(temperature.tolist()) if t >= _GREEDY_BELOW]
    if len(drawn) == len(rows):
        return _draw(logits, rows, temperature)
    tokens = _argmax(logits)
    if len(drawn):
        at = mx.array(drawn)
        tokens[at] = _draw(logits[at], [rows[i] for i in drawn], temperature[drawn])
    return tokens


def _argmax(logits: mx.array) -> mx.array:
    if mx.default_device() == mx.cpu:  # where MLX's own is a scalar loop
        return ops.greedy_tokens(logits)[0]
    return mx.argmax(logits, axis=-1).astype(mx.int32)


def _draw(logits: mx.array, rows: Sequence[SamplingRow], temperature: np.ndarray) -> mx.array:
    logits = logits.astype(mx.float32)
    # The largest becomes 0: the filters then need no other reduction to know probabilities.
    logits = logits - logits.max(axis=-1, keepdims=True)
    logits = apply_filters(logits / mx.array(temperature)[:, None], rows)
    keys = np.array([(row.seed & 0xFFFFFFFF, row.position) for row in rows], dtype=np.uint32)
    return mx.vmap(_categorical)(logits, mx.array(keys)).astype(mx.int32)


def _categorical(logits: mx.array, key: mx.array) -> mx.array:
    return mx.random.categorical(logits, key=key)
