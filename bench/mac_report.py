"""The kernels on an Apple GPU: runs their tests, calibrates them (docs/metal-kernels.md), compares
every primitive with copy bandwidth, MLX's dense attention and gathering first, and decodes as
calibration chose and with MLX's graphs. Writes bench/results/mac-<chip>.json, .md.

python bench/mac_report.py
python bench/mac_report.py --quick     # small shapes and few repeats, for CI's virtual GPU
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_paged.calibration import table
from mlx_paged.extension import build_info

# isort: split
import mlx.core as mx
from harness import RESULTS

ROOT = Path(__file__).resolve().parent.parent
SHAPES = [
    ["--batch", "1", "--context", "8192,32768"],
    ["--batch", "16", "--context", "4096"],
]
QUICK_SHAPES = [["--batch", "4", "--context", "1024"]]


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    print("+", *(f"{name}={value}" for name, value in env.items()), *command, flush=True)
    return subprocess.run([sys.executable, *command], cwd=ROOT, text=True, check=False,
                          capture_output=True, env={**os.environ, **env})  # fmt: skip


_DECODE = """
import json, statistics, sys, time
from mlx_paged import LLM, SamplingParams
mode, batch, tokens, runs = sys.argv[1], *map(int, sys.argv[2:])
llm = LLM(calibrate=mode)
params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
prompts, seconds = [list(range(5, 133))] * batch, []
for _ in range(2 + runs):
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds.append(time.perf_counter() - start)
tokens = list(outputs[0].outputs[0].token_ids)
print(json.dumps({"seconds": statistics.median(seconds[2:]), "tokens": tokens}))
"""


def whole_steps(
    tokens: int = 128, runs: int = 5, turns: int = 3, batches: Sequence[int] = (1, 8, 16)
) -> list[dict[str, Any]]:
    """Decodes with the embedded model as calibration chose, and with steps as MLX graphs: seconds
    of the median batch, in turns, and whether the greedy answers are equal."""
    ways = {"graphs": "off", "calibrated": "auto"}
    results = []
    for batch in batches:
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        answers = {}
        for _ in range(turns):
            for name, mode in ways.items():
                done = run("-c", _DECODE, mode, str(batch), str(tokens), str(runs))
                if done.returncode:
                    return [{"failed": name, "batch": batch, "error": done.stderr[-2000:]}]
                told = json.loads(done.stdout.splitlines()[-1])
                seconds[name].append(told["seconds"])
                answers[name] = told["tokens"]
        medians = {name: statistics.median(s) for name, s in seconds.items()}
        same = answers["graphs"] == answers["calibrated"]
        results.append({"batch": batch, **medians, "same_answer": same})
    return results


def calibration() -> dict[str, Any] | None:
    """Calibrates this Mac anew; None: doctor says why."""
    done = run("-m", "mlx_paged.cli.main", "doctor", "--calibrate", "--json")
    try:
        table: dict[str, Any] | None = json.loads(done.stdout)["calibration"]
    except ValueError:
        print(done.stderr)
        return None
    return table


def markdown(
    chip: str,
    tests: str,
    results: list[dict[str, Any]],
    copy: float,
    steps: list[dict[str, Any]],
    calibrated: Any,
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
    if calibrated is not None:
        lines.append("\nCalibration with the embedded model:\n")
        lines += [f"- {line}" for line in table.lines(calibrated)]
    lines.append("\nDecoding of the embedded model, as calibrated and with MLX's graphs:\n")
    lines += [f"- {json.dumps(step)}" for step in steps]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests and measures the kernels on an Apple GPU.")
    parser.add_argument("--quick", action="store_true", help="small shapes and few repeats")
    quick = parser.parse_args().quick
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
    for i, shape in enumerate(QUICK_SHAPES if quick else SHAPES):
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
        "quick": quick,
        "environment": parts[0]["environment"],
        "chip": chip,
        "tests": {"summary": summary, "passed": tests.returncode == 0},
        "copy_bytes_per_second": copy,
        "results": results,
        "calibration": (calibrated := calibration()),
        "whole_steps": (steps := whole_steps(32, 2, 1, (1, 8)) if quick else whole_steps()),
    }
    (RESULTS / f"{slug}.json").write_text(json.dumps(report, indent=2) + "\n")
    (RESULTS / f"{slug}.md").write_text(markdown(chip, summary, results, copy, steps, calibrated))
    print(f"wrote {RESULTS / slug}.json and .md")
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
