"""Committed figures say where they come from, and new ones do so in the same form."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from mlx_paged.bench.results import write_json

BENCH = Path(__file__).resolve().parents[2] / "bench"
VALIDATOR = jsonschema_rs.validator_for(json.loads((BENCH / "results.schema.json").read_text()))
FILES = sorted((BENCH / "results").glob("**/*.json"))


def test_there_are_results() -> None:
    assert FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_committed_results_hold_the_schema(file) -> None:
    VALIDATOR.validate(json.loads(file.read_text()))


def test_what_is_written_holds_the_schema(tmp_path) -> None:
    file = tmp_path / "new.json"
    write_json(file, {"results": [1]})
    VALIDATOR.validate(json.loads(file.read_text()))


@pytest.mark.parametrize(
    "path",
    [("environment",), *(("environment", key) for key in ("date", "command", "commit", "dirty")),
     *(("environment", "machine", key) for key in ("processor", "cores", "system", "python")),
     *(("environment", "build", key) for key in ("version", "mlx_version", "mlx_lm_version"))],
    ids=".".join,
)  # fmt: skip
def test_results_that_do_not_say_it_are_refused(path) -> None:
    results: Any = copy.deepcopy(json.loads(FILES[0].read_text()))
    *above, last = path
    part = results
    for key in above:
        part = part[key]
    del part[last]
    assert not VALIDATOR.is_valid(results)


def test_an_environment_alone_is_no_result() -> None:
    results = json.loads(FILES[0].read_text())
    assert not VALIDATOR.is_valid({"environment": results["environment"]})
