"""Logits for the rows that are sampled from, and for no others.

A step has a row for every token, but only the last row of a sequence is sampled from, and the
output projection is the widest layer of most models. The rows are gathered just before it,
whichever module it is: `lm_head`, or the embedding's `as_linear` where the two are tied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.model.overrides import overridden
from mlx_paged.model.step import StepContext


@dataclass(frozen=True)
class OutputProjection:
    """The module that makes logits of hidden states, and its method that does."""

    module: nn.Module
    method: str  # "__call__" or "as_linear"


class OutputRows:
    """Makes a model's logits be those of `step.logit_rows` only, while a step is built.

    The module keeps its place and its parameters; only its class changes, to a subclass of itself.

    Args:
        projection: None for a model that makes its logits without a module: then all rows are
            projected, and selected afterwards.
    """

    def __init__(self, projection: OutputProjection | None, context: StepContext) -> None:
        self._context = context
        self._selected_before = projection is not None
        if projection is not None:
            self._override(projection.module, projection.method)

    def finish(self, logits: mx.array) -> mx.array:
        """``[num_samples, vocab_size]`` of what the model returned."""
        logits = logits.reshape(-1, logits.shape[-1])
        return logits if self._selected_before else logits[self._context.step.logit_rows]

    def _override(self, module: Any, method: str) -> None:
        base, context = type(module), self._context

        def project_selected(self: Any, x: mx.array) -> mx.array:
            if context.active:
                x = x.reshape(-1, 1, x.shape[-1])[context.step.logit_rows]
            return getattr(base, method)(self, x)  # (looked up now: layer_ops rebinds it)

        module.__class__ = overridden(base, method, project_selected)
