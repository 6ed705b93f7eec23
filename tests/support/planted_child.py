"""The child process of calibration on MLX's default device, with faults planted in operations.

Unlike `calibration_child`, whose simulated GPU has faults in single kernels, this one runs the
kernels of the device: a job that announces a faulty kernel gets wrong or late results from the
operations that it calls. So the same faults run over CUDA and on the CPU.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
from mlx.utils import tree_map

from mlx_paged import child_jobs, ops
from mlx_paged.calibration import child, timing
from support.planted_kernels import Clock, planted

OPERATIONS = (
    *("paged_attention", "write_kv", "gather_kv", "copy_blocks"),
    *("greedy_tokens", "draw_tokens", "apply_token_bitmask", "lora"),
)
SLOW = 0.01  # seconds per call


def _changed(a: mx.array) -> mx.array:
    return a + mx.ones(1, a.dtype)


def plant(faults: dict[str, str], clock: Clock | None) -> None:
    """Plants faults by kernel in `ops`.

    Args:
        clock: A clock on which an operation takes a second, and a slow one a hundred. None: a slow
            one really waits.
    """

    def faulty(right: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            found = {faults[k] for k in child_jobs.announced() or () if k in faults}
            is_slow = "slow" in found
            if clock is not None:
                clock.seconds += 100 if is_slow else 1
            elif is_slow:
                time.sleep(SLOW)
            if "crash" in found:
                os.abort()
            result = right(*args, **kwargs)
            return tree_map(_changed, result) if "wrong" in found else result

        return run

    for name in OPERATIONS:
        setattr(ops, name, faulty(getattr(ops, name)))


if __name__ == "__main__":
    on_gpu = os.environ.get("MLX_PAGED_TEST_DEVICE") == "gpu"
    if not on_gpu:
        mx.set_default_device(mx.cpu)
        timing.clock = clock = Clock()
        timing.CONTEXT, timing.CALLS, timing.REPEATS = 40, 1, 1
        timing.LONG_CONTEXTS = 1, 400
    plant(planted(), None if on_gpu else clock)
    child_jobs.serve(child.run, sys.argv[1:])
