"""Checks each case, then times it, its peers and a plain copy in turns.

A machine's speed drifts; taking turns spreads the drift over all variants.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged import extension, platform
from mlx_paged.bench.figures import percentile
from mlx_paged.bench.kernels import workloads
from mlx_paged.bench.kernels.cases import LAYER, Case, refusal
from mlx_paged.bench.kernels.data import OURS, Checked, PoolCache, Variant, Work, key_of
from mlx_paged.bench.results import memory_bytes
from mlx_paged.errors import BackendUnavailableError, MlxPagedError

# Share of the available memory that pools and dense copies may use.
_MAX_MEMORY = 0.6

COPY = "copy"  # the variant that sets the roofline
# A sample runs as many launches as fill about this time, so that start and wait do not count.
SAMPLE_SECONDS = 0.01
MAX_LAUNCHES = 256
# The outputs of a sample's launches stay in memory until it ends.
MAX_OUTPUT_BYTES = {"cpu": 512 << 20, "gpu": 4 << 30}
# Slow cases get fewer rounds, but at least three.
SECONDS_PER_VARIANT = 2.0
FEWEST_SAMPLES = 3


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement.

    Attributes:
        rounds: Samples per variant.
        past_cache: Bytes that launches read before they read the same data again.
        seed: Seed of inputs and block tables.
    """

    rounds: int = 9
    past_cache: int = 256 << 20
    seed: int = 0


def use_device(name: str | None) -> str:
    """Makes "cpu" or "gpu" MLX's default device; None picks the best one that has kernels.

    Returns:
        "cpu" or "gpu".
    """
    if name is None:
        platform.use_supported_device()
    elif name == "cpu":
        mx.set_default_device(mx.cpu)
    else:
        backends = extension.build_info()["backends"]
        if not mx.is_available(mx.gpu):
            raise BackendUnavailableError("gpu", "MLX finds no GPU on this machine")
        if not {"metal", "cuda"} & set(backends.split()):
            raise BackendUnavailableError(
                "gpu", f"this build of mlx_paged has kernels for {backends} only"
            )
        mx.set_default_device(mx.gpu)
    return "cpu" if platform.is_cpu_default() else "gpu"


def gpu_head_dims() -> set[int]:
    """Head dims (same for keys and values) that have GPU kernels."""
    dims = set()
    for host_name, _, _ in extension.ext.kernel_names():
        if host_name.startswith("paged_decode_") and not host_name.startswith("paged_decode_m"):
            _, _, _, key_dim, value_dim, _ = host_name.split("_")
            if key_dim == value_dim:
                dims.add(int(key_dim))
    return dims


def device_memory(device: str) -> int | None:
    """Bytes of a device's memory; None if unknown."""
    if device == "gpu":
        info = mx.device_info()  # type: ignore[attr-defined]
        for name in ("memory_size", "total_memory"):  # Metal's and CUDA's names
            if name in info:
                return int(info[name])
    return memory_bytes()


def divide(cases: Sequence[Case], device: str) -> tuple[list[Case], list[dict[str, Any]]]:
    """Splits cases into those that the backend can run and the rest, each with its ``reason``."""
    dims = gpu_head_dims()
    memory = device_memory(device)
    limit = None if memory is None else int(_MAX_MEMORY * memory)
    served, refused = [], []
    for case in cases:
        reason = refusal(case, device, dims, limit)
        if reason is None:
            served.append(case)
        else:
            refused.append({**asdict(case), "reason": reason})
    return served, refused


def measure(
    cases: Sequence[Case],
    device: str,
    settings: Settings,
    on_case: Callable[[Case, bool], None] = lambda case, is_done: None,
) -> list[dict[str, Any]]:
    """Measures all cases; returns one entry for each.

    Args:
        on_case: Called for each case when it starts and when it is done.

    Raises:
        WrongResultError: An op returned a wrong result.
    """
    copy, pools, rows = Copy(device), PoolCache(), []
    for case in cases:
        on_case(case, False)
        try:
            row = _measure(case, device, copy, pools, settings)
        except (ValueError, RuntimeError) as error:
            if isinstance(error, MlxPagedError):
                raise
            raise MlxPagedError(f"{case}: {error}") from error
        rows.append(row)
        on_case(case, True)
        gc.collect()
    return rows


def _measure(
    case: Case, device: str, copy: Copy, pools: PoolCache, settings: Settings
) -> dict[str, Any]:
    if case.op in LAYER:
        work = workloads.layer_op(case, settings.past_cache, settings.seed)
    else:
        data = pools.get(key_of(case, settings.past_cache, settings.seed))
        work = workloads.ON_POOLS[case.op](case, data, settings.past_cache, settings.seed)
    checked = work.check()
    timings = interleaved(
        [*work.variants, copy.variant],
        settings.rounds,
        most_output_bytes=min(MAX_OUTPUT_BYTES[device], (device_memory(device) or 0) // 8 or 1),
    )
    return _row(case, work, checked, timings, copy.bytes)


def _row(
    case: Case, work: Work, checked: Checked, timings: dict[str, Timing], copy_bytes: int
) -> dict[str, Any]:
    ours, copy = timings[OURS], timings[COPY]
    return {
        **asdict(case),
        "bytes": work.bytes,
        "flops": work.flops,
        "seconds": ours.to_json(),
        "bytes_per_second": work.bytes / ours.median,
        "copy_bytes_per_second": copy_bytes / copy.median,
        "share_of_copy": work.bytes / copy_bytes * copy.over(ours),
        "max_relative_error": checked.max_relative_error,
        "checked": [checked.rows, checked.of],
        "peers": {
            name: {
                "seconds": timing.to_json(),
                "over_ours": timing.over(ours),
                "max_relative_error": checked.peers[name],
            }
            for name, timing in timings.items()
            if name not in (OURS, COPY)
        },
    }


# --- Times ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Samples of one variant.

    Attributes:
        samples: Seconds per launch.
        rounds: The round of each sample.
        launches: Launches per sample.
    """

    samples: tuple[float, ...]
    rounds: tuple[int, ...]
    launches: int

    @property
    def median(self) -> float:
        """Median seconds per launch."""
        return percentile(self.samples, 50)

    @property
    def spread(self) -> float:
        """Interquartile range of the samples, as a share of the median."""
        return (percentile(self.samples, 75) - percentile(self.samples, 25)) / self.median

    def over(self, other: Timing) -> float:
        """Median ratio of this time to another's, over the rounds that measured both."""
        mine, theirs = (dict(zip(t.rounds, t.samples)) for t in (self, other))
        return percentile([mine[i] / theirs[i] for i in mine if i in theirs], 50)

    def to_json(self) -> dict[str, Any]:
        """Summary for the results; times are seconds per launch."""
        return {
            "median": self.median,
            "p25": percentile(self.samples, 25),
            "p75": percentile(self.samples, 75),
            "min": min(self.samples),
            "max": max(self.samples),
            "spread": self.spread,
            "launches": self.launches,
            "samples": list(self.samples),
        }


def interleaved(
    variants: Sequence[Variant],
    rounds: int,
    *,
    most_output_bytes: int = MAX_OUTPUT_BYTES["cpu"],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times variants in turns; every second round runs in reverse order.

    Args:
        rounds: Samples per variant.
        most_output_bytes: Maximum bytes of outputs that a sample may keep until it ends.

    Returns:
        Times by variant name.
    """
    launches, counts = {}, {}
    for variant in variants:
        variant.prepare(variant.warmup)()
        seconds = _seconds(variant, 1, clock)
        if seconds < SECONDS_PER_VARIANT / 10:
            seconds = min(seconds, _seconds(variant, 1, clock))
        seconds = max(seconds, 1e-9)  # the clock has a limited resolution
        most = most_output_bytes // max(1, variant.output_bytes)
        wanted = round(SAMPLE_SECONDS / seconds)
        launches[variant.name] = max(1, min(wanted, most, MAX_LAUNCHES))
        sample_seconds = seconds * launches[variant.name]
        counts[variant.name] = min(
            rounds, max(FEWEST_SAMPLES, int(SECONDS_PER_VARIANT / sample_seconds))
        )
    samples: dict[str, dict[int, float]] = {variant.name: {} for variant in variants}
    for i in range(rounds):
        for variant in reversed(variants) if i % 2 else variants:
            name = variant.name
            # A variant with fewer samples than rounds spreads them over all rounds.
            if (
                len(samples[name]) * rounds <= i * counts[name]
                and len(samples[name]) < counts[name]
            ):
                samples[name][i] = _seconds(variant, launches[name], clock)
    return {
        name: Timing(tuple(found.values()), tuple(found), launches[name])
        for name, found in samples.items()
    }


def _seconds(variant: Variant, launches: int, clock: Callable[[], float]) -> float:
    run = variant.prepare(launches)
    start = clock()
    run()
    return (clock() - start) / launches


class Copy:
    """Measures the machine's copy bandwidth, the roofline of all memory-bound work.

    On the CPU every core copies its share; on a GPU an elementwise operation reads and writes.
    Both bytes read and bytes written count.
    """

    def __init__(self, device: str, megabytes: int = 256) -> None:
        self.bytes = 2 * (megabytes << 20)
        if device == "cpu":
            self._source = np.ones(megabytes << 20, dtype=np.uint8)
            self._target = np.zeros_like(self._source)
            self._threads = ThreadPoolExecutor(os.cpu_count() or 1)
            size = -(-len(self._source) // (os.cpu_count() or 1))
            self._ranges = [slice(a, a + size) for a in range(0, len(self._source), size)]
            self.variant = Variant(COPY, self._on_cpu)
        else:
            self._array = mx.ones((megabytes << 20) // 4)
            mx.eval(self._array)
            self.variant = Variant(COPY, self._on_gpu)

    def _on_cpu(self, launches: int) -> Callable[[], object]:
        def part(where: slice) -> None:
            for _ in range(launches):
                np.copyto(self._target[where], self._source[where])

        return lambda: list(self._threads.map(part, self._ranges))

    def _on_gpu(self, launches: int) -> Callable[[], None]:
        array = self._array
        for _ in range(launches):
            array = array + 1.0  # depends on the previous one and reuses its memory
        return lambda: mx.eval(array)
