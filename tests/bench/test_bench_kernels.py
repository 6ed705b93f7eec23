"""`mlx-paged bench kernels`: what is measured, checked, written and refused. Nothing is timed."""

from __future__ import annotations

import csv
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.reference import GPU_HEAD_DIMS, ON_GPU
from typer.testing import CliRunner

from mlx_paged import ops
from mlx_paged.bench.kernels import data, measure, workloads
from mlx_paged.bench.kernels.cases import LAYER, OPS, Case, cases, defaults, refusal
from mlx_paged.bench.kernels.data import PoolCache, WrongResultError, key_of
from mlx_paged.cli.main import app
from mlx_paged.errors import BackendUnavailableError, InvalidParameterError, MlxPagedError

DEVICE = "gpu" if ON_GPU else "cpu"
HERE = [op for op in OPS if not (ON_GPU and op in LAYER)]
SMALL = {"--batch": "2", "--context": "70", "--kv-heads": "2", "--group": "2", "--head-dim": "32",
         "--rounds": "3", "--past-cache": "0", "--device": DEVICE}  # fmt: skip


@pytest.fixture(autouse=True)
def small_copies(monkeypatch) -> None:
    """A copy of 1 MiB: nothing here looks at times."""
    monkeypatch.setattr(measure, "Copy", partial(measure.Copy, megabytes=1))


def small(*arguments: str) -> list[str]:
    """A grid of one small shape, but for what is named."""
    rest = [word for pair in SMALL.items() if pair[0] not in arguments for word in pair]
    return [*rest, *arguments]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "kernels", *arguments])


def failure(*arguments: str) -> BaseException:
    result = invoke(*arguments)
    assert isinstance(result.exception, MlxPagedError), result.output
    return result.exception


def measured(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "out.json"
    result = invoke(*small("--json", str(path), *arguments))
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    return json.loads(path.read_text())


# --- The grid -------------------------------------------------------------------------------------


def test_every_primitive_is_measured_and_checked(tmp_path) -> None:
    found = measured(tmp_path)
    assert [row["op"] for row in found["results"]] == HERE
    for row in found["results"]:
        assert row["max_relative_error"] <= data.TOLERANCE[row["dtype"]]
        assert row["checked"][0] > 0
        peers = {"paged_attention": {"dense_sdpa", "gather_sdpa"}}.get(row["op"], set())
        assert set(row["peers"]) == ({"mlx"} if row["op"] in LAYER else peers)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("option", "field", "values"),
    [
        ("--batch", "batch", [1, 3]),
        ("--context", "context", [64, 100]),
        ("--rows", "rows", [1, 4, 40]),
        ("--kv-heads", "kv_heads", [1, 3]),
        ("--group", "group", [1, 8]),
        ("--head-dim", "head_dim", [64, 128]),
        ("--block-size", "block_size", [8, 16, 32, 64]),
        ("--dtype", "dtype", ["float32", "float16", "bfloat16"]),
        ("--window", "window", [None, 5]),
        ("--skew", "skew", [1, 3]),
    ],
)
def test_an_option_takes_lists_and_reaches_the_op(tmp_path, option, field, values) -> None:
    words = [str(value) for value in values]
    options = [option, ",".join(words[:2]), *(w for word in words[2:] for w in (option, word))]
    found = measured(tmp_path, "--op", "paged_attention", *options)
    assert [row[field] for row in found["results"]] == values


def test_the_grid_holds_each_case_once() -> None:
    grid = defaults("cpu", quick=True) | {"group": [1, 4], "rows": [1, 2], "window": [None, 64]}
    found = cases(OPS, grid)
    assert len(set(found)) == len(found)
    counts = {op: sum(case.op == op for case in found) for op in OPS}
    # Two batches; attention depends on the rest too, layers on rows and group.
    assert counts == {op: 16 if op == "paged_attention" else 8 if op in LAYER else 2 for op in OPS}


def test_skew_keeps_the_sum_and_makes_an_eighth_longer() -> None:
    case = Case("paged_attention", 32, 8, 128, "float32", 1248, 1, 4, 32, None, 32)
    assert case.lens == [256] * 28 + [8192] * 4


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("rows", [1, 5])
def test_bytes_and_operations_are_those_of_what_rows_see(window, rows) -> None:
    case = Case("paged_attention", 8, 2, 32, "float16", 40, rows, 2, 8, window, 4)
    seen, scored = 0, 0
    for n in case.lens:
        by_row = [
            {p for p in range(at + 1) if window is None or p > at - window}
            for at in range(n - rows, n)
        ]
        seen += len(set.union(*by_row))
        scored += sum(len(tokens) for tokens in by_row)
    assert case.seen_tokens == seen
    assert case.scored_tokens == scored
    assert case.token_bytes == 2 * 2 * 32 * 2


def test_bytes_in_results_are_counted_by_hand(tmp_path) -> None:
    found = measured(tmp_path, "--op", "paged_attention,write_kv,copy_blocks,gather_kv",
                     "--dtype", "float16", "--block-size", "8")  # fmt: skip
    moved = {row["op"]: row["bytes"] for row in found["results"]}
    kv = 2 * 70 * 2 * 2 * 32 * 2  # sequences, tokens, K and V, heads, dim, bytes
    assert moved["paged_attention"] == kv + 2 * 2 * 4 * 32 * 2
    assert moved["write_kv"] == moved["gather_kv"] == 2 * kv
    assert moved["copy_blocks"] == 2 * (2 * 9 // 2) * 8 * 2 * 2 * 32 * 2


def test_pools_are_turned_over_past_the_cache_but_not_without_end() -> None:
    case = Case("paged_attention", 2, 2, 32, "float32", 64, 1, 2, 32, None, 1)
    per_set = 2 * 64 * case.token_bytes
    assert key_of(case, 0, 0).num_sets == 1
    assert key_of(case, 10 * per_set, 0).num_sets == 10
    assert key_of(case, 10_000 * per_set, 0).num_sets == 128
    windowed = Case("paged_attention", 2, 2, 32, "float32", 64, 1, 2, 32, 2, 1)
    assert key_of(windowed, 10 * per_set, 0).num_sets == 40
    pools = PoolCache().get(key_of(case, 3 * per_set, 0))
    blocks = np.array(pools.tables).reshape(-1)
    assert sorted(blocks) == list(range(1, len(blocks) + 1))  # no set shares a block


# --- Checks ---------------------------------------------------------------------------------------


def _off_by_little(made: Any) -> Any:
    return made * 1.01


def _wrong_tokens(made: Any) -> Any:
    return made[0] + 1, *made[1:]


def _nothing_written(*pools_and_rows: Any) -> Any:
    return pools_and_rows[:2]


def _too_much_written(key_pool: Any, value_pool: Any, keys: Any, values: Any, slots: Any) -> Any:
    real = ops.ext.write_kv(key_pool, value_pool, keys, values, slots)
    slots = mx.zeros((1,), dtype=mx.int32)  # of block 0, which is nobody's
    return ops.ext.write_kv(*real, keys[:1], values[:1], slots)


PLANTED: list[tuple[str, Any]] = [
    ("paged_attention", lambda real: lambda *a, **k: _off_by_little(real(*a, **k))),
    ("paged_attention", lambda real: lambda *a, **k: real(*a, **{**k, "window": 9})),
    ("paged_attention", lambda real: lambda *a, **k: real(*a, **k) * mx.nan),
    ("copy_blocks", lambda real: lambda pools, pairs: list(pools)),
    ("copy_blocks", lambda real: lambda pools, pairs: real(pools, pairs[:, ::-1])),
    ("gather_kv", lambda real: lambda *a: [_off_by_little(x) for x in real(*a)]),
    ("gather_kv", lambda real: lambda *a: real(*a)[::-1]),
    ("rope", lambda real: lambda *a: _off_by_little(real(*a))),
    ("rms_norm", lambda real: lambda *a: _off_by_little(real(*a))),
    ("silu_mul", lambda real: lambda *a: _off_by_little(real(*a))),
    ("linear", lambda real: lambda *a: _off_by_little(real(*a))),
    ("greedy_tokens", lambda real: lambda *a: _wrong_tokens(real(*a))),
]


@pytest.mark.parametrize(("op", "plant"), PLANTED)
def test_a_wrong_kernel_ends_the_run(tmp_path, monkeypatch, op, plant) -> None:
    if op not in HERE:
        pytest.skip(f"{op} is native on the CPU only")
    monkeypatch.setattr(ops, op, plant(getattr(ops, op)))
    path = tmp_path / "out.json"
    error = failure(*small("--op", op, "--json", str(path)))
    assert isinstance(error, WrongResultError)
    assert op in str(error) and "wrong result" in str(error)
    assert not path.exists()


@pytest.mark.parametrize("wrong", [_nothing_written, _too_much_written])
def test_a_wrong_write_ends_the_run(monkeypatch, wrong) -> None:
    case = Case("write_kv", 2, 2, 32, "float32", 64, block_size=32, skew=1)
    settings = measure.Settings(rounds=3, past_cache=0)
    assert measure.measure([case], DEVICE, settings)[0]["op"] == "write_kv"
    # (The pool is filled by the op itself, so it goes wrong only after that.)
    real = workloads.write_kv

    def planted(*arguments: Any) -> Any:
        work = real(*arguments)
        monkeypatch.setattr(ops, "write_kv", wrong)
        return work

    monkeypatch.setitem(workloads.ON_POOLS, "write_kv", planted)
    with pytest.raises(WrongResultError, match="tokens that it"):
        measure.measure([case], DEVICE, settings)


def test_a_peer_that_computes_something_else_is_told(monkeypatch) -> None:
    real = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(
        mx.fast,
        "scaled_dot_product_attention",
        lambda q, k, v, *, scale, mask: real(q, k, v, scale=scale, mask=None),
    )
    error = failure(*small("--op", "paged_attention", "--window", "8"))
    assert "the peer dense_sdpa" in str(error)


def test_other_errors_name_the_case(monkeypatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("[gather_kv] out of order")

    monkeypatch.setattr(ops, "gather_kv", broken)
    error = failure(*small("--op", "gather_kv"))
    assert "gather_kv(batch=2" in str(error) and "out of order" in str(error)


# --- Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--op", "flash", "op"),
        ("--batch", "0", "batch"),
        ("--context", "many", "context"),
        ("--rows", "-1", "rows"),
        ("--kv-heads", "1.5", "kv_heads"),
        ("--group", "", "group"),
        ("--head-dim", "100", "head_dim"),
        ("--head-dim", "584", "head_dim"),
        ("--block-size", "24", "block_size"),
        ("--dtype", "int8", "dtype"),
        ("--window", "-1", "window"),
        ("--skew", "0", "skew"),
        ("--json", "/no/such/directory/a.json", "json"),
        ("--csv", "/no/such/directory/a.csv", "csv"),
        ("--plot", "roof.txt", "plot"),
    ],
)
def test_a_value_that_means_nothing_is_refused(option, value, field) -> None:
    error = failure(*small(option, value))
    assert isinstance(error, InvalidParameterError)
    assert error.field == field


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({"rows": 80}, "cpu", "rows must be at most the shortest context"),
        ({"skew": 2, "batch": 1}, "cpu", "at least 2 sequences"),
        ({"head_dim": 40}, "gpu", "head_dim must be one of 64, 128 but got 40"),
        ({"op": "rope"}, "gpu", "on the CPU only"),
        ({"op": "linear", "dtype": "float16"}, "cpu", "float32 only"),
        ({"batch": 1 << 20}, "cpu", "GiB"),
    ],
)
def test_a_case_that_the_backend_cannot_serve_is_refused(changes, device, reason) -> None:
    fields = {"op": "paged_attention", "batch": 2, "kv_heads": 2, "head_dim": 64,
              "dtype": "float32", "context": 70, "rows": 1, "group": 2, "block_size": 32,
              "window": None, "skew": 1}  # fmt: skip
    limit = 1 << 30
    assert refusal(Case(**fields), device, {64, 128}, limit) is None
    assert reason in (refusal(Case(**{**fields, **changes}), device, {64, 128}, limit) or "")


def test_the_gpu_head_dims_are_those_of_the_kernels() -> None:
    assert measure.gpu_head_dims() == {k for k, v in GPU_HEAD_DIMS if k == v}


def test_what_is_left_out_is_told_and_written(tmp_path) -> None:
    path = tmp_path / "out.json"
    result = invoke(*small("--op", "paged_attention", "--rows", "1,71,72", "--json", str(path)))
    assert result.exit_code == 0
    assert "left out: paged_attention(batch=2" in result.stderr and "got 71" in result.stderr
    found = json.loads(path.read_text())
    assert [row["rows"] for row in found["results"]] == [1]
    assert [row["rows"] for row in found["refused"]] == [71, 72]


def test_nothing_left_to_measure_is_an_error() -> None:
    assert "no case" in str(failure(*small("--op", "paged_attention", "--rows", "71")))


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    assert isinstance(failure("--device", "gpu", "--quick"), BackendUnavailableError)


def test_a_picture_without_matplotlib_has_a_remedy(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'mlx-paged[plot]'" in str(failure(*small("--plot", "roof.svg")))


# --- What becomes of it ---------------------------------------------------------------------------


def test_json_says_where_and_how(tmp_path) -> None:
    found = measured(tmp_path, "--op", "paged_attention,gather_kv", "--seed", "3")
    assert found["benchmark"] == "kernels" and found["device"] == DEVICE
    assert found["settings"] == {"rounds": 3, "past_cache_bytes": 0, "seed": 3}
    assert set(found["counting"]) == {"paged_attention", "gather_kv"}
    environment = found["environment"]
    assert {"date", "command", "commit", "dirty", "machine", "build"} <= environment.keys()
    assert environment["machine"]["processor"] and environment["build"]["mlx_version"]
    row = found["results"][0]
    assert set(Case.__dataclass_fields__) <= row.keys()
    seconds = row["seconds"]
    assert len(seconds["samples"]) == 3 and seconds["launches"] >= 1
    assert seconds["min"] <= seconds["p25"] <= seconds["median"] <= seconds["p75"] <= seconds["max"]
    assert row["bytes_per_second"] == pytest.approx(row["bytes"] / seconds["median"])
    assert row["share_of_copy"] > 0 and row["copy_bytes_per_second"] > 0
    for peer in row["peers"].values():
        assert peer["over_ours"] > 0 and len(peer["seconds"]["samples"]) == 3


def test_csv_has_a_line_a_case(tmp_path) -> None:
    path = tmp_path / "out.csv"
    invoke(*small("--op", "paged_attention,write_kv", "--group", "1,2", "--csv", str(path)))
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["op"], row["group"]) for row in rows] == [
        ("paged_attention", "1"), ("paged_attention", "2"), ("write_kv", "")]  # fmt: skip
    assert float(rows[0]["peers.dense_sdpa.over_ours"]) > 0
    assert rows[2]["peers.dense_sdpa.over_ours"] == ""
    assert not any("samples" in column for column in rows[0])


def test_the_table_has_columns_for_what_varies(tmp_path) -> None:
    result = invoke(*small("--op", "paged_attention", "--context", "64,70"))
    assert "batch 2, KV heads 2, D 32" in result.output
    header = next(line for line in result.output.splitlines() if line.startswith("op "))
    assert "context" in header and "dense SDPA takes" in header and "batch" not in header
    assert sum(line.startswith("paged_attention ") for line in result.output.splitlines()) == 2
    assert "copy bandwidth, read + written" in result.output


def test_the_picture_shows_every_series(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "roof.svg"
    arguments = small("--op", "paged_attention", "--batch", "1,3", "--context", "64,70")
    assert invoke(*arguments, "--plot", str(path)).exit_code == 0
    drawn = path.read_text()
    assert drawn.startswith("<?xml") and "batch 1" in drawn and "batch 3" in drawn


def test_a_picture_needs_attention(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    error = failure(*small("--op", "gather_kv", "--plot", str(tmp_path / "roof.svg")))
    assert "paged_attention" in str(error)


def test_quick_is_a_small_grid_and_options_override_it() -> None:
    quick, whole = (cases(HERE, defaults(DEVICE, quick=q)) for q in (True, False))
    assert 0 < len(quick) < len(whole)
    assert {case.op for case in quick} == set(HERE)


def test_help_teaches() -> None:
    output = invoke("--help").output
    assert "Examples:" in output and "--compare before.json after.json" in output
