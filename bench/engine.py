"""Throughput and latency of the engine against mlx-lm's BatchGenerator, in one process, in turns.

    python bench/engine.py

Both have the same float32 weights and the same OpenBLAS, and generate the same number of tokens for
the same random prompts.
"""

from __future__ import annotations

import argparse
import re
import statistics
from dataclasses import dataclass, replace
from typing import Any

import mlx_paged.extension  # loads BLAS before mlx.core

# isort: split
import mlx.core as mx
import numpy as np
from harness import print_table, save

from mlx_paged.bench.datasets import Prompt
from mlx_paged.bench.engines import MlxLmRunner, PagedRunner, Settings
from mlx_paged.bench.figures import Run, compare, percentile
from mlx_paged.engine.loading import load

OUTPUT_TOKENS = 32


@dataclass(frozen=True)
class Workload:
    """`count` requests with random prompts."""

    name: str
    count: int
    lengths: tuple[int, ...]  # prompt lengths, cycled over the requests
    shared: int = 0  # length of the common prefix of all prompts

    def prompts(self, vocab_size: int) -> list[Prompt]:
        rng = np.random.default_rng(self.count)
        common = rng.integers(3, vocab_size, self.shared).tolist()
        lengths = [self.lengths[i % len(self.lengths)] for i in range(self.count)]
        own = [rng.integers(3, vocab_size, n - self.shared).tolist() for n in lengths]
        return [Prompt((*common, *rest), OUTPUT_TOKENS, "") for rest in own]


SKEWED = (64,) * 15 + (2048,)
WORKLOADS = [
    *(Workload("equal 128", n, (128,)) for n in (1, 8, 32, 64, 256)),
    Workload("skewed 15 x 64 + 2048", 32, SKEWED),
    *(Workload("half of 512 shared", n, (512,), 256) for n in (8, 32)),
    *(Workload("90% of 512 shared", n, (512,), 461) for n in (8, 32)),
    Workload("1024 shared + 32", 32, (1056,), 1024),
]


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
    model = load(dtype="float32")
    results, rows = [], []
    chosen = [w for w in WORKLOADS if re.search(options.only, f"{w.name}, {w.count} requests")]
    if not chosen:
        parser.error(f"--only {options.only!r} matches no workload")
    engines = {"mlx_paged": PagedRunner, "mlx-lm BatchGenerator": MlxLmRunner}
    for workload in chosen:
        prompts = workload.prompts(model.vocab_size)
        runs: dict[str, list[Run]] = {name: [] for name in engines}
        for _ in range(options.rounds):
            for name, make in engines.items():
                runner = make(model, Settings())
                runner.run(
                    [replace(p, token_ids=p.token_ids[:4], max_tokens=2) for p in prompts[:2]]
                )
                runs[name].append(runner.run(prompts, cold=True))
        summary: dict[str, Any] = {"workload": workload.name, "concurrency": workload.count}
        for name, done in runs.items():
            seconds = statistics.median(run.seconds for run in done)
            ttft = [answer.ttft for answer in done[-1].answers]
            summary[name] = {
                "seconds": seconds,
                "output_tokens_per_second": workload.count * OUTPUT_TOKENS / seconds,
                "ttft_median": statistics.median(ttft),
                "ttft_p99": percentile(ttft, 99),
            }
        compared = compare(*runs.values())
        same = summary["same_answers"] = compared["same_answers"]
        summary["speedup"] = compared["speedup"]
        a, b = (summary[name] for name in engines)
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
