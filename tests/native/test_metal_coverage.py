"""Every line of metal/ is executed by some check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sim import METAL
from sim.checks import checks_of
from sim.coverage import Coverage
from support.simulated import metal_library, needs_simulator, tensor_library

_LITERAL = re.compile(r"\{ return \d+; \}")


def is_constant(file: str, line: int) -> bool:
    """True for constant expressions and functions of a literal, which have no code."""
    text = Path(file).read_text().split("\n")
    is_constexpr = any("constexpr" in text[i] for i in (line - 2, line - 1))
    return is_constexpr or _LITERAL.search(text[line - 1]) is not None


@pytest.mark.long
@needs_simulator
def test_every_line_of_the_kernels_is_executed() -> None:
    """(Some functions serve kernels for tensor units only, which are a library of their own.)"""
    modules = {"support.metal_checks": metal_library(), "support.tensor_checks": tensor_library()}
    for module, library in modules.items():
        for check in checks_of(module).values():
            check(library)
    parts = [library.coverage().within(METAL) for library in modules.values()]
    coverage = Coverage.merge(parts)
    print(coverage.report())
    assert coverage.percent == 100, coverage.report()
    dead = [f for f in coverage.dead_functions if not is_constant(f.file, f.first)]
    assert not dead, coverage.report()
