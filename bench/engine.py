"""Throughput and latency of the engine against mlx-lm's BatchGenerator, in one process, in turn.

    python bench/engine.py

Both have the same float32 weights and the same OpenBLAS, and generate the same number of tokens for
the same random prompts.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from dataclasses import dataclass
from typing import Any

import mlx_paged.core  # loads BLAS before mlx.core

# isort: split
import mlx.core as mx
import numpy as np
from harness import print_table, save

from mlx_paged import LLM, SamplingParams
from mlx_paged.models.load import LoadedModel, load

OUTPUT_TOKENS = 32


@dataclass(frozen=True)
class Workload:
    """Prompts of `count` requests."""

    name: str
    count: int
    lengths: tuple[int, ...]  # cycled over the requests
    shared: int = 0  # first tokens that all prompts have in common

    def prompts(self, vocab_size: int) -> list[list[int]]:
        rng = np.random.default_rng(self.count)
        common = rng.integers(3, vocab_size, self.shared).tolist()
        lengths = [self.lengths[i % len(self.lengths)] for i in range(self.count)]
        return [common + rng.integers(3, vocab_size, n - self.shared).tolist() for n in lengths]


SKEWED = (64,) * 15 + (2048,)
WORKLOADS = [
    *(Workload("equal 128", n, (128,)) for n in (1, 8, 32, 64, 256)),
    Workload("skewed 15 x 64 + 2048", 32, SKEWED),
    *(Workload("half of 512 shared", n, (512,), 256) for n in (8, 32)),
    *(Workload("90% of 512 shared", n, (512,), 461) for n in (8, 32)),
    Workload("1024 shared + 32", 32, (1056,), 1024),
]


def run_engine(model: LoadedModel, prompts: list[list[int]]) -> dict[str, Any]:
    llm = LLM(model)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    llm.generate([p[:4] for p in prompts[:2]], SamplingParams(temperature=0, max_tokens=2))
    llm.engine.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    first = [o.metrics.time_to_first_token or 0.0 for o in outputs]
    return {"seconds": seconds, "ttft": first, "tokens": [o.outputs[0].token_ids for o in outputs]}


def run_batch_generator(model: LoadedModel, prompts: list[list[int]]) -> dict[str, Any]:
    from mlx_lm.generate import BatchGenerator  # here: mlx-lm's own, once it is unpatched

    generator = BatchGenerator(model.model, completion_batch_size=len(prompts))
    start = time.perf_counter()
    ids = generator.insert(prompts, [OUTPUT_TOKENS] * len(prompts))
    tokens: dict[int, list[int]] = {i: [] for i in ids}
    first: dict[int, float] = {}
    while responses := generator.next_generated():
        for response in responses:
            first.setdefault(response.uid, time.perf_counter() - start)
            tokens[response.uid].append(int(response.token))
    seconds = time.perf_counter() - start
    generator.close()
    return {"seconds": seconds, "ttft": list(first.values()), "tokens": [tokens[i] for i in ids]}


def main() -> None:
    mlx_paged.unpatch()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--only", default="", help="a regular expression over 'PROMPTS, COUNT requests'"
    )
    parser.add_argument("--name", default="engine-cpu", help="of the file of results")
    parser.add_argument("--no-save", dest="save", action="store_false")
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    model = load()
    results, rows = [], []
    chosen = [w for w in WORKLOADS if re.search(options.only, f"{w.name}, {w.count} requests")]
    if not chosen:
        parser.error(f"--only {options.only!r} matches no workload")
    for workload in chosen:
        prompts = workload.prompts(model.vocab_size)
        ours, theirs = [], []
        for _ in range(options.rounds):
            ours.append(run_engine(model, prompts))
            theirs.append(run_batch_generator(model, prompts))
        summary: dict[str, Any] = {"workload": workload.name, "concurrency": workload.count}
        for name, runs in (("mlx_paged", ours), ("mlx-lm BatchGenerator", theirs)):
            seconds = statistics.median(r["seconds"] for r in runs)
            ttft = sorted(runs[-1]["ttft"])
            summary[name] = {
                "seconds": seconds,
                "output_tokens_per_second": workload.count * OUTPUT_TOKENS / seconds,
                "ttft_median": statistics.median(ttft),
                "ttft_p99": ttft[int(0.99 * (len(ttft) - 1))],
            }
        same = sum(a == b for a, b in zip(ours[-1]["tokens"], theirs[-1]["tokens"]))
        summary["same_answers"] = same
        a, b = summary["mlx_paged"], summary["mlx-lm BatchGenerator"]
        summary["speedup"] = b["seconds"] / a["seconds"]
        results.append(summary)
        rows.append(
            [
                workload.name,
                str(workload.count),
                f"{a['output_tokens_per_second']:.0f}",
                f"{b['output_tokens_per_second']:.0f}",
                f"{summary['speedup']:.1f}x",
                f"{a['ttft_median']:.2f} / {b['ttft_median']:.2f}",
                f"{same}/{workload.count}",
            ]
        )
        print(*rows[-1], flush=True)
    header = ["prompts", "requests", "tokens/s", "mlx-lm", "ratio", "median TTFT s", "same answers"]
    print_table(header, rows)
    if options.save:
        results_file = save(
            options.name,
            {"output_tokens": OUTPUT_TOKENS, "rounds": options.rounds, "results": results},
        )
        print(results_file)


if __name__ == "__main__":
    main()
