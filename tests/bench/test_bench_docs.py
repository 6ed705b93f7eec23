"""docs/benchmarking.md names what there is, and all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from mlx_paged.bench.datasets import Dataset
from mlx_paged.cli.bench import bench

TEXT = (Path(__file__).resolve().parents[2] / "docs/benchmarking.md").read_text()
VERBS = typer.main.get_command(bench).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("verb", VERBS)
def test_every_benchmark_is_explained(verb) -> None:
    assert f"mlx-paged bench {verb}" in TEXT


@pytest.mark.parametrize("dataset", Dataset)
def test_every_data_set_is_explained(dataset) -> None:
    assert f"| `{dataset.value}` |" in TEXT


def test_options_that_are_named_exist() -> None:
    there = {flag for verb in VERBS.values() for p in verb.params for flag in p.opts}
    there |= {flag for verb in VERBS.values() for p in verb.params for flag in p.secondary_opts}
    named = set(re.findall(r"--[a-z][a-z-]+", TEXT))
    assert len(named) > 20 and named <= there, named - there


def test_verbs_with_data_sets_have_the_same_options() -> None:
    def of_data(verb: str) -> dict[str, list[str]]:
        return {
            parameter.opts[0]: parameter.opts
            for parameter in VERBS[verb].params
            if parameter.rich_help_panel == "Data set"
        }

    assert of_data("serve") == of_data("throughput")
    assert len(of_data("serve")) >= 12
