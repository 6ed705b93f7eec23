"""The costs of KV formats, in the page and in the help, are those of a real model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mlx_paged.cli.options import KV_CACHE_DTYPE_HELP

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/kv-store.md").read_text().partition("### Quality on real weights")[2]
MEASURED = json.loads((ROOT / "bench/results/kv_quality-smollm2.json").read_text())
BY_FORMAT = {each["kv_cache_dtype"]: each for each in MEASURED["results"]}


@pytest.mark.parametrize("name", ["int8", "int8_k_int4_v", "fp8", "int4"])
def test_the_page_has_the_measured_figures(name: str) -> None:
    [row] = re.findall(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
    kl, perplexity, top1, equal = (cell.strip() for cell in row.split("|")[2:6])
    found, answers = BY_FORMAT[name], MEASURED["answers"]
    assert float(kl) == pytest.approx(found["kl"], abs=0.00005)
    assert perplexity == f"{100 * found['perplexity_change']:+.2f}%"
    assert top1 == f"{100 * found['top1']:.1f}%"
    assert equal == f"{answers['equal'][name]} of {answers['number']}"


@pytest.mark.parametrize(
    ("name", "digits"), [("int8_k_int4_v or k8v4", 1), ("fp8", 1), ("int4", 0)]
)
def test_the_help_says_what_formats_cost(name: str, digits: int) -> None:
    change = 100 * BY_FORMAT[name.partition(" ")[0]]["perplexity_change"]
    assert re.search(
        rf"\b{name} \([^()]*\+{re.escape(f'{change:.{digits}f}')}%\)", KV_CACHE_DTYPE_HELP
    )
