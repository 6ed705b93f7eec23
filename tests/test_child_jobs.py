"""Jobs in a child process: crashes, hangs, limits, and an interruption of the caller."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.interpreters import python_path

from mlx_paged.child_jobs import Outcome, run_in_child

ROOT = Path(__file__).resolve().parents[1]
MODULE = "jobs_of_a_test"
SOURCE = """
import os, sys, time
from mlx_paged import child_jobs

def run(name):
    kind, _, rest = name.partition("/")
    if kind == "set":
        os.environ["SAID"] = rest
    if kind == "say":
        return os.environ.get("SAID")
    if kind == "about":
        child_jobs.announce([rest])
    if kind == "abort":
        child_jobs.announce(["something"])
        os.abort()
    if kind == "hang":
        time.sleep(600)
    if kind == "stuck":  # faulthandler cannot end it
        import faulthandler
        faulthandler.cancel_dump_traceback_later()
        time.sleep(600)
    if kind == "slow":
        time.sleep(float(rest))
    if kind == "raise":
        raise ValueError("no\\nsuch  thing")
    return rest

if __name__ == "__main__":
    child_jobs.serve(run, sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path, ROOT))


def run(*names: str, per_job: float = 60.0, **options: Any) -> dict[str, Outcome]:
    return run_in_child(MODULE, names, seconds_per_job=per_job, **options)


def test_answers_and_errors() -> None:
    assert run("a/1", "raise", "b/2") == {
        "a/1": Outcome("1"),
        "raise": Outcome(error="ValueError: no such thing"),
        "b/2": Outcome("2"),
    }


def test_a_crash_fails_its_job_and_the_next_child_is_told_first_what_to_know() -> None:
    told: list[int] = []

    def first() -> list[str]:
        told.append(1)
        return [f"set/{len(told)}"]

    outcomes = run("say/1", "abort/x", "say/2", first=first)
    assert (outcomes["say/1"].value, outcomes["say/2"].value) == ("1", "2")
    assert outcomes["abort/x"].is_crash and "SIGABRT" in str(outcomes["abort/x"].error)
    assert not outcomes["say/1"].is_crash


def test_the_caller_hears_what_begins_before_it_crashes() -> None:
    heard: list[Any] = []
    run(
        "about/k",
        "abort/x",
        on_begin=lambda name, about: heard.append((name, about)),
        on_end=lambda name, outcome: heard.append((name, outcome.is_crash)),
    )
    assert heard == [
        *(("about/k", None), ("about/k", ["k"]), ("about/k", False)),
        *(("abort/x", None), ("abort/x", ["something"]), ("abort/x", True)),
    ]


@pytest.mark.parametrize("kind", ["hang", "stuck"])
def test_a_hang_is_ended(kind: str) -> None:
    outcomes = run(f"{kind}/x", "a/1", per_job=2.0, seconds_to_start=60.0)
    assert outcomes[f"{kind}/x"].error == "Crash: no answer within 2 s"
    assert outcomes["a/1"].value == "1"


def test_jobs_beyond_the_limit_have_no_outcome_and_are_no_crash() -> None:
    outcomes = run("a/1", "hang/x", "b/2", seconds=6.0)
    assert "hang/x" not in outcomes and "b/2" not in outcomes
    assert all(not outcome.is_crash for outcome in outcomes.values())
    assert run("a/1", seconds=0.0) == {}


def test_a_child_that_cannot_start_fails_its_first_job_without_a_beginning() -> None:
    begun: list[str] = []
    [outcome] = run_in_child(
        "no_such_module", ["a"], seconds_per_job=60, on_begin=lambda *a: begun.append(a[0])
    ).values()
    assert outcome.is_crash and "No module named" in str(outcome.error) and not begun


def test_an_exception_in_the_caller_ends_the_child(tmp_path: Path) -> None:
    def interrupt(name: str, about: Any) -> None:
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run("hang/x", on_begin=interrupt)
    assert time.monotonic() - start < 60
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=False)
    assert f"{MODULE} " not in listed.stdout
    assert sys.executable
