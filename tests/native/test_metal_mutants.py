"""Every planted fault is noticed by a check; the checks themselves pass on metal/."""

from __future__ import annotations

import pytest
from sim.checks import checks_of
from sim.mutants import run_mutants, score
from support.metal_mutants import MUTANTS
from support.simulated import kernels, needs_simulator

pytestmark = needs_simulator


@pytest.mark.parametrize("name", list(checks_of("support.metal_checks")))
def test_the_kernels_pass(name) -> None:
    checks_of("support.metal_checks")[name](kernels())


def test_every_mutant_is_caught() -> None:
    verdicts = run_mutants(MUTANTS, "support.metal_checks")
    print(score(verdicts))
    assert len(verdicts) >= 25
    assert all(v.caught and v.valid for v in verdicts), score(verdicts)
