"""Whole calls of `LLM.generate` on a GPU, measured like vLLM, in turns with mlx-lm; random weights.

python bench/whole_calls.py                       # all parts: eight minutes on an H100
python bench/whole_calls.py --only decode ttft    # some; keeps the others' results
python bench/whole_calls.py --only decode --workload "32 x 1024" --no-peer
python bench/whole_calls.py --tiny                # smoke test: seconds on a CPU

The time of a step is (time of a call for 145 tokens - time of one for 17) / 128, with the prompts
in the prefix cache; mlx-lm computes its prompts in both calls. Every decode workload also has: host
time per step (everything except waiting for the device), the share of time in which the GPU was
idle (as the driver samples it) and MLX's peak memory. `busy` repeats two of them on one core, alone
and next to a busy-waiting process on the same core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cuda_engine  # first, because it keeps mlx-lm unpatched
import mlx.core as mx
import numpy as np
from cuda_engine import attempt, plain_mlx, random_model, rest
from harness import RESULTS, environment, print_table, save
from host_time import Clock
from mlx_lm.generate import BatchGenerator

from mlx_paged import LLM, SamplingParams, ops
from mlx_paged.engine.engine import Engine
from mlx_paged.model.loader import LoadedModel

BLOCK = 32
SHORT, LONG = 17, 145  # tokens of the two calls that give the time of a step
LARGEST = 64  # with more rows, a call is made once instead of three times
DECODE = {**cuda_engine.DECODE, **cuda_engine.DECODE_MORE}
FEW = cuda_engine.OTHER_MODELS
PREFILL = cuda_engine.PREFILL
BUSY = {name: DECODE[name] for name in ("8 x 1024", "32 x 1024")}
LONG_CONTEXTS = {"32 x 8192": (8192,) * 32}
CONFIGS = cuda_engine.CONFIGS
CONFIGS["Llama-3.1-8B"] = CONFIGS["Llama-3.1-8B, 4 bits"]
CONFIGS["Qwen3-30B-A3B, 4 bits"] = CONFIGS["Qwen3-30B-A3B"]
CONFIGS["tiny"] = {
    **CONFIGS["Llama-3.2-3B"],
    "hidden_size": 64,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
Lengths = tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """The command-line options.

    Attributes:
        peer: Measure mlx-lm too.
        workloads: Names of the workloads to run; empty: all.
        tiny: Use a small model and short prompts, on a CPU.
        ends_at: Start no workload after this time, in seconds of `time.monotonic`.
    """

    peer: bool = True
    workloads: tuple[str, ...] = ()
    tiny: bool = False
    ends_at: float = float("inf")

    def chosen(self, workloads: dict[str, Lengths]) -> Iterator[tuple[str, Lengths]]:
        """The workloads to run, until the time is up."""
        for name, lengths in workloads.items():
            if self.workloads and name not in self.workloads:
                continue
            if time.monotonic() > self.ends_at:
                print(f"{name}: left out, the time is over", flush=True)
                continue
            yield name, tuple(-(-n // 64) for n in lengths[:8]) if self.tiny else lengths

    @property
    def tokens(self) -> tuple[int, int]:
        """Lengths of the two calls."""
        return (2, 6) if self.tiny else (SHORT, LONG)


def prompts_of(model: LoadedModel, lengths: Lengths, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng((seed, len(lengths), lengths[0]))
    return [rng.integers(3, min(model.vocab_size, 128000), n).tolist() for n in lengths]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def seconds_of(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def llm_for(
    model: LoadedModel, lengths: Lengths, max_tokens: int, copies: int = 1, **options: Any
) -> LLM:
    """Makes an engine with room for `copies` times the workload (prefixes that stay cached)."""
    blocks = sum(-(-(n + max_tokens) // BLOCK) + 1 for n in lengths) * copies + 8
    return LLM(
        model,
        num_gpu_blocks_override=blocks,
        max_num_seqs=len(lengths),
        max_model_len=max(lengths) + max_tokens + 64,
        **options,
    )


# --- Decoding -------------------------------------------------------------------------------------


def step_ms(times: Callable[[int], float], run: Run, repeat: int) -> dict[str, Any]:
    """The time of a step from two calls; the median, and all samples.

    Args:
        times: Returns the seconds of a call for a number of tokens.
    """
    short, long = run.tokens
    times(short)  # warm-up: prepares kernels and graphs, and caches the prompts
    times(long)
    found = [(times(long) - times(short)) / (long - short) * 1e3 for _ in range(repeat)]
    return {
        "step_ms": round(statistics.median(found), 3),
        "all_ms": [round(ms, 3) for ms in found],
    }


def decode(model: LoadedModel, lengths: Lengths, run: Run, **options: Any) -> dict[str, Any]:
    """Our step time, host time, GPU idle share and peak memory, with engine options."""
    rest()
    copies = ops.pool_copies()
    prompts, (_, long) = prompts_of(model, lengths), run.tokens
    start = time.perf_counter()
    llm = llm_for(model, lengths, long, **options)
    start_s = time.perf_counter() - start

    def call(max_tokens: int) -> float:
        return seconds_of(lambda: llm.generate(prompts, greedy(max_tokens)))

    result = step_ms(call, run, 1 if len(lengths) > LARGEST else 3)
    result["host_ms"] = host_ms(llm.engine, lambda: call(long))
    with gpu_use() as used:
        call(long)
        if result["step_ms"] * long < 1000 and not run.tiny:
            call(long)
    if used:
        result["idle_share"] = round(1 - statistics.mean(used) / 100, 3)
    result["start_s"] = round(start_s, 2)
    result["peak_gb"] = round(mx.get_peak_memory() / 1e9, 2)
    result["pool_copies"] = ops.pool_copies() - copies
    return result


def decode_peer(model: LoadedModel, lengths: Lengths, run: Run) -> dict[str, Any]:
    """mlx-lm's BatchGenerator."""
    rest()
    prompts = prompts_of(model, lengths)

    def call(max_tokens: int) -> float:
        generator = BatchGenerator(model.model, completion_batch_size=len(prompts))
        start = time.perf_counter()
        generator.insert(prompts, [max_tokens] * len(prompts))
        left = len(prompts)
        while left and (responses := generator.next_generated()):
            left -= sum(r.finish_reason is not None for r in responses)
        spent = time.perf_counter() - start
        generator.close()
        return spent

    with plain_mlx() if not run.tiny else contextlib.nullcontext():
        short, long = run.tokens
        call(short)
        found = (call(long) - call(short)) / (long - short) * 1e3
    return {"step_ms": round(found, 3), "peak_gb": round(mx.get_peak_memory() / 1e9, 2)}


def host_ms(engine: Engine, call: Callable[[], object]) -> dict[str, float]:
    """Work of the host's thread in the median decode step, by phase; `all` excludes waiting."""
    clock, samples, step = Clock(), [], engine.step

    def watched() -> Any:
        clock.reset()
        start = time.perf_counter()
        updates = step()
        spent = time.perf_counter() - start
        samples.append({"all": spent - clock.seconds["read"], **clock.seconds})
        return updates

    with watching(clock, engine):
        engine.step = watched  # type: ignore[method-assign]
        try:
            call()
        finally:
            del engine.step  # type: ignore[method-assign]
    names = ("all", "schedule", "launch", "commit", "publish")
    middle = samples[len(samples) // 4 : -2] or samples
    return {
        name: round(statistics.median(sample[name] for sample in middle) * 1e3, 3) for name in names
    }


@contextlib.contextmanager
def watching(clock: Clock, engine: Engine) -> Iterator[None]:
    """Like `Clock.watching`, but encoding (within MLX's evaluations) counts as launching."""
    parts = [
        (engine._scheduler, "schedule", "schedule"),
        (engine._scheduler, "update_from_output", "commit"),
        (engine._executor, "launch", "launch"),
        (engine._executor, "read", "read"),
        (engine._output_processor, "process_outputs", "publish"),
    ]
    clock.reset()
    for part, name, phase in parts:
        setattr(part, name, clock.timed(phase, getattr(part, name)))
    try:
        yield
    finally:
        for part, name, _ in parts:
            delattr(part, name)


@contextlib.contextmanager
def gpu_use() -> Iterator[list[int]]:
    """Collects the driver's samples: percentage of time in which the GPU ran a kernel."""
    samples: list[int] = []
    if shutil.which("nvidia-smi") is None or mx.default_device() == mx.cpu:
        yield samples
        return
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    with subprocess.Popen(
        [*query, "-i", "0", "-lms", "50"], stdout=subprocess.PIPE, text=True
    ) as process:
        time.sleep(0.3)
        yield samples
        process.terminate()
        out = process.stdout.read() if process.stdout else ""
    found = [int(line) for line in out.split() if line.isdigit()]
    # A sample covers the sixth of a second before it, so the first ones precede the call.
    samples += found[10:] or found[-1:]


# --- One core, shared with a busy process ---------------------------------------------------------


@contextlib.contextmanager
def pinned() -> Iterator[int]:
    """Pins this thread to one core."""
    before = os.sched_getaffinity(0)
    core = max(before)
    os.sched_setaffinity(0, {core})
    try:
        yield core
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def neighbor(core: int) -> Iterator[None]:
    """Runs a busy-waiting process on a core."""
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def busy(model: LoadedModel, lengths: Lengths, run: Run) -> dict[str, Any]:
    """Step time on one core, alone and next to a busy process."""
    rest()
    prompts, (_, long) = prompts_of(model, lengths), run.tokens
    llm = llm_for(model, lengths, long)

    def call(max_tokens: int) -> float:
        return seconds_of(lambda: llm.generate(prompts, greedy(max_tokens)))

    with pinned() as core:
        alone = step_ms(call, run, 3)["step_ms"]
        with neighbor(core):
            shared = step_ms(call, run, 3)["step_ms"]
    return {"alone_ms": alone, "with_neighbor_ms": shared, "growth": round(shared / alone - 1, 3)}


# --- Prompts --------------------------------------------------------------------------------------


def prefill(model: LoadedModel, lengths: Lengths, run: Run) -> dict[str, Any]:
    """Prompt tokens per second, until the last first token; each call has new prompts."""
    rest()
    llm = llm_for(model, lengths, 1, copies=2)
    seconds = []
    for i in range(1, 2 if run.tiny else 6):
        prompts = prompts_of(model, lengths, seed=i)
        seconds.append(seconds_of(lambda prompts=prompts: llm.generate(prompts, greedy(1))))
    median = statistics.median(seconds[1:] or seconds)
    return {
        "tokens_per_s": round(sum(lengths) / median),
        "seconds": round(median, 4),
        "first_s": round(seconds[0], 4),
        "step_tokens": llm.engine.config.step_tokens,
        "peak_gb": round(mx.get_peak_memory() / 1e9, 2),
    }


def prefill_peer(model: LoadedModel, lengths: Lengths, run: Run) -> dict[str, Any]:
    rest()

    def call(seed: int) -> float:
        return cuda_engine._prefill_batch_generator(model, prompts_of(model, lengths, seed=seed))

    with plain_mlx() if not run.tiny else contextlib.nullcontext():
        seconds = [call(i) for i in range(1, 3)]
    return {"tokens_per_s": round(sum(lengths) / seconds[-1]), "seconds": round(seconds[-1], 4)}


def ttft(model: LoadedModel, prefix_len: int, tail_len: int, run: Run) -> dict[str, Any]:
    """Time to first token of a prompt: new and, if it has a prefix, with that cached."""
    rest()
    llm = llm_for(model, (prefix_len + tail_len,), 1, copies=12)
    cold, warm = [], []
    for i in range(2 if run.tiny else 8):
        [prefix] = prompts_of(model, (prefix_len,), seed=100 + i) if prefix_len else [[]]
        [first, second] = prompts_of(model, (tail_len,) * 2, seed=200 + i)
        cold.append(seconds_of(lambda p=prefix + first: llm.generate([p], greedy(1))))
        if prefix:
            warm.append(seconds_of(lambda p=prefix + second: llm.generate([p], greedy(1))))
    found = {"cold_ms": round(statistics.median(cold[1:]) * 1e3, 2)}
    if warm:
        found["cached_ms"] = round(statistics.median(warm[1:]) * 1e3, 2)
        found["share"] = round(found["cached_ms"] / found["cold_ms"], 3)
    return found


def new_lengths(
    model: LoadedModel, prefix_len: int, tail_lens: Lengths, run: Run
) -> dict[str, Any]:
    """Time to first token after a cached prefix, for new prompt lengths and for repeated
    ones."""
    rest()
    llm = llm_for(model, (prefix_len + max(tail_lens),), 1, copies=12)
    [prefix] = prompts_of(model, (prefix_len,), seed=300)
    llm.generate([prefix], greedy(1))
    found: dict[str, Any] = {}
    for name in ("first_ms", "again_ms"):
        tails = prompts_of(model, tail_lens, seed=301 + len(found))
        times = [seconds_of(lambda t=tail: llm.generate([prefix + t], greedy(1))) for tail in tails]
        found[name] = [round(seconds * 1e3, 1) for seconds in times]
    return found


# --- Parts of the report --------------------------------------------------------------------------

Measure = Callable[[LoadedModel, Lengths, Run], dict[str, Any]]
Report = list[dict[str, Any]]


def compared(
    model: LoadedModel,
    workloads: dict[str, Lengths],
    run: Run,
    ours: Measure,
    peer: Measure | None = None,
) -> Report:
    results = []
    for name, lengths in run.chosen(workloads):
        found: dict[str, Any] = {"workload": name, "mlx_paged": attempt(ours, model, lengths, run)}
        print(name, "mlx_paged", found["mlx_paged"], flush=True)
        if peer is not None and run.peer:
            found["mlx-lm"] = attempt(peer, model, lengths, run)
            print(name, "mlx-lm", found["mlx-lm"], flush=True)
        results.append(found)
    return results


def ttft_part(model: LoadedModel, run: Run) -> Report:
    rows = {"4096 cached + 64": (4096, 64), "32": (0, 32)}
    results = []
    for name, (prefix, tail) in rows.items():
        lengths = (prefix // 32, tail // 4) if run.tiny else (prefix, tail)
        found = attempt(ttft, model, *lengths, run)
        print("ttft", name, found, flush=True)
        results.append({"workload": name, "mlx_paged": found})
    tails = (520, 700, 1000, 1300, 1900)
    name = f"4096 cached + {', '.join(map(str, tails))}"
    lengths = tuple(n // 16 for n in tails) if run.tiny else tails
    found = attempt(new_lengths, model, 4096 // 32 if run.tiny else 4096, lengths, run)
    print("ttft", name, found, flush=True)
    return [*results, {"workload": name, "mlx_paged": found}]


Part = tuple[str, Callable[[LoadedModel, Run], Report]]


def few(model: LoadedModel, run: Run) -> Report:
    return compared(model, FEW, run, decode, decode_peer)


def kv_formats(model: LoadedModel, run: Run) -> Report:
    """Long contexts in 16-bit and in quantized pools."""
    results = []
    for name in ("auto", "int8", "int8_k_int4_v"):
        ours = partial(decode, kv_cache_dtype=name)
        for row in compared(model, LONG_CONTEXTS, run, ours):
            results.append({**row, "workload": f"{row['workload']}, KV cache {name}"})
    return results


PARTS: dict[str, Part] = {
    "decode": ("Llama-3.2-3B", lambda m, r: compared(m, DECODE, r, decode, decode_peer)),
    "prefill": ("Llama-3.2-3B", lambda m, r: compared(m, PREFILL, r, prefill, prefill_peer)),
    "ttft": ("Llama-3.2-3B", ttft_part),
    "busy": ("Llama-3.2-3B", lambda m, r: compared(m, BUSY, r, busy)),
    "qwen3-0.6b": ("Qwen3-0.6B", few),
    "llama-8b-kv": ("Llama-3.1-8B", kv_formats),
    "llama-8b-4bit": ("Llama-3.1-8B, 4 bits", few),
    "qwen3-30b-a3b-4bit": ("Qwen3-30B-A3B, 4 bits", few),
    "qwen3-30b-a3b": ("Qwen3-30B-A3B", few),
}


def table_of(report: Report) -> None:
    """The main figure of each row."""

    def figure(result: dict[str, Any] | None) -> str:
        keys = ("step_ms", "tokens_per_s", "cached_ms", "cold_ms", "with_neighbor_ms", "error")
        return next((str(result[k])[:40] for k in keys if k in result), "") if result else ""

    rows = [[r["workload"], figure(r.get("mlx_paged")), figure(r.get("mlx-lm"))] for r in report]
    print_table(["prompts", "mlx_paged", "mlx-lm"], rows)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART",
                        help=", ".join(PARTS))  # fmt: skip
    parser.add_argument("--workload", nargs="+", default=[], help='such as "32 x 1024"')
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="without mlx-lm")
    parser.add_argument("--seconds", type=float, default=450.0,
                        help="no workload begins after so many; default 450")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU")
    parser.add_argument("--name", default="calls-gpu", help="of the file in bench/results")
    parser.add_argument("--no-save", dest="save", action="store_false")
    options = parser.parse_args(arguments)
    ends_at = time.monotonic() + options.seconds
    run = Run(options.peer, tuple(options.workload), options.tiny, ends_at)
    mx.set_default_device(mx.cpu if options.tiny else mx.gpu)
    path = RESULTS / f"{options.name}.json"
    parts = {}
    if options.save and path.exists():
        parts = json.loads(path.read_text()).get("parts", {})
    name, model = "", None
    for part in options.only:
        wanted, measure = PARTS[part]
        wanted = "tiny" if options.tiny else wanted
        if time.monotonic() > ends_at:
            print(f"== {part}: left out, the time is over", flush=True)
            continue
        if wanted != name:
            del model
            rest()
            name, model = wanted, random_model(wanted)
        assert model is not None
        print(f"== {part}: {name}", flush=True)
        report = measure(model, run)
        table_of(report)
        parts[part] = {"model": name, "results": report, "environment": environment()}
        if options.save:
            save(options.name, {"parts": parts})
    return parts


if __name__ == "__main__":
    main()
