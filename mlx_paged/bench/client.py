"""Load generator for OpenAI-compatible endpoints: request arrivals and per-request timings."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from mlx_paged.bench.datasets import Prompt
from mlx_paged.bench.figures import time_per_token

# Reading is part of the measurement. Log-probabilities make stream lines long.
_READ_BUFFER = 1 << 20


@dataclass
class Result:
    """The timings of one request, in seconds."""

    prompt: Prompt
    success: bool = False
    started: float = 0.0
    latency: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    num_prompt_tokens: int | None = None  # as the server counted
    num_cached_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """See `time_per_token`."""
        return time_per_token(self.ttft, self.latency, self.num_output_tokens)


@dataclass(frozen=True)
class Target:
    """The endpoint, and request fields other than the prompt and its limit."""

    url: str
    model: str
    chat: bool
    extra: dict[str, Any]
    key: str | None = None


async def arrivals(
    prompts: Sequence[Prompt], rate: float, burstiness: float, seed: int
) -> AsyncIterator[Prompt]:
    """Yields prompts at a mean rate (requests per second; inf: all at once), with gamma gaps."""
    rng = random.Random(seed)
    due = time.perf_counter()
    for prompt in prompts:
        yield prompt
        if rate != float("inf"):
            due += rng.gammavariate(burstiness, 1 / (rate * burstiness))
            await asyncio.sleep(max(0.0, due - time.perf_counter()))


def hint_of(status: int) -> str:
    """Returns a hint for an HTTP status, if a command-line option affects it."""
    return " (give --api-key)" if status == 401 else ""


async def one_request(session: aiohttp.ClientSession, target: Target, prompt: Prompt) -> Arrivals:
    """Sends a prompt and records its stream."""
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": prompt.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra,
    }
    if target.chat:
        alone = [{"role": "user", "content": prompt.text}]
        body["messages"] = alone if prompt.messages is None else list(prompt.messages)
    else:
        body["prompt"] = prompt.text
    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    seen = Arrivals(prompt, time.perf_counter())
    try:
        async with await _post(session, target.url, json=body, headers=headers) as response:
            if response.status != 200:
                told = (await response.text())[:500]
                seen.error = f"{response.status}{hint_of(response.status)}: {told}"
                return seen
            async for data in response.content.iter_any():
                seen.pieces.append((time.perf_counter(), data))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    return seen


async def _post(session: aiohttp.ClientSession, url: str, **options: Any) -> aiohttp.ClientResponse:
    """Sends a request, and again if it went to a kept-alive connection that the server closed.

    A server may close an idle connection while a request is on its way (RFC 9112, section 9.3.1),
    which is not a failure of the server. Each attempt uses up a kept connection. A request is not
    repeated if its connection was new or if any byte of an answer came.

    Args:
        session: From `_session`.
    """
    while True:
        attempt = _Attempt()
        try:
            return await session.post(url, trace_request_ctx=attempt, **options)
        except aiohttp.ServerDisconnectedError as error:
            if not attempt.is_reused or not isinstance(error.message, str):  # headers of an answer
                raise
        except aiohttp.ClientOSError:
            if not attempt.is_reused:
                raise


@dataclass
class _Attempt:
    """One attempt to send a request."""

    is_reused: bool = False  # the connection has carried a request before


def _session() -> aiohttp.ClientSession:
    """Returns a client session that tells `_post` about reused connections."""

    async def note(_: Any, context: Any, __: Any) -> None:
        context.trace_request_ctx.is_reused = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(note)
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=6 * 3600),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=_READ_BUFFER,
        trace_configs=[trace],
    )


@dataclass
class Arrivals:
    """The bytes of a stream with their arrival times, parsed after the benchmark has ended.

    The client shares the machine with the server it measures, and parsing JSON while receiving took
    longer than receiving itself.
    """

    prompt: Prompt
    started: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""

    def result(self) -> Result:
        """Returns the timings of the request."""
        result = Result(self.prompt, started=self.started, error=self.error)
        if not self.error:
            try:
                self._read(result)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                result.error = f"{type(error).__name__}: {error}"
        return result

    def _lines(self) -> Iterator[tuple[float, bytes]]:
        """Yields whole lines, each with the arrival time of its end."""
        rest = b""
        for moment, data in self.pieces:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield moment, line

    def _read(self, result: Result) -> None:
        last = result.started
        num_chunks = 0
        for now, line in self._lines():
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                break
            chunk = json.loads(data)
            if "error" in chunk:
                result.error = str(chunk["error"])
                return
            if usage := chunk.get("usage"):
                result.num_output_tokens = usage["completion_tokens"]
                result.num_prompt_tokens = usage["prompt_tokens"]
                details = usage.get("prompt_tokens_details") or {}
                result.num_cached_tokens = details.get("cached_tokens") or 0
            for choice in chunk.get("choices") or ():
                text = choice.get("text") or (choice.get("delta") or {}).get("content")
                if not text:
                    continue
                if num_chunks == 0:
                    result.ttft = now - result.started
                else:
                    result.itl.append(now - last)
                last = now
                num_chunks += 1
                result.text += text
        result.latency = last - result.started
        result.num_output_tokens = result.num_output_tokens or num_chunks
        result.success = num_chunks > 0
        if not result.success:
            result.error = "the stream had no text"


async def run(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    rate: float = float("inf"),
    burstiness: float = 1.0,
    concurrency: int | None = None,
    seed: int = 0,
) -> tuple[list[Result], float]:
    """Runs a workload.

    Args:
        rate: Mean requests a second.
        burstiness: 1 is a Poisson process; less is burstier.
        concurrency: Maximum concurrent requests; None means no limit.

    Returns:
        Results in the order of the prompts, and the seconds for all of them.
    """
    gate = asyncio.Semaphore(concurrency or len(prompts) or 1)
    async with _session() as session:

        async def limited(prompt: Prompt) -> Arrivals:
            async with gate:
                return await one_request(session, target, prompt)

        start = time.perf_counter()
        tasks = [
            asyncio.create_task(limited(prompt))
            async for prompt in arrivals(prompts, rate, burstiness, seed)
        ]
        seen = await asyncio.gather(*tasks)
        duration = time.perf_counter() - start
    return [arrivals.result() for arrivals in seen], duration
