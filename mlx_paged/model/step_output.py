"""StepOutput: the arrays that a step computes, and the signature of functions that build one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_paged.model.caches import Step

Pools = list[mx.array]


class Greedy(NamedTuple):
    """Greedy sampling of a step's logits; see `ops.greedy_tokens`."""

    tokens: mx.array  # [num_rows] int32
    largest: mx.array  # [num_rows] float32
    reported: mx.array  # [num_rows] int32, in memory that the host reads


class StepOutput(NamedTuple):
    """The arrays that a step computes, lazily."""

    logits: mx.array  # [len(logit_rows), vocab_size]
    pools: Pools  # handles after its writes; a GPU's executable returns the list from before it
    greedy: Greedy | None = None  # the choice from the logits, if the step computes it
    taps: Sequence[mx.array] = ()  # each [num_rows, hidden_size], see `model.taps`


# Tokens, the step and the pools' handles -> logits, the new handles and taps.
Forward = Callable[[mx.array, Step, Pools], StepOutput]
