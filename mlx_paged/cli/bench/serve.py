"""`mlx-paged bench serve`: the figures of an endpoint under load."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_paged.cli.bench import percentiles
from mlx_paged.cli.bench import vllm_options as options
from mlx_paged.cli.bench.datasets import Dataset, Workload, tokenizer_of
from mlx_paged.cli.bench.environment import checkout, environment
from mlx_paged.cli.entry import needs_extra
from mlx_paged.errors import InvalidParameterError, MlxPagedError


class Backend(StrEnum):
    """Which endpoint is asked."""

    OPENAI = "openai"
    OPENAI_CHAT = "openai-chat"


def serve(
    base_url: Annotated[
        str, typer.Option(help="Of the server, without /v1.")
    ] = "http://127.0.0.1:8000",
    backend: Annotated[
        Backend, typer.Option(help="openai: /v1/completions; openai-chat: /v1/chat/completions.")
    ] = Backend.OPENAI,
    model: Annotated[
        str | None, typer.Option(help="Name in the API.", show_default="the server's first")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Directory or id, to make prompts.", show_default="the embedded model's"),
    ] = None,
    dataset_name: options.DatasetName = Dataset.RANDOM,
    num_prompts: options.NumPrompts = 64,
    dataset_path: options.DatasetPath = None,
    random_input_len: options.InputLen = None,
    random_output_len: options.OutputLen = None,
    random_prefix_len: options.PrefixLen = None,
    random_range_ratio: options.RangeRatio = None,
    prefix_repetition_prefix_len: options.RepeatedPrefixLen = None,
    prefix_repetition_suffix_len: options.RepeatedSuffixLen = None,
    prefix_repetition_num_prefixes: options.NumPrefixes = None,
    system_prompt: options.SystemPrompt = None,
    request_rate: Annotated[
        float, typer.Option(min=0.001, help="Requests a second.", show_default="inf: all at once")
    ] = float("inf"),
    burstiness: Annotated[float, typer.Option(min=0.01, help="1: Poisson; less: bursts.")] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most requests at once.")
    ] = None,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before the clock runs.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Answers of full length.")] = True,
    extra_body: Annotated[str, typer.Option(help="JSON object: more fields.")] = "{}",
    api_key: Annotated[
        str | None, typer.Option(help="Key.", envvar="MLX_PAGED_API_KEY")
    ] = None,
    metric_percentiles: options.MetricPercentiles = "50,90,99",
    seed: options.Seed = 0,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write JSON.")] = False,
    result_filename: Annotated[
        Path | None, typer.Option(help="Where to.", show_default="by time and model")
    ] = None,
) -> None:  # fmt: skip
    """Send a workload to any OpenAI endpoint, and tell latency and throughput.

    Examples:
      mlx-paged bench serve --base-url http://127.0.0.1:8000 --num-prompts 200
      mlx-paged bench serve --request-rate 10 --save-result

    Output and JSON keys are those of `vllm bench serve`.
    """
    with needs_extra("bench", "mlx-paged bench serve"):
        from mlx_paged.cli.bench import client
    from mlx_paged.cli.bench import report

    checkout()
    shares = percentiles.parse(metric_percentiles)
    extra = _extra(extra_body)
    name = model or asyncio.run(_first_model(base_url, api_key))
    workload = Workload(
        dataset_name,
        num_warmups + num_prompts,
        dataset_path,
        random_input_len,
        random_output_len,
        random_prefix_len,
        random_range_ratio,
        prefix_repetition_prefix_len,
        prefix_repetition_suffix_len,
        prefix_repetition_num_prefixes,
        system_prompt,
    )
    of_prompts = tokenizer_of(tokenizer)
    prompts = [prompt.as_text(of_prompts) for prompt in workload.sample(of_prompts, seed)]
    chat = backend is Backend.OPENAI_CHAT
    path = "/v1/chat/completions" if chat else "/v1/completions"
    target = client.Target(
        base_url.rstrip("/") + path,
        name,
        chat,
        {"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {}), **extra},
        api_key,
    )
    if num_warmups:
        warm, _ = asyncio.run(client.run(target, prompts[:num_warmups]))
        if not any(r.success for r in warm):
            raise MlxPagedError(f"{target.url} does not answer: {warm[0].error}")
    results, duration = asyncio.run(
        client.run(
            target,
            prompts[num_warmups:],
            rate=request_rate,
            burstiness=burstiness,
            concurrency=max_concurrency,
            seed=seed,
        )
    )
    made = report.figures(results, duration, shares)
    typer.echo(report.text(made, request_rate, max_concurrency, shares))
    if save_result:
        now = datetime.now().strftime("%Y%m%d-%H%M%S")
        file = result_filename or Path(f"{backend.value}-{request_rate:g}qps-{now}.json")
        saved = {
            "environment": environment(),  # of the client
            "date": now,
            "endpoint_type": backend.value,
            "backend": backend.value,
            "model_id": name,
            "tokenizer_id": tokenizer or name,
            "num_prompts": num_prompts,
            "request_rate": "inf" if request_rate == float("inf") else request_rate,
            "burstiness": burstiness,
            "max_concurrency": max_concurrency,
            **made,
        }
        file.write_text(json.dumps(saved) + "\n")
    if made["completed"] == 0:
        raise MlxPagedError(f"no request succeeded: {results[0].error}")


def _extra(given: str) -> dict[str, Any]:
    try:
        extra = json.loads(given)
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise InvalidParameterError("extra_body", "a JSON object", given)
    return extra


async def _first_model(base_url: str, key: str | None) -> str:
    import aiohttp

    url = base_url.rstrip("/") + "/v1/models"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
            answer.raise_for_status()
            return str((await answer.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, KeyError, IndexError) as error:
        raise MlxPagedError(f"{url} does not name a model: {error}") from error
