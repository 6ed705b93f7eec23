"""GraphRunner: compiles steps of few rows, once per shape.

Half of the host's time in a decode step is Python model code that builds the same graph for every
step of one shape, and most steps have as many rows as the previous one. So it runs once per shape.

**CUDA.** The graph becomes one operation (`GpuExecutable`) that the GPU replays as a whole, which
leaves the host almost nothing to do. It is compiled at a shape's first occurrence: MLX's own
products sum in another order, and a token must not depend on how often its shape occurred before.
Decodes are padded to a small set of row counts, and the warm-up compiles all of them. For more rows
or unsupported operations, `mx.compile` repeats the graph from the third occurrence on, so one-off
shapes cost nothing; its arrays keep their sizes because a plan's sizes grow in strides
(`plan.build_plan`).

**Metal.** If enabled, the same operation is encoded as a whole (docs/metal-kernels.md).

**CPU.** The graph becomes one operation (`CpuExecutable`), also at the first occurrence, because
compiling costs no more than evaluating. A plan's work may have any size.

`Refusals` holds the reasons why steps are not compiled. Each is logged once, as are the operations
that an executable leaves to MLX.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import NamedTuple

import mlx.core as mx

from mlx_paged import executables, ops
from mlx_paged.model import patches
from mlx_paged.model.caches import Step
from mlx_paged.model.compilation import Compilation
from mlx_paged.model.graph_templates import GraphTemplates
from mlx_paged.model.media import MediaRows
from mlx_paged.model.step_output import Forward, Greedy, Pools, StepOutput
from mlx_paged.ops import AttentionPlan
from mlx_paged.platform import Platform

logger = logging.getLogger(__name__)

_MAX_GRAPHS = 64
_SEEN_BEFORE = 2  # occurrences of a shape before `mx.compile` repeats it
_ROWS_OF_PROMPTS = 16  # steps with prompts are padded to multiples of it, a tile of products
# (max rows, stride): up to that many decodes are padded to a multiple of the stride, 0 meaning the
# next power of two. Padding costs little, because products read the same weights anyway.
_STRIDES_OF_DECODES = ((4, 0), (32, 8), (64, 16), (1 << 31, 32))
_FEW_ROWS = ops.max_product_rows()
_MAX_ROWS_OF_PROMPTS = _FEW_ROWS  # Larger shapes repeat too rarely to be worth a graph.
# Decodes have no bounds.
_PLAN_FIELDS = tuple(field.name for field in fields(AttentionPlan) if field.name != "bounds")
# Only attention reads these, so an executable takes them at any size.
_ANY_SIZE = {"block_tables", "work_items", "merge_items"}
# Unused on the CPU, so steps of other sequences with as many rows repeat one graph.
_ANY_SIZE_ON_CPU = {*_ANY_SIZE, "context_lens", "query_starts"}

_Graph = Callable[[mx.array, list[mx.array], Pools], StepOutput]
_Compiler = Callable[[_Graph, mx.array, list[mx.array], Pools], _Graph]


class Repeat(Enum):
    """The ways to repeat a step."""

    NOT = "not"  # built again each time
    AS_GRAPH = "as a graph"  # of its shape: decodes, and on the CPU any step of few rows
    WITH_PROMPTS = "with prompts"  # as a GPU's executable of few rows, some of them padding


class Repetition(NamedTuple):
    """How a step repeats, decided once before it is planned (`GraphRunner.repetition_of`)."""

    repeat: Repeat
    num_rows: int  # tokens of the step, including padding, which belongs to no sequence
    num_sequences: int  # including padding, which has no tokens
    reads_once: bool  # True if it will probably be an executable, which reads host arrays once


@dataclass
class Refusals:
    """The reasons why steps of a model are not compiled; None means they are.

    Attributes:
        steps: For all steps.
        executables: For all as executables of a GPU. `mx.compile` may repeat their graphs.
        many_rows: For those of more than `max_rows` rows as executables; fewer kernels serve them.
        max_rows: At least 64.
        prompts: For those with prompts as executables.
    """

    steps: str | None = None
    executables: str | None = None
    many_rows: str | None = None
    max_rows: int = _FEW_ROWS
    prompts: str | None = None


# Logged (model, primitive or reason); pools may be reallocated, and models loaded twice.
_logged: set[tuple[str, str]] = set()


class GraphRunner:
    """Runs steps of few rows as compiled graphs.

    Args:
        forward: Builds a step; a function of its arguments, apart from the model's weights.
        platform: The device of the steps; None means MLX's default device.
        enabled: False compiles nothing.
        chooses: True if `forward` returns logits to sample from.
        in_order: See `PagedModel.runs_in_order`.
        model_name: For log messages.

    Attributes:
        refusals: Why steps are not compiled. Tests may set it.
        foreign: The operations that the latest executable leaves to MLX, by primitive.
        templates: Graphs of other steps; None if the host has time to build them.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        platform: Platform | None = None,
        enabled: bool = True,
        chooses: Callable[[], bool] = lambda: False,
        in_order: bool = False,
        model_name: str = "this model",
    ) -> None:
        self._forward = forward
        self.platform = platform or Platform.current()
        self._chooses = chooses
        self._in_order = in_order
        self._model_name = model_name
        self._times: OrderedDict[object, int] = OrderedDict()  # times a shape occurred
        self._graphs: OrderedDict[object, _Graph] = OrderedDict()
        self.refusals = Refusals(steps=None if enabled else "repeating steps is off")
        self.foreign: Counter[str] = Counter()
        # Elsewhere, computing a step takes much longer than building it.
        default = "1" if self.platform.has_cuda else "0"
        wanted = enabled and os.environ.get("MLX_PAGED_GRAPH_TEMPLATES", default) != "0"
        self.templates = GraphTemplates(forward) if wanted else None

    def forget(self) -> None:
        """Drops all graphs. Call it when the pools have other sizes."""
        self._graphs.clear()
        if self.templates is not None:
            self.templates.forget()
        self._times.clear()

    @property
    def compilation(self) -> Compilation:
        """The current `Compilation`."""
        return Compilation(self.refusals.steps or self.refusals.executables, dict(self.foreign))

    def repetition_of(
        self,
        num_rows: int,
        num_sequences: int,
        num_samples: int,
        *,
        is_of_arrays: bool,
        may_pad_prompts: bool = False,
        may_pad_decodes: bool = False,
    ) -> Repetition:
        """Decides how a step repeats.

        Args:
            num_rows: Number of its tokens.
            num_samples: Number of rows whose logits are needed.
            is_of_arrays: True if it depends only on arrays whose sizes such steps share: no
                recurrent state, no media features, and no row that sees later positions.
            may_pad_prompts: True if a step with prompts may get more rows and sequences, so that it
                repeats an earlier one. Then as many rows as it has have logits.
            may_pad_decodes: The same for a step of decodes.
        """
        if num_rows != num_sequences:
            if may_pad_prompts and num_samples and self.takes_prompts(num_rows):
                num_rows = _rounded_up(num_rows, _ROWS_OF_PROMPTS)
        elif may_pad_decodes and num_samples == num_rows and is_of_arrays:
            padded = padded_decodes(num_rows)
            if self.platform.repeats_steps and self.reads_once(padded):
                num_rows = num_sequences = num_samples = padded
        repeat = self.repeat_of(num_rows, num_sequences, num_samples, is_of_arrays=is_of_arrays)
        if repeat is Repeat.WITH_PROMPTS and may_pad_prompts:
            # Otherwise, each number of decodes in a step with prompts would be another shape.
            num_sequences = num_rows
        # A step without samples is no executable.
        reads_once = repeat is not Repeat.NOT and num_samples > 0 and self.reads_once(num_rows)
        return Repetition(repeat, num_rows, num_sequences, reads_once)

    def repeat_of(
        self, num_rows: int, num_sequences: int, num_samples: int, *, is_of_arrays: bool
    ) -> Repeat:
        """See `repetition_of`; `num_rows` includes padding."""
        if self.refusals.steps or not is_of_arrays:
            return Repeat.NOT
        if not num_samples and self.platform.repeats_steps:
            return Repeat.NOT  # Nothing to sample, as in a chunk of one token of a longer prompt.
        platform, is_decode = self.platform, num_rows == num_sequences
        if not platform.repeats_steps:
            fits = platform.on_cpu and num_rows <= platform.max_cpu_step_rows
            return Repeat.AS_GRAPH if fits else Repeat.NOT
        if is_decode and (platform.has_cuda or num_rows <= platform.max_gpu_step_rows):
            return Repeat.AS_GRAPH
        # A step with prompts is built sooner than a graph of `mx.compile` would begin.
        repeats = self.takes_prompts(num_rows) and num_rows % _ROWS_OF_PROMPTS == 0
        return Repeat.WITH_PROMPTS if repeats else Repeat.NOT

    def run(self, tokens: mx.array, step: Step, pools: Pools, repeat: Repeat) -> StepOutput:
        """Runs the step, compiled or not."""
        if self.refusals.steps or repeat is Repeat.NOT:
            return self._build(tokens, step, pools)
        shape = self._shape_of(tokens, step)
        graph = self._graphs.get(shape)
        if graph is not None:
            self._graphs.move_to_end(shape)
            return graph(tokens, _arrays_of(step), pools)
        self._times[shape] = times = self._times.pop(shape, 0) + 1
        if len(self._times) > 4 * _MAX_GRAPHS:
            self._times.popitem(last=False)
        is_compiled_graph = self.platform.repeats_steps and not self.reads_once(tokens.shape[0])
        if is_compiled_graph and times <= _SEEN_BEFORE:
            return StepOutput(*self._forward(tokens, step, pools))
        return self._compile(shape, tokens, step, pools, repeat)

    def _build(self, tokens: mx.array, step: Step, pools: Pools) -> StepOutput:
        """Runs the step as a graph of its own."""
        templates = self.templates
        output = None if templates is None else templates.run(tokens, step, pools)
        return StepOutput(*self._forward(tokens, step, pools)) if output is None else output

    def reads_once(self, num_rows: int) -> bool:
        """True if a step of this many decodes will read its plan once, as a GPU's executable."""
        refusals, limit = self.refusals, self.platform.max_gpu_step_rows
        if refusals.many_rows:
            limit = min(limit, refusals.max_rows)
        return not (refusals.steps or refusals.executables) and num_rows <= limit

    def takes_prompts(self, num_rows: int) -> bool:
        """True if a step with prompts and this many rows may become a GPU's executable."""
        limit = _MAX_ROWS_OF_PROMPTS
        return not self.refusals.prompts and num_rows <= limit and self.reads_once(num_rows)

    def _compile(
        self, shape: object, tokens: mx.array, step: Step, pools: Pools, repeat: Repeat
    ) -> StepOutput:
        group_specs, further = tuple(step.plans), _further_inputs(step)
        arrays = _arrays_of(step)

        def forward(tokens: mx.array, arrays: list[mx.array], pools: Pools) -> StepOutput:
            built = self._forward(tokens, _step_of(arrays, group_specs, further), pools)
            return StepOutput(*built)

        for make in self._ways(tokens.shape[0], repeat):
            try:
                graph = make(forward, tokens, arrays, pools)
                result = graph(tokens, arrays, pools)
                if make == self._gpu_executable:
                    # Fails here if the GPU refuses it, while the step can still run another way.
                    mx.eval(result.logits)
            except Exception as error:
                # Also raised by model code that reads values, which cannot be traced.
                self._refuse(make, tokens.shape[0], repeat, str(error))
            else:
                self._keep(shape, graph)
                return result
        return StepOutput(*self._forward(tokens, step, pools))

    def _ways(self, num_rows: int, repeat: Repeat) -> list[_Compiler]:
        """Returns the ways to compile a step, the best first."""
        platform = self.platform
        if not platform.repeats_steps:
            return [self._cpu_executable]
        ways: list[_Compiler] = [self._gpu_executable] if self.reads_once(num_rows) else []
        # With Metal, MLX encodes compiled graphs like any others.
        if platform.has_cuda and repeat is not Repeat.WITH_PROMPTS:
            ways.append(self._compiled_graph)
        return ways

    def _refuse(self, way: _Compiler, num_rows: int, repeat: Repeat, reason: str) -> None:
        refusals, what = self.refusals, "steps"
        if way != self._gpu_executable:
            refusals.steps = reason
            self._graphs.clear()
        elif repeat is Repeat.WITH_PROMPTS:
            refusals.prompts, what = reason, "steps with prompts"
        elif num_rows > _FEW_ROWS:
            refusals.many_rows, refusals.max_rows = reason, num_rows - 1
            what = f"steps of {num_rows} rows or more"
        else:
            refusals.executables = reason
            if not self.platform.has_cuda:
                refusals.steps = reason  # no other way is left
        is_primitive = "the operation " in reason  # otherwise a choice of the user, such as a dtype
        level = logging.WARNING if is_primitive else logging.INFO
        self._log(level, reason, f"its {what} are not compiled as a whole: {reason}")

    def _log(self, level: int, about: str, message: str) -> None:
        if (self._model_name, about) not in _logged:
            _logged.add((self._model_name, about))
            logger.log(level, "%s: %s", self._model_name, message)

    def _note_foreign(self, names: list[str]) -> None:
        self.foreign = Counter(names)
        for name in self.foreign:
            self._log(
                logging.WARNING,
                name,
                f"there is no kernel for {name}, so MLX runs it in every step",
            )

    # --- Ways to compile. Each returns the graph of `forward`, and evaluates no array of the step.

    def _gpu_executable(
        self, forward: _Graph, tokens: mx.array, arrays: list[mx.array], pools: Pools
    ) -> _Graph:
        chooses = self._chooses()  # False if its outputs are no logits
        end = 1 + len(arrays)
        inputs = executables.placeholders([tokens, *arrays, *pools])
        with patches.graph_for_program():
            logits, written, _, taps = forward(inputs[0], inputs[1:end], inputs[end:])
        greedy = ops.greedy_tokens(logits) if chooses else ()
        executable = executables.GpuExecutable(inputs, [logits, *greedy, *taps, *written])

        def run(tokens: mx.array, arrays: list[mx.array], pools: Pools) -> StepOutput:
            logits, *more = executable([tokens, *arrays, *pools], returns_pools=False)
            # The pools keep their handles, so submit the step before building on them.
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
            num_greedy = len(greedy)
            found = Greedy(*more[:num_greedy]) if chooses else None
            return StepOutput(logits, pools, found, more[num_greedy:])

        return run

    def _cpu_executable(
        self, forward: _Graph, tokens: mx.array, arrays: list[mx.array], pools: Pools
    ) -> _Graph:
        end = 1 + len(arrays)
        inputs = executables.placeholders([tokens, *arrays, *pools])
        logits, written, _, taps = forward(inputs[0], inputs[1:end], inputs[end:])
        executable = executables.CpuExecutable(inputs, [logits, *taps, *written])
        self._note_foreign(executable.foreign)
        num_taps, in_order = len(taps), self._in_order

        def run(tokens: mx.array, arrays: list[mx.array], pools: Pools) -> StepOutput:
            logits, *more = executable([tokens, *arrays, *pools], returns_pools=not in_order)
            taps, written = more[:num_taps], more[num_taps:]
            return StepOutput(logits, [*pools[:-1], *written] if in_order else written, None, taps)

        return run

    def _compiled_graph(self, forward: _Graph, *_: object) -> _Graph:
        def build(
            tokens: mx.array, arrays: list[mx.array], pools: Pools
        ) -> tuple[mx.array, Pools, list[mx.array]]:
            built = forward(tokens, arrays, pools)
            return built.logits, built.pools, list(built.taps)

        compiled = mx.compile(build)

        def run(tokens: mx.array, arrays: list[mx.array], pools: Pools) -> StepOutput:
            logits, pools, taps = compiled(tokens, arrays, pools)
            return StepOutput(logits, pools, None, taps)

        return run

    def _shape_of(self, tokens: mx.array, step: Step) -> object:
        repeats = self.platform.repeats_steps
        is_compiled_graph = repeats and not self.reads_once(tokens.shape[0])
        any_size = _ANY_SIZE if repeats else _ANY_SIZE_ON_CPU
        if is_compiled_graph:
            any_size = set()
        # Operations that MLX runs use the stream of the thread that built them.
        stream = None if repeats else repr(mx.default_stream(mx.default_device()))
        return (
            tuple(step.plans),
            tokens.shape[0],
            step.logit_rows.shape[0],
            _further_inputs(step),
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


def padded_decodes(num_rows: int) -> int:
    """Returns the padded number of rows of a step of this many decodes, one of a small set."""
    stride = next(stride for bound, stride in _STRIDES_OF_DECODES if num_rows <= bound)
    return _rounded_up(num_rows, stride) if stride else 1 << (num_rows - 1).bit_length()


def _rounded_up(count: int, stride: int) -> int:
    return -(-count // stride) * stride


def _arrays_of(step: Step) -> list[mx.array]:
    plans = (step.plan, *step.plans.values())
    arrays = [step.logit_rows, *(getattr(plan, name) for plan in plans for name in _PLAN_FIELDS)]
    if step.media is not None and step.media.rope_positions is not None:
        arrays.append(step.media.rope_positions)
    if step.features is not None:
        arrays.append(step.features)
    if step.adapters is not None:
        arrays.append(step.adapters)
    return arrays


class _FurtherInputs(NamedTuple):
    """The inputs of a step besides its plans."""

    has_rope: bool
    features: tuple[int, ...] | None  # shape
    has_adapters: bool


def _further_inputs(step: Step) -> _FurtherInputs:
    has_rope = step.media is not None and step.media.rope_positions is not None
    features = None if step.features is None else tuple(step.features.shape)
    return _FurtherInputs(has_rope, features, step.adapters is not None)


def _step_of(
    arrays: list[mx.array], group_specs: tuple[object, ...], further: _FurtherInputs
) -> Step:
    media = features = adapters = None
    if further.has_adapters:
        *arrays, adapters = arrays
    if further.features is not None:
        *arrays, features = arrays
    if further.has_rope:
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
        features=features,
        adapters=adapters,
    )
