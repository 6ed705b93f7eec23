"""Results as tables: what varies is a column, what does not is said once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from mlx_paged.cli.bench.kernels.cases import Case
from mlx_paged.cli.bench.results import table

_FIELDS = [field.name for field in fields(Case)]
_SHORT = {"kv_heads": "KV heads", "group": "G", "head_dim": "D", "block_size": "block"}
_PEERS = {
    "dense_sdpa": "dense SDPA takes",
    "gather_sdpa": "gather + SDPA takes",
    "mlx": "MLX takes",
}


def results_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line a case: time, rate, share of the copy's, and what peers take."""
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
    """A line for each reason why cases are not measured."""
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
    """What the copy reached beside the cases."""
    rates = sorted(row["copy_bytes_per_second"] / 1e9 for row in rows)
    middle = rates[len(rates) // 2]
    return (
        f"copy bandwidth, read + written: {middle:.1f} GB/s ({rates[0]:.1f} to {rates[-1]:.1f} "
        "between cases)"
    )


def split_fields(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Fields of `Case` with the value that all rows agree on, and those that vary."""
    constant: dict[str, Any] = {}
    varying = []
    for name in _FIELDS:
        # (None: the op does not depend on it.)
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
    """What is the same in all rows."""
    return ", ".join(
        f"{_SHORT.get(name, name)} {value}"
        for name, value in constant.items()
        if (name, value) not in (("skew", 1), ("rows", 1))
    )


def cell(value: Any) -> str:
    """A value of a case; empty where the op does not depend on it."""
    return "" if value is None else str(value)


def duration(seconds: float) -> str:
    """With a unit that fits."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _differs(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Whether attention was measured with this and without."""
    return len({row[name] for row in rows if row["op"] == "paged_attention"}) > 1
