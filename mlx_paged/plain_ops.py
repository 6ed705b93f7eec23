"""The operations of `ops` that have GPU kernels, in MLX's own operations.

They serve two purposes: calibration compares every kernel with them, and they replace kernels that
calibration rejected. They are slow, and a write copies its pool unless MLX can donate it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

# Rows of queries for which dense keys and values are gathered at once.
_ROWS = 16


def write_kv(
    key_pool: mx.array,
    value_pool: mx.array,
    keys: mx.array,
    values: mx.array,
    slot_mapping: mx.array,
) -> tuple[mx.array, mx.array]:
    """See `ops.write_kv`. Rows without a slot go to block 0, which is padding."""
    slots = mx.maximum(slot_mapping, 0)
    pools = []
    for pool, rows in ((key_pool, keys), (value_pool, values)):
        flat = pool.flatten(0, 1)
        flat[slots] = rows
        pools.append(flat.reshape(pool.shape))
    return pools[0], pools[1]


def lora(base: mx.array, x: mx.array, adapters: mx.array, a: mx.array, b: mx.array) -> mx.array:
    """See `ops.lora`."""
    num_rows = adapters.size
    exists = mx.logical_and(adapters >= 0, adapters < a.shape[0])
    chosen = mx.where(exists, adapters, 0)
    rows = x.reshape(num_rows, 1, -1).astype(mx.float32)
    down = rows @ mx.swapaxes(a[chosen], 1, 2).astype(mx.float32)
    added = down @ b[chosen].astype(mx.float32)
    total = base.astype(mx.float32) + added.reshape(base.shape)
    keeps = exists.reshape(-1, *[1] * (base.ndim - 1))
    return mx.where(keeps, total.astype(base.dtype), base)


def copy_blocks(pools: Sequence[mx.array], block_pairs: mx.array) -> list[mx.array]:
    """See `ops.copy_blocks`."""
    source, to = block_pairs[:, 0], block_pairs[:, 1]
    copied = []
    for pool in pools:
        after = mx.array(pool)
        after[to] = pool[source]
        copied.append(after)
    return copied


def gather_kv(
    key_pool: mx.array,
    value_pool: mx.array,
    block_tables: mx.array,
    context_lens: mx.array,
    max_context_len: int,
) -> tuple[mx.array, mx.array]:
    """See `ops.gather_kv`; for plain pools."""
    is_token = mx.arange(max_context_len) < context_lens[:, None]
    gathered = []
    for pool in (key_pool, value_pool):
        rows = pool[block_tables].flatten(1, 2)
        missing = max(0, max_context_len - rows.shape[1])
        rows = mx.pad(rows, [(0, 0), (0, missing), (0, 0), (0, 0)])[:, :max_context_len]
        rows = mx.where(is_token[:, :, None, None], rows, mx.array(0, rows.dtype))
        gathered.append(rows.transpose(0, 2, 1, 3))
    return gathered[0], gathered[1]


def paged_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    plan: Any,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    alibi_slopes: mx.array | None = None,
) -> mx.array:
    """See `ops.paged_attention`.

    Args:
        keys: Dense ``[num_seqs, num_kv_heads, max_context_len, key_dim]``, as `gather_kv` returns
            them.
        values: Like `keys`.
        plan: An `ops.AttentionPlan`.
    """
    num_rows, num_q_heads, _ = queries.shape
    num_seqs, num_kv_heads, length, _ = keys.shape
    group = num_q_heads // num_kv_heads
    bounds = plan.positions[None] if plan.bounds is None else plan.bounds
    sequence = (mx.arange(num_rows)[:, None] >= plan.query_starts[1:]).sum(axis=1)
    is_row = sequence < num_seqs
    sequence = mx.minimum(sequence, num_seqs - 1)
    token = mx.arange(length)
    keys, values = keys.astype(mx.float32), values.astype(mx.float32)
    parts = []
    for begin in range(0, num_rows, _ROWS):
        rows = slice(begin, begin + _ROWS)
        of_rows = sequence[rows]
        at = bounds[0, rows][:, None]
        visible = (token <= at) & is_row[rows][:, None]
        if window is not None:
            visible &= token > at - window
        if plan.bounds is not None:
            first, last = bounds[1, rows][:, None], bounds[2, rows][:, None]
            visible |= (token >= first) & (token <= last) & is_row[rows][:, None]
        shown = visible[:, None, None]  # [rows, 1, 1, length]
        q = queries[rows].astype(mx.float32) * scale
        q = q.reshape(-1, num_kv_heads, group, q.shape[-1])
        scores = q @ keys[of_rows].swapaxes(-1, -2)  # [rows, num_kv_heads, group, length]
        if softcap is not None:
            scores = mx.tanh(scores / softcap) * softcap
        if alibi_slopes is not None:
            slopes = alibi_slopes.reshape(num_kv_heads, group)[..., None]
            scores = scores + slopes * (token - at)[:, None, None]
        scores = mx.where(shown, scores, -mx.inf)
        largest = scores.max(axis=-1, keepdims=True)
        if sinks is not None:
            sink = sinks.astype(mx.float32).reshape(num_kv_heads, group)[..., None]
            largest = mx.maximum(largest, sink)
        largest = mx.where(largest == -mx.inf, 0.0, largest)
        weights = mx.exp(scores - largest)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + mx.exp(sink - largest)
        clean = mx.where(visible[:, None, :, None], values[of_rows], 0.0)
        out = (weights @ clean) / mx.where(total == 0, 1.0, total)
        parts.append(out.reshape(-1, num_q_heads, out.shape[-1]).astype(queries.dtype))
    return mx.concatenate(parts) if len(parts) > 1 else parts[0]


def greedy_tokens(logits: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """See `ops.greedy_tokens`."""
    tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
    has_nan = mx.isnan(logits).any(axis=-1)
    largest = mx.where(has_nan, mx.nan, logits.max(axis=-1).astype(mx.float32))
    return tokens, largest, mx.where(mx.isfinite(largest), tokens, -1)


def draw_tokens(
    logits: mx.array,
    tokens: mx.array,
    largest: mx.array,
    temperature: mx.array,
    keys: mx.array,
    thresholds: mx.array,
) -> mx.array:
    """See `ops.draw_tokens`."""
    is_drawn = temperature > 0
    scaled = logits.astype(mx.float32) - largest[:, None]
    scaled = scaled / mx.where(is_drawn, temperature, 1.0)[:, None]
    scaled = mx.where(scaled < thresholds[:, None], -mx.inf, scaled)
    drawn = mx.vmap(_categorical)(scaled, keys).astype(mx.int32)
    # The noise of a token is -inf once in 2**32: if no other is left, it is no likelier than any.
    chosen = mx.take_along_axis(scaled, drawn[:, None], axis=-1).squeeze(1)
    return mx.where(is_drawn & (chosen > -mx.inf), drawn, tokens)


def _categorical(logits: mx.array, key: mx.array) -> mx.array:
    return mx.random.categorical(logits, key=key)


def sampling_thresholds(
    logits: mx.array,
    largest: mx.array,
    temperature: mx.array,
    floors: mx.array,
    top_k: mx.array,
    top_p: mx.array,
) -> mx.array:
    """See `ops.sampling_thresholds`. Sorts each row, and sums probabilities in float32."""
    scaled = (logits.astype(mx.float32) - largest[:, None]) / temperature[:, None]
    ordered = -mx.sort(-scaled, axis=-1)

    def logit_at(index: mx.array) -> mx.array:
        return mx.take_along_axis(ordered, mx.maximum(index, 0)[:, None], axis=-1).squeeze(1)

    limited = (top_k > 0) & (top_k < logits.shape[1])
    kth = logit_at(mx.where(limited, top_k - 1, 0))
    kept = mx.where(limited, mx.maximum(floors, kth), floors)
    inside = ordered >= kept[:, None]
    mass = mx.where(inside, mx.exp(ordered), 0.0)
    above = mx.cumsum(mass, axis=-1, inclusive=False)
    inside &= above < (top_p * (above[:, -1] + mass[:, -1]))[:, None]
    nucleus = logit_at(inside.sum(axis=-1) - 1)
    return mx.where(top_p < 1, mx.maximum(nucleus, kept), kept)


def apply_token_bitmask(logits: mx.array, bitmask: mx.array, rows: mx.array) -> mx.array:
    """See `ops.apply_token_bitmask`."""
    words = bitmask.view(mx.uint32)
    bits = (words[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].astype(mx.bool_)
    own = logits[rows]
    keeps = allowed | mx.isnan(own) | (own == mx.inf)
    masked = mx.array(logits)
    masked[rows] = mx.where(keeps, own, mx.array(-mx.inf, logits.dtype))
    return masked


def edit_logits(
    logits: mx.array,
    rows: mx.array,
    factors: mx.array,
    entries: mx.array,
    values: mx.array,
    newest: mx.array,
) -> mx.array:
    """See `ops.edit_logits`."""
    row, source, begin, middle, end = np.array(rows).T
    last = mx.where(mx.array(source) < 0, -1, newest[mx.array(np.maximum(source, 0))])

    def entries_in(first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, mx.array]:
        """Returns the edited row of each entry, and the entries."""
        of = np.repeat(np.arange(len(first)), end - first)
        at = np.concatenate([np.arange(a, b) for a, b in zip(first, end)])
        return of, mx.array(at.astype(np.int32))

    of, at = entries_in(begin, middle)
    if len(of):
        after = entries[at, 1]
        applies = (after < 0) | (after == last[mx.array(of)])
        logits = logits.at[mx.array(row[of]), entries[at, 0]].add(
            mx.where(applies, values[at], 0.0)
        )
    of, at = entries_in(middle, end)
    # The newest token becomes an entry of its own. If its row already has the token, both entries
    # get the same count and write the same value.
    awaiting = np.flatnonzero(source >= 0)
    ids, counts, of_rows = entries[at, 0], entries[at, 1], mx.array(of)
    again = (ids == last[of_rows]).astype(mx.int32)
    before = mx.zeros(len(row), dtype=mx.int32).at[of_rows].add(again * counts)
    ids = mx.concatenate([ids, last[mx.array(awaiting)]])
    counts = mx.concatenate([counts + again, before[mx.array(awaiting)] + 1])
    of = np.concatenate([of, awaiting])
    if not len(of):
        return logits
    place = mx.array(row[of]), ids
    repetition, presence, frequency = factors[mx.array(of)].T
    found = logits[place]
    found = mx.where(found > 0, found / repetition, found * repetition)
    edited = mx.array(logits)
    edited[place] = found - frequency * counts - presence * (counts > 0)
    return edited
