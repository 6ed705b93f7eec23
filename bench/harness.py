"""Shared parts of the benchmarks in this folder: timing, servers, and result files."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mlx_paged.bench.results import checkout, environment, table, write_json

__all__ = ["environment", "free_port", "median_seconds", "print_table", "save", "server_process"]

RESULTS = Path(__file__).parent / "results"
START_TIMEOUT = 120.0


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


def free_port() -> int:
    """Returns an unused loopback port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def server_process(name: str, command: list[str], port: int, **options: Any) -> Iterator[str]:
    """Starts a server, yields its address once /health answers, and ends it afterwards.

    Args:
        name: Name of the server, for errors.
        options: Options of `subprocess.Popen`.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, **options)
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + START_TIMEOUT
            while True:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{url}/health", timeout=2).close()
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"{name} did not start:\n{log.read()[-3000:]}")
                time.sleep(0.2)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Prints a table with the first column left-aligned and the rest right-aligned."""
    print(table(header, rows))


checkout()  # Caches the commit of the measured code: the checkout may change during the run.
