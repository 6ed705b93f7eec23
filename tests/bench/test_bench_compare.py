"""Samples and their figures, comparisons of two runs, and the files that benchmarks write."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import mlx_paged
from mlx_paged.bench import results
from mlx_paged.bench.kernels import measure, report
from mlx_paged.bench.kernels.data import Variant
from mlx_paged.bench.kernels.measure import Timing, interleaved
from mlx_paged.cli.main import app
from mlx_paged.errors import InvalidParameterError, MlxPagedError

# --- Samples --------------------------------------------------------------------------------------


class Clock:
    """Time passes only where work is done."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[tuple[str, int]] = []

    def __call__(self) -> float:
        return self.now

    def variant(self, name: str, seconds: float, **options: Any) -> Variant:
        def prepare(launches: int) -> Callable[[], None]:
            def run() -> None:
                self.log.append((name, launches))
                self.now += seconds * launches

            return run

        return Variant(name, prepare, **options)


def test_variants_take_turns_and_every_second_round_runs_backwards() -> None:
    clock = Clock()
    variants = [clock.variant(name, 0.01) for name in "abc"]
    found = interleaved(variants, 4, clock=clock)
    assert [name for name, _ in clock.log[-12:]] == [*"abc", *"cba", *"abc", *"cba"]
    for timed in found.values():
        assert timed.samples == pytest.approx((0.01,) * 4)
        assert timed.rounds == (0, 1, 2, 3)


def test_a_sample_is_as_many_launches_as_take_long_enough() -> None:
    clock = Clock()
    variants = [
        clock.variant("short", measure.SAMPLE_SECONDS / 20),
        clock.variant("instant", 0.0),
        clock.variant("long", 0.1),
        clock.variant("large", 0.0, output_bytes=300),
    ]
    interleaved(variants, 3, most_output_bytes=1000, clock=clock)
    launches = dict(clock.log[-4:])
    assert launches == {"short": 20, "instant": measure.MAX_LAUNCHES, "long": 1, "large": 3}


def test_what_is_slow_gets_fewer_samples_spread_over_the_rounds() -> None:
    clock = Clock()
    variants = [clock.variant("ours", 0.01), clock.variant("slow", measure.SECONDS_PER_VARIANT / 2)]
    found = interleaved(variants, 9, clock=clock)
    assert found["ours"].rounds == tuple(range(9))
    assert found["slow"].rounds == (0, 3, 6)


def test_warm_up_comes_before_samples() -> None:
    clock = Clock()
    interleaved([clock.variant("ours", 0.01, warmup=7)], 3, clock=clock)
    assert clock.log[0] == ("ours", 7)


def test_ratios_are_of_samples_of_the_same_round() -> None:
    # The machine is four times slower in the second half; the ratio is 2 throughout.
    ours = Timing((1.0, 1.0, 4.0, 4.0), (0, 1, 2, 3), 1)
    peer = Timing((2.0, 8.0, 8.0), (0, 2, 3), 1)
    assert peer.over(ours) == 2
    assert ours.over(peer) == 0.5


def test_spread_is_the_middle_half_over_the_median() -> None:
    timed = Timing((1.0, 2.0, 3.0, 4.0, 5.0), (0, 1, 2, 3, 4), 1)
    assert timed.spread == pytest.approx((4 - 2) / 3)
    made = timed.to_json()
    assert (made["median"], made["p25"], made["p75"], made["min"], made["max"]) == (3, 2, 4, 1, 5)


def test_the_copy_copies_everything() -> None:
    copy = measure.Copy("cpu", megabytes=3)
    assert copy.bytes == 2 * 3 << 20
    copy._source[:] = 7
    copy.variant.prepare(1)()
    assert (copy._target == 7).all()


# --- Comparisons ----------------------------------------------------------------------------------


def run_of(*medians: float, width: float = 0.02, copy: float = 1e10, **where: Any) -> dict:
    """A file of results: cases of group 1, 2, ... with these medians."""
    rows = []
    for group, median in zip(count(1), medians):
        half = median * width / 2
        rows.append(
            {
                "op": "paged_attention", "batch": 1, "kv_heads": 8, "head_dim": 64,
                "dtype": "float32", "context": 512, "rows": 1, "group": group, "block_size": 32,
                "window": None, "skew": 1, "copy_bytes_per_second": copy,
                "seconds": {"median": median, "p25": median - half, "p75": median + half},
            }
        )  # fmt: skip
    machine = {"processor": "x", "device": "cpu", "cores": 8, "load_average": 0.1, **where}
    return {
        "benchmark": "kernels",
        "environment": {"machine": machine, "build": {"mlx_version": "1"}},
        "results": rows,
    }


def verdicts(before: dict, after: dict) -> list[str]:
    return [row["verdict"] for row in report.compare(before, after)["results"]]


def test_a_difference_beyond_the_spread_counts() -> None:
    before, after = run_of(1.0, 1.0, 1.0, 1.0), run_of(0.8, 1.25, 1.015, 1.0)
    assert verdicts(before, after) == ["faster", "slower", "within noise", "within noise"]


def test_a_difference_within_the_spread_does_not() -> None:
    before, after = (run_of(*medians, width=0.4) for medians in ((1.0, 1.0), (0.9, 1.1)))
    assert verdicts(before, after) == ["within noise"] * 2


def test_a_machine_that_was_slower_is_not_a_slower_kernel() -> None:
    assert verdicts(run_of(1.0, copy=2e10), run_of(2.0, copy=1e10)) == ["within noise"]
    # As fast as before on a machine that copies at half the rate: told by neither alone.
    assert verdicts(run_of(1.0, copy=2e10), run_of(1.0, copy=1e10)) == ["within noise"]
    assert verdicts(run_of(1.0, copy=2e10), run_of(3.0, copy=1e10)) == ["slower"]


def test_cases_of_one_file_only_and_other_machines_are_told() -> None:
    before, after = run_of(1.0, 1.0, 1.0), run_of(1.0, processor="y", load_average=7.0)
    compared = report.compare(before, after)
    assert (len(compared["results"]), compared["only_before"], compared["only_after"]) == (1, 2, 0)
    text = report.comparison_table(compared)
    assert "2 cases are in the first file only" in text
    assert "processor was x and is y" in text
    assert "the second run began on a busy machine (load 7.0)" in text


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "kernels", *arguments])


def files(tmp_path: Path, *runs: dict) -> list[str]:
    paths = [tmp_path / f"{i}.json" for i in range(len(runs))]
    for path, run in zip(paths, runs):
        path.write_text(json.dumps(run))
    return [str(path) for path in paths]


def test_the_command_prints_and_writes_a_comparison(tmp_path) -> None:
    both = files(tmp_path, run_of(1.0, 1.0), run_of(0.5, 1.0))
    out = tmp_path / "out.json", tmp_path / "out.csv"
    result = invoke("--compare", *both, "--json", str(out[0]), "--csv", str(out[1]))
    assert result.exit_code == 0, result.output
    assert "0.50x" in result.output and "1 faster, 0 slower, 1 within noise" in result.output
    written = json.loads(out[0].read_text())
    assert written["benchmark"] == "kernels-compared" and "environment" in written
    assert [row["time_ratio"] for row in written["results"]] == [0.5, 1.0]
    with out[1].open() as file:
        assert [row["verdict"] for row in csv.DictReader(file)] == ["faster", "within noise"]


@pytest.mark.parametrize("more", [["--batch", "1"], ["--quick"], ["--plot", "a.svg"]])
def test_a_comparison_measures_nothing(tmp_path, more) -> None:
    pytest.importorskip("matplotlib")
    both = files(tmp_path, run_of(1.0), run_of(1.0))
    error = invoke("--compare", *both, *more).exception
    assert isinstance(error, InvalidParameterError) and error.field == "compare"


@pytest.mark.parametrize(
    "wrong",
    [[], {}, {"environment": {}, "benchmark": "memory", "results": []},
     {"environment": {}, "benchmark": "kernels", "results": [{"op": "rope"}]}],
)  # fmt: skip
def test_a_file_of_something_else_is_refused(tmp_path, wrong) -> None:
    error = invoke("--compare", *files(tmp_path, run_of(1.0), wrong)).exception
    assert isinstance(error, InvalidParameterError) and "1.json" in str(error)


def test_files_that_cannot_be_read_are_refused(tmp_path) -> None:
    [good] = files(tmp_path, run_of(1.0))
    assert "readable file" in str(invoke("--compare", good, str(tmp_path / "no")).exception)
    (tmp_path / "text").write_text("{")
    assert "JSON" in str(invoke("--compare", str(tmp_path / "text"), good).exception)


def test_nothing_in_common_is_an_error(tmp_path) -> None:
    other = run_of(1.0)
    other["results"][0]["dtype"] = "float16"
    result = invoke("--compare", *files(tmp_path, run_of(1.0), other))
    assert "no case is in both files" in result.output
    assert isinstance(result.exception, MlxPagedError)


# --- Environment and files ------------------------------------------------------------------------


def test_the_environment_says_what_figures_mean() -> None:
    found = results.environment()
    assert json.loads(json.dumps(found)) == found
    assert set(found) == {"date", "command", "commit", "dirty", "machine", "build"}
    assert set(found["machine"]) == {
        "processor", "cores", "memory_bytes", "load_average", "system", "python", "device"
    }  # fmt: skip


def test_an_installed_package_has_no_commit(tmp_path, monkeypatch) -> None:
    # The environment that it is installed in may lie in a checkout of something else.
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(mlx_paged, "__file__", str(tmp_path / "lib" / "mlx_paged" / "__init__.py"))
    results.checkout.cache_clear()
    try:
        assert results.checkout() == (None, None)
    finally:
        results.checkout.cache_clear()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/opt/env/bin/mlx-paged", "bench", "kernels"], "mlx-paged bench kernels"),
        (["bench/engine.py", "--only", "a b"], "python bench/engine.py --only 'a b'"),
        (["/opt/x/mlx_paged/cli/main.py", "-q"], "python -m mlx_paged.cli.main -q"),
        (["/opt/x/mlx_paged/__main__.py", "-q"], "python -m mlx_paged -q"),
    ],
)
def test_the_command_is_what_was_typed(monkeypatch, argv, expected) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert results.command() == expected


def test_csv_flattens_and_joins_columns(tmp_path) -> None:
    path = tmp_path / "a.csv"
    results.write_csv(path, [{"a": 1, "b": {"c": 2, "d": {"e": 3}}}, {"a": None, "f": 4}])
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"a": "1", "b.c": "2", "b.d.e": "3", "f": ""}, {"a": "", "b.c": "", "b.d.e": "", "f": "4"}
    ]  # fmt: skip


def test_a_table_lines_up() -> None:
    made = results.table(["op", "ms"], [["write_kv", "1.5"], ["x", "10.25"]])
    assert made.splitlines() == ["op           ms", "write_kv    1.5", "x         10.25"]


def test_a_file_that_cannot_be_written_is_told(tmp_path) -> None:
    for write in (
        lambda: results.write_json(tmp_path, {}),
        lambda: results.write_csv(tmp_path, []),
    ):
        with pytest.raises(InvalidParameterError, match="can be written"):
            write()
