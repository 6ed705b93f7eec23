"""Taps: record hidden states of a model while a step is built, for drafters that read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.model.caches import StepContext
from mlx_paged.model.patches import OutputRows, overridden

#: The place of the states that the output projection reads, after the final norm.
FINAL = -1


class Taps:
    """Records hidden states of all rows of a step.

    Args:
        model: An mlx-lm model; the classes of its layers are changed.
        places: Layers whose inputs are recorded, by number from 0. The number of layers means the
            output of the last one, and `FINAL` its output after the final norm.

    Raises:
        ValueError: The model has no such layer.
    """

    def __init__(
        self,
        model: nn.Module,
        places: Sequence[int],
        *,
        context: StepContext,
        output_rows: OutputRows,
    ) -> None:
        layers = getattr(model, "layers", None)
        if not isinstance(layers, list):
            if set(places) != {FINAL}:
                raise ValueError("the model has no list of layers to read hidden states from")
            layers = []
        wrong = [place for place in places if not FINAL <= place <= len(layers)]
        if wrong:
            raise ValueError(f"the model has {len(layers)} layers, and none before {wrong[0]}")
        self._context = context
        self._places = tuple(places)
        self._found: dict[int, mx.array] = {}
        #: True if all rows of the last layer are needed.
        self.reads_end = FINAL in places or len(layers) in places
        for place in sorted(set(places) - {FINAL}):
            if place < len(layers):
                self._record_input(layers[place], place)
            else:
                self._record_output(layers[-1], place)
        if FINAL in places:
            output_rows.on_hidden = self._record_final

    def take(self) -> tuple[mx.array, ...]:
        """Returns the states of the step that was built, each ``[num_rows, hidden_size]``."""
        found = tuple(_rows(self._found[place]) for place in self._places)
        self._found.clear()
        return found

    def _record_final(self, x: mx.array) -> None:
        self._found[FINAL] = x

    def _record_input(self, layer: Any, place: int) -> None:
        base, taps = type(layer), self

        def call(self: Any, x: mx.array, *args: Any, **options: Any) -> Any:
            if taps._context.active:
                taps._found[place] = x
            return base.__call__(self, x, *args, **options)

        layer.__class__ = overridden(base, "__call__", call)

    def _record_output(self, layer: Any, place: int) -> None:
        base, taps = type(layer), self

        def call(self: Any, *args: Any, **options: Any) -> Any:
            result = base.__call__(self, *args, **options)
            if taps._context.active:
                taps._found[place] = result[0] if isinstance(result, tuple) else result
            return result

        layer.__class__ = overridden(base, "__call__", call)


def _rows(x: mx.array) -> mx.array:
    return x.reshape(-1, x.shape[-1])
