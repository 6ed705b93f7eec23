"""Taps: record hidden states of a model while a step is built, for drafters that read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.model.caches import StepContext
from mlx_paged.model.output_rows import OutputRows
from mlx_paged.model.overrides import overridden

#: Layer id of the states after the final norm, which the output projection reads.
FINAL = -1


class Taps:
    """Records hidden states of all rows of a step.

    Args:
        model: An mlx-lm model; the classes of its layers are changed.
        layer_ids: Indices of the layers whose inputs are recorded. The number of layers stands for
            the output of the last one, and `FINAL` for its output after the final norm.

    Raises:
        ValueError: The model has no such layer.
    """

    def __init__(
        self,
        model: nn.Module,
        layer_ids: Sequence[int],
        *,
        context: StepContext,
        output_rows: OutputRows,
    ) -> None:
        layers = getattr(model, "layers", None)
        if not isinstance(layers, list):
            if set(layer_ids) != {FINAL}:
                raise ValueError("the model has no list of layers to read hidden states from")
            layers = []
        wrong = [layer_id for layer_id in layer_ids if not FINAL <= layer_id <= len(layers)]
        if wrong:
            raise ValueError(f"the model has {len(layers)} layers, and none before {wrong[0]}")
        self._context = context
        self._layer_ids = tuple(layer_ids)
        self._found: dict[int, mx.array] = {}
        #: True if all rows of the last layer are needed.
        self.reads_end = FINAL in layer_ids or len(layers) in layer_ids
        for layer_id in sorted(set(layer_ids) - {FINAL}):
            if layer_id < len(layers):
                self._record_input(layers[layer_id], layer_id)
            else:
                self._record_output(layers[-1], layer_id)
        if FINAL in layer_ids:
            output_rows.on_hidden = self._record_final

    def take(self) -> tuple[mx.array, ...]:
        """Returns the states of the step that was built, each ``[num_rows, hidden_size]``."""
        found = tuple(_rows(self._found[layer_id]) for layer_id in self._layer_ids)
        self._found.clear()
        return found

    def _record_final(self, x: mx.array) -> None:
        self._found[FINAL] = x

    def _record_input(self, layer: Any, layer_id: int) -> None:
        base, taps = type(layer), self

        def call(self: Any, x: mx.array, *args: Any, **options: Any) -> Any:
            if taps._context.active:
                taps._found[layer_id] = x
            return base.__call__(self, x, *args, **options)

        layer.__class__ = overridden(base, "__call__", call)

    def _record_output(self, layer: Any, layer_id: int) -> None:
        base, taps = type(layer), self

        def call(self: Any, *args: Any, **options: Any) -> Any:
            result = base.__call__(self, *args, **options)
            if taps._context.active:
                taps._found[layer_id] = result[0] if isinstance(result, tuple) else result
            return result

        layer.__class__ = overridden(base, "__call__", call)


def _rows(x: mx.array) -> mx.array:
    return x.reshape(-1, x.shape[-1])
