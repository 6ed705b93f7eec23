"""Attention of encoders on the CPU.

MLX's CPU backend computes one exponential at a time, in one thread. Here, attention is the paged
kernel over blocks made from keys and values, with every position visible to every row.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.model.plan import build_plan

_BLOCK = 64
# Fewer rows than this are a prompt's tokens or a resampler's, not worth a plan.
_MIN_ROWS = 16
_MAX_WIDTH = 256  # of a head, which is padded with zeros to a multiple of eight


class TowerOps:
    """Replacements while one encoder is built; all its layers share plans."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, int], ops.AttentionPlan] = {}

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, scale: float, more: dict[str, Any]
    ) -> mx.array | None:
        """Computes ``mx.fast.scaled_dot_product_attention`` of ``[batch, heads, rows, width]``;
        None if it is not supported: it needs equal numbers of rows, and no mask."""
        if any(value is not None for value in more.values()) or not q.ndim == k.ndim == v.ndim == 4:
            return None
        batch, heads, rows, width = q.shape
        same = k.shape == v.shape and k.shape[0] == batch and k.shape[2:] == (rows, width)
        if not (
            same
            and heads % k.shape[1] == 0
            and rows >= _MIN_ROWS
            and width <= _MAX_WIDTH
            and q.dtype == k.dtype == v.dtype == mx.float32
        ):
            return None
        padded = -(-width // 8) * 8
        queries = _filled(q.transpose(0, 2, 1, 3), 0, padded - width)
        keys, values = (_blocks(each, padded - width) for each in (k, v))
        plan = self._plans.get((batch, rows))
        if plan is None:
            plan = self._plans[batch, rows] = _plan(batch, rows)
        out = ops.paged_attention(
            queries.reshape(batch * rows, heads, padded), keys, values, plan, scale=scale
        )
        out = out.reshape(batch, rows, heads, padded)[..., :width]
        return out.transpose(0, 2, 1, 3)


def _blocks(array: mx.array, columns: int) -> mx.array:
    """``[batch, heads, rows, width]`` -> ``[blocks, _BLOCK, heads, width + columns]``."""
    _, heads, rows, width = array.shape
    filled = _filled(array.transpose(0, 2, 1, 3), -rows % _BLOCK, columns)
    return mx.contiguous(filled.reshape(-1, _BLOCK, heads, width + columns))


def _filled(array: mx.array, rows: int, columns: int) -> mx.array:
    if not rows and not columns:
        return array
    return mx.pad(array, [(0, 0), (0, rows), (0, 0), (0, columns)])


def _plan(batch: int, rows: int) -> ops.AttentionPlan:
    """Plans attention in which every row of an image sees all of its rows."""
    per_item = -(-rows // _BLOCK)
    tables = np.arange(batch * per_item).reshape(batch, per_item).tolist()
    bounds = np.empty((2, batch * rows), dtype=np.int32)
    bounds[0], bounds[1] = 0, rows - 1
    lens = [rows] * batch
    return build_plan(tables, lens, lens, block_size=_BLOCK, bounds=bounds)
