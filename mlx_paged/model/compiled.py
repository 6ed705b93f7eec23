"""Decode steps as compiled graphs, one for each shape. (With CUDA.)

There a decode step of a small batch waits for the host, half of whose time is model code in Python.
`mx.compile` runs that code once for a shape and repeats the graph afterwards. Shapes repeat in
decoding: there are as many rows as in the step before, and the arrays of a plan grow in strides
(`plan.build_plan`). A shape is compiled when it occurs for the third time, so that model code has
run on real arrays before, and shapes that do not repeat cost nothing.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.model.caches import Step
from mlx_paged.model.media import MediaRows
from mlx_paged.ops import AttentionPlan

logger = logging.getLogger(__name__)

_MOST_GRAPHS = 32
_SEEN_BEFORE = 2
# (Decodes have no bounds.)
_PLAN_FIELDS = tuple(field.name for field in fields(AttentionPlan) if field.name != "bounds")

Pools = list[mx.array]
# Tokens, the step and the pools' handles -> logits and the new handles.
Forward = Callable[[mx.array, Step, Pools], tuple[mx.array, Pools]]
_Graph = Callable[[mx.array, list[mx.array], Pools], tuple[mx.array, Pools]]


class CompiledSteps:
    """Runs decode steps of shapes that repeat as compiled graphs.

    Args:
        forward: builds a step; a function of its arguments, but for the model's weights.
        enabled: false: none is compiled.
    """

    def __init__(self, forward: Forward, *, enabled: bool = True) -> None:
        self._forward = forward
        self._times: OrderedDict[object, int] = OrderedDict()  # times a shape occurred
        self._graphs: OrderedDict[object, _Graph] = OrderedDict()
        self._failed = not enabled

    def run(self, tokens: mx.array, step: Step, pools: Pools) -> tuple[mx.array, Pools]:
        """The step, compiled or not."""
        if self._failed or not _serves(tokens, step):
            return self._forward(tokens, step, pools)
        arrays = _arrays_of(step)
        has_rope = _has_rope_positions(step)
        shape = (tuple(step.plans), tokens.shape[0], has_rope, *(tuple(a.shape) for a in arrays))
        graph = self._graphs.get(shape)
        if graph is not None:
            self._graphs.move_to_end(shape)
            return graph(tokens, arrays, pools)
        self._times[shape] = times = self._times.pop(shape, 0) + 1
        if len(self._times) > 4 * _MOST_GRAPHS:
            self._times.popitem(last=False)
        if times <= _SEEN_BEFORE:
            return self._forward(tokens, step, pools)
        return self._compile(shape, tokens, step, arrays, pools)

    def _compile(
        self, shape: object, tokens: mx.array, step: Step, arrays: list[mx.array], pools: Pools
    ) -> tuple[mx.array, Pools]:
        reaches, has_rope = tuple(step.plans), _has_rope_positions(step)

        def forward(
            tokens: mx.array, arrays: list[mx.array], pools: Pools
        ) -> tuple[mx.array, Pools]:
            return self._forward(tokens, _step_of(arrays, reaches, has_rope), pools)

        graph = mx.compile(forward)
        try:
            result = graph(tokens, arrays, pools)
        except Exception:
            # Model code that reads array values cannot be traced; it runs uncompiled.
            logger.info("decode steps of this model are not compiled", exc_info=True)
            self._failed = True
            self._graphs.clear()
            return self._forward(tokens, step, pools)
        self._graphs[shape] = graph
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return result


def _serves(tokens: mx.array, step: Step) -> bool:
    """Whether a step is a decode of every sequence, and depends on arrays only."""
    return (
        ops.has_cuda()
        and step.states is None
        and step.prefill is None
        # (Features are as many as a step's pictures have rows: such a step does not repeat.)
        and (step.media is None or step.media.rows is None)
        and tokens.shape[0] == step.plan.context_lens.shape[0]
        and all(plan.bounds is None for plan in (step.plan, *step.plans.values()))
    )


def _arrays_of(step: Step) -> list[mx.array]:
    plans = (step.plan, *step.plans.values())
    arrays = [step.logit_rows, *(getattr(plan, name) for plan in plans for name in _PLAN_FIELDS)]
    if step.media is not None and step.media.rope_positions is not None:
        arrays.append(step.media.rope_positions)
    return arrays


def _has_rope_positions(step: Step) -> bool:
    return step.media is not None and step.media.rope_positions is not None


def _step_of(arrays: list[mx.array], reaches: tuple[object, ...], has_rope: bool) -> Step:
    media = None
    if has_rope:
        *arrays, positions = arrays
        media = MediaRows(None, None, positions)
    count = len(_PLAN_FIELDS)
    plans = [
        AttentionPlan(*arrays[i : i + count])
        for i in range(1, 1 + count * (1 + len(reaches)), count)
    ]
    return Step(
        plans[0],
        arrays[0],
        dict(zip(reaches, plans[1:])),  # type: ignore[arg-type]
        media=media,
    )
