"""Decode steps on an NVIDIA GPU as device programs (each a replayed CUDA graph) and as graphs of
`mx.compile`, in turns, on random weights. Runs no engine: the same step repeats with a fixed plan.

python bench/cuda_steps.py                      # the 3B shape, two minutes on an H100
python bench/cuda_steps.py --model Qwen3-0.6B --only "8 x 1024"

Reports for each workload: the difference between the two results, the time of a step when steps are
queued back to back, and the host's time to build and encode one.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from typing import Any

os.environ["MLX_PAGED_DISABLE"] = "1"
import mlx_paged.extension  # noqa: F401  (before mlx.core)

# isort: split
import mlx.core as mx
import numpy as np
from cuda_engine import CONFIGS, DECODE, DECODE_MORE, random_model
from harness import environment, print_table, save

from mlx_paged import ops
from mlx_paged.model import graph_runner
from mlx_paged.model.graph_runner import GraphRunner, Repeat
from mlx_paged.model.plan import PaddedTables, StepInputs
from mlx_paged.model.wrap import build_paged_model

BLOCK = 32
WORKLOADS = {**DECODE, **DECODE_MORE}


def step_of(paged: Any, contexts: tuple[int, ...]) -> tuple[mx.array, Any]:
    """A step's tokens and plan, in GPU memory."""
    lengths = np.array([-(-n // BLOCK) for n in contexts])
    tables = np.zeros((len(contexts), lengths.max()), np.int32)
    tables[np.arange(lengths.max()) < lengths[:, None]] = 1 + np.arange(lengths.sum())
    inputs = StepInputs(
        context_lens=np.array(contexts),
        query_lens=np.ones(len(contexts), np.int64),
        tables=PaddedTables(tables, lengths),
        logit_rows=np.arange(len(contexts)),
        state_slots=None,
    )
    step = paged._planner.plan(inputs, paged.repetition_of(inputs))
    [tokens] = ops.upload(np.arange(5, 5 + len(contexts), dtype=np.int32))
    mx.eval(tokens, graph_runner._arrays_of(step))
    return tokens, step


class Runner:
    """One way to run a step repeatedly."""

    def __init__(self, paged: Any, tokens: mx.array, step: Any, programs: bool) -> None:
        self.paged, self.tokens, self.step = paged, tokens, step
        self.steps = GraphRunner(paged._run)
        self.steps.refusals.executables = None if programs else "graphs"

    def forward(self) -> mx.array:
        output = self.steps.run(self.tokens, self.step, self.paged.pools(), Repeat.AS_GRAPH)
        self.paged.restore(output.pools)
        return output.logits

    def time(self, count: int) -> float:
        """Milliseconds per step, with each queued while the previous one runs."""
        last = None
        mx.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            logits = self.forward()
            token = mx.argmax(logits, -1)
            mx.async_eval(token, *self.paged.pools())
            if last is not None:
                mx.eval(last)
            last = token
        mx.eval(last)
        mx.synchronize()
        return (time.perf_counter() - start) / count * 1e3

    def host(self, count: int) -> float:
        """Host milliseconds per step to build and encode, with an idle GPU."""
        seconds = []
        for _ in range(count):
            mx.synchronize()
            start = time.perf_counter()
            logits = self.forward()
            mx.async_eval(logits, *self.paged.pools())
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds) * 1e3


def fp32(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32), np.float64)


def compare(paged: Any, contexts: tuple[int, ...], repeat: int) -> dict[str, Any]:
    tokens, step = step_of(paged, contexts)
    graph, program = (Runner(paged, tokens, step, programs) for programs in (False, True))
    for runner in (graph, program):
        for _ in range(5):  # A shape is compiled on its third occurrence.
            mx.eval(runner.forward())
    is_program = program.steps.reads_once(len(contexts))
    expected, actual = fp32(graph.forward()), fp32(program.forward())
    error = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)
    again = fp32(program.forward())
    result = {
        "is_program": is_program,
        "same_tokens": float((actual.argmax(1) == expected.argmax(1)).mean()),
        "largest_relative_difference": float(error.max()),
        "same_again": bool((again == actual).all()),
    }
    times: dict[str, list[float]] = {"graph": [], "program": []}
    gc.collect()
    gc.disable()
    for _ in range(repeat):
        times["graph"].append(graph.time(30))
        times["program"].append(program.time(30))
    for name, runner in (("graph", graph), ("program", program)):
        result[f"{name}_ms"] = round(statistics.median(times[name]), 3)
        result[f"{name}_host_ms"] = round(runner.host(15), 3)
    gc.enable()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Llama-3.2-3B", choices=CONFIGS)
    parser.add_argument("--only", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--save", default="cuda-steps", help="name in bench/results")
    options = parser.parse_args()
    mx.set_default_device(mx.gpu)
    loaded = random_model(options.model)
    paged = build_paged_model(loaded.model, loaded.config, block_size=BLOCK)
    results: dict[str, Any] = {}
    for name in options.only:
        contexts = WORKLOADS[name]
        paged.allocate(sum(-(-n // BLOCK) for n in contexts) + 8)
        # Fresh memory may hold NaNs, which would hide differences.
        mx.random.seed(1)
        pools = [mx.random.normal(p.shape, p.dtype) for p in paged.pools()]
        mx.eval(pools)
        paged.restore(pools)
        del pools
        results[name] = compare(paged, contexts, options.repeat)
        print(name, results[name], flush=True)
        gc.collect()
        mx.clear_cache()
    columns = ("graph_ms", "program_ms", "graph_host_ms", "program_host_ms", "same_tokens")
    print_table(
        ["", *columns], [[name, *(str(r[c]) for c in columns)] for name, r in results.items()]
    )
    path = save(
        options.save, {"model": options.model, "steps": results, "environment": environment()}
    )
    print(path)


if __name__ == "__main__":
    main()
