"""`mlx-paged bench serve`: measures an OpenAI endpoint under load."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mlx_paged.bench.datasets import Workload, tokenizer_of
from mlx_paged.bench.figures import parse_percentiles
from mlx_paged.bench.results import checkout, environment
from mlx_paged.bench.serve import figures, first_model, root_of, text
from mlx_paged.cli.bench.options import MetricPercentiles, Seed
from mlx_paged.cli.options import with_options
from mlx_paged.errors import InvalidParameterError, MlxPagedError
from mlx_paged.extras import needs_extra


@with_options()
def serve(
    *,
    base_url: Annotated[
        str, typer.Option(help="URL of the server, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    backend: Annotated[
        Literal["openai", "openai-chat"],
        typer.Option(help="openai: /v1/completions; openai-chat: /v1/chat/completions.")
    ] = "openai",
    model: Annotated[
        str | None, typer.Option(help="Model name in the API.", show_default="the server's first")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Model whose tokenizer makes prompts.", show_default="the embedded one"),
    ] = None,
    workload: Workload,
    request_rate: Annotated[
        float, typer.Option(min=0.001, help="Requests per second.", show_default="inf: all at once")
    ] = float("inf"),
    burstiness: Annotated[float, typer.Option(min=0.01, help="Burstiness of arrivals. 1: "
                                                             "Poisson; less: bursts.")] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Maximum concurrent requests.")
    ] = None,
    num_warmups: Annotated[int, typer.Option(min=0, help="Warm-up requests.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Generate answers to their full length.")] = True,
    extra_body: Annotated[str, typer.Option(help="Additional request fields, as a JSON "
                                                 "object.")] = "{}",
    api_key: Annotated[
        str | None, typer.Option(help="API key.", envvar="MLX_PAGED_API_KEY")
    ] = None,
    metric_percentiles: MetricPercentiles = "50,90,99",
    seed: Seed = 0,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Write results as JSON.")
    ] = False,
    result_filename: Annotated[
        Path | None,
        typer.Option(help="File for the results.", show_default="backend, rate and time"),
    ] = None,
) -> None:  # fmt: skip
    """Send a workload to any OpenAI endpoint, and report latency and throughput.

    Examples:
      mlx-paged bench serve --base-url http://127.0.0.1:8000 --num-prompts 200
      mlx-paged bench serve --request-rate 10 --save-result

    Output and JSON keys are those of `vllm bench serve`.
    """
    with needs_extra("bench", "mlx-paged bench serve"):
        from mlx_paged.bench import client
    checkout()
    shares = parse_percentiles(metric_percentiles)
    extra = _extra(extra_body)
    name = model or asyncio.run(first_model(base_url, api_key))
    asked = replace(workload, num_prompts=num_warmups + workload.num_prompts)
    of_prompts = tokenizer_of(tokenizer)
    prompts = [prompt.as_text(of_prompts) for prompt in asked.sample(of_prompts, seed)]
    chat = backend == "openai-chat"
    path = "/v1/chat/completions" if chat else "/v1/completions"
    target = client.Target(
        root_of(base_url) + path,
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
    made = figures(results, duration, shares)
    typer.echo(text(made, request_rate, max_concurrency, shares))
    if save_result:
        now = datetime.now().strftime("%Y%m%d-%H%M%S")
        file = result_filename or Path(f"{backend}-{request_rate:g}qps-{now}.json")
        saved = {
            "environment": environment(),  # of the client
            "date": now,
            "endpoint_type": backend,
            "backend": backend,
            "model_id": name,
            "tokenizer_id": tokenizer or name,
            "num_prompts": workload.num_prompts,
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
