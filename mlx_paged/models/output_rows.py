"""Logits for the rows that are sampled from, and for no others.

A step has a row for every token, but only the last row of a sequence is sampled from, and the
output projection is the widest layer of most models. The rows are gathered just before it,
whichever module it is: `lm_head`, or the embedding's `as_linear` where the two are tied.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.attention.cache import StepContext
from mlx_paged.errors import UnsupportedModelError


def select_output_rows(model: nn.Module, context: StepContext) -> None:
    """Makes the model's output projection see `step.logit_rows` only, while a step is built.

    The module keeps its place and its parameters; only its class changes, to a subclass of itself.

    Raises:
        UnsupportedModelError: if the model has no output projection where mlx-lm's models keep it.
    """
    head = getattr(model, "lm_head", None)
    if isinstance(head, nn.Module):
        _override(head, "__call__", context)
        return
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if not hasattr(embedding, "as_linear"):
        raise UnsupportedModelError(
            str(getattr(model, "model_type", type(model).__name__)),
            "it has neither lm_head nor a tied model.embed_tokens",
        )
    _override(embedding, "as_linear", context)


def _override(module: Any, method: str, context: StepContext) -> None:
    base = type(module)
    project = getattr(base, method)

    def project_selected(self: Any, x: mx.array) -> mx.array:
        if context.active:
            x = x[context.step.logit_rows]
        return project(self, x)

    module.__class__ = type(base.__name__, (base,), {method: project_selected})
