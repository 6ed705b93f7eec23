"""GraphTemplates: steps with prompts whose graphs model code has built once, made again natively.

Model code takes the host 3.5 ms to build the graph of a step of 28 layers, as long as a GPU needs
for 300 tokens. The graph hardly depends on the number of tokens, so it is learned from two
graphs that model code builds without values: for the fewest and for the most rows of a range. If
they are equal but for their sizes, `executables.GraphTemplate` makes the graph of any step between
them, with the same operations and so the same bits, ten times as fast. A condition such as
`rows > 512` that changes the graph makes the two differ; then narrower ranges are tried.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import count
from typing import NamedTuple

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.executables import GraphTemplate, placeholders
from mlx_paged.model.caches import Step
from mlx_paged.model.layerwise import LayerwiseSubmit
from mlx_paged.model.step_output import Forward, Pools, StepOutput
from mlx_paged.ops import AttentionPlan

logger = logging.getLogger(__name__)

# Steps of fewer rows use other products, and many of them are executables.
MIN_ROWS = ops.max_product_rows() + 1
_MAX_ROWS = 1 << 16
# Numbers of logits that share a template: none, those of kernels for few rows, and more.
_LOGITS = ((0, 0), (1, MIN_ROWS - 1), (MIN_ROWS, _MAX_ROWS))
_PLAN_FIELDS = tuple(each.name for each in fields(AttentionPlan) if each.name != "bounds")
_OF_ROWS = ("positions", "slot_mapping")


class _Range(NamedTuple):
    """Numbers of rows, both ends included."""

    first: int
    last: int


class _Kind(NamedTuple):
    """Everything besides sizes on which the graph of a step depends."""

    rows: _Range
    logits: _Range
    group_specs: tuple[object, ...]
    has_adapters: bool
    is_pruned: bool
    num_ordered_rows: int
    is_layerwise: bool
    stream: str  # Operations belong to the stream of the thread that built them.


@dataclass(frozen=True)
class _Recorder(LayerwiseSubmit):
    """Records layers instead of submitting them."""

    built: list[tuple[int, mx.array, mx.array]] = field(default_factory=list, compare=False)

    def layer_built(self, layer: int, pool: mx.array, rows: mx.array) -> None:
        """See `LayerwiseSubmit`."""
        self.built.append((layer, pool, rows))


@dataclass(frozen=True)
class _StandIn:
    """A step without values, at one end of the ranges of its kind.

    Sizes that have nothing to do with each other differ, and each differs between both ends.
    """

    tokens: mx.array
    step: Step

    @classmethod
    def of(cls, kind: _Kind, step: Step, is_last: bool) -> _StandIn:
        """Stands in for a step of this kind."""
        num_rows, num_logits = kind.rows[is_last], kind.logits[is_last]
        others = count(8209, 6) if is_last else count(4099, 2)

        def array(like: mx.array, num: int | None = None) -> mx.array:
            shape = list(like.shape)
            shape[0] = next(others) if num is None else num
            [made] = placeholders([mx.zeros(shape, like.dtype)])
            return made

        def plan_of(plan: AttentionPlan, num_rows: int) -> AttentionPlan:
            made = {}
            for name in _PLAN_FIELDS:
                like = getattr(plan, name)
                if name == "block_tables":
                    shape = (next(others), next(others))
                    [made[name]] = placeholders([mx.zeros(shape, like.dtype)])
                elif name in _OF_ROWS:
                    made[name] = array(like, num_rows)
                else:
                    made[name] = array(like)
            return AttentionPlan(**made)

        logit_rows = array(step.logit_rows, num_logits)
        selected = step.selected
        if selected is not None:
            selected = selected.on(logit_rows, plan_of(selected.plan, num_logits))
        stand_in = Step(
            plan_of(step.plan, num_rows),
            logit_rows,
            {spec: plan_of(plan, num_rows) for spec, plan in step.plans.items()},
            layerwise=None if step.layerwise is None else _Recorder(1),
            selected=selected,
            num_ordered_rows=step.num_ordered_rows,
            adapters=None if step.adapters is None else array(step.adapters, num_rows),
        )
        [tokens] = placeholders([mx.zeros((num_rows,), mx.int32)])
        return cls(tokens, stand_in)


@dataclass(frozen=True)
class _Built:
    """A graph without values."""

    inputs: list[mx.array]
    outputs: list[mx.array]
    num_taps: int
    num_pools: int
    layers: tuple[int, ...]  # whose pool and rows are outputs, after the pools


@dataclass(frozen=True)
class _Template:
    graph: GraphTemplate
    num_taps: int
    num_pools: int
    layers: tuple[int, ...]

    def run(self, tokens: mx.array, step: Step, pools: Pools) -> StepOutput:
        """Makes a step's graph and submits its parts as `LayerwiseSubmit` does."""
        made = self.graph([tokens, *_arrays_of(step), *pools])
        end = 1 + self.num_taps
        logits, taps = made[0], made[1:end]
        written = made[end : end + self.num_pools]
        parts = deque(made[end + self.num_pools :])
        del made  # so that rows go once they are submitted
        for layer in self.layers:
            assert step.layerwise is not None
            step.layerwise.layer_built(layer, parts.popleft(), parts.popleft())
        return StepOutput(logits, written, None, taps)


class GraphTemplates:
    """The templates of one model, in its current pools.

    Args:
        forward: Builds a step.

    Attributes:
        refusals: Why steps of a kind have no template, as far as known. For tests and logs.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._templates: dict[_Kind, _Template | None] = {}
        self.refusals: list[str] = []

    def forget(self) -> None:
        """Drops all templates. Call it when the pools have other sizes."""
        self._templates.clear()

    def run(self, tokens: mx.array, step: Step, pools: Pools) -> StepOutput | None:
        """Runs a step; None if it must be built by model code."""
        if not _is_supported(tokens, step):
            return None
        for kind in _kinds_of(tokens, step):
            if kind not in self._templates:
                self._templates[kind] = self._learn(kind, tokens, step, pools)
            template = self._templates[kind]
            if template is not None:
                return template.run(tokens, step, pools)
        return None

    def _learn(self, kind: _Kind, tokens: mx.array, step: Step, pools: Pools) -> _Template | None:
        try:
            first, second = (
                self._build(_StandIn.of(kind, step, is_last), pools) for is_last in (False, True)
            )
            if first.layers != second.layers or first.num_taps != second.num_taps:
                raise ValueError("its parts differ")
            graph = GraphTemplate(first.inputs, first.outputs, second.inputs, second.outputs)
        except Exception as error:
            # Also raised by model code that reads values.
            self.refusals.append(str(error))
            logger.debug("steps of %s have no template: %s", kind, error)
            return None
        return _Template(graph, first.num_taps, first.num_pools, first.layers)

    def _build(self, stand_in: _StandIn, pools: Pools) -> _Built:
        tokens, step = stand_in.tokens, stand_in.step
        own_pools = placeholders(pools)
        output = self._forward(tokens, step, own_pools)
        built = step.layerwise.built if isinstance(step.layerwise, _Recorder) else []
        parts = [array for _, pool, rows in built for array in (pool, rows)]
        return _Built(
            [tokens, *_arrays_of(step), *own_pools],
            [output.logits, *output.taps, *output.pools, *parts],
            len(output.taps),
            len(output.pools),
            tuple(layer for layer, _, _ in built),
        )


def _is_supported(tokens: mx.array, step: Step) -> bool:
    """True for steps whose graph depends only on arrays that `_arrays_of` returns."""
    return (
        MIN_ROWS <= tokens.shape[0] <= _MAX_ROWS
        and step.prefill is None
        and step.states is None
        and step.media is None
        and step.features is None
        and all(plan.bounds is None for plan in _plans_of(step))
    )


def _plans_of(step: Step) -> list[AttentionPlan]:
    plans = [step.plan, *step.plans.values()]
    return plans if step.selected is None else [*plans, step.selected.plan]


def _arrays_of(step: Step) -> list[mx.array]:
    arrays = [step.logit_rows]
    if step.adapters is not None:
        arrays.append(step.adapters)
    arrays += [getattr(plan, name) for plan in _plans_of(step) for name in _PLAN_FIELDS]
    return arrays


def _kinds_of(tokens: mx.array, step: Step) -> Iterator[_Kind]:
    """The kinds of a step, that with the widest ranges first."""
    num_rows, num_logits = tokens.shape[0], step.logit_rows.shape[0]
    logits = next(_Range(*ends) for ends in _LOGITS if num_logits <= ends[1])
    wide = _Kind(
        _Range(MIN_ROWS, _MAX_ROWS),
        logits,
        tuple(step.plans),
        step.adapters is not None,
        step.selected is not None,
        step.num_ordered_rows,
        step.layerwise is not None,
        repr(mx.default_stream(mx.default_device())),
    )
    narrow = wide._replace(rows=_around(num_rows), logits=_around(num_logits))
    for kind in (wide, narrow):
        if kind.rows == kind.logits:  # Equal ends would be one size.
            kind = kind._replace(logits=_Range(kind.logits.first + 1, kind.logits.last))
        yield kind


def _around(num: int) -> _Range:
    """Returns the numbers from above one power of two to the next, among them `num`."""
    last = 1 << (num - 1).bit_length() if num else 0
    return _Range(min(last // 2 + 1, last), last)
