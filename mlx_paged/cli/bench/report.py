"""Figures of a run, printed and saved in the form of ``vllm bench serve``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from mlx_paged.cli.bench.client import Result

_WIDTH = 50


def percentile(values: Sequence[float], share: float) -> float:
    """With linear interpolation, as NumPy does it; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def figures(
    results: Sequence[Result], duration: float, percentiles: Sequence[float]
) -> dict[str, Any]:
    """Everything that is measured; times in milliseconds, under vLLM's keys."""
    good = [r for r in results if r.success]
    input_lens = [
        r.prompt.num_tokens if r.num_prompt_tokens is None else r.num_prompt_tokens for r in good
    ]
    total_output = sum(r.num_output_tokens for r in good)
    made: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(results) - len(good),
        "total_input_tokens": sum(input_lens),
        "total_output_tokens": total_output,
        "total_cached_tokens": sum(r.num_cached_tokens for r in good),
        "request_throughput": len(good) / duration,
        "output_throughput": total_output / duration,
        "total_token_throughput": (sum(input_lens) + total_output) / duration,
        "max_output_tokens_per_s": _peak(good),
        "max_concurrent_requests": _most_at_once(good),
        "input_lens": input_lens,
        "output_lens": [r.num_output_tokens for r in good],
        "ttfts": [r.ttft for r in good],
        "itls": [r.itl for r in good],
        "generated_texts": [r.text for r in good],
        "errors": [r.error for r in results],
    }
    kinds = {
        "ttft": [r.ttft for r in good],
        "tpot": [r.tpot for r in good if r.tpot is not None],
        "itl": [gap for r in good for gap in r.itl],
        "e2el": [r.latency for r in good],
    }
    for name, seconds in kinds.items():
        values = [1000 * s for s in seconds]
        made[f"mean_{name}_ms"] = statistics.fmean(values) if values else 0.0
        made[f"median_{name}_ms"] = statistics.median(values) if values else 0.0
        made[f"std_{name}_ms"] = statistics.pstdev(values) if values else 0.0
        for share in percentiles:
            made[f"p{share:g}_{name}_ms"] = percentile(values, share)
    return made


def text(
    made: dict[str, Any], rate: float, concurrency: int | None, shares: Sequence[float]
) -> str:
    """The table."""

    def line(name: str, value: float | int | str) -> str:
        shown = f"{value:.2f}" if isinstance(value, float) else str(value)
        return f"{name:<40} {shown:<10}".rstrip()

    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    lines.append(line("Successful requests:", made["completed"]))
    lines.append(line("Failed requests:", made["failed"]))
    if concurrency is not None:
        lines.append(line("Maximum request concurrency:", concurrency))
    if rate != float("inf"):
        lines.append(line("Request rate configured (RPS):", rate))
    for name, key in (
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Total cached prompt tokens:", "total_cached_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
        ("Peak concurrent requests:", "max_concurrent_requests"),
        ("Total token throughput (tok/s):", "total_token_throughput"),
    ):
        lines.append(line(name, made[key]))
    for name, title, short in (
        ("ttft", "Time to First Token", "TTFT"),
        ("tpot", "Time per Output Token (excl. 1st token)", "TPOT"),
        ("itl", "Inter-token Latency", "ITL"),
        ("e2el", "End-to-end Latency", "E2EL"),
    ):
        lines.append(f"{title:-^{_WIDTH}}")
        lines.append(line(f"Mean {short} (ms):", made[f"mean_{name}_ms"]))
        lines.append(line(f"Median {short} (ms):", made[f"median_{name}_ms"]))
        lines += [
            line(f"P{share:g} {short} (ms):", made[f"p{share:g}_{name}_ms"]) for share in shares
        ]
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _peak(results: Sequence[Result]) -> float:
    """Most tokens (chunks of text) that came in any one second."""
    seconds: dict[int, int] = {}
    for result in results:
        at = result.started + result.ttft
        seconds[int(at)] = seconds.get(int(at), 0) + 1
        for gap in result.itl:
            at += gap
            seconds[int(at)] = seconds.get(int(at), 0) + 1
    return float(max(seconds.values(), default=0))


def _most_at_once(results: Sequence[Result]) -> int:
    changes = [(r.started, 1) for r in results] + [(r.started + r.latency, -1) for r in results]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most
