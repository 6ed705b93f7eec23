"""Greedy generation against mlx-lm: same weights, same prompts, one process each, in turns.

    python bench/generate.py

mlx-lm runs twice: as installed (with MLX's own BLAS), and with the OpenBLAS that mlx_paged uses.
All compute in float32, and their tokens must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from harness import print_table, save

HEADER = ["workload", "chats", "who", "s", "tokens/s", "mlx_paged is"]
WORKERS: dict[str, dict[str, str]] = {
    "mlx_paged": {},
    "mlx-lm one by one": {},
    "mlx-lm BatchGenerator": {},
    "mlx-lm one by one, as installed": {"MLX_PAGED_BLAS": "off"},
    "mlx-lm BatchGenerator, as installed": {"MLX_PAGED_BLAS": "off"},
}


def prompts_of(workload: str, count: int) -> list[list[dict[str, str]]]:
    """Chats, all with the demo's system prompt or all without one."""
    from mlx_paged.demo.prompts import CHATS, REQUESTS, SYSTEM_PROMPT

    system = [{"role": "system", "content": SYSTEM_PROMPT}] if workload == "shared-prefix" else []
    requests = [*CHATS, *REQUESTS][:count]
    return [[*system, {"role": "user", "content": request}] for request in requests]


def work(name: str, workload: str, count: int, max_tokens: int) -> dict[str, Any]:
    """Runs the work in this process; the time excludes loading and a short warm-up."""
    import mlx_paged.extension

    mlx_paged.unpatch()  # compare with unpatched mlx-lm

    # isort: split
    import mlx.core as mx

    from mlx_paged.bench.datasets import Prompt
    from mlx_paged.bench.engines import MlxLmRunner, PagedRunner, Runner, Settings
    from mlx_paged.cli import demo
    from mlx_paged.engine.loading import load

    mx.set_default_device(mx.cpu)
    # float32 for all: MLX's own 8-bit products take twenty times as long.
    model = load(dtype="float32")
    prompts = [
        model.tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        for chat in prompts_of(workload, count)
    ]
    warm_up = [prompts[0][:4]] * 2
    if name.startswith("mlx-lm one by one"):
        demo.one_by_one(model, warm_up, 4)
        answers, seconds = demo.one_by_one(model, prompts, max_tokens)
        return {"seconds": seconds, "tokens": answers}
    settings = Settings(dtype="float32", ignore_eos=False)
    runner: Runner = PagedRunner(settings) if name == "mlx_paged" else MlxLmRunner(model, settings)
    runner.run([Prompt(tuple(tokens), 4, "") for tokens in warm_up])
    run = runner.run([Prompt(tuple(tokens), max_tokens, "") for tokens in prompts], cold=True)
    eos = set(model.tokenizer.eos_token_ids)
    answers = [[t for t in answer.token_ids if t not in eos] for answer in run.answers]
    return {"seconds": run.seconds, "tokens": answers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", nargs="+", default=["shared-prefix", "plain"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--as-installed", nargs="*", default=["plain:8", "shared-prefix:8"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, workload, count = options.worker
        print(json.dumps(work(name, workload, int(count), options.max_tokens)))
        return

    results: list[dict[str, Any]] = []
    for workload in options.workload:
        for count in options.concurrency:
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in WORKERS}
            for round_ in range(options.rounds):
                for name, env in WORKERS.items():
                    # The installed mlx-lm takes minutes: it runs once, and only on request.
                    if name.endswith("as installed") and (
                        round_ or f"{workload}:{count}" not in options.as_installed
                    ):
                        continue
                    runs[name].append(_spawn(name, workload, count, options.max_tokens, env))
            results.append(_summarize(workload, count, runs))
            print_table(HEADER, _rows(results[-1]))
            saved = save("generate-cpu", {"max_tokens": options.max_tokens, "results": results})
    print(saved)


def _spawn(
    name: str, workload: str, count: int, max_tokens: int, env: dict[str, str]
) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", name, workload, str(count)]
    command += ["--max-tokens", str(max_tokens)]
    done = subprocess.run(command, env={**os.environ, **env}, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _summarize(workload: str, count: int, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    reference = runs["mlx-lm one by one"][0]["tokens"]
    agree = runs["mlx_paged"][0]["tokens"] == reference
    ours = statistics.median(r["seconds"] for r in runs["mlx_paged"])
    summary: dict[str, Any] = {"workload": workload, "concurrency": count, "tokens_agree": agree}
    for name, done in runs.items():
        if not done:
            continue
        seconds = statistics.median(r["seconds"] for r in done)
        num_tokens = sum(len(answer) for answer in done[0]["tokens"])
        summary[name] = {
            "seconds": seconds,
            "all_seconds": [r["seconds"] for r in done],
            "tokens_per_second": num_tokens / seconds,
            "times_as_long_as_mlx_paged": seconds / ours,
        }
    return summary


def _rows(summary: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name in [name for name in WORKERS if name in summary]:
        run = summary[name]
        ratio = run["times_as_long_as_mlx_paged"]
        rows.append([
            summary["workload"], str(summary["concurrency"]), name, f"{run['seconds']:.2f}",
            f"{run['tokens_per_second']:.0f}",
            f"{ratio:.1f}x as fast" if name != "mlx_paged" else
            ("same tokens" if summary["tokens_agree"] else "TOKENS DIFFER"),
        ])  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
