"""The costs of KV formats, in the page and in the help, are those of a real model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mlx_paged.cli.options import KV_CACHE_DTYPE_HELP

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/kv-store.md").read_text().partition("### Quality on real weights")[2]
MEASURED = [
    json.loads((ROOT / "bench/results" / name).read_text())
    for name in ("kv_quality-smollm2.json", "kv_quality-smollm2-4096.json")
]


def figures(name: str) -> list[dict[str, float]]:
    """Those of a format, in short and in long contexts."""
    return [
        next(each for each in measured["results"] if each["kv_cache_dtype"] == name)
        for measured in MEASURED
    ]


@pytest.mark.parametrize("name", ["int8", "int8_k_int4_v", "fp8", "int4"])
def test_the_page_has_the_measured_figures(name: str) -> None:
    [row] = re.findall(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
    kl, perplexity, top1, equal = (cell.strip() for cell in row.split("|")[2:6])
    found, answers = figures(name), MEASURED[0]["answers"]
    assert kl == " / ".join(f"{each['kl']:.4f}".lstrip("0") for each in found)
    assert perplexity == " / ".join(f"{100 * each['perplexity_change']:+.2f}%" for each in found)
    assert top1 == " / ".join(f"{100 * each['top1']:.1f}%" for each in found)
    assert equal == f"{answers['equal'][name]} of {answers['number']}"


def test_the_help_says_what_formats_cost() -> None:
    said = re.findall(r"(\w+) \([^()]*?\+([\d.]+)%(?: to \+([\d.]+)%)?\)", KV_CACHE_DTYPE_HELP)
    assert [name for name, _, _ in said] == ["k8v4", "fp8", "int4"]
    for name, least, most in said:
        found = figures({"k8v4": "int8_k_int4_v"}.get(name, name))
        digits = len(least.partition(".")[2])
        short, long = (f"{100 * each['perplexity_change']:.{digits}f}" for each in found)
        assert least == short
        assert (most or least) == long or abs(float(short) - float(long)) < 0.15
