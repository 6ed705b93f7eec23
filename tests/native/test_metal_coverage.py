"""Every line of metal/ is executed by some check."""

from __future__ import annotations

from pathlib import Path

import pytest
from sim import METAL
from sim.checks import checks_of, library
from support.simulated import needs_simulator


def constexpr(file: str, line: int) -> bool:
    text = Path(file).read_text().split("\n")
    return any("constexpr" in text[i] for i in (line - 2, line - 1))


@pytest.mark.long
@needs_simulator
def test_every_line_of_the_kernels_is_executed() -> None:
    kernels = library(METAL)
    for check in checks_of("support.metal_checks").values():
        check(kernels)
    coverage = kernels.coverage().within(METAL)
    print(coverage.report())
    assert coverage.percent == 100, coverage.report()
    # Constant expressions have no code.
    dead = [f for f in coverage.dead_functions if not constexpr(f.file, f.first)]
    assert not dead, coverage.report()
