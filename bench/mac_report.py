"""The kernels on an Apple GPU: runs their tests, compares every primitive with copy bandwidth,
MLX's dense attention and gathering first, and decodes with and without whole-step encoding
(MLX_PAGED_UNCHECKED_KERNELS=1, docs/metal-kernels.md). Writes bench/results/mac-<chip>.json, .md.

python bench/mac_report.py
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from mlx_paged.extension import build_info

# isort: split
import mlx.core as mx
from harness import RESULTS

ROOT = Path(__file__).resolve().parent.parent
SHAPES = [
    ["--batch", "1", "--context", "8192,32768"],
    ["--batch", "16", "--context", "4096"],
]


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    print("+", *(f"{name}={value}" for name, value in env.items()), *command, flush=True)
    return subprocess.run([sys.executable, *command], cwd=ROOT, text=True, check=False,
                          capture_output=True, env={**os.environ, **env})  # fmt: skip


def whole_steps(tokens: int = 128, runs: int = 5) -> list[dict[str, Any]]:
    """Decodes with the embedded model, with steps as MLX graphs and as one operation each: seconds
    of the median batch, in turns, and whether the greedy answers are equal."""
    ways = {"graphs": "0", "whole": "1"}
    prompt = ["generate", "Return the n-th Fibonacci number", "--temperature", "0"]
    results = []
    for batch in (1, 8, 16):
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        options = ["--batch-size", str(batch), "--output-len", str(tokens), "--input-len", "128"]
        for _ in range(3):
            for name, value in ways.items():
                path = RESULTS / "latency-part.json"
                done = run("-m", "mlx_paged.cli.main", "bench", "latency", *options, "--num-iters",
                           str(runs), "--num-iters-warmup", "2", "--output-json", str(path),
                           MLX_PAGED_UNCHECKED_KERNELS=value)  # fmt: skip
                if done.returncode:
                    return [{"failed": name, "batch": batch, "error": done.stderr[-2000:]}]
                seconds[name] += json.loads(path.read_text())["latencies"]
                path.unlink()
        results.append(
            {"batch": batch, **{name: statistics.median(s) for name, s in seconds.items()}}
        )
    answers = [
        run("-m", "mlx_paged.cli.main", *prompt, MLX_PAGED_UNCHECKED_KERNELS=value).stdout
        for value in ways.values()
    ]
    results.append({"same_answer": bool(answers[0]) and answers[0] == answers[1]})
    return results


def markdown(
    chip: str, tests: str, results: list[dict[str, Any]], copy: float, steps: list[dict[str, Any]]
) -> str:
    lines = [
        f"# {chip}\n",
        f"Tests on the GPU: {tests}. Copy bandwidth: {copy / 1e9:.0f} GB/s.\n",
        "| op | group | dtype | batch x context | KV heads x dim | ms | GB/s | of copy "
        "| dense SDPA takes | gather first takes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        times = [
            f"{r['peers'][name]['over_ours']:.2f}x" if name in r["peers"] else ""
            for name in ("dense_sdpa", "gather_sdpa")
        ]
        cells = [
            *(r["op"], r["group"] or "", r["dtype"], f"{r['batch']} x {r['context']}"),
            *(f"{r['kv_heads']} x {r['head_dim']}", f"{r['seconds']['median'] * 1e3:.3f}"),
            *(f"{r['bytes_per_second'] / 1e9:.0f}", f"{r['share_of_copy']:.0%}", *times),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines.append("\nDecoding of the embedded model, steps encoded as a whole or node by node:\n")
    lines += [f"- {json.dumps(step)}" for step in steps]
    return "\n".join(lines) + "\n"


def main() -> int:
    if "metal" not in build_info()["backends"].split() or not mx.is_available(mx.gpu):
        print(f"mac-report needs an Apple GPU and a build with Metal kernels; this one has "
              f"{build_info()['backends']}")  # fmt: skip
        return 1
    chip = str(mx.device_info().get("device_name", "apple-gpu"))  # type: ignore[attr-defined]
    slug = "mac-" + re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-")
    tests = run("-m", "pytest", "-q", "tests/native/test_gpu.py")
    summary = tests.stdout.strip().rsplit("\n", 1)[-1]
    print(tests.stdout[-4000:])

    parts = []
    for i, shape in enumerate(SHAPES):
        part = RESULTS / f"{slug}-part{i}.json"
        options = ["--device", "gpu", "--group", "1,4,8", *shape, "--json", str(part)]
        done = run("-m", "mlx_paged.cli.main", "bench", "kernels", *options)
        print(done.stdout, done.stderr, sep="\n")
        if done.returncode:
            return done.returncode
        parts.append(json.loads(part.read_text()))
        part.unlink()
    results = [r for part in parts for r in part["results"]]
    copy = statistics.median(r["copy_bytes_per_second"] for r in results)
    report = {
        "environment": parts[0]["environment"],
        "chip": chip,
        "tests": {"summary": summary, "passed": tests.returncode == 0},
        "copy_bytes_per_second": copy,
        "results": results,
        "whole_steps": (steps := whole_steps()),
    }
    (RESULTS / f"{slug}.json").write_text(json.dumps(report, indent=2) + "\n")
    (RESULTS / f"{slug}.md").write_text(markdown(chip, summary, results, copy, steps))
    print(f"wrote {RESULTS / slug}.json and .md")
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
