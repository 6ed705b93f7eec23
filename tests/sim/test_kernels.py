"""The kernels of metal/ in the simulator: the checks pass, every line is executed, and every planted
fault is noticed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import METAL, missing
from .checks import checks_of, library
from .kernel_mutants import MUTANTS
from .library import SimLibrary
from .mutants import run_mutants, score

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

MODULE = "sim.checks_kernels"


@pytest.fixture(scope="module")
def kernels() -> SimLibrary:
    return library(METAL)


@pytest.fixture(scope="module")
def passed() -> Iterator[set[str]]:
    yield set()


@pytest.mark.parametrize("name", list(checks_of(MODULE)) if missing() is None else [])
def test_check(kernels, passed, name) -> None:
    checks_of(MODULE)[name](kernels)
    passed.add(name)


def test_every_line_of_metal_is_executed(kernels, passed) -> None:
    for name, run in checks_of(MODULE).items():
        if name not in passed:
            run(kernels)
    coverage = kernels.coverage().within(METAL)
    print("\n" + coverage.report())
    assert len(coverage.lines) > 500
    assert not coverage.missed and not coverage.dead_functions, coverage.report()


def test_every_planted_fault_is_noticed() -> None:
    verdicts = run_mutants(MUTANTS, MODULE)
    print("\n" + score(verdicts))
    assert len(MUTANTS) >= 25
    assert all(v.valid for v in verdicts), score([v for v in verdicts if not v.valid])
    assert all(v.caught for v in verdicts), score([v for v in verdicts if not v.caught])
