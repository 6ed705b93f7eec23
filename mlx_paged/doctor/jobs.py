"""What needs MLX, in small jobs: each is named by a string and answers with plain data.

They run in a child process (`isolation`), one after the other.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MLX, EXTENSION, MATMUL, MEMORY = "mlx", "extension", "matmul", "memory"


def run(job: str) -> Any:
    """Does one job.

    Args:
        job: a name, or a name and arguments: ``test/cpu/rope/float32``.

    Raises:
        Whatever goes wrong: it becomes the job's outcome.
    """
    name, *arguments = job.split("/")
    return _JOBS[name](*arguments)


def _mlx() -> dict[str, Any]:
    """MLX alone: does it import, and which device is its default?"""
    import mlx.core as mx

    # (MLX may be another version than ours, and older ones lack this question.)
    has_gpu = mx.default_device() == mx.Device(mx.gpu) or bool(
        getattr(mx, "is_available", lambda _: False)(mx.gpu)
    )
    return {
        "version": mx.__version__,  # type: ignore[attr-defined]
        "default_device": "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu",
        "gpu_available": has_gpu,
        "gpu_info": _plain(_device_info(mx.gpu)) if has_gpu else {},
    }


def _device_info(device: Any) -> dict[str, Any]:
    import mlx.core as mx

    ask = getattr(mx, "device_info", None)
    return ask(device) if ask else {}


def _plain(info: dict[str, Any]) -> dict[str, str | int]:
    return {k: v if isinstance(v, int) else str(v) for k, v in info.items()}


def _extension() -> dict[str, Any]:
    """The extension: does it load beside this MLX?"""
    from mlx_paged import blas, extension

    return {
        # (Not `build_info`: it asks for mlx-lm's version too, which may be what is missing.)
        "build_info": {**extension.ext.build_info(), "blas": blas.status()},
        "loaded_from": extension.ext.__file__,
        "missing": sorted(_called() - set(dir(extension.ext))),
        "has_forwarder": _is_mapped("libmlx_paged_blas"),
    }


def _called() -> set[str]:
    """Functions of the extension that the package's Python calls: newer sources, older build?"""
    package = Path(__file__).parent.parent
    calls = re.compile(r"\b_?ext\.(\w+)\(")
    return {name for file in package.rglob("*.py") for name in calls.findall(file.read_text())}


def _is_mapped(library: str) -> bool | None:
    """Whether a library is in this process; None where that cannot be told."""
    try:
        return library in Path("/proc/self/maps").read_text()
    except OSError:
        return None


def _matmul() -> dict[str, float]:
    """GFLOP/s of a float32 product on the CPU, by MLX and by NumPy (which brings a BLAS)."""
    import mlx.core as mx
    import numpy as np

    size = 512
    a = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    b = mx.array(a)
    mx.eval(b)
    mine = numpys = float("inf")
    with mx.stream(mx.cpu):
        for _ in range(3):  # in turns, as both may be disturbed
            mine = min(mine, fastest(lambda: mx.eval(b @ b), 3, seconds=0.3))
            numpys = min(numpys, fastest(lambda: a @ a, 3, seconds=0.3))
    operations = 2 * size**3
    return {"mlx_gflops": operations / mine / 1e9, "numpy_gflops": operations / numpys / 1e9}


def _memory() -> dict[str, Any]:
    """Memory as the engine sees it, and the rules by which it sizes its pool."""
    import mlx.core as mx

    from mlx_paged import extension
    from mlx_paged.engine import config, memory

    extension.use_supported_device()
    return {
        "on_gpu": mx.default_device() != mx.Device(mx.cpu),
        "device_bytes": memory.device_memory(),
        "physical_bytes": config._physical_memory(),
        "available_bytes": memory.available_memory(),
        "utilization": memory._DEFAULT_GPU_UTILIZATION,
    }


def _bandwidth(device: str) -> float:
    from mlx_paged.doctor import bandwidth

    return bandwidth.cpu_copy() if device == "cpu" else bandwidth.gpu_copy()


def _cases(device: str) -> list[str]:
    from mlx_paged.doctor import self_test

    return self_test.jobs(device)


def _test(device: str, case: str, dtype: str) -> float:
    from mlx_paged.doctor import self_test

    start = time.perf_counter()
    self_test.run_case(case, device, dtype)
    return time.perf_counter() - start


def fastest(action: Callable[[], object], repeat: int, *, seconds: float) -> float:
    """Shortest of some runs, after one that warms up; no new run begins after `seconds`."""
    action()
    best, deadline = float("inf"), time.perf_counter() + seconds
    for _ in range(repeat):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > deadline:
            break
    return best


def _crash() -> None:
    """For the tests of isolation: a job that takes its process along."""
    os.abort()


_JOBS: dict[str, Callable[..., Any]] = {
    MLX: _mlx,
    EXTENSION: _extension,
    MATMUL: _matmul,
    MEMORY: _memory,
    "bandwidth": _bandwidth,
    "cases": _cases,
    "test": _test,
    "crash": _crash,
    "sleep": lambda seconds: time.sleep(float(seconds)),
}
