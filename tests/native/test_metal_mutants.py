"""Every planted fault is noticed by a check; the checks themselves pass on metal/."""

from __future__ import annotations

import pytest
from sim.checks import checks_of
from sim.mutants import Mutant, judge
from support.metal_mutants import MUTANTS
from support.simulated import metal_library, needs_simulator

pytestmark = needs_simulator


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", list(checks_of("support.metal_checks")))
def test_the_kernels_pass(name) -> None:
    checks_of("support.metal_checks")[name](metal_library())


@pytest.mark.one_in(345)  # at least one of each file
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.what}")
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    verdict = judge(mutant, "support.metal_checks")
    assert verdict.caught and verdict.valid, str(verdict)
