"""`bench latency` and `bench throughput` at the command line: what they print and write."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mlx_paged.cli.main import app
from mlx_paged.errors import MlxPagedError

VLLM_LATENCY = {"avg_latency", "std_latency", "latencies", "percentiles"}
VLLM_THROUGHPUT = {
    "elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second",
}  # fmt: skip
LATENCIES = {
    f"{kind}_{name}_ms"
    for name in ("ttft", "tpot", "itl", "e2el")
    for kind in ("mean", "median", "std", "p50", "p90")
}
MEMORY = {
    "process_peak", "mlx_peak", "mlx_cache", "pool", "pool_used", "system_used", "system_total",
}  # fmt: skip


def run_verb(tmp_path, *arguments: str) -> tuple[str, dict[str, Any]]:
    file = tmp_path / "results.json"
    flags = ["--metric-percentiles", "50,90", "--output-json", str(file)]
    done = CliRunner().invoke(app, ["bench", *arguments, *flags])
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done.stdout, json.loads(file.read_text())


def test_latency(tmp_path) -> None:
    output, saved = run_verb(
        tmp_path, "latency", "--input-len", "6", "--output-len", "5", "--batch-size", "3",
        "--num-iters", "4", "--num-iters-warmup", "1", "--n", "2",
    )  # fmt: skip
    assert saved.keys() >= VLLM_LATENCY | {"environment", "engine", "options", "engines"}
    latencies = saved["latencies"]
    assert len(latencies) == 4
    assert saved["avg_latency"] == pytest.approx(np.mean(latencies))
    assert saved["std_latency"] == pytest.approx(np.std(latencies))
    shares = [10, 25, 50, 75, 90, 99]
    assert saved["percentiles"] == pytest.approx(
        dict(zip(map(str, shares), np.percentile(latencies, shares)))
    )
    ours = saved["engines"]["mlx-paged"]
    assert ours.keys() >= VLLM_LATENCY | LATENCIES and ours["memory"].keys() == MEMORY
    assert ours["output_tokens_per_second"] * saved["avg_latency"] == pytest.approx(3 * 2 * 5)
    assert ours["tokens_per_second"] * saved["avg_latency"] == pytest.approx(3 * (6 + 2 * 5))
    assert saved["comparison"] == {}
    for line in ("Avg latency: ", "99% percentile latency: ", "Median TTFT (ms):", "P90 ITL (ms):",
                 "Process memory (peak)", "MLX peak memory", "MLX cache memory", "KV pool",
                 "System memory"):  # fmt: skip
        assert line in output


@pytest.mark.one_in(5)
@pytest.mark.parametrize("verb", ["latency", "throughput"])
def test_engines_side_by_side(verb, tmp_path) -> None:
    size = ["--batch-size", "3"] if verb == "latency" else ["--num-prompts", "3"]
    output, saved = run_verb(
        tmp_path, verb, "--input-len", "9", "--output-len", "4", *size,
        "--num-iters", "2", "--num-iters-warmup", "0",
        "--engine", "mlx-lm", "--engine", "mlx-paged",
    )  # fmt: skip
    assert saved["engine"] == "mlx-lm" and list(saved["engines"]) == ["mlx-lm", "mlx-paged"]
    assert saved["engines"]["mlx-lm"]["memory"]["pool"] is None
    found = saved["comparison"]["mlx-paged"]
    assert len(found["ratios"]) == 2 and found["same_answers"] == found["num_answers"] == 3
    assert "x as fast as mlx-paged (median of 2 turns" in output
    assert "3 of 3 answers have the same tokens" in output
    key = "latencies" if verb == "latency" else "elapsed_times"
    theirs, ours = (saved["engines"][name][key] for name in ("mlx-lm", "mlx-paged"))
    assert found["ratios"] == pytest.approx([b / a for a, b in zip(theirs, ours)])


@pytest.mark.parametrize("engine", ["mlx-paged", "mlx-lm"])
def test_throughput(engine, tmp_path) -> None:
    output, saved = run_verb(
        tmp_path, "throughput", "--engine", engine, "--num-prompts", "6", "--num-iters", "3",
        "--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "40",
        "--prefix-repetition-suffix-len", "5", "--prefix-repetition-num-prefixes", "2",
        "--output-len", "3", "--disable-detokenize",
    )  # fmt: skip
    assert saved.keys() >= VLLM_THROUGHPUT | {"environment", "options"}
    assert saved["num_requests"] == 6
    assert saved["total_prompt_tokens"] == 6 * 45 and saved["total_output_tokens"] == 6 * 3
    assert saved["total_num_tokens"] == 6 * 48
    assert saved["elapsed_time"] == np.median(saved["elapsed_times"])
    assert saved["requests_per_second"] == pytest.approx(6 / saved["elapsed_time"])
    assert saved["tokens_per_second"] == pytest.approx(6 * 48 / saved["elapsed_time"])
    assert saved["engines"][engine].keys() >= VLLM_THROUGHPUT | LATENCIES
    # Prompts of a prefix wait for the first of them, and then share it.
    shared = saved["total_cached_tokens"]
    assert shared >= 4 * 32 if engine == "mlx-paged" else shared == 0
    assert saved["options"]["num_prefixes"] == 2 and not saved["options"]["detokenize"]
    assert "Throughput: " in output and "Total num output tokens:  18" in output


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "mlx_paged.bench.engines", raising=False)
    monkeypatch.delattr("mlx_paged.bench.engines", raising=False)
    monkeypatch.setitem(sys.modules, "psutil", None)
    done = CliRunner().invoke(app, ["bench", "latency"])
    assert isinstance(done.exception, MlxPagedError)
    assert re.search(r"\(psutil\): pip install 'mlx-paged\[bench\]'", str(done.exception))


def test_a_file_of_conversations(tmp_path) -> None:
    path = tmp_path / "conversations.json"
    turns = [{"value": "Write a function that adds two numbers"}, {"value": "def add(a, b): a"}]
    path.write_text(json.dumps([{"conversations": turns}] * 2))
    _, saved = run_verb(
        tmp_path, "throughput", "--dataset-name", "sharegpt", "--dataset-path", str(path),
        "--num-prompts", "2", "--num-iters-warmup", "0", "--output-len", "3",
    )  # fmt: skip
    assert saved["options"]["dataset_path"] == str(path)
    assert saved["total_output_tokens"] == 6
