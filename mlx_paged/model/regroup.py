"""Runs recurrent layers of a flat step on equal-length groups of sequences.

A step has one batch row for each token. A recurrence runs along a sequence, so for the modules that
hold state the rows are cut into ``[num_seqs, length]`` groups, the module runs on each group with
the states of its sequences, and the results are put back in the order of the rows. Everything else
of the model (norms, projections outside of the module, experts) sees all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlx_paged.model.recurrent import RecurrentCache, SequenceGroup
from mlx_paged.model.step import StepContext


def regrouped(module: nn.Module, context: StepContext) -> Callable[..., Any]:
    """The `__call__` of a module that holds recurrent state, for the rows of a flat step."""
    base = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        caches = [a for a in (*args, *kwargs.values()) if isinstance(a, RecurrentCache)]
        if not context.active or not caches:
            return base.__call__(self, *args, **kwargs)
        step = context.step
        if step.states is None:
            raise RuntimeError("a step of a model with recurrent state came without state slots")
        [cache] = caches
        num_rows = step.plan.positions.shape[0]
        results = []
        for group in step.states.groups:
            with cache.grouped(group):
                result = base.__call__(
                    self,
                    *(_cut(a, group, num_rows) for a in args),
                    **{name: _cut(a, group, num_rows) for name, a in kwargs.items()},
                )
            results.append(tree_map(_as_rows, result))
        if len(results) == 1:
            return results[0]
        return tree_map(lambda *parts: mx.concatenate(parts)[step.states.order], *results)

    return call


def _as_rows(grouped: mx.array) -> mx.array:
    return grouped.reshape(grouped.shape[0] * grouped.shape[1], 1, *grouped.shape[2:])


def _cut(value: Any, group: SequenceGroup, num_rows: int) -> Any:
    """The rows of a group, as ``[num_seqs, length, ...]``; what has no rows is left alone."""
    if not isinstance(value, mx.array) or value.shape[:1] != (num_rows,):
        return value
    if group.rows is not None:
        value = value[group.rows]
    if value.ndim == 1:  # positions: a sequence begins at that of its first row
        return value[:: group.length]
    return value.reshape(group.num_seqs, group.length, *value.shape[2:])
