"""Measures how loading a model delays another one's stream, with and without a spare process.

    python bench/loading.py [--model PATH_OF_THE_LOADED_MODEL] [--leave-out-others]

`mlx-paged serve` streams one model while a second one is loaded and unloaded again, in rounds. The
result is the largest time between two chunks in windows of five seconds: `loading` begins with a
load, `preparing` is while the router starts its next spare process, and `quiet` is neither.

With --leave-out-others, gaps count only if other programs ran for less than a tenth of their
length, which `perf` tells; so the machine need not be quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from harness import free_port, print_table, save, server_process
from models import MIB, PROMPT, STREAM_BEGINS, server_command
from switches import OtherPrograms, recorded

from mlx_paged.demo import model_path

WINDOW = 5.0  # seconds
MAX_SHARE_OF_OTHERS = 0.1
LOOK_INTERVAL = 0.02


@dataclass
class Window:
    """A part of the stream.

    Attributes:
        chunks: Arrival times, as given by `time.monotonic`; NaN before each stream.
    """

    kind: str
    chunks: list[float] = field(default_factory=list)

    def largest_gap(self, others: OtherPrograms | None) -> float:
        """Largest gap in milliseconds; 0.0 if all are left out."""
        pairs = [(a, b) for a, b in itertools.pairwise(self.chunks) if a <= b]
        gaps = sorted(((b - a, a, b) for a, b in pairs), reverse=True)
        for gap, begin, end in gaps:
            if others is None or others.share(begin, end) < MAX_SHARE_OF_OTHERS:
                return 1000 * gap
        return 0.0


class Rounds:
    """Runs the rounds on one server.

    Attributes:
        own: Ids of all processes of the measurement.
        windows: Those measured so far.
        loads: Seconds that loads took.
    """

    def __init__(self, session: aiohttp.ClientSession, server: psutil.Process) -> None:
        self._session, self._server = session, server
        self._chunks: list[float] = []
        self.own = {os.getpid(), server.pid}
        self.windows: list[Window] = []
        self.loads: list[float] = []

    async def run(self, num: int, *, has_spare: bool) -> None:
        """Runs rounds while the model "a" streams."""
        await self._load("a")
        streaming = asyncio.create_task(self._stream())
        await asyncio.sleep(STREAM_BEGINS)
        for _ in range(num):
            if has_spare:
                await self._measure("preparing", self.spare_is_ready())
            await self._measure("quiet", asyncio.sleep(WINDOW))
            await self._measure("loading", self._load_and_wait())
            await self._change("b", "unload", "unloaded")
        streaming.cancel()
        await asyncio.gather(streaming, return_exceptions=True)

    async def _measure(self, kind: str, work: Awaitable[Any]) -> None:
        """Measures some work in one window, or in several if it takes that long."""
        begin = time.monotonic()
        await work
        end = time.monotonic()
        num = max(1, int((end - begin) / WINDOW))
        for number in range(num):
            first = begin + number * (end - begin) / num
            last = first + (end - begin) / num
            self.windows.append(
                Window(kind, [t for t in self._chunks if not (t < first or t > last)])
            )
        self._chunks.clear()

    async def _load_and_wait(self) -> None:
        begin = time.monotonic()
        await self._load("b")
        self.loads.append(time.monotonic() - begin)
        await asyncio.sleep(WINDOW - self.loads[-1])

    async def _load(self, model: str) -> None:
        await self._change(model, "load", "loaded")
        self.own |= {child.pid for child in self._server.children()}

    async def _change(self, model: str, verb: str, state: str) -> None:
        await self._session.post(f"/models/{verb}", json={"model": model})
        while True:
            async with self._session.get(f"/v1/models/{model}") as answer:
                if (await answer.json())["status"]["value"] == state:
                    return
            await asyncio.sleep(LOOK_INTERVAL)

    async def spare_is_ready(self) -> None:
        """Waits until the newest process has done all its work."""
        before = None
        while True:
            spare = self.newest()
            now = spare.pid, sum(spare.cpu_times()[:2])
            if now == before and len(self._server.children()) == 2:
                self.own.add(spare.pid)
                return
            before = now
            await asyncio.sleep(0.5)

    def newest(self) -> psutil.Process:
        """Returns the router's newest process."""
        return max(self._server.children(), key=lambda child: child.create_time())

    async def _stream(self) -> None:
        body = {"model": "a", "prompt": PROMPT, "max_tokens": 3000, "temperature": 0,
                "ignore_eos": True, "stream": True}  # fmt: skip
        while True:
            self._chunks.append(math.nan)
            async with self._session.post("/v1/completions", json=body) as answer:
                async for _ in answer.content.iter_chunks():
                    self._chunks.append(time.monotonic())


async def measure(
    url: str, pid: int, num: int, *, has_spare: bool
) -> tuple[Rounds, dict[str, Any]]:
    """Runs rounds on a server; returns them, and the memory of its spare process."""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(None)) as session:
        rounds = Rounds(session, psutil.Process(pid))
        await rounds.run(num, has_spare=has_spare)
        if not has_spare:
            return rounds, {}
        await rounds.spare_is_ready()
        memory = rounds.newest().memory_full_info()
        return rounds, {"resident_mib": memory.rss / MIB, "proportional_mib": memory.pss / MIB}


def result_of(rounds: Rounds, others: OtherPrograms | None) -> dict[str, Any]:
    largest: dict[str, list[float]] = {}
    for window in rounds.windows:
        largest.setdefault(window.kind, []).append(window.largest_gap(others))
    return {
        "largest_gap_ms": {kind: statistics.median(all_) for kind, all_ in largest.items()},
        "worst_gap_ms": {kind: max(all_) for kind, all_ in largest.items()},
        "largest_gaps_ms": largest,
        "load_seconds": statistics.median(rounds.loads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(model_path()), help="the model that is loaded")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--leave-out-others", action="store_true")
    parser.add_argument("--no-save", dest="save", action="store_false")
    given = parser.parse_args()
    result: dict[str, Any] = {
        "rounds": given.rounds,
        "leaves_out_others": given.leave_out_others,
        "load_before": os.getloadavg(),
    }
    models = (f"--model=a={model_path()}", f"--model=b={given.model}")
    rows = []
    for name, options in (("spare", ()), ("no_spare", ("--no-spare-process",))):
        port = free_port()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "switches"
            with server_process(name, server_command(port, *models, *options), port) as url:
                [pid] = [c.pid for c in psutil.Process().children() if str(port) in c.cmdline()]
                work = measure(url, pid, given.rounds, has_spare=name == "spare")
                if given.leave_out_others:
                    with recorded(file):
                        rounds, memory = asyncio.run(work)
                else:
                    rounds, memory = asyncio.run(work)
            others = OtherPrograms(file, rounds.own) if given.leave_out_others else None
        result[name] = found = result_of(rounds, others) | memory
        rows += [
            [name, kind, f"{gap:.1f}", f"{found['worst_gap_ms'][kind]:.1f}"]
            for kind, gap in found["largest_gap_ms"].items()
        ]
        print(f"{name}: a load takes {found['load_seconds']:.2f} s {memory}", flush=True)
    print_table(["server", "window", "largest gap ms", "worst ms"], rows)
    if given.save:
        print(save("loading-cpu", result))


if __name__ == "__main__":
    main()
