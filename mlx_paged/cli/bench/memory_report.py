"""What the loads of `bench memory` say: tables, ratios, and the claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_paged.cli.bench.memory_runs import NAMES
from mlx_paged.cli.bench.results import table

# What this field says of paged KV caches: so many times less than dense ones.
CLAIM = (2.0, 4.0)


def row(load: Mapping[str, int], held: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One load's results, and how many times as much dense caches hold as paged ones."""
    ratios = {
        f"{dense}_over_{paged}": held[dense]["live_bytes"] / held[paged]["live_bytes"]
        for dense in ("dense", "batch_generator")
        for paged in ("paged", "paged_shared")
    }
    return {**load, "held": {name: dict(found) for name, found in held.items()}, "ratios": ratios}


def judge(ratio: float) -> str:
    """A ratio beside the claim."""
    low, high = CLAIM
    if ratio < low:
        return "below"
    return "within" if ratio <= high else "above"


def verdict(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """How many loads are below, within and above the claim, for each comparison."""
    counts = {name: {"below": 0, "within": 0, "above": 0} for name in rows[0]["ratios"]}
    for one in rows:
        for name, ratio in one["ratios"].items():
            counts[name][judge(ratio)] += 1
    return counts


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Two tables: what everyone held, and the claim."""
    loads = ("users", "system_len", "user_len", "answer_len")
    header = ["users", "system", "user", "answer"]
    body = [
        [*(str(one[k]) for k in loads), *(_mib(one["held"][name]["live_bytes"]) for name in NAMES)]
        for one in rows
    ]
    parts = ["KV memory at its highest, MiB", table([*header, *NAMES.values()], body)]
    body = [
        [*(str(one[k]) for k in loads), *(f"{ratio:.2f}x" for ratio in one["ratios"].values())]
        for one in rows
    ]
    columns = [_comparison(name) for name in rows[0]["ratios"]]
    parts += ["", "Dense over paged", table([*header, *columns], body)]
    parts += ["", f"The claim: {CLAIM[0]:g} to {CLAIM[1]:g} times less memory than dense caches."]
    for name, counts in verdict(rows).items():
        ratios = [one["ratios"][name] for one in rows]
        found = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        parts.append(f"  {_comparison(name)}: {min(ratios):.2f}x to {max(ratios):.2f}x: {found} it")
    return "\n".join(parts)


def _comparison(name: str) -> str:
    dense, paged = name.split("_over_")
    return f"{dense.replace('_', ' ')} / {paged.replace('_', ' ')}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"
