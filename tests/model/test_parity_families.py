"""Every model module of mlx-lm: proven against its dense cache, or refused by name."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from support.family_config_parts import VOCAB_SIZE
from support.family_configs import CONFIGS, config_of
from support.metal_stand_ins import standing_in
from support.parity import Driver, family_model, relative_difference

# isort: split
import mlx_lm.models

from mlx_paged import kernels
from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.families import PROVEN, REFUSED, require_family
from mlx_paged.model.layout import Mode
from mlx_paged.model.prepare import prepare_kernels
from mlx_paged.model.wrap import build_paged_model, convert_to_paged

TOLERANCE = 1e-4  # RMS of the logits' difference over that of the logits, float32


def model_modules() -> list[str]:
    """Modules of mlx-lm that have a `Model`, by their text: some do things when imported."""
    [folder] = mlx_lm.models.__path__
    found = []
    for path in sorted(Path(folder).glob("*.py")):
        names: set[str] = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.ImportFrom):
                names.update(alias.name for alias in node.names)
        if {"Model", "ModelArgs"} <= names:
            found.append(path.stem)
    return found


def test_every_module_of_mlx_lm_is_proven_or_refused() -> None:
    modules = set(model_modules())
    assert len(modules) > 120
    unproven = modules - PROVEN.keys() - REFUSED.keys()
    assert not unproven, f"neither proven nor refused: {sorted(unproven)}"
    assert PROVEN.keys() | REFUSED.keys() == modules
    assert not PROVEN.keys() & REFUSED.keys()
    assert PROVEN.keys() <= CONFIGS.keys() <= modules


@pytest.mark.one_in(12)
@pytest.mark.parametrize("module", sorted(PROVEN))
def test_a_mixed_step_matches_the_dense_cache(
    module: str, record_property: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As at the start on a Mac: the graph of a step is built and dropped.
    monkeypatch.setattr(kernels, "compiles_kernels", lambda: True)
    monkeypatch.setattr(kernels, "prepare_kernels", lambda on_kernel: 7)
    with standing_in(module):
        model = family_model(config_of(module))
        paged = build_paged_model(model, config_of(module), block_size=8)
        assert paged.layout.mode is PROVEN[module]
        driver = Driver(paged)
        assert prepare_kernels(paged) == 7
        differences = relative_difference(model, driver, VOCAB_SIZE)
    record_property("difference", max(differences.values()))
    # Each by itself: `max` may step over a NaN.
    assert all(d < TOLERANCE for d in differences.values()), differences


@pytest.mark.parametrize("module", sorted(REFUSED))
def test_what_is_refused_is_refused_with_its_reason(module: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        require_family({"model_type": module})
    assert repr(module) in str(caught.value)
    assert REFUSED[module] in str(caught.value)


@pytest.mark.parametrize("module", sorted(m for m in PROVEN if PROVEN[m].is_gathered))
def test_dense_copies_are_made_where_nothing_less_will_do(module: str) -> None:
    """Earlier modes do not run the model, or they answer something else."""
    modes = list(Mode)
    for mode in modes[: modes.index(PROVEN[module])]:
        model = family_model(config_of(module))
        try:
            paged = convert_to_paged(model, module, modes=[mode], block_size=8)
        except UnsupportedModelError:
            continue
        differences = relative_difference(model, Driver(paged), VOCAB_SIZE)
        # minimax_m3_vl: it counts blocks of keys from the end of the longest sequence.
        assert max(differences.values()) > 1e-2
