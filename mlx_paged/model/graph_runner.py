"""Runs steps of few rows as one graph or one operation, for each shape.

Half of the host's time in a decode step is model code in Python, which builds the same graph in
every step of one shape, and most steps have as many rows as the one before. So it runs once for
each shape.

With CUDA, the graph becomes one operation (`ops.GpuExecutable`), which a GPU replays as a whole, so
the host has almost nothing to do. If the step has more rows or other operations than that supports,
`mx.compile` repeats the graph; its arrays keep their sizes because those of a plan grow in strides
(`plan.build_plan`). A shape is compiled at its third occurrence, so that model code has run on real
arrays before, and shapes that do not repeat cost nothing. With Metal, the same operation is encoded
as a whole if it is enabled (docs/metal-kernels.md).

On the CPU, the graph becomes one operation (`ops.CpuExecutable`). Reading it costs no more than
evaluating it, so that happens immediately, and a plan's work may have any size.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from typing import NamedTuple

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.model import patches
from mlx_paged.model.caches import Step
from mlx_paged.model.media import MediaRows
from mlx_paged.ops import AttentionPlan
from mlx_paged.platform import Platform

logger = logging.getLogger(__name__)

_MAX_GRAPHS = 64
_SEEN_BEFORE = 2
_ROWS_OF_PROMPTS = 16  # steps with prompts have multiples of it: a tile of products
_FEW_ROWS = 64  # Products of up to this many rows are our own kernels, for more formats.
_MAX_ROWS_OF_PROMPTS = _FEW_ROWS  # Larger shapes repeat too rarely to be worth a graph.
# Decodes have no bounds.
_PLAN_FIELDS = tuple(field.name for field in fields(AttentionPlan) if field.name != "bounds")
_ANY_SIZE = {"block_tables", "work_items", "merge_items"}  # on the CPU

Pools = list[mx.array]
# Tokens, the step and the pools' handles -> logits and the new handles.
Forward = Callable[[mx.array, Step, Pools], tuple[mx.array, Pools]]


class Greedy(NamedTuple):
    """Greedy sampling of a step's logits; see `ops.greedy_tokens`."""

    tokens: mx.array  # [num_rows] int32
    largest: mx.array  # [num_rows] float32
    reported: mx.array  # [num_rows] int32, in memory that the host reads


class StepOutput(NamedTuple):
    """The arrays that a step computes, lazily."""

    logits: mx.array  # [len(logit_rows), vocab_size]
    pools: Pools  # handles after its writes; the same list as before it, for a device program
    greedy: Greedy | None = None  # the choice from the logits, if the step computes it


_Graph = Callable[[mx.array, list[mx.array], Pools], StepOutput]


class Repeat(Enum):
    """How a step repeats."""

    NOT = "not"  # built anew
    AS_GRAPH = "as a graph"  # of its shape: decodes, and on the CPU any step of few rows
    WITH_PROMPTS = "with prompts"  # as a device program of few rows, some of them padding


class Repetition(NamedTuple):
    """Decided once, before a step is planned (`GraphRunner.repetition_of`)."""

    repeat: Repeat
    num_rows: int  # tokens of the step, including padding, which belongs to no sequence
    reads_once: bool  # True if it probably reads the host's arrays once, as a device program


class GraphRunner:
    """Runs steps of few rows as compiled graphs.

    Args:
        forward: Builds a step; a function of its arguments, apart from the model's weights.
        platform: The device of the steps; None means MLX's default device.
        enabled: False compiles nothing.
        chooses: True if `forward` returns logits to choose tokens from.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        platform: Platform | None = None,
        enabled: bool = True,
        chooses: Callable[[], bool] = lambda: False,
    ) -> None:
        self._forward = forward
        self.platform = platform or Platform.current()
        self._chooses = chooses
        self._times: OrderedDict[object, int] = OrderedDict()  # times a shape occurred
        self._graphs: OrderedDict[object, _Graph] = OrderedDict()
        self._failed = not enabled
        # Until the device refuses a graph of the model: of a decode step, of one with prompts.
        self.uses_device_programs = True
        self._refuses_many_rows = False
        self._takes_prompts = True

    def repetition_of(
        self,
        num_rows: int,
        num_sequences: int,
        num_samples: int,
        *,
        is_of_arrays: bool,
        may_pad: bool = False,
    ) -> Repetition:
        """Decides how a step repeats.

        Args:
            num_rows: Number of its tokens.
            num_samples: Number of rows whose logits are needed.
            is_of_arrays: True if it depends only on arrays whose sizes such steps share: no
                recurrent state, no media features, and no row that sees later positions.
            may_pad: True if a step with prompts may get more rows, so that it repeats an earlier
                one.
        """
        if may_pad and num_samples and num_rows != num_sequences and self.takes_prompts(num_rows):
            num_rows = -(-num_rows // _ROWS_OF_PROMPTS) * _ROWS_OF_PROMPTS
        repeat = self.repeat_of(num_rows, num_sequences, num_samples, is_of_arrays=is_of_arrays)
        # A step without samples is no program.
        reads_once = repeat is not Repeat.NOT and num_samples > 0 and self.reads_once(num_rows)
        return Repetition(repeat, num_rows, reads_once)

    def repeat_of(
        self, num_rows: int, num_sequences: int, num_samples: int, *, is_of_arrays: bool
    ) -> Repeat:
        """See `repetition_of`; `num_rows` includes padding."""
        if self._failed or not is_of_arrays:
            return Repeat.NOT
        platform, is_decode = self.platform, num_rows == num_sequences
        if not platform.repeats_steps:
            fits = platform.on_cpu and num_rows <= platform.max_cpu_step_rows
            return Repeat.AS_GRAPH if fits else Repeat.NOT
        if is_decode and (platform.has_cuda or num_rows <= platform.max_gpu_step_rows):
            return Repeat.AS_GRAPH
        # A graph of `mx.compile` would begin later than a step with prompts is built now.
        repeats = self.takes_prompts(num_rows) and num_rows % _ROWS_OF_PROMPTS == 0
        return Repeat.WITH_PROMPTS if repeats and num_samples > 0 else Repeat.NOT

    def run(self, tokens: mx.array, step: Step, pools: Pools, repeat: Repeat) -> StepOutput:
        """Runs the step, compiled or not."""
        if self._failed or repeat is Repeat.NOT:
            return StepOutput(*self._forward(tokens, step, pools))
        shape = self._shape_of(tokens, step)
        graph = self._graphs.get(shape)
        if graph is not None:
            self._graphs.move_to_end(shape)
            return graph(tokens, _arrays_of(step), pools)
        self._times[shape] = times = self._times.pop(shape, 0) + 1
        if len(self._times) > 4 * _MAX_GRAPHS:
            self._times.popitem(last=False)
        if self.platform.repeats_steps and times <= _SEEN_BEFORE:
            return StepOutput(*self._forward(tokens, step, pools))
        return self._compile(shape, tokens, step, pools, repeat)

    def reads_once(self, num_rows: int) -> bool:
        """True if a step of this many decodes will read its plan once, as a device program."""
        return (
            self.uses_device_programs and not self._failed and self._fits_device_program(num_rows)
        )

    def _fits_device_program(self, num_rows: int) -> bool:
        most = self.platform.max_gpu_step_rows
        return num_rows <= (min(most, _FEW_ROWS) if self._refuses_many_rows else most)

    def takes_prompts(self, num_rows: int) -> bool:
        """Returns True if a step with prompts and this many rows may become a device program."""
        return (
            self._takes_prompts and num_rows <= _MAX_ROWS_OF_PROMPTS and self.reads_once(num_rows)
        )

    def _compile(
        self, shape: object, tokens: mx.array, step: Step, pools: Pools, repeat: Repeat
    ) -> StepOutput:
        group_specs, has_rope = tuple(step.plans), _has_rope_positions(step)
        arrays = _arrays_of(step)
        graph: _Graph

        def forward(
            tokens: mx.array, arrays: list[mx.array], pools: Pools
        ) -> tuple[mx.array, Pools]:
            return self._forward(tokens, _step_of(arrays, group_specs, has_rope), pools)

        if self.uses_device_programs and self._fits_device_program(tokens.shape[0]):
            try:
                graph = _device_program(forward, tokens, arrays, pools, chooses=self._chooses())
                result = graph(tokens, arrays, pools)
                # Anything a GPU refuses shows now, while the step can still run another way.
                mx.eval(result.logits)
                self._keep(shape, graph)
                return result
            except Exception as error:
                if repeat is Repeat.WITH_PROMPTS:
                    logger.info("its steps with prompts are not device programs: %s", error)
                    self._takes_prompts = False
                    return StepOutput(*self._forward(tokens, step, pools))
                if tokens.shape[0] > _FEW_ROWS:
                    logger.info("its steps of many rows are not device programs: %s", error)
                    self._refuses_many_rows = True
                else:
                    logger.info("steps of this model are not device programs: %s", error)
                    self.uses_device_programs = False
        is_cuda = self.platform.has_cuda
        if (
            self.platform.repeats_steps and not is_cuda
        ):  # Metal, where MLX encodes compiled graphs like any others
            self._failed = True
            return StepOutput(*self._forward(tokens, step, pools))
        try:
            make = _compiled if is_cuda else _program
            graph = make(forward, tokens, arrays, pools)
            result = graph(tokens, arrays, pools)
        except Exception as error:
            # Model code that reads array values cannot be traced, and programs have not all
            # operations; it runs uncompiled.
            logger.info("steps of this model are not compiled: %s", error)
            self._failed = True
            self._graphs.clear()
            return StepOutput(*self._forward(tokens, step, pools))
        self._keep(shape, graph)
        return result

    def _shape_of(self, tokens: mx.array, step: Step) -> object:
        repeats = self.platform.repeats_steps
        any_size = set() if repeats else _ANY_SIZE
        # MLX's own operations in a program have the stream of the thread that built them.
        stream = None if repeats else repr(mx.default_stream(mx.default_device()))
        return (
            tuple(step.plans),
            tokens.shape[0],
            step.logit_rows.shape[0],
            _has_rope_positions(step),
            *(
                tuple(getattr(plan, name).shape)
                for plan in (step.plan, *step.plans.values())
                for name in _PLAN_FIELDS
                if name not in any_size
            ),
            stream,
        )

    def _keep(self, shape: object, graph: _Graph) -> None:
        self._graphs[shape] = graph
        if len(self._graphs) > _MAX_GRAPHS:
            self._graphs.popitem(last=False)


def _device_program(
    forward: Callable[[mx.array, list[mx.array], Pools], tuple[mx.array, Pools]],
    tokens: mx.array,
    arrays: list[mx.array],
    pools: Pools,
    *,
    chooses: bool,
) -> _Graph:
    """Returns the graph of `forward` as one operation of a GPU.

    Args:
        chooses: True if it also computes the greedy choice; False if its outputs are no logits.
    """
    end = 1 + len(arrays)
    inputs = ops.placeholders([tokens, *arrays, *pools])
    with patches.graph_for_program():
        logits, written = forward(inputs[0], inputs[1:end], inputs[end:])
    greedy = ops.greedy_tokens(logits) if chooses else ()
    program = ops.GpuExecutable(inputs, [logits, *greedy, *written])

    def run(tokens: mx.array, arrays: list[mx.array], pools: Pools) -> StepOutput:
        logits, *greedy = program([tokens, *arrays, *pools], returns_pools=False)
        # The pools keep their handles, so the step must go before all that is built on them.
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        return StepOutput(logits, pools, Greedy(*greedy) if chooses else None)

    return run


def _compiled(
    forward: Callable[[mx.array, list[mx.array], Pools], tuple[mx.array, Pools]],
    *_: object,
) -> _Graph:
    """Returns the graph of `forward` as `mx.compile` repeats it."""
    compiled = mx.compile(forward)
    return lambda tokens, arrays, pools: StepOutput(*compiled(tokens, arrays, pools))


def _program(
    forward: Callable[[mx.array, list[mx.array], Pools], tuple[mx.array, Pools]],
    tokens: mx.array,
    arrays: list[mx.array],
    pools: Pools,
) -> _Graph:
    """The graph of `forward` as one operation. No array of the step is evaluated for it."""
    end = 1 + len(arrays)
    inputs = ops.placeholders([tokens, *arrays, *pools])
    logits, written = forward(inputs[0], inputs[1:end], inputs[end:])
    program = ops.CpuExecutable(inputs, [logits, *written])

    def run(tokens: mx.array, arrays: list[mx.array], pools: Pools) -> StepOutput:
        logits, *pools = program([tokens, *arrays, *pools])
        return StepOutput(logits, pools)

    return run


def _arrays_of(step: Step) -> list[mx.array]:
    plans = (step.plan, *step.plans.values())
    arrays = [step.logit_rows, *(getattr(plan, name) for plan in plans for name in _PLAN_FIELDS)]
    if step.media is not None and step.media.rope_positions is not None:
        arrays.append(step.media.rope_positions)
    return arrays


def _has_rope_positions(step: Step) -> bool:
    return step.media is not None and step.media.rope_positions is not None


def _step_of(arrays: list[mx.array], group_specs: tuple[object, ...], has_rope: bool) -> Step:
    media = None
    if has_rope:
        *arrays, positions = arrays
        media = MediaRows(None, None, positions)
    count = len(_PLAN_FIELDS)
    plans = [
        AttentionPlan(*arrays[i : i + count])
        for i in range(1, 1 + count * (1 + len(group_specs)), count)
    ]
    return Step(
        plans[0],
        arrays[0],
        dict(zip(group_specs, plans[1:])),  # type: ignore[arg-type]
        media=media,
    )
