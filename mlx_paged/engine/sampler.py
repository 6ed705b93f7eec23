"""Chooses the next token of every row, in one vectorised computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

# A temperature this low is greedy: dividing by it may overflow, and changes nothing otherwise.
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class SamplingRow:
    """What the sampler needs to know of one row.

    Randomness is counter-based: it depends on `seed` and `position` alone, so a row's tokens do not
    depend on who shares its batch, nor on how its prompt was cut into chunks.
    """

    temperature: float
    seed: int  # any integer; its low 32 bits count
    position: int  # of the token to be chosen


def sample(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """Chooses a token for each row.

    Args:
        logits: ``[num_rows, vocab_size]``.
        rows: one for each row of `logits`.

    Returns:
        ``[num_rows]`` int32 token ids.
    """
    choice = mx.argmax(logits, axis=-1).astype(mx.int32)
    temperature = np.array([row.temperature for row in rows], dtype=np.float32)
    greedy = temperature < _GREEDY_BELOW
    if greedy.all():
        return choice
    keys = np.array([(row.seed & 0xFFFFFFFF, row.position) for row in rows], dtype=np.uint32)
    # Greedy rows take part with temperature 1 and are put back afterwards.
    scaled = logits.astype(mx.float32) / mx.array(np.where(greedy, 1, temperature))[:, None]
    sampled = mx.vmap(_categorical)(scaled, mx.array(keys)).astype(mx.int32)
    return mx.where(mx.array(greedy), choice, sampled)


def _categorical(logits: mx.array, key: mx.array) -> mx.array:
    return mx.random.categorical(logits, key=key)
