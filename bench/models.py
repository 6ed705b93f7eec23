"""Measures a server of several models, which runs one process per model, against threads.

    python bench/models.py [--model PATH_OF_THE_SECOND_MODEL]

- **gaps**: the largest time between two tokens of a stream while a second model is loaded, by a
  thread of the same process and by a process of its own, next to the same stream when nothing
  happens for as long as a load took. Each is measured several times, in turns; the result is the
  median.
- **freed**: how much of the memory that the second model took comes back when it is unloaded.
- **router**: the same gaps through `mlx-paged serve` with two models, the share of that time for
  which the router waited for a processor, and what the router adds to the time of a token.
- **shares**: tokens a second of two models under equal load, each alone and both together.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import mlx.core as mx
import psutil
from harness import free_port, print_table, save, server_process

from mlx_paged.demo import model_path
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.client import EngineRequest
from mlx_paged.engine.sampling_params import SamplingParams

PROMPT = "def add(a, b):\n"
BLOCKS = 200
QUIET_SECONDS = 6.0  # until a load has shown how long one takes
STREAM_BEGINS = 1.0  # seconds
LOAD_SECONDS = 6.0
MIB = 1 << 20


# Threads and processes, without a server.


class Gaps:
    """The times between the tokens of an endless stream."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._gaps: list[float] = []
        self._token = asyncio.Event()  # set by each token
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        params = SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0)
        while True:
            stream = await self._engine.submit(EngineRequest(PROMPT, params))
            last = None
            async for _ in stream:
                now = time.perf_counter()
                if last is not None:
                    self._gaps.append(now - last)
                last = now
                self._token.set()

    async def during(self, work: Awaitable[Any]) -> float:
        """Awaits `work`; returns the largest gap that begins meanwhile, in milliseconds."""
        await self._next_token()  # Ends a gap that began before.
        self._gaps.clear()
        await work
        await self._next_token()
        return max(self._gaps) * 1000

    async def _next_token(self) -> None:
        self._token.clear()
        await self._token.wait()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def serve_in_child(path: str, told: Any, end: Any) -> None:
    """Runs an engine in this child process until the parent puts something into `end`."""

    async def run() -> None:
        engine = AsyncEngine.from_model(path, num_gpu_blocks_override=BLOCKS)
        await engine.ready()
        told.put("ready")
        await asyncio.get_running_loop().run_in_executor(None, end.get)
        await engine.shutdown()

    asyncio.run(run())


def resident() -> int:
    """Bytes of this process and its children in main memory."""
    own = psutil.Process()
    return sum(each.memory_info().rss for each in (own, *own.children(recursive=True)))


@contextlib.asynccontextmanager
async def loaded_in_thread(path: str) -> AsyncIterator[None]:
    engine = AsyncEngine.from_model(path, num_gpu_blocks_override=BLOCKS)
    await engine.ready()
    yield
    await engine.shutdown()
    del engine
    gc.collect()
    mx.clear_cache()


@contextlib.asynccontextmanager
async def loaded_in_process(path: str) -> AsyncIterator[None]:
    context = multiprocessing.get_context("spawn")
    told, end = context.Queue(), context.Queue()
    child = context.Process(target=serve_in_child, args=(path, told, end))
    child.start()
    in_thread = asyncio.get_running_loop().run_in_executor
    await in_thread(None, told.get)
    yield
    end.put("end")
    await in_thread(None, child.join)


async def compare(path: str, rounds: int) -> dict[str, Any]:
    """Measures gaps and freed memory of both ways."""
    sys.setswitchinterval(0.0005)  # as in `server.run`
    first = AsyncEngine.from_model(num_gpu_blocks_override=2000)
    await first.ready()
    gaps = Gaps(first)
    await asyncio.sleep(1.0)
    ways: dict[str, Callable[[str], Any]] = {
        "thread": loaded_in_thread,
        "process": loaded_in_process,
    }
    found: dict[str, list[float]] = {name: [] for name in ("quiet", *ways)}
    memory: dict[str, list[tuple[int, int]]] = {name: [] for name in ways}
    seconds = QUIET_SECONDS
    for _ in range(rounds):
        found["quiet"].append(await gaps.during(asyncio.sleep(seconds)))
        for name, loaded in ways.items():
            before = resident()
            life = loaded(path)
            began = time.perf_counter()
            found[name].append(await gaps.during(life.__aenter__()))
            seconds = time.perf_counter() - began
            taken = resident() - before
            await life.__aexit__(None, None, None)
            memory[name].append((taken, before + taken - resident()))
    await gaps.close()
    await first.shutdown()
    result: dict[str, Any] = {
        "largest_gap_ms": {name: statistics.median(all_) for name, all_ in found.items()},
        "largest_gaps_ms": found,
    }
    for name, pairs in memory.items():
        taken = statistics.median(pair[0] for pair in pairs) / MIB
        freed = statistics.median(pair[1] for pair in pairs) / MIB
        result[f"memory_{name}"] = {"taken_mib": taken, "freed_mib": freed}
    return result


# A server of two models.


async def stream_gaps(
    session: aiohttp.ClientSession, model: str, work: Callable[[], Awaitable[Any]]
) -> list[float]:
    """Runs `work` while a model streams; returns the gaps of the stream, in milliseconds."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 3000, "temperature": 0,
            "ignore_eos": True, "stream": True}  # fmt: skip
    gaps: list[float] = []

    async def read() -> None:
        while True:
            async with session.post("/v1/completions", json=body) as answer:
                last = None
                async for _ in answer.content.iter_chunks():
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append((now - last) * 1000)
                    last = now

    reading = asyncio.create_task(read())
    await asyncio.sleep(STREAM_BEGINS)
    gaps.clear()
    await work()
    num_gaps = len(gaps)
    while len(gaps) == num_gaps:  # The last one has not ended.
        await asyncio.sleep(0.001)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return gaps


def waited(process: psutil.Process) -> float:
    """Seconds that a process's threads have waited for a processor; 0 except on Linux."""
    nanoseconds = 0
    for thread in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # It has ended.
            nanoseconds += int(thread.read_text().split()[1])
    return nanoseconds / 1e9


async def load_again(session: aiohttp.ClientSession, model: str) -> None:
    """Unloads a model, loads it again, and waits until it is ready."""
    await session.post("/models/unload", json={"model": model})
    await state_is(session, model, "unloaded")
    await session.post("/models/load", json={"model": model})
    await state_is(session, model, "loaded")


async def state_is(session: aiohttp.ClientSession, model: str, state: str) -> None:
    while True:
        async with session.get(f"/v1/models/{model}") as answer:
            if (await answer.json())["status"]["value"] == state:
                return
        await asyncio.sleep(0.1)


async def rates(session: aiohttp.ClientSession, models: list[str], num: int) -> dict[str, float]:
    """Returns the tokens per second of each model with `num` concurrent streams."""
    counts = dict.fromkeys(models, 0)
    ended = False

    async def read(model: str) -> None:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 2000, "temperature": 1,
                "ignore_eos": True, "stream": True}  # fmt: skip
        while not ended:
            async with session.post("/v1/completions", json=body) as answer:
                async for line in answer.content:
                    counts[model] += line.startswith(b"data: {")
                    if ended:
                        return

    tasks = [asyncio.create_task(read(model)) for model in models for _ in range(num)]
    await asyncio.sleep(1.5)
    counts.update(dict.fromkeys(models, 0))
    began = time.perf_counter()
    await asyncio.sleep(LOAD_SECONDS)
    seconds = time.perf_counter() - began
    found = {model: count / seconds for model, count in counts.items()}
    ended = True
    await asyncio.gather(*tasks)
    return found


async def measure_router(url: str, pid: int, rounds: int) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(None)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        for model in ("a", "b"):
            await session.post("/models/load", json={"model": model})
            await state_is(session, model, "loaded")
        server = psutil.Process(pid)
        works: dict[str, Callable[[], Awaitable[Any]]] = {
            "quiet": lambda: asyncio.sleep(seconds),
            "loading": lambda: load_again(session, "b"),
        }
        largest: dict[str, list[float]] = {name: [] for name in works}
        shares: dict[str, list[float]] = {name: [] for name in works}
        seconds = QUIET_SECONDS
        for _ in range(rounds):
            for name, work in works.items():
                before, began = waited(server), time.perf_counter()
                largest[name].append(max(await stream_gaps(session, "a", work)))
                taken = time.perf_counter() - began
                shares[name].append((waited(server) - before) / taken)
            seconds = taken - STREAM_BEGINS
        alone = {}
        for model in ("a", "b"):
            alone |= await rates(session, [model], 4)
        both = await rates(session, ["a", "b"], 4)
        full = [each.memory_info().rss for each in server.children()]
        router = server.memory_info().rss
        await session.post("/models/unload", json={"model": "b"})
        await state_is(session, "b", "unloaded")
        left = [each.memory_info().rss for each in server.children()]
    return {
        "largest_gap_ms": {name: statistics.median(all_) for name, all_ in largest.items()},
        "largest_gaps_ms": largest,
        "share_router_waited": {name: statistics.median(all_) for name, all_ in shares.items()},
        "tokens_per_second": {"alone": alone, "together": both},
        "memory_mib": {
            "router": router / MIB,
            "models": [each / MIB for each in full],
            "models_after_unloading_one": [each / MIB for each in left],
        },
    }


async def token_time(url: str, model: str | None) -> float:
    """Median time between the chunks of one stream, in milliseconds."""
    async with aiohttp.ClientSession(url) as session:
        name = model or "default"
        gaps = await stream_gaps(session, name, lambda: asyncio.sleep(3.0))
        return statistics.median(gaps)


def server_command(port: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "mlx_paged", "serve", "--port", str(port), "--log-level",
            "warning", "--num-gpu-blocks-override", "1000", *options]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(model_path()), help="the model that is loaded")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    result: dict[str, Any] = {"rounds": given.rounds, "load_before": os.getloadavg()}
    result["engines"] = asyncio.run(compare(given.model, given.rounds))
    print(json.dumps(result["engines"], indent=1), flush=True)
    port = free_port()
    with server_process("one model", server_command(port), port) as url:
        asyncio.run(asyncio.sleep(1))
        one = asyncio.run(token_time(url, None))
    port = free_port()
    # bench/loading.py measures what a spare process changes.
    models = (f"--model=a={model_path()}", f"--model=b={given.model}", "--no-spare-process")
    with server_process("router", server_command(port, *models), port) as url:
        [pid] = [c.pid for c in psutil.Process().children() if str(port) in c.cmdline()]
        result["router"] = asyncio.run(measure_router(url, pid, given.rounds))
        result["router"]["token_time_ms"] = {
            "one_model": one,
            "routed": asyncio.run(token_time(url, "a")),
        }
    gaps = result["engines"]["largest_gap_ms"] | {
        f"router, {name}": value for name, value in result["router"]["largest_gap_ms"].items()
    }
    print_table(["largest gap", "ms"], [[name, f"{value:.1f}"] for name, value in gaps.items()])
    print(json.dumps(result["router"], indent=1))
    print(save("models-cpu", result))


if __name__ == "__main__":
    main()
