"""`mlx-paged bench memory`: what everyone holds is read while it runs, and can be counted."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from typing import Any

import pytest
from support.models import embedded, tiny_config, tiny_model
from support.plain import plain_mlx_lm
from typer.testing import CliRunner

from mlx_paged.bench import memory_runs
from mlx_paged.bench.memory_runs import BATCH, DENSE, PAGED, SHARED, Load
from mlx_paged.cli.main import app
from mlx_paged.demo import model_path
from mlx_paged.engine.loading import load
from mlx_paged.errors import InvalidParameterError, MlxPagedError, UnsupportedModelError
from mlx_paged.model.loader import LoadedModel

# isort: split
import mlx.core as mx

BLOCK = 16
DENSE_STEP = 256  # tokens by which mlx-lm's caches grow


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load()


def bytes_per_token(model: LoadedModel) -> int:
    c = model.config
    return 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"] * 4


def test_what_is_held_is_what_can_be_counted(model) -> None:
    one = Load(3, 100, 8, 8)
    lens = [len(prompt) + count for prompt, count in one.requests(model.vocab_size, 0)]
    with plain_mlx_lm():  # as the verb does
        held = memory_runs.measure(model, one, BLOCK, 0, ["int8"])
    per_token = bytes_per_token(model)
    assert held[DENSE].live_bytes == 3 * DENSE_STEP * per_token
    assert held[DENSE].allocated_bytes is not None
    assert held[DENSE].allocated_bytes >= held[DENSE].live_bytes
    assert held[BATCH].live_bytes == 3 * DENSE_STEP * per_token
    # (The last token of an answer is never written, and the block for it may not be needed.)
    each = [-(-(n - 1) // BLOCK) for n in lens]
    assert 0 <= held[PAGED].blocks - sum(each) <= 3
    # The shared part is held once: its full blocks.
    shared = 100 // BLOCK
    assert 0 <= held[SHARED].blocks - (sum(each) - 2 * shared) <= 3
    for name in (PAGED, SHARED):
        assert held[name].live_bytes == held[name].blocks * BLOCK * per_token
        assert held[name].allocated_bytes is not None
        assert held[name].allocated_bytes >= held[name].live_bytes
    quantized = held["paged_int8"]
    assert (quantized.blocks, quantized.live_bytes * 4 * 64) == (
        held[PAGED].blocks,
        held[PAGED].live_bytes * (64 + 2),
    )
    assert len({found.answer_tokens for found in held.values()}) == 1


def test_tokens_that_32_users_hold_in_the_memory_of_bfloat16() -> None:
    config = tiny_config("llama", head_dim=128, num_attention_heads=4, num_key_value_heads=1)
    model = tiny_model({**config, "num_hidden_layers": 1})
    model.set_dtype(mx.bfloat16)
    loaded = LoadedModel(model, embedded().tokenizer, config, "tiny")
    with plain_mlx_lm():
        held = memory_runs.measure(loaded, Load(32, 4, 4, 2), 8, 0, ["int8", "int8_k_int4_v"])
    load_ = {"users": 32, "system_len": 4, "user_len": 4, "answer_len": 2}
    row = memory_runs.row(load_, {name: asdict(found) for name, found in held.items()})
    tokens = row["tokens_in_the_same_memory"]
    assert tokens["int8"] >= 1.9 and tokens["int8_k_int4_v"] >= 2.4
    assert "1.97x" in memory_runs.text([row]).splitlines()[-1]


def test_a_run_that_ends_early_is_not_a_result(model, monkeypatch) -> None:
    real = memory_runs._dense
    monkeypatch.setattr(memory_runs, "_dense", lambda model, requests: real(model, requests[:1]))
    with pytest.raises(RuntimeError, match="dense made"):
        memory_runs.measure(model, Load(2, 8, 4, 4), BLOCK, 0)


def test_lengths_vary_about_their_means_and_repeat() -> None:
    load_ = Load(200, 5, 40, 20)
    requests = load_.requests(1000, 1)
    assert requests == load_.requests(1000, 1) != load_.requests(1000, 2)
    assert {tuple(prompt[:5]) for prompt, _ in requests} == {tuple(requests[0][0][:5])}
    for lens, mean in ([[len(p) - 5 for p, _ in requests], 40], [[n for _, n in requests], 20]):
        assert min(lens) >= mean // 2 and max(lens) <= mean + mean // 2
        assert sum(lens) / len(lens) == pytest.approx(mean, rel=0.1)


def test_layers_with_windows_are_refused(model, monkeypatch) -> None:
    monkeypatch.setattr(memory_runs, "LLM", _Windowed)
    with pytest.raises(UnsupportedModelError, match="windows"):
        memory_runs.measure(model, Load(1, 8, 4, 4), BLOCK, 0)


class _Windowed:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.group_usage = ("a window group",)

    def stats(self) -> _Windowed:
        return self


# --- The command ----------------------------------------------------------------------------------

HELD = {
    DENSE: {"live_bytes": 1200}, BATCH: {"live_bytes": 1800},
    PAGED: {"live_bytes": 600}, SHARED: {"live_bytes": 300},
}  # fmt: skip


def test_the_claim_is_judged_by_every_ratio() -> None:
    load_ = {"users": 2, "system_len": 1, "user_len": 1, "answer_len": 1}
    row = memory_runs.row(load_, HELD)
    assert row["ratios"] == {
        "dense_over_paged": 2, "dense_over_paged_shared": 4,
        "batch_generator_over_paged": 3, "batch_generator_over_paged_shared": 6,
    }  # fmt: skip
    less = memory_runs.row(load_, {**HELD, DENSE: {"live_bytes": 660}})
    verdict = memory_runs.verdict([row, less])
    assert verdict["dense_over_paged"] == {"below": 1, "within": 1, "above": 0}
    assert verdict["batch_generator_over_paged_shared"] == {"below": 0, "within": 0, "above": 2}
    said = memory_runs.text([row, less])
    assert "dense / paged: 1.10x to 2.00x: 1 below, 1 within it" in said
    assert "batch generator / paged shared: 6.00x to 6.00x: 2 above it" in said


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "memory", *arguments])


def test_the_command_measures_the_grid_and_writes_it(tmp_path) -> None:
    paths = tmp_path / "a.json", tmp_path / "a.csv"
    result = invoke(
        "--users", "1,2", "--system-len", "40", "--user-len", "4", "--answer-len", "4",
        "--block-size", "8", "--json", str(paths[0]), "--csv", str(paths[1]),
    )  # fmt: skip
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    found = json.loads(paths[0].read_text())
    assert found["benchmark"] == "memory" and found["block_size"] == 8
    assert found["environment"]["machine"]["cores"]
    assert [row["users"] for row in found["results"]] == [1, 2]
    for row in found["results"]:
        quantized = ["paged_int8", "paged_int8_k_int4_v"]
        assert list(row["held"]) == [DENSE, BATCH, PAGED, SHARED, *quantized]
        assert 3.8 < row["tokens_in_the_same_memory"]["int8"] < 4
    alone, two = found["results"]
    assert alone["held"][PAGED]["live_bytes"] == alone["held"][SHARED]["live_bytes"]
    assert two["held"][PAGED]["live_bytes"] > two["held"][SHARED]["live_bytes"]
    assert sum(found["verdict"]["dense_over_paged"].values()) == 2
    assert "The claim: 2 to 4 times" in result.output
    with paths[1].open() as file:
        assert [row["users"] for row in csv.DictReader(file)] == ["1", "2"]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--users", "0"], "users"),
        (["--system-len", "-1"], "system_len"),
        (["--user-len", "x"], "user_len"),
        (["--answer-len", "0"], "answer_len"),
        (["--block-size", "12"], "block_size"),
        (["--kv-cache-dtype", "int8,int9"], "kv_cache_dtype"),
        (["--json", "/no/such/directory/a.json"], "json"),
        (["--system-len", "9000"], "system_len, user_len and answer_len"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments, field) -> None:
    error = invoke(*arguments).exception
    assert isinstance(error, InvalidParameterError), error
    assert error.field == field


def test_a_model_that_is_not_there_is_told() -> None:
    assert isinstance(invoke("--model", str(model_path() / "no")).exception, MlxPagedError)


def test_help_teaches() -> None:
    assert "mlx-paged bench memory --quick" in invoke("--help").output
