"""What every benchmark shares: timing, the machine's own copy bandwidth, and where results go."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Machine, versions, commit and command: what a figure means nothing without."""
    from mlx_paged import core

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "commit": _COMMIT,
        "dirty": _DIRTY,
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "load_average": _LOAD_AVERAGE,  # of the last minute: what else ran here
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
        },
        "build": core.build_info(),
    }


def save(name: str, results: dict[str, Any]) -> Path:
    """Writes `results` with its environment to ``bench/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **results}, indent=2) + "\n")
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
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        print("  ".join(cells))


def _git(*args: str) -> str:
    done = subprocess.run(
        ["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# Of the code that is measured: the checkout may move on while it runs.
# (A copy without its repository is told by whoever made it.)
_COMMIT = os.environ.get("MLX_PAGED_COMMIT") or _git("rev-parse", "HEAD")
_LOAD_AVERAGE = os.getloadavg()[0]
_DIRTY = bool(_git("status", "--porcelain"))
