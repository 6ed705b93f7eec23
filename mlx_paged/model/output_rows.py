"""OutputRows: computes logits, or returns hidden states, only for the rows that a step samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.model.caches import StepContext
from mlx_paged.model.overrides import overridden


@dataclass(frozen=True)
class OutputProjection:
    """The module, and its method, that compute logits from hidden states."""

    module: nn.Module
    method: str  # "__call__" or "as_linear"


_PROJECTIONS = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)


class OutputRows:
    """Limits a model's logits to the rows of `step.logit_rows` while a step is built.

    A step has a row for every token, but only the last row of a sequence is sampled, and the output
    projection is the widest layer of most models. The rows are gathered just before it, whichever
    module that is: `lm_head`, or the embedding's `as_linear` if the two are tied.

    It can also return the hidden states of these rows (`keep_hidden_states`).

    Args:
        projection: None for a model whose logits come from no module; then all rows are projected,
            and selected afterwards.
    """

    def __init__(self, projection: OutputProjection | None, context: StepContext) -> None:
        self._context = context
        self._projection = projection
        self._keeps_hidden = False
        self._hidden: mx.array | None = None  # of the forward that is being built
        #: Called with the hidden states of all rows; see `model.taps`.
        self.on_hidden: Callable[[mx.array], None] | None = None
        if projection is not None:
            self._override(projection.module, projection.method)

    @property
    def module(self) -> nn.Module | None:
        """The module that makes the logits; None if no module does."""
        return None if self._projection is None else self._projection.module

    @property
    def projection(self) -> OutputProjection | None:
        """The module that makes the logits."""
        return self._projection

    @property
    def keeps_hidden(self) -> bool:
        """True if the rows are hidden states instead of logits."""
        return self._keeps_hidden

    def keep_hidden_states(self) -> int:
        """Returns the inputs of the projection from now on, instead of logits.

        Returns:
            The size of the hidden states.

        Raises:
            ValueError: The projection's inputs may not be the model's last hidden states.
        """
        module = None if self._projection is None else self._projection.module
        if not isinstance(module, _PROJECTIONS):
            made = "no module" if module is None else f"a module of type {type(module).__name__}"
            raise ValueError(
                f"its logits are made by {made}, and hidden states are taken only from models that "
                "make them by a linear layer or by their embedding"
            )
        self._keeps_hidden = True
        width = int(module.weight.shape[-1])
        # A quantized one packs its weights into uint32.
        return width * 32 // module.bits if "scales" in module else width

    def weights_of(self, token_ids: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Returns the projection's weights for some tokens. Call `keep_hidden_states` first.

        Returns:
            ``[len(token_ids), hidden_size]`` weights and ``[len(token_ids)]`` biases, float32.
        """
        assert self._projection is not None and self._keeps_hidden
        module, at = self._projection.module, mx.array(list(token_ids))
        weights = module["weight"][at]
        if "scales" in module:
            biases = module["biases"][at] if module.get("biases") is not None else None
            weights = mx.dequantize(
                weights,
                module["scales"][at],
                biases,
                group_size=module.group_size,
                bits=module.bits,
                mode=module.mode,
            )
        bias = module["bias"][at] if "bias" in module else mx.zeros((len(token_ids),))
        return weights.astype(mx.float32), bias.astype(mx.float32)

    def finish(self, logits: mx.array) -> mx.array:
        """Selects ``[num_samples, vocab_size]`` or ``[.., hidden_size]`` of the model's output."""
        if self._keeps_hidden:
            hidden, self._hidden = self._hidden, None
            assert hidden is not None, "the forward did not reach the output projection"
            return hidden.reshape(-1, hidden.shape[-1])
        logits = logits.reshape(-1, logits.shape[-1])
        return logits if self._projection is not None else self._context.step.select(logits)

    def _override(self, module: Any, method: str) -> None:
        base, context, rows = type(module), self._context, self

        def project_selected(self: Any, x: mx.array) -> mx.array:
            if context.active:
                if rows.on_hidden is not None:
                    rows.on_hidden(x)
                x = context.step.select(x.reshape(-1, 1, x.shape[-1]))
                if rows._keeps_hidden:
                    rows._hidden = x
                    # A placeholder for the rest of the model; nothing evaluates it.
                    return mx.zeros((*x.shape[:-1], self.weight.shape[0]), x.dtype)
            return getattr(base, method)(self, x)  # Looked up now, because `install` rebinds it.

        module.__class__ = overridden(base, method, project_selected)
