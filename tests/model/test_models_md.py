"""docs/models.md says what the code does: its tables, and its example, run as it stands."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import mlx_paged

# isort: split
import pytest

from mlx_paged import SamplingParams
from mlx_paged.model.families import MLX_LM_VERSION, PROVEN, REFUSED, unregister_family
from mlx_paged.multimodal.families import MEDIA_FAMILIES, MEDIA_REFUSED
from mlx_paged.multimodal.mlx_vlm import MLX_VLM_VERSION

PAGE = (Path(__file__).resolve().parents[2] / "docs/models.md").read_text()


def rows(name: str) -> list[list[str]]:
    """The cells of a table, heading left out."""
    table = PAGE.split(f"<!-- {name}: written")[1].split(f"<!-- {name}: end")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_proven_family_is_in_the_table_as_it_runs() -> None:
    assert f"mlx-lm {MLX_LM_VERSION}." in PAGE
    table = {row[0]: row for row in rows("proven")}
    assert {family: row[2] for family, row in table.items()} == {
        family: str(mode) for family, mode in PROVEN.items()
    }
    differences = [float(row[3]) for row in table.values()]
    assert max(differences) < 5e-3
    assert sorted(differences)[len(differences) // 2] < 1e-5
    for family, row in table.items():
        assert ("recurrent" in row[1]) == (row[4] == "at snapshots"), family


def test_every_refused_family_is_in_the_table_with_its_reason() -> None:
    assert dict(rows("refused")) == REFUSED


def test_every_multimodal_family_is_in_its_table() -> None:
    assert f"mlx-vlm {MLX_VLM_VERSION}." in PAGE
    table = {row[0]: row for row in rows("media")}
    assert {name: (row[1], row[2]) for name, row in table.items()} == {
        name: (", ".join(family.kinds), str(family.mode)) for name, family in MEDIA_FAMILIES.items()
    }
    for name, row in table.items():
        differences = [float(cell) for cell in row[3:6] if cell]
        assert max(differences) < 1e-5, name
        assert bool(row[5]) == ("audio" in MEDIA_FAMILIES[name].kinds)
    assert dict(rows("media refused")) == MEDIA_REFUSED
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    assert f": {len(MEDIA_FAMILIES)} multimodal families of mlx-vlm" in readme


def test_the_example_of_a_custom_family_runs(caplog: pytest.LogCaptureFixture) -> None:
    [example] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    try:
        with caplog.at_level(logging.WARNING):
            exec(compile(example, "docs/models.md", "exec"), names)
    finally:
        unregister_family("mine")
    assert "'mine'" in caplog.text
    llm = names["llm"]
    assert isinstance(llm, mlx_paged.LLM)
    [output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4
