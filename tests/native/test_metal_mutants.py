"""Every planted fault is noticed by a check; the checks themselves pass on metal/."""

from __future__ import annotations

import pytest
from sim.checks import checks_of
from sim.mutants import Mutant, judge
from support.metal_mutants import MUTANTS
from support.quick_mutants import mutant_cases
from support.simulated import metal_library, needs_simulator

pytestmark = needs_simulator

# One fault for each part of the kernels in quick runs, where a wrong result shows least.
QUICK = {
    "attention_variant.h: the window of a draft is one too long",
    "data.h: a slot of -1 is written",
    "experts.h: a sum that is not rounded before its bias",
    "lora.h: an adapter past the last",
    "matrix_tile.h: tokens past the end are loaded",
    "paged_decode.h: values keep their scale when the maximum grows",
    "prefill_tiles.h: tiles are overwritten while in use",
    "products.h: rows past the last are read",
    "quantized_pool.h: sums without differences",
    "thresholds.h: logits above the interval are counted twice",
}


@pytest.mark.one_in(48)
@pytest.mark.parametrize("name", list(checks_of("support.metal_checks")))
def test_the_kernels_pass(name) -> None:
    checks_of("support.metal_checks")[name](metal_library())


@pytest.mark.parametrize("mutant", mutant_cases(MUTANTS, QUICK))
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    verdict = judge(mutant, "support.metal_checks")
    assert verdict.caught and verdict.valid, str(verdict)
