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


def names(cell: str) -> list[str]:
    """The names that a row of a table groups."""
    return re.findall(r"`([^`]+)`", cell)


def test_every_proven_family_is_in_the_table_as_it_runs() -> None:
    assert f"mlx-lm {MLX_LM_VERSION}." in PAGE
    found = {}
    for layers, mode, reused, difference, families in rows("proven"):
        assert float(difference) < 1e-5, layers
        assert ("recurrent" in layers) == (reused == "at snapshots"), layers
        for family in names(families):
            assert family not in found
            found[family] = mode
    assert found == {family: str(mode) for family, mode in PROVEN.items()}


def test_every_refused_family_is_in_the_table_with_its_reason() -> None:
    assert dict(rows("refused")) == REFUSED


def test_every_multimodal_family_is_in_its_table() -> None:
    assert f"mlx-vlm {MLX_VLM_VERSION}." in PAGE
    found = {}
    for takes, mode, text, images, audio, families in rows("media"):
        assert max(float(cell) for cell in (text, images, audio) if cell) < 1e-5, takes
        assert bool(audio) == ("audio" in takes)
        for family in names(families):
            assert family not in found
            found[family] = (takes, mode)
    assert found == {
        name: (", ".join(family.kinds), str(family.mode)) for name, family in MEDIA_FAMILIES.items()
    }
    refused = [(name, why) for why, cell in rows("media refused") for name in names(cell)]
    assert len(refused) == len(MEDIA_REFUSED)
    assert dict(refused) == MEDIA_REFUSED
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
