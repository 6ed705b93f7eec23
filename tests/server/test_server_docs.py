"""The documentation says what the code does; `bench serve` speaks as vLLM's."""

from __future__ import annotations

import json
import math
import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from support.server_helpers import running
from typer.testing import CliRunner

from mlx_paged.bench.datasets import Dataset, Workload, tokenizer_of
from mlx_paged.bench.figures import percentile
from mlx_paged.cli.main import app
from mlx_paged.engine.config import EngineConfig
from mlx_paged.server.api import API
from mlx_paged.server.config import ServerConfig

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/serving.md"
WRITER = runpy.run_path(str(ROOT / "scripts/write_options_md.py"))


def test_the_table_of_options_is_the_command_lines() -> None:
    text = DOCUMENT.read_text()
    assert WRITER["rewrite"](text) == text, "run: python scripts/write_options_md.py"
    help_text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "300"}).output
    flags = set(re.findall(r"--[a-z][a-z-]+", WRITER["table"]()))
    assert len(flags) > 35 and flags <= set(re.findall(r"--[a-z][a-z-]+", help_text))


def test_every_path_is_documented() -> None:
    text = DOCUMENT.read_text()
    for operation in API:
        path = operation.path.replace("{model:path}", "{id}")
        assert f"`{path}`" in text, path


def test_every_option_of_engine_and_server_has_a_flag() -> None:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    names = {option.name for option in serve.params}
    for option in (*fields(EngineConfig), *fields(ServerConfig)):
        # Two follow from other flags.
        derived = {"priority_scheduling": "policy", "warm_up_loras": "lora_modules"}
        assert derived.get(option.name, option.name) in names, option.name


def test_variables_follow_from_flags() -> None:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    for option in serve.params:
        if option.name == "models":  # MLX_PAGED_MODEL is the argument.
            assert option.envvar == "MLX_PAGED_MODELS"
        elif option.name != "help" and option.param_type_name == "option":
            flag = option.opts[0].removeprefix("--").replace("-", "_").replace(".", "_")
            assert option.envvar == f"MLX_PAGED_{flag.upper()}"


def test_percentiles() -> None:
    assert percentile([], 50) == 0
    assert percentile([3.0], 99) == 3
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile(list(map(float, range(101))), 99) == 99


VLLM_KEYS = {
    "environment",
    "date", "endpoint_type", "backend", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens",
    "total_output_tokens", "request_throughput", "output_throughput", "total_token_throughput",
    "input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors",
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el")
      for kind in ("mean", "median", "std", "p99")),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_bench_serve(tmp_path, backend) -> None:
    file = tmp_path / "result.json"
    with running() as server:
        done = CliRunner().invoke(
            app,
            ["bench", "serve", "--base-url", server.url, "--num-prompts", "12",
             "--backend", backend, "--max-concurrency", "4", "--random-input-len", "20",
             "--random-output-len", "9",
             "--random-prefix-len", "16", "--save-result", "--result-filename", str(file),
             "--request-rate", "200"],
        )  # fmt: skip
        stats = server.stats()
    assert done.exit_code == 0, done.output
    saved = json.loads(file.read_text())
    assert saved.keys() >= VLLM_KEYS
    assert saved["completed"] == 12 and saved["failed"] == 0
    assert saved["total_output_tokens"] == 12 * 9 and saved["output_lens"] == [9] * 12
    assert saved["total_cached_tokens"] > 0
    assert saved["max_concurrent_requests"] <= 4 and stats.max_used_blocks > 0
    rate = saved["total_output_tokens"] / saved["duration"]
    assert math.isclose(saved["output_throughput"], rate)
    assert saved["mean_ttft_ms"] <= saved["mean_e2el_ms"]
    gaps = [1000 * gap for answer in saved["itls"] for gap in answer]
    assert saved["longest_gap_ms"] == pytest.approx(max(gaps))
    assert saved["num_chunks"] == 12 + len(gaps)  # an answer's first chunk has no gap before it
    for line in ("Successful requests:                     12", "Output token throughput (tok/s):",
                 "Mean TTFT (ms):", "P99 ITL (ms):", "Mean TPOT (ms):", "Longest gap (ms):",
                 "Chunks of generated text:"):  # fmt: skip
        assert line in done.output


def test_bench_serve_sends_the_messages_of_a_chat(tmp_path) -> None:
    file = tmp_path / "result.json"
    asked = Workload(Dataset.EMBEDDED, 4, system_prompt=False).sample(tokenizer_of(None), 5)
    with running() as server:
        done = CliRunner().invoke(
            app,
            ["bench", "serve", "--base-url", server.url, "--num-prompts", "3", "--seed", "5",
             "--backend", "openai-chat", "--dataset-name", "embedded", "--no-system-prompt",
             "--output-len", "4", "--num-warmups", "1",
             "--save-result", "--result-filename", str(file)],
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    # As the server counts: the template of the chat is around each question, once.
    assert json.loads(file.read_text())["input_lens"] == [p.num_tokens for p in asked[1:]]


def test_bench_serve_without_a_server() -> None:
    done = CliRunner().invoke(app, ["bench", "serve", "--base-url", "http://127.0.0.1:9"])
    assert done.exit_code != 0 and "does not name a model" in str(done.exception)
