"""Verdicts, and the order of calibration, with made-up outcomes instead of a child process."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_paged import kernels
from mlx_paged.calibration import cases, table
from mlx_paged.calibration.cache import Cache, Result
from mlx_paged.calibration.calibrate import calibrate, take_known
from mlx_paged.calibration.cases import Needs, Product
from mlx_paged.calibration.verdicts import RejectedKernelError, Verdicts
from mlx_paged.child_jobs import Outcome
from mlx_paged.kernels import AttentionLayer

LAYER = AttentionLayer("float16", 1, 64, 64, 0, 0, 0)
PRODUCTS = (Product(256, 64, 4, 64, "affine"), Product(64, 256, 4, 64, "affine"))
NEEDS = Needs("float16", (LAYER,), 32, 64, PRODUCTS, step_rows=16)
DECODE, MATRIX = "paged_decode_float16_64_64_q1", "paged_decode_matrix_float16_64_64_m8"

Answer = Callable[[str], tuple[Sequence[str], Outcome] | None]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    kernels.reject_kernels(())
    kernels.allow_step_rows(0)


class Child:
    """Runs jobs like `run_in_child`, with answers of a function: the kernels, and the outcome.

    None leaves out the job and all others, as when the time is over.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer, self.ran, self.known = answer, [], []

    def __call__(
        self, module: str, names: Sequence[str], *, first: Any, on_begin: Any, on_end: Any, **_: Any
    ) -> dict[str, Outcome]:
        self.known.append(json.loads(first()[0].partition("/")[2]))
        for name in names:
            answer = self.answer(name)
            if answer is None:
                break
            names, outcome = answer
            on_begin(name, None)
            on_begin(name, list(names))
            self.ran.append(name)
            on_end(name, outcome)
        return {}


def right(job: str) -> tuple[Sequence[str], Outcome]:
    """Every kernel is right, and equally fast."""
    kind, _, rest = job.partition("/")
    names = [rest.rpartition("/")[2]] if kind in ("attention", "merge") else [f"of {kind}"]
    return names, Outcome({"seconds": 1.0} if kind.startswith("time-") else {})


def run(tmp_path: Path, answer: Answer, **options: Any) -> tuple[Verdicts, Child]:
    child = Child(answer)
    verdicts = calibrate(NEEDS, Cache({"chip": "test"}, tmp_path), run=child, **options)
    return verdicts, child


# --- Which jobs run -------------------------------------------------------------------------------


def test_every_kernel_is_checked_before_any_is_timed(tmp_path) -> None:
    verdicts, child = run(tmp_path, right)
    kinds = [job.partition("/")[0] for job in child.ran]
    first = kinds.index("time-attention")
    assert all(kind.startswith("time-") for kind in kinds[first:])
    assert set(kinds[:first]) == {
        *("greedy", "draw", "thresholds", "bitmask", "edits", "strided", "lora", "pool", "blocks"),
        *("attention", "merge", "uncovered"),
        *("norm", "silu", "rows", "product", "heads"),
    }
    assert len(set(child.ran)) == len(child.ran) == len(Cache({"chip": "test"}, tmp_path).load())
    assert {DECODE, MATRIX} <= verdicts.proven and not verdicts.rejected


def test_the_kernels_of_every_number_of_rows_are_checked() -> None:
    jobs = cases.checks(NEEDS, kernels.attention_kernel)
    checked = {job.rpartition("/")[2] for job in jobs if job.startswith("attention/")}
    assert checked == {kernels.attention_kernel(LAYER, rows) for rows in range(1, 300)}


def test_a_second_start_runs_nothing_and_follows_the_first(tmp_path) -> None:
    run(tmp_path, lambda job: ([DECODE], Outcome(error="wrong")) if DECODE in job else right(job))
    kernels.reject_kernels(())
    verdicts, child = run(tmp_path, right)
    assert child.ran == [] and DECODE in verdicts.rejected and DECODE in kernels.rejected
    verdicts, child = run(tmp_path, right, anew=True)
    assert child.ran and DECODE not in verdicts.rejected


def test_a_model_with_another_layer_runs_only_what_is_new(tmp_path) -> None:
    run(tmp_path, right)
    other = Needs("float16", (LAYER, AttentionLayer("float16", 2, 128, 128, 0, 0, 0)), 32)
    child = Child(right)
    calibrate(other, Cache({"chip": "test"}, tmp_path), run=child)
    assert child.ran and all("128" in job for job in child.ran)


def test_what_does_not_fit_runs_at_the_next_start(tmp_path) -> None:
    left = iter(range(6))
    verdicts, child = run(
        tmp_path, lambda job: right(job) if next(left, None) is not None else None
    )
    assert len(child.ran) == 6 and verdicts.step_rows == 0
    assert "product_rows_float16_m1" in kernels.rejected, "unproven kernels of whole steps"
    assert DECODE not in kernels.rejected, "attention has no proven substitute"
    before = child.ran
    verdicts, child = run(tmp_path, right)
    assert not set(child.ran) & set(before) and verdicts.step_rows == 16


def test_the_substitute_of_a_rejected_kernel_is_checked_too(tmp_path) -> None:
    def answer(job: str) -> tuple[Sequence[str], Outcome]:
        names, outcome = right(job)
        is_matrix = "paged_decode" in job and not job.startswith("time-")
        return names, Outcome(error="wrong") if is_matrix else outcome

    _, child = run(tmp_path, answer)
    checked = [job for job in child.ran if job.startswith("attention/")]
    assert any("/1/paged_prefill" in job for job in checked), "which serves decodes now"
    assert DECODE in child.known[-1]["rejected"]


# --- Interruptions --------------------------------------------------------------------------------


def test_an_interruption_keeps_the_outcomes_and_blames_no_kernel(tmp_path) -> None:
    def answer(job: str) -> tuple[Sequence[str], Outcome]:
        if job.startswith("merge/"):
            raise KeyboardInterrupt
        return right(job)

    child = Child(answer)
    cache = Cache({"chip": "test"}, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        calibrate(NEEDS, cache, run=child)
    assert set(cache.load()) == set(child.ran) and not any(r.error for r in cache.load().values())


def test_the_job_under_way_is_in_the_file(tmp_path, monkeypatch) -> None:
    """So that a kernel that ends the machine does not run again after it has started."""
    cache, seen = Cache({"chip": "test"}, tmp_path), []

    def answer(job: str) -> tuple[Sequence[str], Outcome]:
        return right(job)

    class Watching(Child):
        def __call__(self, module, names, *, on_end, **options):
            def end(job: str, outcome: Outcome) -> None:
                seen.append((job, json.loads(cache.path.read_text())["running"]))
                on_end(job, outcome)

            return super().__call__(module, names, on_end=end, **options)

    calibrate(NEEDS, cache, run=Watching(answer))
    assert len(seen) == len(cache.load()) > 20
    for job, running in seen:
        assert running == {"job": job, "kernels": list(right(job)[0]), "pid": os.getpid()}
    assert "running" not in json.loads(cache.path.read_text())


def test_a_child_that_cannot_start_rejects_nothing(tmp_path, caplog) -> None:
    def child(module: str, names: Sequence[str], *, on_end: Any, **_: Any) -> dict[str, Outcome]:
        on_end(names[0], Outcome(error="Crash: the process ended with status 1"))
        return {}

    cache = Cache({"chip": "test"}, tmp_path)
    with caplog.at_level(logging.WARNING):
        verdicts = calibrate(NEEDS, cache, run=child)
    assert not verdicts.rejected and not cache.load() and "could not be calibrated" in caplog.text


# --- Verdicts -------------------------------------------------------------------------------------

SHAPE = f"time-attention/{cases.layer_text(LAYER)}/32"


def verdicts_of(seconds: dict[str, float], **others: Result) -> Verdicts:
    timed = {job: Result((), None, s) for job, s in seconds.items()}
    return Verdicts.of({**timed, **others}, NEEDS)


def test_a_kernel_that_is_slower_than_the_next_is_rejected() -> None:
    verdicts = verdicts_of({f"{SHAPE}/1/a": 2.0, f"{SHAPE}/1/b": 1.0, f"{SHAPE}/1/c": 3.0})
    assert list(verdicts.rejected) == ["a"], "c is not preferred to b, so it does no harm"
    assert verdicts.rejected["a"] == "2000.000 ms where b takes 1000.000 ms"


def test_small_differences_and_shapes_where_it_is_best_keep_a_kernel() -> None:
    assert not verdicts_of({f"{SHAPE}/1/a": 1.09, f"{SHAPE}/1/b": 1.0}).rejected
    seconds = {f"{SHAPE}/1/a": 2.0, f"{SHAPE}/1/b": 1.0, f"{SHAPE}/4/a": 1.0, f"{SHAPE}/4/b": 2.0}
    assert not verdicts_of(seconds).rejected


def test_a_wrong_kernel_is_no_alternative() -> None:
    seconds = {f"{SHAPE}/1/a": 2.0, f"{SHAPE}/1/b": 1.0}
    verdicts = verdicts_of(seconds, job=Result(("b",), "wrong"))
    assert verdicts.rejected == {"b": "wrong"}


def step_times(**by_rows: tuple[float, float]) -> dict[str, float]:
    shapes = json.dumps([str(product) for product in PRODUCTS], separators=(",", ":"))
    return {
        f"time-step/float16/{shapes}/{rows[1:]}/{way}": seconds
        for rows, both in by_rows.items()
        for way, seconds in zip(("whole", "graph"), both)
    }


def test_whole_steps_have_the_rows_up_to_which_they_are_not_slower() -> None:
    fast, slow = (1.0, 2.0), (2.0, 1.0)
    assert verdicts_of(step_times(_1=fast, _8=fast, _16=fast)).step_rows == 16
    assert verdicts_of(step_times(_1=fast, _8=fast, _16=slow)).step_rows == 8
    assert verdicts_of(step_times(_1=slow, _8=fast, _16=fast)).step_rows == 0
    assert verdicts_of(step_times(_8=fast)).step_rows == 0, "one row was not measured"
    crash = Result((), "Crash: no answer within 4 s")
    assert verdicts_of(step_times(_1=fast), heads=crash).step_rows == 0


def test_a_kernel_without_a_substitute_is_an_error() -> None:
    verdicts = verdicts_of({}, job=Result(("copy_strided_16",), "wrong"))
    with pytest.raises(RejectedKernelError, match=r"copy_strided_16 \(wrong\)"):
        verdicts.require([LAYER])
    verdicts.require([AttentionLayer("float32", 1, 64, 64, 0, 0, 0)])
    quantized = Result(("quantize_kv_float16_64",), "wrong")
    with pytest.raises(RejectedKernelError, match="quantize_kv_float16_64"):
        verdicts_of({}, job=quantized).require([AttentionLayer("float16", 1, 64, 64, 0, 1, 1)])
    verdicts_of({}, job=quantized).require([LAYER])


def test_known_verdicts_are_taken_without_a_child(tmp_path) -> None:
    cache = Cache({"chip": "test"}, tmp_path)
    cache.save({"a": Result((DECODE,), "wrong")})
    assert take_known(NEEDS, cache).rejected == {DECODE: "wrong"}
    assert kernels.attention_kernel(LAYER, 1) == MATRIX


def test_the_table_lists_kernels_and_times() -> None:
    verdicts = verdicts_of(
        {f"{SHAPE}/1/a": 0.002, f"{SHAPE}/1/b": 0.001, **step_times(_1=(1.0, 2.0))},
        x=Result(("p",)),
    )
    made = table.table_of(verdicts, {"chip": "Apple M5"})
    assert list(table.lines(made)) == [
        "a: 2.000 ms where b takes 1.000 ms",
        "p: right",
        "attention float16, group 1, dims 64/64, 1 rows: b 1.000 ms, a 2.000 ms",
        "2 products in float16, 1 rows: whole 1000.000 ms, graph 2000.000 ms",
        "whole steps: up to 1 rows",
        "products outside of them: all by MLX",
        "pieces of contexts: the built-in length",
    ]
