"""top-k, top-p and min-p: the least logit that a row may still sample.

Each of the three keeps the tokens above a threshold, so together they are one: the largest.
Tokens with the same logit are kept or left out together. That makes a row's choice independent of
its batch (a partition breaks ties as it likes), and half-precision models have many.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.engine.sampling.rows import FloatArray, SamplingRow, SamplingRows

# Up to this share of the vocabulary, finding the k largest and sorting those beats sorting all.
_PARTITION_SHARE = 8


def apply_filters(logits: mx.array, rows: Sequence[SamplingRow] | SamplingRows) -> mx.array:
    """Sets the logits of tokens that must not be sampled to -inf.

    min_p comes first, then top_k, then top_p on what is left, renormalised, as in vLLM.

    Args:
        logits: ``[num_rows, vocab_size]`` float32 after temperature, the largest of each row 0.
        rows: one for each row of `logits`.
    """
    rows, vocab_size = SamplingRows.of(rows), logits.shape[1]
    with np.errstate(divide="ignore"):
        floor = np.log(rows.min_p.astype(np.float32))
    # A row's way depends on its own settings alone, or its batch would change its rounding.
    limited = (rows.top_k > 0) & (rows.top_k < vocab_size)
    is_few = (rows.top_k > 0) & (rows.top_k <= vocab_size // _PARTITION_SHARE)
    # Where no top_k helps, a CPU need not sort (MLX's own sort there is a scalar loop).
    is_nucleus = ~limited & (rows.top_p < 1) & (mx.default_device() == mx.cpu)
    is_many = ~is_few & ~is_nucleus & ((rows.top_p < 1) | limited)
    ways = (
        (is_few, _of_the_largest),
        (is_nucleus, _of_the_nucleus),
        (is_many, _of_all_in_order),
    )
    if not any(members.any() for members, _ in ways) and np.isneginf(floor).all():
        return logits
    thresholds = mx.array(floor)
    for members, way in ways:
        group = np.flatnonzero(members)
        if len(group) == len(rows):
            thresholds = way(logits, rows, floor)
        elif len(group):
            at = mx.array(group.astype(np.int32))
            thresholds[at] = way(logits[at], rows.only(group), floor[group])
    return mx.where(logits < thresholds[:, None], -mx.inf, logits)


def _of_the_largest(logits: mx.array, rows: SamplingRows, floor: FloatArray) -> mx.array:
    return _thresholds(logits, rows, floor, int(rows.top_k.max()))


def _of_all_in_order(logits: mx.array, rows: SamplingRows, floor: FloatArray) -> mx.array:
    return _thresholds(logits, rows, floor, logits.shape[1])


def _of_the_nucleus(logits: mx.array, rows: SamplingRows, floor: FloatArray) -> mx.array:
    top_p = mx.array(rows.top_p.astype(np.float32))
    return ops.nucleus_thresholds(logits, mx.array(floor), top_p)


def _thresholds(x: mx.array, rows: SamplingRows, floors: FloatArray, largest: int) -> mx.array:
    """``[num_rows]`` least logits to keep, from the `largest` likeliest tokens of each row."""
    num_rows, vocab_size = x.shape
    ordered = -mx.sort(-(mx.topk(x, largest) if largest < vocab_size else x), axis=-1)
    floor = mx.array(floors)
    kth = mx.full((num_rows,), -mx.inf)
    limited = (rows.top_k > 0) & (rows.top_k < vocab_size)
    if limited.any():
        last = mx.array(np.where(limited, rows.top_k - 1, 0).astype(np.int32))
        kth = mx.take_along_axis(ordered, last[:, None], axis=-1).squeeze(1)
        kth = mx.where(mx.array(limited), kth, -mx.inf)
    kept = mx.maximum(floor, kth)
    if (rows.top_p == 1).all():
        return kept
    # The mass above each token. Those that tie with the k-th are counted in the whole row: how
    # many of them are among the `largest` depends on the other rows.
    above_kth = (ordered >= kept[:, None]) & (ordered > kth[:, None])
    mass = mx.cumsum(mx.where(above_kth, mx.exp(ordered), 0.0), axis=-1)
    mass_above = mx.concatenate([mx.zeros((num_rows, 1)), mass[:, :-1]], axis=-1)
    num_ties = (x == kth[:, None]).sum(axis=-1)
    ties = mx.where(kth >= floor, num_ties * mx.exp(kth), 0.0)
    top_p = mx.array(rows.top_p.astype(np.float32))
    wanted = top_p * (mass[:, -1] + ties)
    inside = (mass_above < wanted[:, None]) & (ordered >= kept[:, None])
    least = mx.maximum(inside.sum(axis=-1) - 1, 0)
    nucleus = mx.take_along_axis(ordered, least[:, None], axis=-1).squeeze(1)
    return mx.where(top_p < 1, mx.maximum(nucleus, kept), kept)
