"""What `bench latency` and `bench throughput` share: running engines in turn, and the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import typer

from mlx_paged.cli.bench import footprint, turns
from mlx_paged.cli.bench.datasets import Prompt
from mlx_paged.cli.bench.environment import checkout
from mlx_paged.cli.bench.percentiles import WIDTH, latency_lines
from mlx_paged.cli.bench.results import check_writable, table, write_json
from mlx_paged.cli.bench.runners import Settings
from mlx_paged.cli.bench.runs import Run, compare, token_latencies
from mlx_paged.cli.bench.vllm_options import EngineName
from mlx_paged.cli.progress import progress_bar
from mlx_paged.errors import InvalidParameterError


@dataclass(frozen=True)
class Measurement:
    """What engines did, in the order in which they were named."""

    runs: dict[str, list[Run]]
    memory: dict[str, footprint.Footprint]


def sized(settings: Settings, prompts: Sequence[Prompt]) -> Settings:
    """Settings whose KV pool has room for all that can run at once, and not more.

    So a pool does not take the memory that the other engine needs, and its size says something.
    """
    longest = max(prompt.num_tokens + prompt.max_tokens for prompt in prompts)
    given = {name: value for name, value in settings.engine_options.items() if value is not None}
    num_seqs = min(settings.max_num_seqs, len(prompts) * settings.num_answers)
    return replace(
        settings, max_num_seqs=num_seqs, engine_options={"max_model_len": longest, **given}
    )


def measure(
    engines: Sequence[EngineName],
    settings: Settings,
    prompts: Sequence[Prompt],
    *,
    num_iters: int,
    num_iters_warmup: int,
    cold: bool,
    output_json: Path | None,
) -> Measurement:
    """Warms up and measures, with a progress bar on standard error.

    Args:
        cold: no run finds prefixes that an earlier one left.
        output_json: where the results will go.
    """
    if len(set(engines)) < len(engines):
        raise InvalidParameterError("engine", "each engine once", [e.value for e in engines])
    check_writable("output_json", output_json)
    checkout()
    with turns.opened(engines, settings) as runners:

        def rounds(what: str, count: int) -> dict[str, list[Run]]:
            with progress_bar(what, count * len(runners)) as advance:
                return turns.take_turns(runners, prompts, count, cold=cold, on_done=advance)

        if num_iters_warmup:
            rounds("warming up", num_iters_warmup)
        for runner in runners.values():
            runner.reset_peak()
        runs = rounds("measuring", num_iters)
        return Measurement(runs, {name: r.footprint() for name, r in runners.items()})


def report(
    measurement: Measurement,
    title: str,
    figures: Callable[[list[Run]], dict[str, Any]],
    lines: Callable[[Mapping[str, Any]], list[str]],
    *,
    shares: Sequence[float],
    options: Mapping[str, Any],
    output_json: Path | None,
) -> None:
    """Prints the figures of each engine, memory and comparison, and writes them as JSON.

    Args:
        title: of the benchmark.
        figures: of the runs of an engine: vLLM's keys.
        lines: `figures` as vLLM prints them.
        shares: percentiles of token latencies.
        options: what was asked, for the file.
    """
    made: dict[str, dict[str, Any]] = {}
    for name, runs in measurement.runs.items():
        of_tokens = token_latencies(runs, shares)
        heading = f" {title}: {name} "
        typer.echo(f"{heading:=^{WIDTH}}")
        made[name] = figures(runs)
        typer.echo("\n".join([*lines(made[name]), *latency_lines(of_tokens, shares)]))
        made[name] |= of_tokens | {"memory": asdict(measurement.memory[name])}
    typer.echo("=" * WIDTH)
    typer.echo(table(*footprint.rows(measurement.memory)))

    if len(made) > 1:
        typer.echo("\n" + table(["Side by side", *made], _side_by_side(list(made.values()))))
    first, *others = measurement.runs
    comparison = {
        other: compare(measurement.runs[first], measurement.runs[other]) for other in others
    }
    for other, found in comparison.items():
        typer.echo(_verdict(first, other, found))
    if output_json is not None:
        # vLLM's keys for who reads vLLM's files, then those of every engine.
        vllm = figures(measurement.runs[first])
        results = {"engine": first, "options": dict(options), "engines": made}
        write_json(output_json, {**vllm, **results, "comparison": comparison})


def _side_by_side(made: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = (
        ("Output tokens/s", "output_tokens_per_second"),
        ("Total tokens/s", "tokens_per_second"),
        ("Median TTFT (ms)", "median_ttft_ms"),
        ("Median TPOT (ms)", "median_tpot_ms"),
        ("Median ITL (ms)", "median_itl_ms"),
        ("Median E2EL (ms)", "median_e2el_ms"),
    )
    return [[name, *(f"{figures[key]:.2f}" for figures in made)] for name, key in rows]


def _verdict(first: str, other: str, found: Mapping[str, Any]) -> str:
    ratios = found["ratios"]
    spread = ""
    if len(ratios) > 1:
        spread = f" (median of {len(ratios)} turns, {min(ratios):.2f} to {max(ratios):.2f})"
    if min(ratios) < 1 < max(ratios):
        spread += ", but turns disagree about who is faster"
    return (
        f"{first} is {found['speedup']:.2f}x as fast as {other}{spread}; "
        f"{found['same_answers']} of {found['num_answers']} answers have the same tokens"
    )
