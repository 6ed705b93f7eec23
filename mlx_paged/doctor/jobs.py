"""Checks that need MLX, as small jobs named by strings: ``test/cpu/rope/float32``.

They run in a child process (`child_jobs`), so a crash or a hang fails one of them.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict

from mlx_paged import child_jobs
from mlx_paged.calibration.table import Table
from mlx_paged.child_jobs import Outcome

# GPU kernels are compiled on first use, which takes NVRTC up to ten seconds.
SECONDS_PER_JOB = 60.0
MLX, EXTENSION, MEMORY, STEPS = "mlx", "extension", "memory", "steps"
CALIBRATION, CALIBRATE = "calibration/known", "calibration/anew"


class Mlx(TypedDict):
    """The answer of `MLX`. `default_device` is "cpu" or "gpu"."""

    version: str
    default_device: str
    gpu_info: dict[str, str | int]


class Extension(TypedDict):
    """The answer of `EXTENSION`. `missing` lists functions that the package calls and it lacks."""

    build_info: dict[str, str]
    missing: list[str]


class Memory(TypedDict):
    """The answer of `MEMORY`: bytes as the engine counts them.

    `device_bytes` is the memory of the default device; `utilization` is the engine's share of it on
    a GPU.
    """

    on_gpu: bool
    device_bytes: int
    utilization: float


class Steps(TypedDict):
    """The answer of `STEPS`, for the embedded model on the default device.

    `supported` is False if steps are never compiled there. `refused` is the reason why these are
    not; `foreign` counts the primitives that MLX runs itself in each step.
    """

    supported: bool
    refused: str | None
    foreign: dict[str, int]


def run_in_child(
    names: Sequence[str], *, seconds_per_job: float = SECONDS_PER_JOB
) -> dict[str, Outcome]:
    """Runs jobs in a child process; see `child_jobs.run_in_child`."""
    return child_jobs.run_in_child(__name__, names, seconds_per_job=seconds_per_job)


def attempt(name: str) -> Outcome:
    """Runs a job in this process; an exception becomes the outcome's error."""
    return child_jobs.attempt(run, name)


def run(name: str) -> Any:
    """Runs a job in this process and returns its answer.

    Args:
        name: A job's name, with arguments after slashes.

    Raises:
        Exception: Any error of the job.
    """
    job, *arguments = name.split("/")
    return _JOBS[job](*arguments)


def _mlx() -> Mlx:
    """Imports MLX alone, and returns its default device."""
    import mlx.core as mx

    device = mx.default_device().type.name  # "cpu" or "gpu"
    ask = getattr(mx, "device_info", None)  # older versions of MLX lack it
    info = ask(mx.gpu) if ask and device == "gpu" else {}
    return {
        "version": mx.__version__,  # type: ignore[attr-defined]
        "default_device": device,
        "gpu_info": {k: v if isinstance(v, int) else str(v) for k, v in info.items()},
    }


def _extension() -> Extension:
    """Checks that the extension loads with this MLX and has every function that we call."""
    from mlx_paged import blas, extension

    calls = re.compile(r"\b_?ext\.(\w+)\(")
    files = Path(__file__).parent.parent.rglob("*.py")
    called = {name for file in files for name in calls.findall(file.read_text())}
    return {
        # `extension.build_info` reads mlx-lm's version, and mlx-lm may be missing.
        "build_info": {**extension.ext.build_info(), "blas": blas.status()},
        "missing": sorted(called - set(dir(extension.ext))),
    }


def _memory() -> Memory:
    """Returns the memory as the engine sees it, and the rule for sizing its pool."""
    from mlx_paged import platform
    from mlx_paged.engine import memory

    platform.use_supported_device()
    return {
        "on_gpu": not platform.is_cpu_default(),
        "device_bytes": memory.device_memory(),
        "utilization": memory._DEFAULT_GPU_UTILIZATION,
    }


def _steps() -> Steps:
    """Decodes with the embedded model until its steps are compiled."""
    from mlx_paged import platform
    from mlx_paged.demo import model_path
    from mlx_paged.engine.config import EngineConfig
    from mlx_paged.engine.engine import Engine
    from mlx_paged.engine.loading import load
    from mlx_paged.engine.sampling_params import SamplingParams

    platform.use_supported_device()
    current = platform.Platform.current()
    engine = Engine(load(model_path()), EngineConfig(kv_cache_memory=16 << 20))
    engine.add_request("steps", [1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    compilation = engine.stats().compilation
    return {
        "supported": current.repeats_steps or current.max_cpu_step_rows > 0,
        "refused": compilation.refused,
        "foreign": dict(compilation.foreign),
    }


def _calibration(how: str) -> Table | None:
    """Returns the calibration results for the embedded model; None if there is no GPU to calibrate
    or no known result.

    Args:
        how: "known" takes what the cache has, "anew" checks and times everything.
    """
    from mlx_paged import platform
    from mlx_paged.calibration import machine
    from mlx_paged.calibration.cache import Cache
    from mlx_paged.calibration.calibrate import calibrate, take_known
    from mlx_paged.calibration.model_needs import needs_of
    from mlx_paged.calibration.table import table_of
    from mlx_paged.demo import model_path
    from mlx_paged.engine.loading import load
    from mlx_paged.model.wrap import build_paged_model

    platform.use_supported_device()
    if not platform.has_gpu_kernels():
        return None
    cache = Cache(machine.key())
    if how == "known" and not cache.load():
        return None
    model = load(model_path())
    needs = needs_of(build_paged_model(model.model, model.config, block_size=32))
    if how == "known":
        verdicts = take_known(needs, cache)
    else:
        # The job has a minute, and no engine is waiting.
        verdicts = calibrate(needs, cache, anew=True, seconds=0.8 * SECONDS_PER_JOB)
    return table_of(verdicts, machine.key())


def _cases(device: str) -> list[str]:
    from mlx_paged.doctor import self_test

    return self_test.jobs(device)


def _test(device: str, case: str, dtype: str) -> float:
    """Runs a case of the self-test; returns its seconds."""
    from mlx_paged.doctor import self_test

    start = time.perf_counter()
    self_test.run_case(case, device, dtype)
    return time.perf_counter() - start


_JOBS: dict[str, Callable[..., Any]] = {
    MLX: _mlx,
    EXTENSION: _extension,
    MEMORY: _memory,
    STEPS: _steps,
    "calibration": _calibration,
    "cases": _cases,
    "test": _test,
}

if __name__ == "__main__":
    child_jobs.serve(run, sys.argv[1:])
