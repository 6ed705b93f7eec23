"""Results of a load test against an endpoint, with the keys and the table of `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlx_paged.bench.figures import WIDTH, answer_latencies, latency_lines, line
from mlx_paged.errors import MlxPagedError

if TYPE_CHECKING:
    from mlx_paged.bench.client import Result


def root_of(base_url: str) -> str:
    """Returns a server's address without the trailing /v1 that OpenAI clients expect."""
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


async def first_model(base_url: str, key: str | None) -> str:
    """Returns the name of the server's first model.

    Raises:
        MlxPagedError: The server does not answer, or lists no model.
    """
    import aiohttp

    from mlx_paged.bench.client import hint_of

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


def figures(
    results: Sequence[Result], duration: float, percentiles: Sequence[float]
) -> dict[str, Any]:
    """All measurements; times in milliseconds, under vLLM's keys.

    Two figures are not vLLM's: ``longest_gap_ms`` (between two chunks of one answer) and
    ``num_chunks`` (fewer than tokens if the server clumps them).
    """
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
        "longest_gap_ms": 1000 * max((gap for r in good for gap in r.itl), default=0.0),
        "num_chunks": sum(1 + len(r.itl) for r in good),
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
    """The results as a table."""
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
        ("Chunks of generated text:", "num_chunks"),
        ("Total cached prompt tokens:", "total_cached_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
        ("Peak concurrent requests:", "max_concurrent_requests"),
        ("Total token throughput (tok/s):", "total_token_throughput"),
    ):
        lines.append(line(name, made[key]))
    lines += latency_lines(made, shares)
    lines.append(line("Longest gap (ms):", made["longest_gap_ms"]))
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def _peak(results: Sequence[Result]) -> float:
    """Maximum number of tokens (text chunks) that arrived in any one second."""
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
