"""Checks that need MLX, as small jobs named by strings: ``test/cpu/rope/float32``.

They run in a child process, one after the other. If it crashes or hangs, the running job has
failed, and a new child runs the rest.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

# GPU kernels are compiled on first use, which takes NVRTC up to ten seconds.
SECONDS_PER_JOB = 60.0
MLX, EXTENSION, MEMORY, STEPS = "mlx", "extension", "memory", "steps"
# Prefix of the child's result lines; code at interpreter start (sitecustomize) may print others.
_MARK = "mlx-paged-doctor:"


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


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Attributes:
        value: The job's answer; None if it failed.
        error: "<type>: <message>", or "Crash: <cause>"; None if it succeeded.
    """

    value: Any = None
    error: str | None = None


# --- In the reporting process ---------------------------------------------------------------------


def run_in_child(
    names: Sequence[str], *, seconds_per_job: float = SECONDS_PER_JOB
) -> dict[str, Outcome]:
    """Runs jobs in a child process; after a crash, runs the rest in a new one."""
    outcomes: dict[str, Outcome] = {}
    while rest := [name for name in names if name not in outcomes]:
        outcomes |= _one_child(rest, seconds_per_job)
    return outcomes


def _one_child(names: Sequence[str], seconds: float) -> dict[str, Outcome]:
    """Returns outcomes up to and including the job that ends the child; at least one."""
    command = [sys.executable, "-m", "mlx_paged.doctor.jobs", str(seconds), *names]
    most = seconds * (len(names) + 1)  # The child enforces each job's own time limit if it can.
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=most
        )
        output, reason = done.stdout, _ending(done, seconds)
    except subprocess.TimeoutExpired as error:
        output, reason = error.stdout or b"", f"no answer within {seconds:.0f} s"
    outcomes = {}
    for line in output.decode(errors="replace").splitlines():
        _, mark, text = line.partition(_MARK)
        if mark and text.endswith("]"):  # A crash may cut a line short.
            name, value, error_text = json.loads(text)
            outcomes[name] = Outcome(value, error_text)
    if len(outcomes) < len(names):
        outcomes[names[len(outcomes)]] = Outcome(error=f"Crash: {reason}")
    return outcomes


def _ending(done: subprocess.CompletedProcess[bytes], seconds: float) -> str:
    said = done.stderr.decode(errors="replace").strip().splitlines()
    if any(line.startswith("Timeout (") for line in said):  # printed by faulthandler
        return f"no answer within {seconds:.0f} s"
    how = f"the process ended with status {done.returncode}"
    if done.returncode < 0:
        number = -done.returncode
        known = number in set(signal.Signals)
        how = f"the process was killed by {signal.Signals(number).name if known else number}"
    return how + (f" ({said[-1].strip()})" if said else "")


# --- In the child ---------------------------------------------------------------------------------


def main(seconds: str, *names: str) -> None:
    """Runs jobs and writes a line for each; redirects all other output to standard error."""
    outcomes = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for name in names:
        faulthandler.dump_traceback_later(float(seconds), exit=True)
        outcome = attempt(name)
        outcomes.write(f"{_MARK}{json.dumps([name, outcome.value, outcome.error])}\n")
    faulthandler.cancel_dump_traceback_later()


def attempt(name: str) -> Outcome:
    """Runs a job in this process; an exception becomes the outcome's error."""
    try:
        return Outcome(run(name))
    except Exception as error:
        return Outcome(error=" ".join(f"{type(error).__name__}: {error}".split()))


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
    "cases": _cases,
    "test": _test,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
