"""Chooses the next token of every row, in one vectorised computation."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.engine.sampling.filters import apply_filters
from mlx_paged.engine.sampling.rows import SamplingRow, SamplingRows

# A temperature this low is greedy, as in vLLM: dividing by it may overflow, and changes nothing
# otherwise.
_GREEDY_BELOW = 1e-5

__all__ = ["SamplingRow", "SamplingRows", "sample"]


def sample(logits: mx.array, rows: Sequence[SamplingRow] | SamplingRows) -> mx.array:
    """Chooses a token for each row: temperature, then min-p, top-k and top-p, then the draw.

    Greedy rows cost an argmax; only the others are scaled, filtered and drawn.

    Args:
        logits: ``[num_rows, vocab_size]``, edited (`sampling.edits`).
        rows: one for each row of `logits`.

    Returns:
        ``[num_rows]`` int32 token ids.
    """
    rows = SamplingRows.of(rows)
    drawn = np.flatnonzero(rows.temperature.astype(np.float64) >= _GREEDY_BELOW)
    if len(drawn) == len(rows):
        return _draw(logits, rows)
    tokens = _argmax(logits)
    if len(drawn):
        [at] = ops.upload(drawn.astype(np.int32))
        tokens[at] = _draw(logits[at], rows.only(drawn))
    return tokens


def _argmax(logits: mx.array) -> mx.array:
    if mx.default_device() == mx.cpu:  # where MLX's own is a scalar loop
        return ops.greedy_tokens(logits)[0]
    return mx.argmax(logits, axis=-1).astype(mx.int32)


def _draw(logits: mx.array, rows: SamplingRows) -> mx.array:
    logits = logits.astype(mx.float32)
    # The largest becomes 0: the filters then need no other reduction to know probabilities.
    logits = logits - logits.max(axis=-1, keepdims=True)
    temperature, keys = ops.upload(rows.temperature, np.stack([rows.seed, rows.position], axis=1))
    logits = apply_filters(logits / temperature[:, None], rows)
    return mx.vmap(_categorical)(logits, keys).astype(mx.int32)


def _categorical(logits: mx.array, key: mx.array) -> mx.array:
    return mx.random.categorical(logits, key=key)
