"""How long calls take on an NVIDIA GPU, by the GPU's own clock.

PyTorch's profiler reads it for every kernel of the process, MLX's too. Every contender is called
many times in one evaluation, each call taking the result of the one before as its queries, as the
layers of a model follow each other. Two times are read: `kernels` is spent in kernels, `in a row`
is from one call to the next, gaps included; where the host takes longer to launch a call than the
GPU to run it, the gap is the host's. MLX launches kernels one by one, as the profiler adds some
microseconds to every kernel of a CUDA graph.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

os.environ["MLX_USE_CUDA_GRAPHS"] = "0"  # before MLX reads it

import torch
from torch.profiler import ProfilerActivity, profile

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx

REPEAT = 24  # calls of one evaluation
ROUNDS = 5  # over all contenders; medians are reported


@dataclass(frozen=True)
class Seconds:
    """Of one call."""

    kernels: float
    in_a_row: float


def time_calls(repeat: Callable[[], None]) -> Seconds:
    """Medians over the REPEAT calls that `repeat` makes."""
    repeat()
    mx.synchronize()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        repeat()
        mx.synchronize()
        torch.cuda.synchronize()
    events = [
        event for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in event.name
    ]  # fmt: skip
    spans: dict[str, list[float]] = {}
    for event in events:
        spans.setdefault(event.name, []).append(event.time_range.elapsed_us())
    # What runs once an evaluation and not once a call is dropped.
    counts = {name: round(len(times) / REPEAT) for name, times in spans.items()}
    kernels = sum(statistics.median(times) * counts[name] for name, times in spans.items())
    starts = sorted(e.time_range.start for e in events if counts[e.name])[:: sum(counts.values())]
    if len(starts) < REPEAT // 2:
        raise RuntimeError(f"the profiler saw too few kernels: {counts}")
    between = statistics.median(b - a for a, b in pairwise(starts))
    return Seconds(kernels / 1e6, between / 1e6)


def compete(contenders: dict[str, Callable[[], None]]) -> dict[str, Any]:
    """Seconds of each, in turns; one that refuses says why."""
    found: dict[str, list[Seconds]] = {name: [] for name in contenders}
    refused: dict[str, str] = {}
    for _ in range(ROUNDS):
        for name, repeat in contenders.items():
            try:
                found[name].append(time_calls(repeat))
            except RuntimeError as error:
                refused[name] = str(error).splitlines()[0]
    return {
        name: {field: statistics.median(asdict(t)[field] for t in times) for field in
               ("kernels", "in_a_row")} if times else refused[name]
        for name, times in found.items()
    }  # fmt: skip


def chain(attend: Callable[[mx.array], mx.array], queries: mx.array) -> Callable[[], None]:
    def repeat() -> None:
        out = queries
        for _ in range(REPEAT):
            out = attend(out)
        mx.eval(out)

    return repeat


def copy_bandwidth() -> float:
    """Bytes a second of a device-to-device copy, read and written bytes both counted."""
    source = torch.ones(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(times)


def share_of(seconds: dict[str, float] | str, num_bytes: int, copy: float) -> dict[str, float]:
    if isinstance(seconds, str):
        return {}
    return {name: num_bytes / value / copy for name, value in seconds.items()}


def percent(share: dict[str, float], name: str) -> str:
    return f"{share[name]:.0%}" if name in share else "-"
