"""`mlx-paged bench latency`: how long one batch takes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_paged.cli.bench import percentiles
from mlx_paged.cli.bench import vllm_options as options
from mlx_paged.cli.bench.datasets import random_prompts, tokenizer_of
from mlx_paged.cli.entry import needs_extra

if TYPE_CHECKING:
    from mlx_paged.cli.bench.runs import Run

# The ones that vLLM tells.
_SHARES = (10, 25, 50, 75, 90, 99)
_BATCH = "Batch"


def latency(
    input_len: Annotated[
        int, typer.Option(min=1, help="Tokens of a prompt.", rich_help_panel=_BATCH)
    ] = 32,
    output_len: Annotated[
        int, typer.Option(min=1, help="Tokens of an answer.", rich_help_panel=_BATCH)
    ] = 128,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Prompts of the batch.", rich_help_panel=_BATCH)
    ] = 8,
    n: options.NumAnswers = 1,
    num_iters_warmup: Annotated[
        int, typer.Option(min=0, help="Times before the clock runs.", rich_help_panel=_BATCH)
    ] = 10,
    num_iters: Annotated[
        int, typer.Option(min=1, help="Times that are measured.", rich_help_panel=_BATCH)
    ] = 30,
    seed: options.Seed = 0,
    engine: options.Engines = [options.EngineName.MLX_PAGED],  # noqa: B006  (never changed)
    model: options.Model = None,
    dtype: options.ModelDType = options.DType.AUTO,
    temperature: options.Temperature = 0.0,
    ignore_eos: options.IgnoreEos = True,
    disable_detokenize: options.DisableDetokenize = False,
    max_num_seqs: options.MaxNumSeqs = 256,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 2048,
    max_model_len: options.MaxModelLen = None,
    block_size: options.BlockSize = 32,
    kv_cache_memory: options.KVCacheMemory = None,
    gpu_memory_utilization: options.GPUMemoryUtilization = None,
    enable_prefix_caching: options.PrefixCaching = False,
    async_scheduling: options.AsyncScheduling = True,
    metric_percentiles: options.MetricPercentiles = "50,90,99",
    output_json: options.OutputJson = None,
) -> None:
    """Generate for one batch of random prompts, again and again, and tell how long it takes.

    Examples:
      mlx-paged bench latency --input-len 512 --output-len 64 --batch-size 1
      mlx-paged bench latency --num-iters 10 --output-json latency.json
      mlx-paged bench latency --engine mlx-paged --engine mlx-lm --num-iters 10

    Options, output and JSON keys are those of `vllm bench latency`. Prefix caching is off, as every
    time has the same prompts.
    """
    with needs_extra("bench", "mlx-paged bench latency"):
        from mlx_paged.cli.bench import offline
    from mlx_paged.cli.bench.runners import Settings

    shares = percentiles.parse(metric_percentiles)
    prompts = random_prompts(tokenizer_of(model), batch_size, input_len, output_len, seed=seed)
    settings = offline.sized(
        Settings(
            model,
            dtype.value,
            n,
            temperature,
            ignore_eos,
            not disable_detokenize,
            max_num_seqs,
            seed,
            {
                "max_num_batched_tokens": max_num_batched_tokens,
                "max_model_len": max_model_len,
                "block_size": block_size,
                "kv_cache_memory": kv_cache_memory,
                "gpu_memory_utilization": gpu_memory_utilization,
                "enable_prefix_caching": enable_prefix_caching,
                "async_scheduling": async_scheduling,
            },
        ),
        prompts,
    )
    measurement = offline.measure(
        engine,
        settings,
        prompts,
        num_iters=num_iters,
        num_iters_warmup=num_iters_warmup,
        cold=False,
        output_json=output_json,
    )
    batch = {"input_len": input_len, "output_len": output_len, "batch_size": batch_size}
    offline.report(
        measurement,
        "Latency",
        figures,
        lines,
        shares=shares,
        options={
            **batch,
            "num_iters": num_iters,
            "num_iters_warmup": num_iters_warmup,
            **asdict(settings),
        },
        output_json=output_json,
    )


def figures(runs: list[Run]) -> dict[str, Any]:
    """vLLM's keys, in seconds, and the rates of a batch that takes the average time."""
    latencies = [run.seconds for run in runs]
    average = statistics.fmean(latencies)
    num_output_tokens = statistics.fmean(run.num_output_tokens for run in runs)
    return {
        "avg_latency": average,
        "std_latency": statistics.pstdev(latencies),
        "latencies": latencies,
        "percentiles": {str(s): percentiles.percentile(latencies, s) for s in _SHARES},
        "output_tokens_per_second": num_output_tokens / average,
        "tokens_per_second": (runs[0].num_prompt_tokens + num_output_tokens) / average,
    }


def lines(made: Mapping[str, Any]) -> list[str]:
    """As vLLM prints it."""
    return [
        f"Avg latency: {made['avg_latency']} seconds",
        f"Std latency: {made['std_latency']} seconds",
        *(f"{s}% percentile latency: {v} seconds" for s, v in made["percentiles"].items()),
        f"Throughput: {made['tokens_per_second']:.2f} total tokens/s, "
        f"{made['output_tokens_per_second']:.2f} output tokens/s",
    ]
