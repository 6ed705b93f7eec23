"""Decode steps on a GPU against vLLM: alternating calls of `LLM.generate`, random weights.

python bench/vllm_steps.py --vllm-env PYTHONPATH=DIR    # all models; vLLM is in DIR (pip --target)
python bench/vllm_steps.py --only 3b 8b --modes greedy --vllm-python /opt/vllm/bin/python
python bench/vllm_steps.py --engines mlx_paged          # either engine alone
python bench/vllm_steps.py --tiny --engines mlx_paged   # smoke test: seconds on a CPU

Each engine runs in its own process and Python environment (`step_worker.py`). Both stay on the GPU,
with KV caches for the same number of tokens, and only one computes at a time. A step's time is the
difference between a long and a short call, divided by the difference in output tokens; prompts come
from the prefix cache. Results are saved after every row.

Both models have the same shape. Quantized ones use the usual 4-bit format of each engine: groups of
64 with bias for MLX (4.5 bits per weight), GPTQ in groups of 128 for vLLM (4.1 bits).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_process import START_SECONDS, Process, WorkerError
from harness import RESULTS, environment, print_table, save
from whole_calls import CONFIGS, DECODE

NAMES = ("mlx_paged", "vllm")
USUAL = ("1 x 1024", "32 x 1024", "256 x 1024")
# Most important first, in case time runs out.
PARTS = {
    "3b": ("Llama-3.2-3B", ("1 x 1024", "32 x 1024", "32 x 4096", "256 x 1024")),
    "8b": ("Llama-3.1-8B", USUAL),
    "8b-4bit": ("Llama-3.1-8B, 4 bits", USUAL),
    "0.6b": ("Qwen3-0.6B", USUAL),
    "30b-a3b-4bit": ("Qwen3-30B-A3B, 4 bits", USUAL),
}
MODES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
}
SHORT, LONG, LONG_OF_MANY = 17, 145, 81  # output tokens of the two calls
MANY = 64  # rows beyond which calls are shorter, with two rounds instead of three
SPARE = 1.1  # room in the KV cache beyond the largest workload


@dataclass(frozen=True)
class Run:
    """The command-line options.

    Attributes:
        engines: Names of the engines.
        workloads: Names of the workloads; empty means all of a part.
        modes: Keys of `MODES`.
        vllm: Command and variables of vLLM's Python.
        tiny: Use a small model and short prompts, on the CPU.
        logs: Folder for the engines' output.
        ends_at: `time.monotonic` after which no row starts.
    """

    engines: tuple[str, ...]
    workloads: tuple[str, ...]
    modes: tuple[str, ...]
    vllm: tuple[str, dict[str, str]]
    tiny: bool
    logs: Path
    ends_at: float

    def chosen(self, part: str) -> tuple[str, list[str]]:
        """Returns a part's model and workloads."""
        model, workloads = PARTS[part]
        wanted = [name for name in workloads if not self.workloads or name in self.workloads]
        return "tiny" if self.tiny else model, wanted

    def lengths(self, workload: str) -> list[int]:
        """Returns the prompt lengths of a workload."""
        found = DECODE[workload]
        return [-(-n // 64) for n in found[:8]] if self.tiny else list(found)

    def tokens(self, rows: int) -> tuple[int, int]:
        """Returns the output tokens of the short and the long call."""
        if self.tiny:
            return 2, 6
        return SHORT, LONG if rows <= MANY else LONG_OF_MANY

    def open(self, name: str, part: str) -> Process:
        log = self.logs / f"{part}-{name}.log"
        if name == "mlx_paged":
            return Process(name, [sys.executable], {}, log)
        python, env = self.vllm
        return Process(name, [python, "-P"], env, log)  # Keeps this folder off vLLM's path.


@contextlib.contextmanager
def engines(part: str, run: Run, found: dict[str, Any]) -> Iterator[dict[str, Process]]:
    """Starts the engines of a part; adds versions or errors to `found`.

    They import concurrently but start one after the other, in case one times its kernels.
    """
    model, workloads = run.chosen(part)
    lengths = [run.lengths(name) for name in workloads]
    room = max(sum(one) + len(one) * (run.tokens(len(one))[1] + 32) for one in lengths)
    options = {
        "name": model,
        "config": CONFIGS[model],
        "rows": sorted({len(one) for one in lengths}),
        "max_len": max(max(one) for one in lengths) + LONG + 32,
        "pool_tokens": int(room * SPARE) + 512,
    }
    opened = {name: run.open(name, part) for name in run.engines}
    for process in opened.values():
        process.send("load")
    started = dict[str, Process]()
    try:
        for name, process in opened.items():
            start = time.monotonic()
            try:
                process.receive(START_SECONDS)
                about = process.ask("start", START_SECONDS, **options)
                started[name] = process
            except WorkerError as error:
                about = {"error": str(error)}
            about["start_s"] = round(time.monotonic() - start, 1)
            print(f"{part}: {name} {about}", flush=True)
            found[name] = about
        yield started
    finally:
        for process in opened.values():
            process.close()


def measure(
    started: dict[str, Process], workload: str, mode: str, run: Run, first: bool
) -> dict[str, Any]:
    """Measures the step time of both engines; returns a row of the results.

    Args:
        first: True if the engines have not computed this workload's prompts yet.
    """
    lengths = run.lengths(workload)
    short, long = run.tokens(len(lengths))
    row: dict[str, Any] = {"workload": workload, "mode": mode}
    alive, steps = dict(started), {name: list[float]() for name in started}
    vocab_size = 300 if run.tiny else 128_000  # every model's vocabulary is larger

    def call(name: str, max_tokens: int) -> float:
        got = alive[name].ask("call", max_tokens=max_tokens, params=MODES[mode])
        row.setdefault(name, {})["distinct"] = got["distinct"]
        return float(got["seconds"])

    def prepare(name: str) -> None:
        if first:
            alive[name].ask("prompts", lengths=lengths, vocab_size=vocab_size)
        call(name, short)
        if first or len(lengths) <= MANY:
            call(name, long)

    def one(name: str) -> None:
        before = call(name, short)
        steps[name].append((call(name, long) - before) / (long - short) * 1e3)

    rounds = 3 if len(lengths) <= MANY else 2
    for turn, step in enumerate([prepare, *[one] * rounds]):
        for name in list(alive)[:: -1 if turn % 2 else 1]:
            try:
                step(name)
            except WorkerError as error:
                row[name] = {"error": str(error)}
                del alive[name]
    for name in alive:
        row[name]["step_ms"] = round(statistics.median(steps[name]), 3)
        row[name]["all_ms"] = [round(ms, 3) for ms in steps[name]]
    if len(alive) == len(NAMES) and row["vllm"]["step_ms"]:  # may be 0.000 for the tiny model
        row["ratio"] = round(row["mlx_paged"]["step_ms"] / row["vllm"]["step_ms"], 3)
    return row


def measure_part(part: str, run: Run, parts: dict[str, Any], saved: Any) -> None:
    """Measures one model. Calls `saved` after each row."""
    model, workloads = run.chosen(part)
    about: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    parts[part] = {"model": model, "engines": about, "results": rows, "environment": environment()}
    with engines(part, run, about) as started:
        for workload in workloads:
            for mode in run.modes if started else ():
                if time.monotonic() > run.ends_at:
                    print(f"{part}: {workload}, {mode}: skipped, out of time", flush=True)
                    continue
                rows.append(measure(started, workload, mode, run, mode == run.modes[0]))
                print(f"{part}: {rows[-1]}", flush=True)
                saved()
    saved()


def table_of(rows: list[dict[str, Any]]) -> None:
    """Prints the rows of a part."""

    def step(row: dict[str, Any], name: str) -> str:
        return str(row.get(name, {}).get("step_ms", "-"))

    cells = [
        [f"{row['workload']}, {row['mode']}", *(step(row, name) for name in NAMES),
         str(row.get("ratio", "-"))]
        for row in rows
    ]  # fmt: skip
    print_table(["step, ms", *NAMES, "ratio"], cells)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART",
                        help=", ".join(PARTS))  # fmt: skip
    parser.add_argument("--workload", nargs="+", default=[], help='such as "32 x 1024"')
    parser.add_argument("--modes", nargs="+", default=["greedy", "sampled"], choices=MODES,
                        metavar="MODE", help=", ".join(MODES))  # fmt: skip
    parser.add_argument("--engines", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--vllm-python", default=sys.executable, help="its interpreter")
    parser.add_argument("--vllm-env", nargs="+", default=[], metavar="NAME=VALUE",
                        help="variables of its process, such as PYTHONPATH")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=900.0,
                        help="start no row later than this; default 900")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU")
    parser.add_argument("--logs", type=Path, help="folder for the engines' output")
    parser.add_argument(
        "--name", default="vllm_steps-gpu", help="name of the file in bench/results"
    )
    parser.add_argument("--no-save", dest="save", action="store_false")
    options = parser.parse_args(arguments)
    run = Run(
        engines=tuple(options.engines),
        workloads=tuple(options.workload),
        modes=tuple(options.modes),
        vllm=(options.vllm_python, dict(each.split("=", 1) for each in options.vllm_env)),
        tiny=options.tiny,
        logs=options.logs or Path(tempfile.mkdtemp(prefix="vllm-steps-logs-")),
        ends_at=time.monotonic() + options.seconds,
    )
    run.logs.mkdir(parents=True, exist_ok=True)
    print(f"the engines' output is in {run.logs}", flush=True)
    path = RESULTS / f"{options.name}.json"
    parts: dict[str, Any] = {}
    if options.save and path.exists():
        parts = json.loads(path.read_text()).get("parts", {})

    def saved() -> None:
        if options.save:
            save(options.name, {"parts": parts})

    for part in options.only:
        if time.monotonic() > run.ends_at:
            print(f"{part}: skipped, out of time", flush=True)
            continue
        measure_part(part, run, parts, saved)
        table_of(parts[part]["results"])
    return parts


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines end too
    main()
