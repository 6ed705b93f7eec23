"""`mlx-paged bench serve`: the figures of an endpoint under load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mlx_paged.cli.bench.datasets import Workload, tokenizer_of
from mlx_paged.cli.bench.figures import (
    WIDTH,
    answer_latencies,
    latency_lines,
    line,
    parse_percentiles,
)
from mlx_paged.cli.bench.options import MetricPercentiles, Seed
from mlx_paged.cli.bench.results import checkout, environment
from mlx_paged.cli.entry import needs_extra
from mlx_paged.cli.options import with_options
from mlx_paged.errors import InvalidParameterError, MlxPagedError

if TYPE_CHECKING:
    from mlx_paged.cli.bench.client import Result


@with_options()
def serve(
    *,
    base_url: Annotated[
        str, typer.Option(help="Of the server, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    backend: Annotated[
        Literal["openai", "openai-chat"],
        typer.Option(help="openai: /v1/completions; openai-chat: /v1/chat/completions.")
    ] = "openai",
    model: Annotated[
        str | None, typer.Option(help="Name in the API.", show_default="the server's first")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Directory or id, to make prompts.", show_default="the embedded model's"),
    ] = None,
    workload: Workload,
    request_rate: Annotated[
        float, typer.Option(min=0.001, help="Requests a second.", show_default="inf: all at once")
    ] = float("inf"),
    burstiness: Annotated[float, typer.Option(min=0.01, help="1: Poisson; less: bursts.")] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most requests at once.")
    ] = None,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests not measured.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Answers of full length.")] = True,
    extra_body: Annotated[str, typer.Option(help="JSON object: more fields.")] = "{}",
    api_key: Annotated[
        str | None, typer.Option(help="Key.", envvar="MLX_PAGED_API_KEY")
    ] = None,
    metric_percentiles: MetricPercentiles = "50,90,99",
    seed: Seed = 0,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write JSON.")] = False,
    result_filename: Annotated[
        Path | None, typer.Option(help="Where to.", show_default="by time and model")
    ] = None,
) -> None:  # fmt: skip
    """Send a workload to any OpenAI endpoint, and report latency and throughput.

    Examples:
      mlx-paged bench serve --base-url http://127.0.0.1:8000 --num-prompts 200
      mlx-paged bench serve --request-rate 10 --save-result

    Output and JSON keys are those of `vllm bench serve`.
    """
    with needs_extra("bench", "mlx-paged bench serve"):
        from mlx_paged.cli.bench import client
    checkout()
    shares = parse_percentiles(metric_percentiles)
    extra = _extra(extra_body)
    name = model or asyncio.run(_first_model(base_url, api_key))
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


def root_of(base_url: str) -> str:
    """A server's address without the /v1 that OpenAI's clients want at its end."""
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


async def _first_model(base_url: str, key: str | None) -> str:
    import aiohttp

    from mlx_paged.cli.bench.client import hint_of

    url = root_of(base_url) + "/v1/models"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
            if not answer.ok:
                reason = f"{answer.status} {answer.reason}{hint_of(answer.status)}"
                raise MlxPagedError(f"{url} does not name a model: {reason}")
            return str((await answer.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, KeyError, IndexError, TypeError, ValueError) as error:
        raise MlxPagedError(f"{url} does not name a model: {error}") from error


# --- Figures, in the form of `vllm bench serve` ---------------------------------------------------


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
    return made | answer_latencies(good, percentiles)


def text(
    made: dict[str, Any], rate: float, concurrency: int | None, shares: Sequence[float]
) -> str:
    """The table."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
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
    lines += latency_lines(made, shares)
    lines.append("=" * WIDTH)
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
