"""The child process of calibration on the simulated GPU, with planted faults and another clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx

from mlx_paged import child_jobs
from mlx_paged.calibration import child, timing
from support.planted_kernels import MLX, Clock, planted, simulated_with_faults


def _mlx_takes(clock: Clock, seconds: float) -> None:
    """MLX takes this long for each norm of a graph, and for each product outside of whole steps. By
    themselves they launch no simulated kernel."""

    def slow(right: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def run(*args: Any, **kwargs: Any) -> mx.array:
            clock.seconds += seconds
            return right(*args, **kwargs)

        return run

    mx.fast.rms_norm = slow(mx.fast.rms_norm)
    timing.multiplied_by_mlx = slow(timing.multiplied_by_mlx)


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    timing.clock = clock = Clock()
    if planted().get(MLX) == "slow":
        _mlx_takes(clock, 1000)
    timing.CONTEXT, timing.CALLS, timing.REPEATS = 40, 1, 1
    timing.LONG_CONTEXTS = 1, 400
    with simulated_with_faults(clock):
        child_jobs.serve(child.run, sys.argv[1:])
