"""Pages for newcomers say what the code does: flags, extras, messages, and figures."""

from __future__ import annotations

import ast
import functools
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from mlx_paged.cli import main
from mlx_paged.doctor.fits import MODELS, fits

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *("README.md", "docs/index.md", "docs/installation.md", "docs/quickstart.md"),
    *("docs/performance.md", "docs/troubleshooting.md", "docs/comparison.md"),
)
#: Flags of pip and xcode-select.
OTHERS = {"--no-deps", "--install"}
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*(?:\.[a-z_]+)?")


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


@functools.cache
def own_flags() -> frozenset[str]:
    """All flags of all verbs."""
    found: set[str] = {"--debug"}
    pending: list[Any] = [typer.main.get_command(main.app)]
    while pending:
        command = pending.pop()
        pending += getattr(command, "commands", {}).values()
        for parameter in command.params:
            found.update(parameter.opts + parameter.secondary_opts)
    return frozenset(flag for flag in found if flag.startswith("--"))


# --- Flags and extras -----------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_flags_exist(page: str) -> None:
    named = set(_FLAG.findall(text_of(page)))
    assert named - own_flags() - OTHERS == set()


def test_flags_to_migrate_to_exist() -> None:
    """In tables, the last column has ours; elsewhere all are ours."""
    tables = 0
    page = re.sub(r"```text.*?```", "", text_of("docs/migrating.md"), flags=re.DOTALL)
    for line in page.splitlines():
        if line.startswith("|"):
            *theirs, ours = cells(line)
            assert theirs and ours, line
            tables += 1
            line = ours
        assert set(_FLAG.findall(line)) - own_flags() == set(), line
    assert tables > 20


def test_the_table_of_extras_is_complete() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    table = text_of("docs/installation.md").partition("| extra | adds |")[2].partition("\n\n")[0]
    named = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line[:40])}
    for_contributors = {"dev", "docs", "litellm", "oracle"}
    assert {name for name in named if name in project["optional-dependencies"]} == (
        project["optional-dependencies"].keys() - for_contributors
    )


# --- Messages -------------------------------------------------------------------------------------


@functools.cache
def strings() -> str:
    """All strings of the package, with a placeholder for formatted values, and its scripts."""
    found: list[str] = []
    for path in (ROOT / "mlx_paged").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%\w|%\d*\.?\d*[a-z]", "\0", node.value))
            elif isinstance(node, ast.JoinedStr):
                values = [v.value if isinstance(v, ast.Constant) else "\0" for v in node.values]
                found.append("".join(map(str, values)))
    found += [path.read_text() for path in (ROOT / "scripts").glob("*.sh")]
    found += [path.read_text() for path in (ROOT / "csrc").rglob("*.cpp")]
    return "\n".join(found)


def test_messages_are_those_of_the_code() -> None:
    quoted = re.findall(r"^```text\n(.*?)\n```$", text_of("docs/troubleshooting.md"), re.M | re.S)
    assert len(quoted) > 20
    for message in quoted:
        for part in re.split(r"\.\.\.|: ", message):
            assert part.strip() in strings(), message


# --- Figures --------------------------------------------------------------------------------------


def test_the_models_that_fit_follow_from_the_rule_of_doctor() -> None:
    page = text_of("docs/performance.md")
    table = page.partition("<!-- fits: begin -->")[2].partition("<!-- fits: end -->")[0]
    sizes = {shape.name: shape.parameters for shape in MODELS}
    rows = [cells(line) for line in table.strip().splitlines()[2:]]
    assert len(rows) == 10
    for (kind, gib), *named in ((row[0].split(", "), *row[1:]) for row in rows):
        memory = {
            "on_gpu": kind == "GPU",
            "device_bytes": int(gib.removesuffix(" GiB")) << 30,
            "utilization": 0.9,
        }
        for precision, name in zip(("16-bit", "8-bit", "4-bit"), named, strict=True):
            most = max(
                (
                    fit
                    for fit in fits(memory)  # type: ignore[arg-type]
                    if fit.precision == precision
                    and fit.num_tokens >= 8000
                    and fit.model != "embedded model"
                ),
                key=lambda fit: sizes[fit.model],
            )
            assert name == f"{most.model}, {most.num_tokens:,}"


def test_the_costs_of_kv_formats_are_as_measured() -> None:
    page = text_of("docs/performance.md").partition("What the formats cost")[2]
    [name] = re.findall(r"\.\./bench/results/(kv_quality-[\w-]+\.json)", page[:400])
    measured = json.loads(text_of(f"bench/results/{name}"))
    by_format = {each["kv_cache_dtype"]: each for each in measured["results"]}
    answers = measured["answers"]
    rows = [cells(line) for line in page.splitlines() if line.startswith("| `")]
    rows = [row for row in rows if not row[0].startswith("`--")][:4]
    assert [row[0].strip("`") for row in rows] == ["int8", "int8_k_int4_v", "int4", "fp8"]
    for cell, bits, kl, perplexity, top1, equal in rows:
        name = cell.strip("`")
        found = by_format[name]
        assert float(bits) == pytest.approx(found["bits"], abs=0.006)
        assert float(kl) == pytest.approx(found["kl"], abs=0.00006)
        change = float(perplexity.rstrip("%")) / 100
        assert change == pytest.approx(found["perplexity_change"], abs=0.00006)
        assert float(top1.rstrip("%")) / 100 == pytest.approx(found["top1"], abs=0.0006)
        assert equal == f"{answers['equal'][name]} of {answers['number']}"


def test_servers_with_a_real_model_are_quoted_as_measured() -> None:
    results = json.loads((ROOT / "bench/results/serve-real-cpu.json").read_text())["results"]
    readme, benchmarks = text_of("README.md"), text_of("docs/benchmarks.md")
    benchmarks = benchmarks.split("## Servers with a real model")[1].split("##")[0]
    for entry, clients in zip(results, ("one client", "8 clients", "16 clients"), strict=True):
        speeds = {
            name: f"{figures['output_throughput']:.0f}"
            for name, figures in entry.items()
            if isinstance(figures, dict)
        }
        [row] = [line for line in readme.splitlines() if line.startswith(f"| {clients} |")]
        ours, peers = cells(row)[1:]
        assert ours == f"{speeds['mlx-paged']}, in float32 {speeds['mlx-paged float32']}"
        assert peers == ", ".join(
            f"{name} {speeds[f'{name}{suffix}']}"
            for name, suffix in (
                ("llama-server", ""),
                ("mlx_lm.server", " float32"),
                ("vllm-mlx", " float32"),
            )
        )
        [row] = [
            line for line in benchmarks.splitlines()
            if line.startswith(f"| {entry['concurrency']} |")
        ]  # fmt: skip
        order = ("mlx-paged", "mlx-paged float32", "llama-server", "mlx_lm.server float32",
                 "vllm-mlx float32")  # fmt: skip
        assert [cell.split(",")[0] for cell in cells(row)[1:]] == [speeds[name] for name in order]
