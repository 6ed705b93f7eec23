"""Results as tables and as a plot, and the comparison of two runs.

In a table, fields that vary are columns; fields that are the same everywhere are named once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from mlx_paged.bench.kernels.cases import Case
from mlx_paged.bench.results import read_json, table
from mlx_paged.errors import InvalidParameterError
from mlx_paged.extras import needs_extra

_FIELDS = [field.name for field in fields(Case)]
_SHORT = {"kv_heads": "KV heads", "group": "G", "head_dim": "D", "block_size": "block"}
_PEERS = {
    "dense_sdpa": "dense SDPA takes",
    "gather_sdpa": "gather + SDPA takes",
    "mlx": "MLX takes",
}


def results_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Prints one line per case: time, rate, share of copy bandwidth, and the peers' times."""
    constant, varying = split_fields(rows)
    peers = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    header = [
        *(_SHORT.get(name, name) for name in varying),
        *("time", "spread", "GB/s", "of copy"),
        *(_PEERS.get(name, name) for name in peers),
    ]
    lines = [
        [
            *(cell(row[name]) for name in varying),
            duration(row["seconds"]["median"]),
            f"{row['seconds']['spread']:.0%}",
            f"{row['bytes_per_second'] / 1e9:.1f}",
            f"{row['share_of_copy']:.0%}",
            *(
                f"{row['peers'][name]['over_ours']:.2f}x" if name in row["peers"] else ""
                for name in peers
            ),
        ]
        for row in rows
    ]
    said = describe(constant)
    return (f"{said}\n\n" if said else "") + table(header, lines)


def left_out(refused: Sequence[Mapping[str, Any]]) -> list[str]:
    """Prints one line for each reason why cases were not measured."""
    by_reason: dict[str, list[Mapping[str, Any]]] = {}
    for row in refused:
        by_reason.setdefault(row["reason"], []).append(row)
    lines = []
    for reason, rows in by_reason.items():
        first = Case(**{name: rows[0][name] for name in _FIELDS})
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        lines.append(f"left out: {first}{more}: {reason}")
    return lines


def copy_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """The copy bandwidth that was measured along with the cases."""
    rates = sorted(row["copy_bytes_per_second"] / 1e9 for row in rows)
    middle = rates[len(rates) // 2]
    return (
        f"copy bandwidth, read + written: {middle:.1f} GB/s ({rates[0]:.1f} to {rates[-1]:.1f} "
        "between cases)"
    )


def split_fields(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Fields of `Case` split into those with the same value in all results, and those that vary."""
    constant: dict[str, Any] = {}
    varying = []
    for name in _FIELDS:
        # None means that the op does not depend on the field.
        values = {row[name] for row in rows if row[name] is not None}
        if (
            name == "op"
            or len(values) > 1
            or (values and name == "window" and _differs(rows, name))
        ):
            varying.append(name)
        elif values:
            constant[name] = values.pop()
    return constant, varying


def describe(constant: Mapping[str, Any]) -> str:
    """Text for the fields that are the same in all results."""
    return ", ".join(
        f"{_SHORT.get(name, name)} {value}"
        for name, value in constant.items()
        if (name, value) not in (("skew", 1), ("rows", 1))
    )


def cell(value: Any) -> str:
    """Text for a value of a case; empty if the op does not depend on it."""
    return "" if value is None else str(value)


def duration(seconds: float) -> str:
    """Formats seconds with a suitable unit."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _differs(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """True if attention was measured both with and without this field."""
    return len({row[name] for row in rows if row["op"] == "paged_attention"}) > 1


# --- Two runs -------------------------------------------------------------------------------------


FASTER, SLOWER, NOISE = "faster", "slower", "within noise"
# Medians closer than this count as equal, however steady the samples are.
MIN_DIFFERENCE = 0.02


def load(path: Path, field: str) -> dict[str, Any]:
    """Reads a file that this benchmark wrote."""
    found = read_json(path, field)
    rows = found.get("results")
    complete = isinstance(rows, list) and all(
        isinstance(row, dict) and {"op", "seconds", "copy_bytes_per_second"} <= row.keys()
        for row in rows
    )
    if found.get("benchmark") != "kernels" or not complete:
        raise InvalidParameterError(field, "results of `mlx-paged bench kernels`", str(path))
    return found


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Compares the cases that both runs have.

    Returns:
        ``results``: for each case ``before`` and ``after`` (median seconds), ``time_ratio``
        (after / before), ``copy_ratio`` (of the machine's copy bandwidth) and ``verdict``;
        ``only_before`` and ``only_after``: numbers of cases without a counterpart; ``remarks``:
        other differences between the runs.
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
    """Compares two results of the same case.

    A difference counts if the interquartile ranges do not overlap and the medians are at least
    `MIN_DIFFERENCE` apart, both in seconds and in bytes that the machine could have copied in
    that time: a slower machine does not make a kernel slower.
    """
    said = set()
    for unit in ("seconds", "copied"):
        a, b = (_quartiles(row, unit) for row in (before, after))
        if b[2] < a[0] and b[1] < a[1] * (1 - MIN_DIFFERENCE):
            said.add(FASTER)
        elif b[0] > a[2] and b[1] > a[1] * (1 + MIN_DIFFERENCE):
            said.add(SLOWER)
        else:
            said.add(NOISE)
    return said.pop() if len(said) == 1 else NOISE


def _quartiles(row: Mapping[str, Any], unit: str) -> list[float]:
    factor = row["copy_bytes_per_second"] if unit == "copied" else 1.0
    return [row["seconds"][name] * factor for name in ("p25", "median", "p75")]


def comparison_table(compared: Mapping[str, Any]) -> str:
    """Prints the comparison as a table, with notes."""
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


# --- A plot: attention against the copy roofline --------------------------------------------------


_AXES = ("op", "context")


def check_picture(path: Path) -> None:
    """Raises before anything is measured if the plot could not be drawn."""
    with needs_extra("plot", "--plot"):
        import matplotlib  # noqa: F401
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise InvalidParameterError("plot", "a file that ends in .svg, .png or .pdf", str(path))


def draw_picture(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Plots share of copy bandwidth over context, and rate over bytes under the copy roofline.

    Args:
        rows: Results. Only `paged_attention` is drawn, with one line for each combination of the
            other fields that vary.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row["op"] == "paged_attention"]
    if not rows:
        raise InvalidParameterError("plot", "drawn from results of paged_attention", str(path))
    constant, varying = split_fields(rows)
    series = [name for name in varying if name not in _AXES]
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["context"]):
        lines.setdefault(_label(row, series), []).append(row)

    style: Any = {"svg.hashsalt": "mlx-paged", "font.size": 9}
    with pyplot.rc_context(style):
        figure, (shares, roof) = pyplot.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
        for label, points in lines.items():
            share = [100 * p["share_of_copy"] for p in points]
            shares.plot([p["context"] for p in points], share, "o-", label=label)
            rate = [p["bytes_per_second"] / 1e9 for p in points]
            roof.plot([p["bytes"] for p in points], rate, "o-", label=label)
        copies = sorted(row["copy_bytes_per_second"] / 1e9 for row in rows)
        roof.axhline(copies[len(copies) // 2], color="black", linestyle="--", label="copy")
        shares.axhline(100, color="black", linestyle="--")
        shares.set(xlabel="context, tokens", ylabel="share of copy bandwidth, %", ylim=(0, None))
        roof.set(xlabel="bytes of one launch", ylabel="GB/s", ylim=(0, None))
        shares.set_xscale("log", base=2)
        roof.set_xscale("log", base=10)
        shares.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        for axes in (shares, roof):
            axes.grid(alpha=0.3)
        handles, labels = roof.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", fontsize=8)
        said = describe(constant)
        figure.suptitle(f"{title}\npaged_attention" + (f": {said}" if said else ""), fontsize=9)
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise InvalidParameterError(
                "plot", f"a file that can be written ({error})", str(path)
            ) from None
        finally:
            pyplot.close(figure)


def _label(row: Mapping[str, Any], series: Sequence[str]) -> str:
    named = [f"{name} {'all' if row[name] is None else row[name]}" for name in series]
    return ", ".join(named) or "paged_attention"
