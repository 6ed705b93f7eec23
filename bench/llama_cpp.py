"""CPU inference against llama.cpp: same shapes and threads, random weights, in turns in one run.

python bench/llama_cpp.py                                         # everything: an hour on 4 cores
python bench/llama_cpp.py --only '1b/4bit/4/*' --turns 1 --add    # one more turn of some cells
python bench/llama_cpp.py --label int8 --env MLX_PAGED_CPU_ACTIVATIONS=int8    # a variant of ours
python bench/llama_cpp.py --kind avx2                             # both sides without AVX-512
python bench/llama_cpp.py --list                                  # ids of all cells
python bench/llama_cpp.py --prepare                               # only builds and writes files
python bench/llama_cpp.py --docs                                  # writes the tables of the docs

A cell is SHAPE/FORMAT/THREADS/WHAT. A process has as many cores as threads. llama.cpp is built and
the checkpoints are written once (`--cache`). Cells of earlier runs are kept; each kind of processor
has its own tables. WHAT is

- decode-N: tokens/s of N sequences after 128 tokens. Ours: whole calls of `LLM.generate` with
  cached prompts; the time of a call for 41 tokens minus that of one for 9. Theirs does not sample.
- prefill: tokens/s of one prompt of 1,024 tokens.
- memory: peak resident bytes of a process that reads 1,024 tokens and writes 32, including mapped
  files.
- load: seconds until the engine is ready, without imports, or llama-completion has its context.
- first-token: seconds from the start of `mlx-paged generate` or `llama-completion` to its first
  byte.
- shared-32: seconds that a server takes for 32 concurrent requests with 1,024 shared prompt tokens,
  16 of their own, and 32 of answer; nothing is cached. llama-server runs in its best configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import llama_peer as peer
import llama_report as report
import numpy as np
from harness import RESULTS, free_port, print_table, save, server_process
from llama_models import SHAPES, write_gguf, write_mlx

from mlx_paged.bench.results import checkout, processor

FORMATS = {"f32": ("float32", "f32"), "bf16": ("bfloat16", "bf16"), "8bit": ("8bit", "q8_0"),
           "4bit": ("4bit", "q4_0")}  # fmt: skip
ROWS = (1, 4, 8, 32)
THREADS = (4, 2)
PROMPT, LONG_PROMPT = 128, 1024
SHORT, STEPS = 9, 32  # tokens of the shorter call, and the number that the longer one adds
OWN, ANSWER = 16, 32  # unshared prompt tokens and answer tokens of a shared-32 request
TEXT = "The quick brown fox jumps over the lazy dog."
_BENCH = "llama-batched-bench"
NAME = "llama_cpp-cpu"


def all_cells() -> list[str]:
    """Ids of the default measurements."""
    return [
        f"{shape}/{format}/{threads}/{what}"
        for shape in ("135m", "1b")
        for format in ("4bit", "bf16", "f32", "8bit")
        for threads in THREADS
        for what in whats(format, threads)
    ]


def whats(format: str, threads: int) -> list[str]:
    found = [*(f"decode-{rows}" for rows in ROWS), "prefill"]
    if threads == max(THREADS):
        found += ["memory", "load", "first-token"]
    return [*found, "shared-32"] if format == "4bit" else found


@dataclass(frozen=True)
class Setting:
    """Properties that the cells of one engine share."""

    shape: str
    format: str
    threads: int
    cache: Path
    env: dict[str, str] = field(default_factory=dict)
    kind: str = field(default_factory=peer.processor_kind)

    @property
    def cores(self) -> set[int]:
        return set(sorted(os.sched_getaffinity(0))[: self.threads])

    @property
    def environ(self) -> dict[str, str]:
        narrow = {
            "avx2": {"MLX_PAGED_SIMD": "avx2", "OPENBLAS_CORETYPE": "Haswell"},
            "no-amx": {"MLX_PAGED_SIMD": "avx512bf16"},
        }.get(self.kind, {})
        return {**os.environ, "MLX_PAGED_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1",
                **narrow, **self.env}  # fmt: skip

    def checkpoint(self) -> Path:
        name = FORMATS[self.format][0]
        folder = self.cache / "models" / f"{self.shape}-mlx-{name}"
        return write_mlx(SHAPES[self.shape], name, folder)

    def gguf(self) -> Path:
        name = FORMATS[self.format][1]
        return write_gguf(
            SHAPES[self.shape], name, self.cache / "models" / f"{self.shape}-{name}.gguf"
        )

    def builds(self) -> dict[str, str]:
        """llama.cpp's builds, by the names of their values in a cell."""
        if self.kind in ("avx2", "no-amx"):
            return {"native": self.kind}
        # Its products in other formats do not support AMX.
        both = self.kind == "amx" and self.format.endswith("bit")
        return {build: build for build in (("native", "no-amx") if both else ("native",))}


# --- Ours, in its own process ---------------------------------------------------------------------


def work(arguments: dict[str, Any]) -> None:
    """Loads a checkpoint, and answers each line of stdin with a line of JSON."""
    import mlx_paged.extension  # noqa: F401  (BLAS before mlx)

    # isort: split
    import mlx.core as mx

    from mlx_paged import LLM, SamplingParams
    from mlx_paged.engine.config import EngineConfig

    mx.set_default_device(mx.cpu)
    tokens = int(arguments["tokens"])
    start = time.perf_counter()
    llm = LLM(
        arguments["model"], max_num_seqs=max(ROWS), max_model_len=2048,
        num_gpu_blocks_override=tokens // EngineConfig().block_size + 2,
        cpu_activations=os.environ.get("MLX_PAGED_CPU_ACTIVATIONS", "float32"),
    )  # fmt: skip
    _answer({"load": time.perf_counter() - start})
    rng = np.random.default_rng(int(arguments.get("seed", 0)))
    prompts = [random_prompt(rng, PROMPT) for _ in range(max(ROWS))]
    prepared: set[int] = set()
    num_written = 0  # tokens of the pool

    def seconds(prompts: list[list[int]], max_tokens: int) -> float:
        start = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        llm.generate(prompts, params)
        return time.perf_counter() - start

    for line in sys.stdin:
        what, _, rows = line.strip().partition("-")
        if what == "decode":
            batch = prompts[: int(rows)]
            if len(batch) not in prepared:
                seconds(batch, SHORT)  # caches the prompts and the step programs
                prepared.add(len(batch))
            more = seconds(batch, SHORT + STEPS) - seconds(batch, SHORT)
            _answer({"value": len(batch) * STEPS / more})
        elif what == "prefill":
            # The system clears a page of the pool at its first write. llama.cpp clears its cache
            # before it measures.
            while num_written < tokens:
                seconds([random_prompt(rng, LONG_PROMPT)], 1)
                num_written += LONG_PROMPT
            _answer({"value": LONG_PROMPT / seconds([random_prompt(rng, LONG_PROMPT)], 1)})
        elif what == "memory":
            seconds([random_prompt(rng, LONG_PROMPT)], STEPS)
            _answer({})


def random_prompt(rng: np.random.Generator, length: int) -> list[int]:
    """Token ids that both vocabularies have."""
    return rng.integers(256, 500, length).tolist()


MARK = "@@"


def _answer(result: dict[str, Any]) -> None:
    print(MARK + json.dumps(result), flush=True)


def answer_of(lines: Iterator[str]) -> dict[str, Any]:
    """Returns a worker's next answer, and skips its other output.

    Raises:
        SystemExit: The worker ended first.
    """
    for line in lines:
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    raise SystemExit("the process of mlx_paged ended before it answered")


def worker_command(model: Path, tokens: int, **more: Any) -> list[str]:
    arguments = json.dumps({"model": str(model), "tokens": tokens, **more})
    return [sys.executable, __file__, "--worker", arguments]


class Worker:
    """A process with a loaded checkpoint."""

    def __init__(self, setting: Setting) -> None:
        # Room for 32 prompts with their answers, and a few long prompts, before any is evicted.
        tokens = max(ROWS) * (PROMPT + SHORT + STEPS + 64) + 4 * (LONG_PROMPT + 64)
        self._process = subprocess.Popen(
            worker_command(setting.checkpoint(), tokens), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env=setting.environ,
            preexec_fn=lambda: os.sched_setaffinity(0, setting.cores),
        )  # fmt: skip
        assert self._process.stdout is not None
        self._lines = iter(self._process.stdout)
        answer_of(self._lines)

    def measure(self, what: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return answer_of(self._lines)["value"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# --- Cells ----------------------------------------------------------------------------------------

Side = Callable[[], float]


def speed_sides(setting: Setting, what: str, worker: Worker) -> dict[str, Side]:
    """Cells of `decode-N` and `prefill`."""
    rows = int(what.partition("-")[2] or 1)
    prompt, tokens = (LONG_PROMPT, 1) if what == "prefill" else (PROMPT, STEPS)

    def theirs(build: str) -> float:
        programs = peer.build(setting.cache, build, _BENCH)
        command = peer.bench_command(
            programs, setting.gguf(), setting.threads, prompt, tokens, rows
        )
        found = peer.parse_bench(peer.run(command, setting.cores).out)
        return found["speed_pp" if what == "prefill" else "speed_tg"]

    sides: dict[str, Side] = {"ours": lambda: worker.measure(what)}
    for name, build in setting.builds().items():
        sides[name] = lambda build=build: theirs(build)
    return sides


def start_sides(setting: Setting, what: str) -> dict[str, Side]:
    """Cells of `memory`, `load` and `first-token`, whose processes end."""
    programs = peer.build(setting.cache, "native")
    completion = peer.completion_command(programs, setting.gguf(), setting.threads, TEXT)

    def run_ours() -> peer.Done:
        if what == "first-token":
            command = [sys.executable, "-m", "mlx_paged.cli.main", "generate",
                       "--ignore-chat-template", "--model", str(setting.checkpoint()),
                       "--max-tokens", "1", "--temperature", "0", "--no-progress",
                       TEXT]  # fmt: skip
            return peer.run(command, setting.cores, setting.environ)
        command = worker_command(setting.checkpoint(), LONG_PROMPT + 64)
        asked = "memory\n" if what == "memory" else ""
        return peer.run(command, setting.cores, setting.environ, asked)

    def ours() -> float:
        done = run_ours()
        if what == "load":
            return answer_of(iter(done.out.splitlines()))["load"]
        return done.peak_rss if what == "memory" else done.first_byte

    def theirs() -> float:
        if what == "memory":
            command = peer.bench_command(
                programs, setting.gguf(), setting.threads, LONG_PROMPT, STEPS, 1
            )
            return peer.run(command, setting.cores).peak_rss
        done = peer.run(completion, setting.cores)
        return peer.parse_load_seconds(done.err) if what == "load" else done.first_byte

    return {"ours": ours, "native": theirs}


async def _post_all(url: str, prompts: list[list[int]]) -> float:
    """Seconds until all requests are answered."""
    import aiohttp

    async def one(prompt: list[int]) -> int:
        body = {"model": "m", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0,
                "ignore_eos": True}  # fmt: skip
        async with session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            return (await response.json())["usage"]["completion_tokens"]

    limits = aiohttp.ClientTimeout(total=1800)
    async with aiohttp.ClientSession(timeout=limits) as session:
        start = time.perf_counter()
        counts = await asyncio.gather(*(one(prompt) for prompt in prompts))
        seconds = time.perf_counter() - start
    if set(counts) != {ANSWER}:
        raise SystemExit(f"{url} answered with {sorted(set(counts))} tokens instead of {ANSWER}")
    return seconds


class Servers:
    """Our server and the remaining candidates of llama.cpp; each turn has a new prefix."""

    def __init__(self, setting: Setting, stack: contextlib.ExitStack, best: str | None) -> None:
        self._setting, self._stack = setting, stack
        self._seed = time.time_ns()
        self._ours: str | None = None
        self._theirs: tuple[str, str] | None = None  # (name, address)
        self.best = best
        self.ways: dict[str, float] = {}

    def _start(self, name: str, command: list[str], port: int) -> str:
        cores = self._setting.cores
        started = server_process(
            name, command, port, env=self._setting.environ,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
        url = self._stack.enter_context(started)
        asyncio.run(_post_all(url, [list(range(300, 308))]))
        return url

    def _prompts(self) -> list[list[int]]:
        self._seed += 1
        rng = np.random.default_rng(self._seed)
        shared = random_prompt(rng, LONG_PROMPT)
        return [shared + random_prompt(rng, OWN) for _ in range(max(ROWS))]

    def ours(self) -> float:
        if self._ours is None:
            port = free_port()
            blocks = (max(ROWS) + 1) * (LONG_PROMPT + OWN + ANSWER) // 16
            command = [sys.executable, "-m", "mlx_paged.cli.main", "serve",
                       str(self._setting.checkpoint()), "--port", str(port),
                       "--served-model-name", "m", "--disable-log-requests", "--max-num-seqs",
                       str(max(ROWS)), "--max-model-len", "2048",
                       "--num-gpu-blocks-override", str(blocks)]  # fmt: skip
            self._ours = self._start("mlx-paged", command, port)
        return asyncio.run(_post_all(self._ours, self._prompts()))

    def theirs(self) -> float:
        if self.best is None:
            for way in peer.SERVER_WAYS:
                self.ways[way] = self._try_way(way, 2 * min(self.ways.values(), default=900.0))
                print(f"  llama-server, {way}: {self.ways[way]:.1f} s", flush=True)
            self.best = min(self.ways, key=self.ways.__getitem__)
            return self.ways[self.best]
        if self._theirs is None:
            self._theirs = self.best, self._start_way(self.best)
        return asyncio.run(_post_all(self._theirs[1], self._prompts()))

    def _try_way(self, way: str, limit: float) -> float:
        """Returns its seconds, or the limit after which it is stopped."""
        with contextlib.ExitStack() as stack:
            keep, self._stack = self._stack, stack
            url = self._start_way(way)
            self._stack = keep
            try:
                return asyncio.run(asyncio.wait_for(_post_all(url, self._prompts()), limit))
            except TimeoutError:
                return limit

    def _start_way(self, way: str) -> str:
        port, setting = free_port(), self._setting
        length = LONG_PROMPT + OWN + ANSWER
        programs = peer.build(setting.cache, "native")
        command = peer.server_command(programs, setting.gguf(), setting.threads, way, length, port)
        return self._start(f"llama-server, {way}", command, port)


# --- Turns ----------------------------------------------------------------------------------------


def busy_seconds() -> float:
    """CPU seconds of all processes, and of other guests of the host, on the cores allowed to us."""
    import psutil

    allowed = os.sched_getaffinity(0)
    cores = [times for core, times in enumerate(psutil.cpu_times(percpu=True)) if core in allowed]
    return sum(sum(times) - times.idle - getattr(times, "iowait", 0.0) for times in cores)


def own_seconds() -> float:
    """CPU seconds of this process and all its descendants, including those that have ended."""
    import psutil

    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # user, system, and the same of ended children
    return total


def watched(side: Side) -> tuple[float, float]:
    """Measures one side, and the number of cores that other programs used meanwhile."""
    start, busy, own = time.perf_counter(), busy_seconds(), own_seconds()
    value = side()
    others = busy_seconds() - busy - (own_seconds() - own)
    return value, max(0.0, others) / (time.perf_counter() - start)


def take_turns(
    sides: dict[str, Side], turns: int, idle: float | None = None, tries: int = 4
) -> dict[str, Any]:
    """Alternates the sides, reversing every other turn.

    Returns the values of each side, and the maximum number of cores that others used.

    Args:
        idle: If others use more cores than this, the side is measured again, up to `tries` times;
            the least disturbed value counts.
    """
    values: dict[str, list[float]] = {name: [] for name in sides}
    others: list[float] = []
    for turn in range(turns):
        for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            value, used = watched(sides[name])
            for _ in range(tries - 1):
                if idle is None or used <= idle:
                    break
                value, used = min((value, used), watched(sides[name]), key=lambda pair: pair[1])
            values[name].append(value)
            others.append(used)
    return {"values": values, "others_cpu": round(max(others), 2)}


def measure_group(
    setting: Setting, label: str, names: list[str], options: Any, cells: dict[str, Any]
) -> None:
    """Cells of one shape, format and number of threads."""
    with contextlib.ExitStack() as stack:
        worker = None
        # Cells that need a process of ours, which keeps its memory, come last.
        for what in sorted(names, key=lambda what: what.startswith(("decode", "prefill"))):
            id = f"{setting.shape}/{setting.format}{label}/{setting.threads}/{what}"
            key = report.key_of(id, setting.kind)
            more: dict[str, Any] = {}
            if what == "shared-32":
                with contextlib.ExitStack() as running:
                    known = cells.get(key, {}).get("best_way") if options.add else None
                    servers = Servers(setting, running, known)
                    sides: dict[str, Side] = {"ours": servers.ours, "native": servers.theirs}
                    found = take_turns(sides, options.turns, options.idle)
                    more = {"best_way": servers.best}
                    if servers.ways:
                        more["ways"] = servers.ways
            elif what in ("memory", "load", "first-token"):
                found = take_turns(start_sides(setting, what), options.turns, options.idle)
            else:
                if worker is None:
                    worker = Worker(setting)
                    stack.callback(worker.close)
                    worker.measure("decode-1")  # the first steps are slower
                found = take_turns(speed_sides(setting, what, worker), options.turns, options.idle)
            cells[key] = cell_of(found, cells.get(key) if options.add else None, setting, more)
            print(report.line_of(key, cells[key]), flush=True)
            if options.save:
                save(options.name, {"peer": peer_facts(), "cells": cells})


def cell_of(
    found: dict[str, Any], before: dict[str, Any] | None, setting: Setting, more: dict[str, Any]
) -> dict[str, Any]:
    """Builds the result of a cell. Keeps the turns of `before` if they are from the same code and
    machine."""
    commit, dirty = checkout()
    values = found["values"]
    made = {"commit": commit, "dirty": dirty, "processor": processor()}
    others = found["others_cpu"]
    if before is not None and all(before.get(key) == value for key, value in made.items()):
        more = {"ways": before["ways"], **more} if "ways" in before else more
        values = {name: [*before["values"].get(name, []), *new] for name, new in values.items()}
        others = max(others, before["others_cpu"])
    return {
        "values": {name: [rounded(value) for value in all] for name, all in values.items()},
        "median": {name: rounded(statistics.median(all)) for name, all in values.items()},
        "others_cpu": others,
        **({"env": setting.env} if setting.env else {}),
        **more,
        **made,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def rounded(value: float) -> float:
    """Rounds to four digits."""
    return float(f"{value:.4g}")


def peer_facts() -> dict[str, Any]:
    return {
        "package": f"llama-cpp-python {peer.VERSION}",
        "cmake": " ".join(peer.OPTIONS),
        "flags": " ".join(peer.common(0)[4:]),
        "builds": {name: " ".join(options) for name, options in peer.BUILD_OPTIONS.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mlx-paged-llama-cpp"
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="of cells' ids")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--add", action="store_true",
                        help="add turns to those that the file has of the same commit")  # fmt: skip
    parser.add_argument("--label", default="", help="of a variant of ours: 4bit-LABEL in the ids")
    parser.add_argument("--env", nargs="+", default=[], metavar="NAME=VALUE", help="for ours")
    parser.add_argument("--kind", choices=["no-amx", "avx2"],
                        help="decode and prefill of both sides without AMX or AVX-512")  # fmt: skip
    parser.add_argument("--idle", type=float, metavar="CORES",
                        help="repeat what was measured while others used more")  # fmt: skip
    parser.add_argument("--cache", type=Path, default=cache, help=f"default {cache}")
    parser.add_argument("--name", default=NAME, help="of the file in bench/results")
    parser.add_argument("--no-save", dest="save", action="store_false")
    parser.add_argument("--list", action="store_true", help="print the ids of the cells")
    parser.add_argument("--prepare", action="store_true", help="build and write files only")
    parser.add_argument("--docs", action="store_true", help="write the tables of the docs")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    path = RESULTS / f"{options.name}.json"
    cells = json.loads(path.read_text())["cells"] if path.exists() else {}
    if options.docs:
        report.write_docs(cells)
        return
    groups = chosen(options.only)
    if options.list:
        print(*(f"{group}/{what}" for group, names in groups.items() for what in names), sep="\n")
        return
    env = dict(pair.split("=", 1) for pair in options.env)
    label = f"-{options.label}" if options.label else ""
    for group, names in groups.items():
        shape, format, threads = group.split("/")
        kind = options.kind or peer.processor_kind()
        setting = Setting(shape, format, int(threads), options.cache, env, kind)
        speeds = [name for name in names if name.startswith(("decode", "prefill"))]
        if options.kind:
            names = speeds
        programs = [_BENCH] if names == speeds else []
        for build in setting.builds().values():
            peer.build(setting.cache, build, *programs)
        setting.checkpoint()
        setting.gguf()
        if not options.prepare:
            measure_group(setting, label, names, options, cells)
    print_table(*report.summary(cells))


def chosen(patterns: list[str]) -> dict[str, list[str]]:
    """Cells that match any pattern, by SHAPE/FORMAT/THREADS; the tiny shape only if named.

    Raises:
        SystemExit: No cell matches.
    """
    ids = all_cells() + [id.replace("135m/", "tiny/") for id in all_cells() if "135m/" in id]
    found: dict[str, list[str]] = {}
    for id in ids:
        for pattern in patterns:
            named = not id.startswith("tiny/") or pattern.startswith("tiny/")
            if named and fnmatch.fnmatchcase(id, pattern):
                group, _, what = id.rpartition("/")
                found.setdefault(group, []).append(what)
                break
    if not found:
        raise SystemExit(f"no cell matches {patterns}; --list prints their ids")
    return found


if __name__ == "__main__":
    main()
