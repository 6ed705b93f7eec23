"""`mlx-paged bench throughput`: how fast many requests are done that all come at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_paged.cli.bench import percentiles
from mlx_paged.cli.bench import vllm_options as options
from mlx_paged.cli.bench.datasets import Dataset, Workload, tokenizer_of
from mlx_paged.cli.entry import needs_extra

if TYPE_CHECKING:
    from mlx_paged.cli.bench.runs import Run

_ROUNDS = "Rounds"


def throughput(
    dataset_name: options.DatasetName = Dataset.RANDOM,
    num_prompts: options.NumPrompts = 64,
    dataset_path: options.DatasetPath = None,
    input_len: options.InputLen = None,
    output_len: options.OutputLen = None,
    prefix_len: options.PrefixLen = None,
    random_range_ratio: options.RangeRatio = None,
    prefix_repetition_prefix_len: options.RepeatedPrefixLen = None,
    prefix_repetition_suffix_len: options.RepeatedSuffixLen = None,
    prefix_repetition_num_prefixes: options.NumPrefixes = None,
    system_prompt: options.SystemPrompt = None,
    seed: options.Seed = 0,
    n: options.NumAnswers = 1,
    num_iters_warmup: Annotated[
        int, typer.Option(min=0, help="Rounds before the clock runs.", rich_help_panel=_ROUNDS)
    ] = 1,
    num_iters: Annotated[
        int,
        typer.Option(
            min=1,
            help="Rounds that are measured; the one of median time is told.",
            rich_help_panel=_ROUNDS,
        ),
    ] = 1,
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
    enable_prefix_caching: options.PrefixCaching = True,
    async_scheduling: options.AsyncScheduling = True,
    metric_percentiles: options.MetricPercentiles = "50,90,99",
    output_json: options.OutputJson = None,
) -> None:
    """Generate for many requests that come at once, and tell requests and tokens a second.

    Examples:
      mlx-paged bench throughput --num-prompts 128 --input-len 256 --output-len 64
      mlx-paged bench throughput --dataset-name prefix_repetition --num-prompts 40
      mlx-paged bench throughput --dataset-name sharegpt --dataset-path chats.json --model DIR
      mlx-paged bench throughput --engine mlx-paged --engine mlx-lm --num-iters 3

    Options, output and JSON keys are those of `vllm bench throughput`. Every round begins without
    cached prefixes: what is shared is shared within the round.
    """
    with needs_extra("bench", "mlx-paged bench throughput"):
        from mlx_paged.cli.bench import offline
    from mlx_paged.cli.bench.runners import Settings

    shares = percentiles.parse(metric_percentiles)
    workload = Workload(
        dataset_name,
        num_prompts,
        dataset_path,
        input_len,
        output_len,
        prefix_len,
        random_range_ratio,
        prefix_repetition_prefix_len,
        prefix_repetition_suffix_len,
        prefix_repetition_num_prefixes,
        system_prompt,
    )
    prompts = workload.sample(tokenizer_of(model), seed)
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
        cold=True,
        output_json=output_json,
    )
    asked = {name: value for name, value in asdict(workload).items() if value is not None}
    if dataset_path is not None:
        asked["dataset_path"] = str(dataset_path)
    offline.report(
        measurement,
        "Throughput",
        figures,
        lines,
        shares=shares,
        options={
            **asked,
            "num_iters": num_iters,
            "num_iters_warmup": num_iters_warmup,
            **asdict(settings),
        },
        output_json=output_json,
    )


def figures(runs: list[Run]) -> dict[str, Any]:
    """vLLM's keys, of the round of median time."""
    from mlx_paged.cli.bench.runs import median_run, rates

    return {**rates(median_run(runs)), "elapsed_times": [run.seconds for run in runs]}


def lines(made: Mapping[str, Any]) -> list[str]:
    """As vLLM prints it."""
    cached = f" ({made['total_cached_tokens']} of them from the prefix cache)"
    return [
        f"Throughput: {made['requests_per_second']:.2f} requests/s, "
        f"{made['tokens_per_second']:.2f} total tokens/s, "
        f"{made['output_tokens_per_second']:.2f} output tokens/s",
        f"Total num prompt tokens:  {made['total_prompt_tokens']}"
        f"{cached if made['total_cached_tokens'] else ''}",
        f"Total num output tokens:  {made['total_output_tokens']}",
    ]
