"""What every benchmark shares: timing, the machine's own copy bandwidth, and where results go."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mlx_paged.cli.bench.environment import checkout, environment
from mlx_paged.cli.bench.results import table, write_json

__all__ = ["copy_bandwidth", "environment", "median_seconds", "print_table", "save"]

RESULTS = Path(__file__).parent / "results"


def save(name: str, results: dict[str, Any]) -> Path:
    """Writes `results` with its environment to ``bench/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    write_json(path, results)
    return path


def median_seconds(run: Callable[[], object], repeat: int = 9, warmup: int = 2) -> float:
    """Median wall time of `run`."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeat // 2]


def copy_bandwidth(megabytes: int = 256) -> float:
    """Bytes per second of a large copy on all cores, read and written bytes both counted."""
    source = np.ones(megabytes << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    parts = np.array_split(np.arange(len(source)), os.cpu_count() or 1)
    ranges = [(int(part[0]), int(part[-1]) + 1) for part in parts]

    def copy() -> None:
        threads = [
            threading.Thread(target=np.copyto, args=(target[a:b], source[a:b])) for a, b in ranges
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return 2 * source.nbytes / median_seconds(copy)


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Prints a table, first column left, the rest right."""
    print(table(header, rows))


checkout()  # of the code that is measured: the checkout may move on while it runs
