"""Mutants as the cases of a test."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import pytest
from sim.mutants import Mutant

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet


def mutant_cases(mutants: Sequence[Mutant], quick: Collection[str]) -> list[ParameterSet]:
    """Cases named "file: fault". Those not in `quick` run by `make test-long` only."""
    names = [f"{mutant.file}: {mutant.what}" for mutant in mutants]
    assert set(names) >= set(quick), set(quick) - set(names)
    return [
        pytest.param(mutant, id=name, marks=() if name in quick else pytest.mark.long)
        for mutant, name in zip(mutants, names, strict=True)
    ]
