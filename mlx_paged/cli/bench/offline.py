"""`mlx-paged bench latency` and `bench throughput`: measures engines in turn, without a server."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_paged.bench.datasets import Prompt, Workload, random_prompts, tokenizer_of
from mlx_paged.bench.figures import (
    WIDTH,
    EngineName,
    Run,
    compare,
    latency_lines,
    median_run,
    parse_percentiles,
    percentile,
    rates,
    token_latencies,
)
from mlx_paged.bench.results import check_writable, checkout, table, write_json
from mlx_paged.cli.bench.options import (
    EngineOptions,
    NumAnswers,
    ReportOptions,
    Seed,
)
from mlx_paged.cli.options import fields_of, option, with_options
from mlx_paged.cli.progress import progress_bar
from mlx_paged.errors import InvalidParameterError
from mlx_paged.extras import needs_extra
from mlx_paged.formatting import format_size

if TYPE_CHECKING:
    from mlx_paged.bench.engines import Footprint, Settings

_BATCH, _ROUNDS = "Batch", "Rounds"
_UNCACHED = EngineOptions(enable_prefix_caching=False)
# The percentiles of `vllm bench latency`.
_SHARES = (10, 25, 50, 75, 90, 99)


@with_options()
def latency(
    *,
    input_len: Annotated[int, option(_BATCH, "Tokens per prompt.", min=1)] = 32,
    output_len: Annotated[int, option(_BATCH, "Tokens per answer.", min=1)] = 128,
    batch_size: Annotated[int, option(_BATCH, "Prompts per batch.", min=1)] = 8,
    n: NumAnswers = 1,
    num_iters_warmup: Annotated[int, option(_BATCH, "Warm-up runs.", min=0)] = 10,
    num_iters: Annotated[int, option(_BATCH, "Measured runs.", min=1)] = 30,
    seed: Seed = 0,
    setup: EngineOptions = _UNCACHED,
    report: ReportOptions,
) -> None:
    """Generate for one batch of random prompts repeatedly, and report how long it takes.

    Examples:
      mlx-paged bench latency --input-len 512 --output-len 64 --batch-size 1
      mlx-paged bench latency --num-iters 10 --output-json latency.json
      mlx-paged bench latency --engine mlx-paged --engine mlx-lm --num-iters 10

    Options, output and JSON keys are those of `vllm bench latency`. Prefix caching is off, because
    the prompts are the same every time.
    """
    tokenizer = tokenizer_of(setup.model)
    prompts = random_prompts(tokenizer, batch_size, input_len, output_len, seed=seed)
    run(
        LATENCY,
        prompts,
        setup,
        report,
        num_answers=n,
        seed=seed,
        rounds={"num_iters": num_iters, "num_iters_warmup": num_iters_warmup},
        asked={"input_len": input_len, "output_len": output_len, "batch_size": batch_size},
    )


@with_options()
def throughput(
    *,
    workload: Workload,
    seed: Seed = 0,
    n: NumAnswers = 1,
    num_iters_warmup: Annotated[int, option(_ROUNDS, "Warm-up rounds.", min=0)] = 1,
    num_iters: Annotated[
        int, option(_ROUNDS, "Measured rounds; the median round is reported.", min=1)
    ] = 1,
    setup: EngineOptions,
    report: ReportOptions,
) -> None:
    """Generate for many requests that arrive at once, and report requests and tokens per second.

    Examples:
      mlx-paged bench throughput --num-prompts 128 --input-len 256 --output-len 64
      mlx-paged bench throughput --dataset-name prefix_repetition --num-prompts 40
      mlx-paged bench throughput --dataset-name sharegpt --dataset-path chats.json --model DIR
      mlx-paged bench throughput --engine mlx-paged --engine mlx-lm --num-iters 3

    Options, output and JSON keys are those of `vllm bench throughput`. Every round starts with an
    empty prefix cache, so prefixes are shared only within a round.
    """
    prompts = workload.sample(tokenizer_of(setup.model), seed)
    asked = {name: value for name, value in asdict(workload).items() if value is not None}
    if workload.dataset_path is not None:
        asked["dataset_path"] = str(workload.dataset_path)
    run(
        THROUGHPUT,
        prompts,
        setup,
        report,
        num_answers=n,
        seed=seed,
        rounds={"num_iters": num_iters, "num_iters_warmup": num_iters_warmup},
        asked=asked,
    )


# --- Measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Benchmark:
    """The differences between the two benchmarks.

    Attributes:
        title: Title of the report.
        cold: Clear the prefix cache before each round.
        figures: Returns the figures of an engine's runs, with vLLM's keys.
        lines: Formats the figures as vLLM does.
    """

    title: str
    cold: bool
    figures: Callable[[list[Run]], dict[str, Any]]
    lines: Callable[[Mapping[str, Any]], list[str]]


def run(
    benchmark: Benchmark,
    prompts: Sequence[Prompt],
    setup: EngineOptions,
    report: ReportOptions,
    *,
    num_answers: int,
    seed: int,
    rounds: Mapping[str, int],
    asked: Mapping[str, Any],
) -> None:
    """Measures engines; prints their figures and a comparison, and writes them as JSON.

    Args:
        rounds: `num_iters` and `num_iters_warmup`.
        asked: Further options to store in the file.
    """
    with needs_extra("bench", f"mlx-paged bench {benchmark.title.lower()}"):
        import mlx_paged.bench.engines  # noqa: F401

    shares = parse_percentiles(report.metric_percentiles)
    if len(set(setup.engine)) < len(setup.engine):
        names = [engine.value for engine in setup.engine]
        raise InvalidParameterError("engine", "each engine once", names)
    check_writable("output_json", report.output_json)
    settings = settings_for(setup, prompts, num_answers, seed)
    measured, memory = _measure(setup.engine, settings, prompts, cold=benchmark.cold, **rounds)
    made: dict[str, dict[str, Any]] = {}
    for name, runs in measured.items():
        of_tokens = token_latencies(runs, shares)
        heading = f" {benchmark.title}: {name} "
        typer.echo(f"{heading:=^{WIDTH}}")
        made[name] = benchmark.figures(runs)
        typer.echo("\n".join([*benchmark.lines(made[name]), *latency_lines(of_tokens, shares)]))
        made[name] |= of_tokens | {"memory": asdict(memory[name])}
    typer.echo("=" * WIDTH)
    typer.echo(table(*_memory_rows(memory)))

    if len(made) > 1:
        typer.echo("\n" + table(["Side by side", *made], _side_by_side(list(made.values()))))
    first, *others = measured
    comparison = {other: compare(measured[first], measured[other]) for other in others}
    for other, found in comparison.items():
        typer.echo(_verdict(first, other, found))
    if report.output_json is not None:
        # First vLLM's keys, for tools that read its files, then the figures of every engine.
        vllm = benchmark.figures(measured[first])
        options = {**asked, **rounds, **asdict(settings)}
        results = {"engine": first, "options": options, "engines": made}
        write_json(report.output_json, {**vllm, **results, "comparison": comparison})


def settings_for(
    setup: EngineOptions, prompts: Sequence[Prompt], num_answers: int, seed: int
) -> Settings:
    """Returns settings from options, with a KV pool just large enough for the prompts."""
    from mlx_paged.bench.engines import Settings
    from mlx_paged.engine.config import EngineConfig

    engine_options = fields_of(EngineConfig, setup)
    return sized(
        Settings(
            model=setup.model,
            dtype=setup.dtype,
            num_answers=num_answers,
            temperature=setup.temperature,
            ignore_eos=setup.ignore_eos,
            detokenize=not setup.disable_detokenize,
            max_num_seqs=engine_options.pop("max_num_seqs"),
            seed=seed,
            engine_options=engine_options,
        ),
        prompts,
    )


def sized(settings: Settings, prompts: Sequence[Prompt]) -> Settings:
    """Returns settings with a KV pool just large enough for all concurrent sequences.

    This leaves memory for the other engine, and makes the size of the pool comparable.
    """
    longest = max(prompt.num_tokens + prompt.max_tokens for prompt in prompts)
    given = {name: value for name, value in settings.engine_options.items() if value is not None}
    num_seqs = min(settings.max_num_seqs, len(prompts) * settings.num_answers)
    return replace(
        settings, max_num_seqs=num_seqs, engine_options={"max_model_len": longest, **given}
    )


def _measure(
    engines: Sequence[EngineName],
    settings: Settings,
    prompts: Sequence[Prompt],
    *,
    num_iters: int,
    num_iters_warmup: int,
    cold: bool,
) -> tuple[dict[str, list[Run]], dict[str, Footprint]]:
    """Returns the runs and the memory of each engine; shows a progress bar on stderr."""
    from mlx_paged.bench.engines import opened, take_turns

    checkout()
    with opened(engines, settings) as runners:

        def rounds(what: str, count: int) -> dict[str, list[Run]]:
            with progress_bar(what, count * len(runners)) as advance:
                return take_turns(runners, prompts, count, cold=cold, on_done=advance)

        if num_iters_warmup:
            rounds("warming up", num_iters_warmup)
        for runner in runners.values():
            runner.reset_peak()
        runs = rounds("measuring", num_iters)
        return runs, {name: r.footprint() for name, r in runners.items()}


# --- Reports --------------------------------------------------------------------------------------


def latency_figures_of(runs: list[Run]) -> dict[str, Any]:
    """Returns latencies in seconds, with vLLM's keys, and the rates at the average latency."""
    latencies = [run.seconds for run in runs]
    average = statistics.fmean(latencies)
    num_output_tokens = statistics.fmean(run.num_output_tokens for run in runs)
    return {
        "avg_latency": average,
        "std_latency": statistics.pstdev(latencies),
        "latencies": latencies,
        "percentiles": {str(s): percentile(latencies, s) for s in _SHARES},
        "output_tokens_per_second": num_output_tokens / average,
        "tokens_per_second": (runs[0].num_prompt_tokens + num_output_tokens) / average,
    }


def latency_report(made: Mapping[str, Any]) -> list[str]:
    """Formats latencies as `vllm bench latency` does."""
    return [
        f"Avg latency: {made['avg_latency']} seconds",
        f"Std latency: {made['std_latency']} seconds",
        *(f"{s}% percentile latency: {v} seconds" for s, v in made["percentiles"].items()),
        f"Throughput: {made['tokens_per_second']:.2f} total tokens/s, "
        f"{made['output_tokens_per_second']:.2f} output tokens/s",
    ]


def throughput_figures(runs: list[Run]) -> dict[str, Any]:
    """Returns the rates of the round with the median time, with vLLM's keys."""
    return {**rates(median_run(runs)), "elapsed_times": [run.seconds for run in runs]}


def throughput_report(made: Mapping[str, Any]) -> list[str]:
    """Formats rates as `vllm bench throughput` does."""
    cached = f" ({made['total_cached_tokens']} of them from the prefix cache)"
    return [
        f"Throughput: {made['requests_per_second']:.2f} requests/s, "
        f"{made['tokens_per_second']:.2f} total tokens/s, "
        f"{made['output_tokens_per_second']:.2f} output tokens/s",
        f"Total num prompt tokens:  {made['total_prompt_tokens']}"
        f"{cached if made['total_cached_tokens'] else ''}",
        f"Total num output tokens:  {made['total_output_tokens']}",
    ]


LATENCY = Benchmark("Latency", False, latency_figures_of, latency_report)
THROUGHPUT = Benchmark("Throughput", True, throughput_figures, throughput_report)


def _memory_rows(footprints: Mapping[str, Footprint]) -> tuple[list[str], list[list[str]]]:
    """Returns the header and rows of a table with one column per engine."""
    columns = list(footprints.values())

    def row(name: str, values: Sequence[int | None]) -> list[str]:
        return [name, *("-" if value is None else format_size(value) for value in values)]

    return ["Memory", *footprints], [
        row("Process memory (peak)", [f.process_peak for f in columns]),
        row("MLX peak memory", [f.mlx_peak for f in columns]),
        row("MLX cache memory", [f.mlx_cache for f in columns]),
        row("KV pool", [f.pool for f in columns]),
        row("KV pool, most used", [f.pool_used for f in columns]),
        ["System memory", *(_share(f) for f in columns)],
    ]


def _share(footprint: Footprint) -> str:
    used, total = footprint.system_used, footprint.system_total
    return f"{format_size(used)} of {format_size(total)} ({used / total:.0%})"


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
        spread += ", but turns disagree on which is faster"
    return (
        f"{first} is {found['speedup']:.2f}x as fast as {other}{spread}; "
        f"{found['same_answers']} of {found['num_answers']} answers have the same tokens"
    )
