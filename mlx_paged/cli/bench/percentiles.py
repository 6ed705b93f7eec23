"""Percentiles, and the latency figures that all benchmarks tell under vLLM's names."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_paged.errors import InvalidParameterError

WIDTH = 50
_TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}


def parse(given: str) -> list[float]:
    """Percentiles by commas, as `--metric-percentiles` has them."""
    try:
        shares = [float(part) for part in given.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share <= 100 for share in shares):
        raise InvalidParameterError("metric_percentiles", "numbers in [0, 100] by commas", given)
    return shares


def percentile(values: Sequence[float], share: float) -> float:
    """With linear interpolation, as NumPy does it; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def latency_figures(
    kinds: Mapping[str, Sequence[float]], shares: Sequence[float]
) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles in milliseconds, under vLLM's keys.

    Args:
        kinds: seconds by ``ttft``, ``tpot``, ``itl`` and ``e2el``.
        shares: which percentiles.
    """
    made = {}
    for name, seconds in kinds.items():
        values = [1000 * s for s in seconds]
        made[f"mean_{name}_ms"] = statistics.fmean(values) if values else 0.0
        made[f"median_{name}_ms"] = statistics.median(values) if values else 0.0
        made[f"std_{name}_ms"] = statistics.pstdev(values) if values else 0.0
        for share in shares:
            made[f"p{share:g}_{name}_ms"] = percentile(values, share)
    return made


def line(name: str, value: float | int | str) -> str:
    """A line of a table of figures, as vLLM prints it."""
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<40} {shown:<10}".rstrip()


def latency_lines(made: Mapping[str, Any], shares: Sequence[float]) -> list[str]:
    """What `latency_figures` made, as vLLM prints it."""
    lines = []
    for name, (title, short) in _TITLES.items():
        lines.append(f"{title:-^{WIDTH}}")
        lines.append(line(f"Mean {short} (ms):", made[f"mean_{name}_ms"]))
        lines.append(line(f"Median {short} (ms):", made[f"median_{name}_ms"]))
        lines += [
            line(f"P{share:g} {short} (ms):", made[f"p{share:g}_{name}_ms"]) for share in shares
        ]
    return lines
