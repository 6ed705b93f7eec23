"""Runs the steps of a `StepDriver` as single operations on the simulated GPU."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_paged import executables, ops
from mlx_paged.model import patches
from mlx_paged.model.caches import Step
from mlx_paged.model.graph_runner import (
    GraphRunner,
    Greedy,
    Pools,
    Repeat,
    StepOutput,
    _arrays_of,
    _further_inputs,
    _step_of,
)
from support.models import StepDriver


class ProgramSteps(GraphRunner):
    """Makes a program for every step. Use it within `simulated`."""

    def __init__(self, forward: Any, **options: Any) -> None:
        super().__init__(forward)
        self.options = options
        self.made: list[
            tuple[executables.GpuExecutable, list[mx.array]]
        ] = []  # (program, its inputs)
        self._newest: Greedy | None = None

    def newest_greedy(self) -> Greedy:
        """Returns the newest step's logits."""
        assert self._newest is not None
        return self._newest

    def run(
        self, tokens: mx.array, step: Step, pools: Pools, repeat: Repeat = Repeat.NOT
    ) -> StepOutput:
        arrays = _arrays_of(step)
        unknown = executables.placeholders([tokens, *arrays, *pools])
        end = 1 + len(arrays)
        of_step = _step_of(unknown[1:end], tuple(step.plans), _further_inputs(step))
        with patches.graph_for_program():
            logits, written, _, taps = StepOutput(
                *self._forward(unknown[0], of_step, unknown[end:])
            )
        greedy = ops.greedy_tokens(logits)
        program = executables.GpuExecutable(
            unknown, [logits, *greedy, *taps, *written], **self.options
        )
        inputs = [tokens, *arrays, *pools]
        self.made.append((program, inputs))
        logits, *rest = program(inputs)
        num_taps = len(taps)
        found, taps, pools = Greedy(*rest[:3]), rest[3 : 3 + num_taps], rest[3 + num_taps :]
        mx.eval(logits)  # first, because the pools are written in place
        self._newest = found
        return StepOutput(logits, pools, found, taps)


def with_programs(driver: StepDriver, **options: Any) -> ProgramSteps:
    """Makes a driver run its steps as programs; returns the object that runs them."""
    model = driver.runner.model
    steps = ProgramSteps(model._run, **options)
    model._graph_runner = steps
    return steps
