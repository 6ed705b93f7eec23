"""The mutation harness and line coverage, tried on a sample kernel: faults are caught, what changes
nothing survives, what does not compile counts as neither, and unexecuted lines show."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import Coverage, missing
from .checks import SURVIVED, checks_of, first_failure, library
from .mutants import Mutant, judge, plant, run_mutants, score

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

SAMPLES = Path(__file__).parent / "samples"
MODULE = "sim.checks_samples"
KERNEL, HEADER = "row_sum.metal", "row_sum.h"

FAULTS = [
    Mutant(KERNEL, "threadgroup_barrier(mem_flags::mem_threadgroup);", "", "no barrier"),
    Mutant(
        KERNEL, "mem_flags::mem_threadgroup", "mem_flags::mem_device", "barrier for other memory"
    ),
    Mutant(KERNEL, "distance = 16", "distance = 8", "half of the lanes"),
    Mutant(KERNEL, "i < params.columns", "i <= params.columns", "one column more"),
    Mutant(KERNEL, "if (lane == 0)", "if (lane == 1 && group == 0)", "a partial never written"),
    Mutant(KERNEL, "if (thread_id == 0)", "", "every thread writes the result"),
    Mutant(KERNEL, "distance /= 2) {", "distance /= 2) {\n    if (lane < 16)", "divergence"),
    Mutant(HEADER, "i < count", "i < count - 1", "a partial left out"),
]
EQUIVALENT = Mutant(KERNEL, "if (lane == 0)", "if (lane == 31)", "another lane of equal value")
INVALID = Mutant(KERNEL, "float sum = 0.0f;", "float sum = none;", "no such name")


def test_checks_pass_on_the_kernels_themselves() -> None:
    assert list(checks_of(MODULE)) == ["full_rows", "short_rows", "half_rows"]
    assert first_failure(SAMPLES, MODULE) == (SURVIVED, "")


def test_faults_are_caught() -> None:
    verdicts = run_mutants(FAULTS, MODULE, SAMPLES)
    print(score(verdicts))
    assert all(v.caught and v.valid for v in verdicts), score(verdicts)
    said = {v.mutant.what: v.said for v in verdicts}
    assert "race" in said["no barrier"] and "race" in said["barrier for other memory"]
    assert "out of bounds" in said["one column more"] or "AssertionError" in said["one column more"]
    assert "uninitialised" in said["a partial never written"]
    assert "race" in said["every thread writes the result"]
    assert "divergence" in said["divergence"]


def test_equivalent_and_invalid_mutants_are_told_apart() -> None:
    same, invalid = run_mutants([EQUIVALENT, INVALID], MODULE, SAMPLES)
    assert not same.caught and same.valid
    assert not invalid.caught and not invalid.valid and "does not compile" in invalid.said


def test_a_mutant_that_never_ends_is_caught(monkeypatch) -> None:
    monkeypatch.setattr("sim.mutants.TIMEOUT_S", 4)
    endless = Mutant(HEADER, "i++", "i += 0", "an endless loop", ("full_rows",))
    verdict = judge(endless, MODULE, SAMPLES)
    assert verdict.caught and ("did not end" in verdict.said or "endless" in verdict.said)


def test_a_mutant_that_crashes_is_caught_and_the_next_one_judged(tmp_path, monkeypatch) -> None:
    (tmp_path / "crashing_checks.py").write_text(
        "import os, signal\n"
        "from sim.checks import check\n"
        "@check\n"
        "def crash(kernels): os.kill(os.getpid(), signal.SIGSEGV)\n"
        "@check\n"
        "def leave(kernels): raise SystemExit('the checks are broken')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    crash, leave = (Mutant(HEADER, "i++", "++i", "none", (name,)) for name in ("crash", "leave"))
    verdict = judge(crash, "crashing_checks", SAMPLES)
    assert verdict.caught and verdict.valid and verdict.said == "crashed with signal 11"
    verdict = judge(leave, "crashing_checks", SAMPLES)
    assert not verdict.caught and not verdict.valid and "the checks are broken" in verdict.said


def test_text_that_is_not_there_is_an_error(tmp_path) -> None:
    with pytest.raises(ValueError, match="0 times"):
        plant(Mutant(KERNEL, "no such text", "", ""), SAMPLES, tmp_path / "a")
    with pytest.raises(ValueError, match="must have it once"):
        plant(Mutant(KERNEL, "sum", "", ""), SAMPLES, tmp_path / "b")


def test_line_coverage(tmp_path) -> None:
    more = "METAL_FUNC float unused(float x) {\n  return x;\n}\n"
    branch = "out[row] = sum_of_groups(partial, THREADS / 32) * params.scale;"
    for name in (KERNEL, HEADER):
        text = (SAMPLES / name).read_text()
        text = text.replace(
            branch, f"{branch}\n    if (params.scale > 7) {{\n      out[row] = 0;\n    }}"
        )
        (tmp_path / name).write_text(text + (more if name == HEADER else ""))

    def covered(root: Path) -> Coverage:
        kernels = library(root)
        for run in checks_of(MODULE).values():
            run(kernels)
        return kernels.coverage().within(root)

    complete = covered(SAMPLES)
    assert complete.percent == 100 and not complete.missed and not complete.dead_functions
    assert len(complete.lines) >= 18
    partial = covered(tmp_path)
    line = (tmp_path / KERNEL).read_text().split("\n").index("      out[row] = 0;") + 1
    assert [(Path(f).name, n) for f, n in partial.missed] == [
        (KERNEL, line),
        (KERNEL, line + 1),
    ] or [(Path(f).name, n) for f, n in partial.missed] == [(KERNEL, line)]
    assert [f.name for f in partial.dead_functions] == ["unused"]
    assert "missed" in partial.report() and "unused is in no kernel" in partial.report()
