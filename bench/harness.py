"""What every benchmark of this folder shares: timing, and where results go."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_paged.cli.bench.results import checkout, environment, table, write_json

__all__ = ["environment", "median_seconds", "print_table", "save"]

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


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Prints a table, first column left, the rest right."""
    print(table(header, rows))


checkout()  # of the code that is measured: the checkout may change during the run
