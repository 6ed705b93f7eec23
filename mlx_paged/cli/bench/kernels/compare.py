"""Two runs side by side: ratios, and whether they mean anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from mlx_paged.cli.bench.kernels.cases import Case
from mlx_paged.cli.bench.kernels.show import cell, describe, duration, split_fields
from mlx_paged.cli.bench.results import read_json, table
from mlx_paged.errors import InvalidParameterError

BENCHMARK = "kernels"
FASTER, SLOWER, NOISE = "faster", "slower", "within noise"
# Medians that are closer than this are the same, however steady the samples.
LEAST_DIFFERENCE = 0.02


def load(path: Path, field: str) -> dict[str, Any]:
    """A file that this benchmark wrote."""
    found = read_json(path, field)
    rows = found.get("results")
    complete = isinstance(rows, list) and all(
        isinstance(row, dict) and {"op", "seconds", "copy_bytes_per_second"} <= row.keys()
        for row in rows
    )
    if found.get("benchmark") != BENCHMARK or not complete:
        raise InvalidParameterError(field, "results of `mlx-paged bench kernels`", str(path))
    return found


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Compares the cases that both runs have.

    Returns:
        ``results``: a row a case with ``before`` and ``after`` (median seconds), ``time_ratio``
        (after / before), ``copy_ratio`` (of the machine's copy bandwidth) and ``verdict``;
        ``only_before`` and ``only_after``: numbers of cases without a counterpart; ``remarks``:
        what else differs.
    """
    old, new = ({_key(row): row for row in run["results"]} for run in (before, after))
    both = [key for key in old if key in new]
    results = []
    for key in both:
        a, b = old[key], new[key]
        results.append(
            {
                **dict(zip(_FIELDS, key)),
                "before": a["seconds"]["median"],
                "after": b["seconds"]["median"],
                "time_ratio": b["seconds"]["median"] / a["seconds"]["median"],
                "copy_ratio": b["copy_bytes_per_second"] / a["copy_bytes_per_second"],
                "verdict": verdict(a, b),
            }
        )
    return {
        "results": results,
        "only_before": len(old) - len(both),
        "only_after": len(new) - len(both),
        "remarks": _remarks(before, after),
    }


def verdict(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What can be said of two rows of the same case.

    A difference counts where the middle halves of the samples do not overlap and the medians are
    at least `LEAST_DIFFERENCE` apart, in seconds *and* in bytes that the machine would have copied
    meanwhile: a machine that was slower that day is not a slower kernel.
    """
    said = set()
    for unit in ("seconds", "copied"):
        a, b = (_quartiles(row, unit) for row in (before, after))
        if b[2] < a[0] and b[1] < a[1] * (1 - LEAST_DIFFERENCE):
            said.add(FASTER)
        elif b[0] > a[2] and b[1] > a[1] * (1 + LEAST_DIFFERENCE):
            said.add(SLOWER)
        else:
            said.add(NOISE)
    return said.pop() if len(said) == 1 else NOISE


def _quartiles(row: Mapping[str, Any], unit: str) -> list[float]:
    factor = row["copy_bytes_per_second"] if unit == "copied" else 1.0
    return [row["seconds"][name] * factor for name in ("p25", "median", "p75")]


def text(compared: Mapping[str, Any]) -> str:
    """The table, and what should be known beside it."""
    rows = compared["results"]
    lines = [f"note: {remark}" for remark in compared["remarks"]]
    for which, name in (("only_before", "first"), ("only_after", "second")):
        if count := compared[which]:
            lines.append(f"note: {count} cases are in the {name} file only")
    if not rows:
        return "\n".join([*lines, "no case is in both files"])
    constant, varying = split_fields(rows)
    body = [
        [
            *(cell(row[name]) for name in varying),
            duration(row["before"]),
            duration(row["after"]),
            f"{row['time_ratio']:.2f}x",
            f"{row['copy_ratio']:.2f}x",
            row["verdict"],
        ]
        for row in rows
    ]
    header = [*varying, "before", "after", "time", "copy bandwidth", "verdict"]
    if said := describe(constant):
        lines.append(said)
    counts = [
        f"{sum(row['verdict'] == kind for row in rows)} {kind}" for kind in (FASTER, SLOWER, NOISE)
    ]
    return "\n".join([*lines, "", table(header, body), "", ", ".join(counts)]).lstrip("\n")


_FIELDS = [field.name for field in fields(Case)]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _FIELDS)


def _remarks(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    remarks = []
    a, b = before["environment"], after["environment"]
    for section, name in (
        ("machine", "processor"),
        ("machine", "device"),
        ("build", "mlx_version"),
        ("build", "simd"),
        ("build", "num_threads"),
        ("build", "blas"),
    ):
        values = [run.get(section, {}).get(name) for run in (a, b)]
        if values[0] != values[1]:
            remarks.append(f"{name} was {values[0]} and is {values[1]}")
    for which, run in (("first", a), ("second", b)):
        machine = run.get("machine", {})
        load, cores = machine.get("load_average"), machine.get("cores")
        if load and cores and load > cores / 2:
            remarks.append(f"the {which} run began on a busy machine (load {load:.1f})")
    return remarks
