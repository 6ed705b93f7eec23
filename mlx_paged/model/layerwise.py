"""Submits a step with prompts to an NVIDIA GPU layer by layer, while the host builds the rest.

A step of decodes is one operation, built while the previous step runs, so it does not need this.
Building a step with prompts takes longer, and the results of its layers take memory until they have
run. In large steps the host therefore waits for earlier layers while it builds later ones. The
layers that it may be ahead keep the GPU busy while it reads the previous step's tokens, sends them,
and plans the next step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import mlx.core as mx

LARGE_STEP = 2048  # rows
# MLX waits for the device when more command buffers than this are in flight.
MAX_PARTS = 8
# In smaller steps, this many layers keep a GPU busy longer than the host takes to build as many.
_LAYERS_OF_PART = 4


@dataclass(frozen=True)
class LayerwiseSubmit:
    """Submits a step in parts.

    Attributes:
        num_layers: Layers of a part.
        max_parts: Maximum parts in flight besides the one being built; None means no limit.
    """

    num_layers: int
    max_parts: int | None = None
    _in_flight: deque[mx.array] = field(default_factory=deque, init=False, compare=False)

    def layer_built(self, layer: int, pool: mx.array, rows: mx.array) -> None:
        """Submits all layers up to `layer` if that ends a part.

        Args:
            pool: The pool that it has written.
            rows: The rows written to it. A pool that is kept alive is not written in place.
        """
        if layer % self.num_layers:
            return
        mx.async_eval(pool)  # type: ignore[no-untyped-call]
        if self.max_parts is None:
            return
        self._in_flight.append(rows)
        if len(self._in_flight) > self.max_parts:
            mx.eval(self._in_flight.popleft())

    def attention_built(self, layer: int, out: mx.array) -> None:
        """Submits the attention of the first layer, because the device would otherwise idle until
        the rest of the layer is built."""
        if layer == 0:
            mx.async_eval(out)  # type: ignore[no-untyped-call]


def layerwise_submit(num_rows: int, parts_ahead: int) -> LayerwiseSubmit:
    """Returns how to submit a step with prompts.

    Args:
        num_rows: Rows of the step.
        parts_ahead: Layers of a large step that the host may be ahead of the device.
    """
    if num_rows < LARGE_STEP:
        return LayerwiseSubmit(_LAYERS_OF_PART)
    return LayerwiseSubmit(1, max_parts=parts_ahead)
