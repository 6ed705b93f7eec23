"""Builds the input tokens of a step. The previous step may still be sampling some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.core import StepBatch


class StepTokens(Protocol):
    """A step whose tokens the next one may use.

    Attributes:
        tokens: ``[num_sampled]`` int32.
    """

    @property
    def tokens(self) -> mx.array: ...


@dataclass(frozen=True)
class KnownTokens:
    """Tokens of a step that has been read, as inputs of the next step.

    Attributes:
        tokens: ``[num_sampled]`` int32.
        reported: The same.
    """

    tokens: mx.array
    reported: mx.array


def input_tokens(
    batch: StepBatch,
    begins: np.ndarray,
    previous: StepTokens | None,
    num_more: int = 0,
    *,
    stays: bool = False,
) -> mx.array:
    """Returns the input tokens ``[num_rows]`` int32. Tokens in flight stay on the device.

    Args:
        begins: First row of each sequence.
        num_more: Padding rows at the end.
        stays: See `ops.upload`; used if all tokens are known.
    """
    known = np.frombuffer(batch.token_ids, dtype=np.uint32).astype(np.int32)
    if num_more:
        known = np.concatenate([known, np.zeros(num_more, dtype=np.int32)])
    num_known = batch.input_from.count(-1)
    if num_known == len(batch.seq_ids):
        return ops.upload(known, stays=stays)[0]
    assert previous is not None, "a sequence awaits a token but no step is in flight"
    input_from = np.frombuffer(batch.input_from, dtype=np.int32)
    if num_known == 0:
        num_rows = len(input_from) + num_more
        if previous.tokens.size == num_rows and np.array_equal(
            input_from, np.arange(len(input_from))
        ):
            return previous.tokens  # the same sequences in the same order, and any padding
        padded = np.concatenate([input_from, np.zeros(num_more, dtype=np.int32)])
        return previous.tokens[ops.upload(padded)[0]]
    source = np.full(len(known), -1, dtype=np.int32)
    is_awaited = input_from >= 0
    source[begins[is_awaited]] = input_from[is_awaited]
    places, tokens = ops.upload(source, known)
    return mx.where(places < 0, tokens, previous.tokens[mx.maximum(places, 0)])
