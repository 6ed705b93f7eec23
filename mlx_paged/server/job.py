"""The engine's requests that one HTTP request stands for."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from mlx_paged.core import FinishReason
from mlx_paged.engine.async_engine import RequestStream, SequenceDelta
from mlx_paged.engine.outputs import RequestOutput
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import EngineDeadError, EngineOverloadedError, MlxPagedError
from mlx_paged.server import errors
from mlx_paged.server.context import Context
from mlx_paged.server.trace import Trace

logger = logging.getLogger(__name__)

_serial = itertools.count()


class Job:
    """Submits prompts, and hands out what their sequences gain.

    Used as ``async with``: entering submits (unless that was done before, so that a stream begins
    with a right status), leaving ends what is unfinished and writes the books.

    Args:
        prompts: tokens, one list for each engine request.
        params: for all of them.
    """

    def __init__(
        self,
        context: Context,
        trace: Trace,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        self.params = params
        self.prompts = prompts
        self._context = context
        self._trace = trace
        self._options: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt}
        self._streams: list[RequestStream] = []
        self._started = time.monotonic()
        self._first: float | None = None
        self._last: dict[tuple[int, int], float] = {}  # by stream and sequence
        self._num_tokens = 0
        self._reasons: set[FinishReason] = set()

    @property
    def outputs(self) -> list[RequestOutput]:
        """What the engine keeps, one for each prompt; whole when the deltas have ended."""
        return [stream.output for stream in self._streams]

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed again."""
        return sum(output.num_cached_tokens for output in self.outputs)

    async def __aenter__(self) -> Job:
        if not self._streams:
            await self.submit()
        return self

    async def submit(self) -> None:
        """Submits all prompts, or none.

        Raises:
            ApiError: the engine refuses one.
        """
        context, trace = self._context, self._trace
        try:
            for prompt in self.prompts:
                self._streams.append(
                    await context.engine.add_request(
                        prompt,
                        self.params,
                        # Clients may use an id twice; the engine must not meet it twice.
                        request_id=f"{trace.request_id}-{next(_serial)}",
                        timeout=context.config.request_timeout,
                        **self._options,
                    )
                )
        except MlxPagedError as error:
            self._close_streams()
            if isinstance(error, EngineOverloadedError):
                context.metrics.reject("queue_full")
            elif not isinstance(error, EngineDeadError):
                context.metrics.reject("invalid")
            else:
                context.check_takes_requests()  # knows more about the cause
            raise errors.from_engine(error, trace.request_id) from error
        except BaseException:
            self._close_streams()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._close_streams()
        self._write_books()

    def _close_streams(self) -> None:
        for stream in self._streams:
            stream.close()

    async def deltas(self) -> AsyncIterator[tuple[int, SequenceDelta]]:
        """(prompt's place, what one of its sequences gained), as it comes.

        Raises:
            ApiError: a sequence ended without being finished.
        """
        try:
            if len(self._streams) == 1:  # (without another generator for each token)
                async for delta in self._streams[0]:
                    self._note(0, delta)
                    yield 0, delta
            else:
                async for place, delta in _merged(self._streams):
                    self._note(place, delta)
                    yield place, delta
        except MlxPagedError as error:
            logger.error("%s", error, extra={"request_id": self._trace.request_id})
            if isinstance(error, EngineDeadError):
                self._context.check_takes_requests()
            raise errors.from_engine(error, self._trace.request_id) from error

    def _check(self, reason: FinishReason, delta: SequenceDelta) -> None:
        if reason is FinishReason.TIMEOUT:
            raise errors.timed_out(self._context.config.request_timeout)
        if reason is FinishReason.ABORT:
            self._context.check_takes_requests()
            raise errors.unavailable("the request was aborted", "aborted")
        if reason is FinishReason.ERROR:
            assert delta.error is not None
            raise delta.error

    def _note(self, place: int, delta: SequenceDelta) -> None:
        """Writes down what came, and raises if the sequence ended without being finished."""
        count = len(delta.token_ids)
        if count:
            now = time.monotonic()
            metrics = self._context.metrics
            self._num_tokens += count
            if self._first is None:
                self._first = now
                metrics.first_token(now - self._started)
            key = place, delta.index
            if key in self._last:
                metrics.tokens(now - self._last[key], count)
            self._last[key] = now
        reason = delta.finish_reason
        if reason is not None:
            self._reasons.add(reason)
            self._check(reason, delta)

    def _write_books(self) -> None:
        for stream in self._streams:
            output = stream.output
            ends = [answer.finish_reason for answer in output.outputs]
            reason = next((r for r in ends if r is not None), FinishReason.ABORT)
            if not output.finished:
                reason = FinishReason.ABORT  # (the engine's thread has not come to it yet)
            self._context.metrics.finish(output, reason, self.params.max_tokens)
        fields = self._trace.fields
        fields["prompt_tokens"] = self.num_prompt_tokens
        fields["cached_tokens"] = self.num_cached_tokens
        fields["completion_tokens"] = self._num_tokens
        if self._first is not None:
            fields["ttft"] = round(self._first - self._started, 4)
        reasons = sorted(reason.value for reason in self._reasons)
        fields["finish_reason"] = ",".join(reasons) or FinishReason.ABORT.value


async def _merged(streams: list[RequestStream]) -> AsyncIterator[tuple[int, SequenceDelta]]:
    """Several streams as one; each waits while the reader is busy, so nothing piles up."""
    queue: asyncio.Queue[tuple[int, SequenceDelta | Exception | None]] = asyncio.Queue(1)

    async def pump(place: int, stream: RequestStream) -> None:
        try:
            async for delta in stream:
                await queue.put((place, delta))
            await queue.put((place, None))
        except Exception as error:
            await queue.put((place, error))

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        unfinished = len(tasks)
        while unfinished:
            place, news = await queue.get()
            if news is None:
                unfinished -= 1
            elif isinstance(news, Exception):
                raise news
            else:
                yield place, news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
