"""top-k, top-p and min-p: the least logit that a row may still sample.

Each of the three keeps the tokens above a threshold, so together they are one: the largest.
Tokens with the same logit are kept or left out together. That makes a row's choice independent of
its batch (a partition breaks ties as it likes), and half-precision models have many.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_paged.engine.sampling.rows import SamplingRow, SamplingRows

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
    few = np.flatnonzero(is_few)
    many = np.flatnonzero(~is_few & ((rows.top_p < 1) | limited))
    if not len(few) and not len(many) and np.isneginf(floor).all():
        return logits
    thresholds = mx.array(floor)
    for group in (few, many):
        if len(group):
            chosen = rows.only(group)
            largest = int(chosen.top_k.max()) if group is few else vocab_size
            found = _thresholds(logits, group, chosen, floor, largest)
            if len(group) == len(rows):
                thresholds = found
            else:
                thresholds[mx.array(group.astype(np.int32))] = found
    return mx.where(logits < thresholds[:, None], -mx.inf, logits)


def _thresholds(
    logits: mx.array,
    group: np.ndarray,
    rows: SamplingRows,
    all_floors: np.ndarray,
    largest: int,
) -> mx.array:
    """``[len(group)]`` least logits to keep, from the `largest` likeliest tokens of each row."""
    vocab_size = logits.shape[1]
    x = logits if len(group) == logits.shape[0] else logits[mx.array(group.astype(np.int32))]
    ordered = -mx.sort(-(mx.topk(x, largest) if largest < vocab_size else x), axis=-1)
    floor = mx.array(all_floors[group])
    kth = mx.full((len(group),), -mx.inf)
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
    mass_above = mx.concatenate([mx.zeros((len(group), 1)), mass[:, :-1]], axis=-1)
    num_ties = (x == kth[:, None]).sum(axis=-1)
    ties = mx.where(kth >= floor, num_ties * mx.exp(kth), 0.0)
    top_p = mx.array(rows.top_p.astype(np.float32))
    wanted = top_p * (mass[:, -1] + ties)
    inside = (mass_above < wanted[:, None]) & (ordered >= kept[:, None])
    least = mx.maximum(inside.sum(axis=-1) - 1, 0)
    nucleus = mx.take_along_axis(ordered, least[:, None], axis=-1).squeeze(1)
    return mx.where(top_p < 1, mx.maximum(nucleus, kept), kept)
