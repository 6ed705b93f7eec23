"""`bench/vllm_steps.py` runs: our engine on a tiny model, and a stand-in for vLLM.

`bench/ranks.py` measures the same stand-in on several GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.interpreters import python_path

BENCH = Path(__file__).resolve().parents[2] / "bench"
# Its answers count their tokens. It fails at a prompt of 64 tokens, and at once if told to.
VLLM = """
import json, os, pathlib, time, types

__version__ = "0.0"


class SamplingParams(types.SimpleNamespace):
    pass


class LLM:
    def __init__(self, **options):
        if os.environ.get("FAILS"):
            raise RuntimeError("no memory")
        config = json.loads((pathlib.Path(options["model"]) / "config.json").read_text())
        pathlib.Path(os.environ["TOLD"]).write_text(json.dumps([config, options]))

    def generate(self, prompts, params, use_tqdm):
        print("noise on stdout")
        assert params.ignore_eos and not params.detokenize
        if len(prompts[0]["prompt_token_ids"]) == 64:
            raise ValueError("too long")
        time.sleep(0.01 * params.max_tokens)  # so that a step takes some time
        out = types.SimpleNamespace(token_ids=range(params.max_tokens))
        return [types.SimpleNamespace(outputs=[out])] * len(prompts)
"""
TORCH = """
import types

__version__ = "2.0"
version = types.SimpleNamespace(cuda="13.0")
"""
RUN = """
import json, sys, vllm_steps
parts = vllm_steps.main(["--tiny", "--no-save", "--only", "3b", *sys.argv[1:]])
print(json.dumps(parts))
"""
# Everything but vLLM's figures is left out.
RANKS = """
import json, sys, ranks
ranks.write_model = ranks.measured = ranks.report = lambda *args: {}
ranks.save = lambda name, found: print(json.dumps(found["models"]))
ranks.main()
"""


@pytest.fixture
def run(tmp_path) -> Any:
    (tmp_path / "vllm.py").write_text(VLLM)
    (tmp_path / "torch.py").write_text(TORCH)

    def started(*options: str, program: str = RUN, **env: str) -> dict[str, Any]:
        variables = {"PYTHONPATH": str(tmp_path), "TOLD": str(tmp_path / "told"), **env}
        words = ["--vllm-env", *(f"{name}={value}" for name, value in variables.items())]
        done = subprocess.run(
            [sys.executable, "-c", program, *options, *words],
            env={**os.environ, "PYTHONPATH": python_path(BENCH, BENCH.parent)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        return json.loads(lines[-1])

    return started


@pytest.mark.long
def test_both_engines_are_measured(run, tmp_path) -> None:
    part = run("--workload", "1 x 1024", "32 x 4096", "--modes", "greedy", "sampled")["3b"]
    assert part["engines"]["vllm"]["version"] == "0.0"
    config, options = json.loads((tmp_path / "told").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert options["cudagraph_capture_sizes"] == [1, 8]
    assert options["kv_cache_memory_bytes"] % (2 * 2 * 2 * 2 * 16) == 0  # the tiny model's token
    assert options["max_model_len"] > 64 + 6
    rows = {(row["workload"], row["mode"]): row for row in part["results"]}
    assert len(rows) == 4
    for mode in ("greedy", "sampled"):
        both = rows["1 x 1024", mode]
        assert len(both["mlx_paged"]["all_ms"]) == 3
        assert both["vllm"] | {"step_ms": 0, "all_ms": 0} == {
            "distinct": 1, "step_ms": 0, "all_ms": 0
        }  # fmt: skip
        assert both["ratio"] == pytest.approx(
            both["mlx_paged"]["step_ms"] / both["vllm"]["step_ms"], rel=0.01, abs=0.01
        )
        # An engine that fails does not take the other's figure with it.
        one = rows["32 x 4096", mode]
        assert "too long" in one["vllm"]["error"] and "ratio" not in one
        assert "step_ms" in one["mlx_paged"]


def test_an_engine_that_does_not_start_is_left_out(run) -> None:
    part = run("--engines", "vllm", FAILS="1")["3b"]
    assert "no memory" in part["engines"]["vllm"]["error"]
    assert part["results"] == []


def test_ranks_measure_vllm_with_the_same_number_of_gpus(run, tmp_path) -> None:
    words = [
        "--models",
        "tiny",
        "--bits",
        "16",
        "--ranks",
        "2",
        "--rows",
        "1",
        "4",
        "--length",
        "32",
    ]
    found = run(*words, program=RANKS)["tiny, 16 bits, vLLM"]["2"]
    _, told = json.loads((tmp_path / "told").read_text())
    assert told["tensor_parallel_size"] == 2
    token = 2 * 2 * 2 * 2 * 64  # keys and values of two layers, two heads and 16 bits
    assert told["kv_cache_memory_bytes"] >= 4 * (32 + 65) * token // 2
    assert told["max_model_len"] >= 32 + 65
    assert {"1 x 32", "4 x 32"} <= set(found)
    assert found["4 x 32"]["step_ms"] > 0
