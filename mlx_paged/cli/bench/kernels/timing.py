"""Times of what is compared, taken in turns, and the machine's copy bandwidth among them.

A machine's speed drifts; what is measured one after the other in each round drifts together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.cli.bench.percentiles import percentile

COPY = "copy"  # the variant that is the roof
# A sample is as many launches as take about this long: starting and waiting must not count.
SAMPLE_SECONDS = 0.01
MOST_LAUNCHES = 256
# Results of a sample's launches live until it ends.
MOST_OUTPUT_BYTES = {"cpu": 512 << 20, "gpu": 4 << 30}
# Something slow gets fewer rounds, but at least three.
SECONDS_PER_VARIANT = 2.0
FEWEST_SAMPLES = 3


@dataclass(frozen=True)
class Variant:
    """One way to do the work.

    Attributes:
        name: in the results.
        prepare: builds so many launches, and returns what runs them to their end.
        output_bytes: of one launch.
        warmup: launches before the first sample: kernels are compiled and plans read in them.
    """

    name: str
    prepare: Callable[[int], Callable[[], object]]
    output_bytes: int = 0
    warmup: int = 1


@dataclass(frozen=True)
class Timing:
    """Samples of one variant.

    Attributes:
        samples: seconds of one launch.
        rounds: that each sample was taken in.
        launches: of a sample.
    """

    samples: tuple[float, ...]
    rounds: tuple[int, ...]
    launches: int

    @property
    def median(self) -> float:
        """Seconds of one launch."""
        return percentile(self.samples, 50)

    @property
    def spread(self) -> float:
        """Width of the middle half of the samples, as a share of the median."""
        return (percentile(self.samples, 75) - percentile(self.samples, 25)) / self.median

    def over(self, other: Timing) -> float:
        """How many times as long as another it took: median over the rounds that had both."""
        mine, theirs = (dict(zip(t.rounds, t.samples)) for t in (self, other))
        return percentile([mine[i] / theirs[i] for i in mine if i in theirs], 50)

    def to_json(self) -> dict[str, Any]:
        """Seconds of one launch."""
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
    most_output_bytes: int = MOST_OUTPUT_BYTES["cpu"],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times variants in turns; every second round runs backwards.

    Args:
        rounds: samples of each.
        most_output_bytes: that the launches of a sample may leave until it ends.

    Returns:
        By name.
    """
    launches, counts = {}, {}
    for variant in variants:
        variant.prepare(variant.warmup)()
        seconds = _seconds(variant, 1, clock)
        if seconds < SECONDS_PER_VARIANT / 10:
            seconds = min(seconds, _seconds(variant, 1, clock))
        seconds = max(seconds, 1e-9)  # a clock has its grain
        most = most_output_bytes // max(1, variant.output_bytes)
        wanted = round(SAMPLE_SECONDS / seconds)
        launches[variant.name] = max(1, min(wanted, most, MOST_LAUNCHES))
        sample_seconds = seconds * launches[variant.name]
        counts[variant.name] = min(
            rounds, max(FEWEST_SAMPLES, int(SECONDS_PER_VARIANT / sample_seconds))
        )
    samples: dict[str, dict[int, float]] = {variant.name: {} for variant in variants}
    for i in range(rounds):
        for variant in reversed(variants) if i % 2 else variants:
            name = variant.name
            # (Spread over all rounds, where there are fewer samples than rounds.)
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
    """The machine's copy bandwidth: the roof over everything that moves bytes.

    On the CPU all cores copy, each its part; on a GPU an elementwise operation reads and writes.
    Bytes read and bytes written are both counted.
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
            array = array + 1.0  # each waits for the one before, whose memory it takes over
        return lambda: mx.eval(array)
