"""Every planted fault is noticed by a check; the checks themselves pass on metal/."""

from __future__ import annotations

import pytest
from sim.checks import checks_of
from sim.library import METAL
from sim.mutants import Mutant, judge
from support.metal_mutants import MUTANTS
from support.quick_mutants import mutant_cases
from support.simulated import metal_library, needs_simulator
from support.tensor_mutants import MUTANTS as TENSOR_MUTANTS

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


def test_the_code_that_faults_replace_exists() -> None:
    """(Most faults are planted in the long runs only.)"""
    for mutant in (*MUTANTS, *TENSOR_MUTANTS):
        assert (METAL / mutant.file).read_text().count(mutant.old) == 1, mutant


@pytest.mark.parametrize("mutant", mutant_cases(MUTANTS, QUICK))
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    verdict = judge(mutant, "support.metal_checks")
    assert verdict.caught and verdict.valid, str(verdict)
