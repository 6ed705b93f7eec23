"""Faults planted in simulated kernels by name: wrong, crashing, hanging or slow ones."""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from sim import SimLibrary, abi, launcher

from mlx_paged import kernels
from support.simulated import metal_library, sim_ext, simulated_extension, tensor_library

# Faults by kernel, as JSON: {"greedy_tokens_float32": "crash"}.
VARIABLE = "MLX_PAGED_TEST_PLANTED"
# Set: the simulated GPU has tensor units, also in child processes.
TENSOR_UNITS = "MLX_PAGED_TEST_TENSOR_UNITS"
MLX = "mlx"  # in the place of a kernel: MLX's graphs and products, as alternatives
_LAUNCHER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(abi.CLaunch), ctypes.POINTER(abi.CReport))
_kept: list[Any] = []


def planted() -> dict[str, str]:
    """The faults of this process and of its children."""
    return json.loads(os.environ.get(VARIABLE, "{}"))


class Clock:
    """Advances by a second for each kernel that runs, and by a hundred for each slow one."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def _launcher(faults: Mapping[str, str], clock: Clock, library_: SimLibrary) -> int:
    """Address of a launcher of kernels with faults; `launcher` describes it."""
    right = _LAUNCHER(launcher(library_))

    def run(launch: Any, report: Any) -> int:
        call = launch.contents
        fault = faults.get(call.kernel.decode())
        clock.seconds += 100 if fault == "slow" else 1
        if fault == "crash":
            os.abort()
        while fault == "hang":
            time.sleep(1)
        status = right(launch, report)
        if fault == "wrong":
            for i in range(call.num_buffers):
                buffer = call.buffers[i]
                if buffer.access & abi.ACCESS["write"]:
                    ctypes.memset(buffer.data, 0x3F, buffer.bytes)
        return int(status)

    _kept.append((right, made := _LAUNCHER(run)))
    return int(ctypes.cast(made, ctypes.c_void_p).value or 0)


@contextmanager
def whole_steps() -> Iterator[None]:
    """The simulated GPU supports whole steps of up to 16 rows, as Apple's do."""
    with (
        mock.patch.object(sim_ext, "supported_step_rows", lambda: 16),
        mock.patch.object(
            sim_ext, "max_gpu_step_rows", lambda: min(16, sim_ext.allowed_step_rows())
        ),
    ):
        yield


@contextmanager
def simulated_with_faults(
    clock: Clock | None = None, library_: SimLibrary | None = None
) -> Iterator[None]:
    """Like `simulated`, with the faults of `planted`, and whole steps of up to 16 rows.

    Args:
        library_: None: metal/ for every Mac, or with `TENSOR_UNITS` that for the M5.
    """
    if library_ is None:
        library_ = tensor_library() if os.environ.get(TENSOR_UNITS) else metal_library()
    sim_ext.set_simulator(_launcher(planted(), clock or Clock(), library_))
    sim_ext.simulated_launches()
    with (
        simulated_extension(),
        whole_steps(),
    ):
        try:
            yield
        finally:
            kernels.allow_tensor_kernels(False)
            kernels.reject_kernels(())
            kernels.allow_step_rows(0)
            kernels.allow_products(())
            kernels.set_piece_tokens(0)
