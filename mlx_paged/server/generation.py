"""Generation: submits the prompts of one HTTP request, and yields their tokens as pieces."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.requests import Request

from mlx_paged.core import FinishReason
from mlx_paged.engine.client import EngineRequest
from mlx_paged.engine.media import PreparedMedia
from mlx_paged.engine.outputs import CompletionOutput, PositionReport, RequestOutput
from mlx_paged.engine.request_stream import RequestStream, SequenceDelta
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import EngineDeadError, MlxPagedError
from mlx_paged.server import errors
from mlx_paged.server.context import context_of, request_log_of
from mlx_paged.server.rate_limits import budget_of
from mlx_paged.server.responses import Reason
from mlx_paged.server.served_model import ServedModel

logger = logging.getLogger(__name__)

_serial = itertools.count()


@dataclass(slots=True)
class Piece:
    """New output of one sequence since its last piece: the content of one event.

    Attributes:
        prompt: Index of the prompt in the request.
        index: Index among the prompt's `n` answers.
        num_before: Tokens of the sequence's earlier pieces.
        texts: The new text, in parts; empty while a character or a stop string is incomplete.
        token_ids: The new tokens.
        logprobs: Log-probabilities of each of `token_ids`; empty if not requested.
        finish_reason: Why the sequence ended; None while it continues.
        stop_reason: The stop string or stop token that ended it.
    """

    prompt: int
    index: int
    num_before: int = 0
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionReport] = field(default_factory=list)
    finish_reason: Reason | None = None
    stop_reason: str | int | None = None

    @classmethod
    def whole(cls, prompt: int, output: CompletionOutput) -> Piece:
        """Returns a finished sequence as a single piece."""
        assert output.finish_reason is not None
        return cls(
            prompt, output.index, 0, [output.text], output.token_ids, output.logprobs or [],
            cast(Reason, output.finish_reason.value), output.stop_reason,
        )  # fmt: skip

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(self.texts)

    @property
    def updates(self) -> Iterator[tuple[int | None, str]]:
        """Yields (token, text that it completed); the token is None for text after the last one."""
        return itertools.zip_longest(self.token_ids, self.texts, fillvalue=None)  # type: ignore[arg-type]

    @property
    def is_cut(self) -> bool:
        """True if a limit or a stop string ended the sequence, not the model."""
        return self.finish_reason != "stop" or isinstance(self.stop_reason, str)

    @property
    def is_plain(self) -> bool:
        """True if it has only text and tokens, and is neither the first nor the last piece."""
        return self.num_before > 0 and self.finish_reason is None and not self.logprobs

    def add(self, delta: SequenceDelta) -> None:
        """Adds a delta from the engine."""
        for update in delta.updates:
            if len(update.token_ids) == 1:  # Fast path: most updates.
                self.texts.append(update.text)
                self.token_ids += update.token_ids
            else:
                for token, text in update.tokens():
                    self.texts.append(text)
                    if token is not None:
                        self.token_ids.append(token)
            if update.reports:
                self.logprobs += update.reports
        if update.finish_reason is not None:
            self.finish_reason = cast(Reason, update.finish_reason.value)
            self.stop_reason = update.stop_reason


class Generation:
    """Submits prompts, and yields the tokens of their sequences.

    Use it with ``async with``. Entering submits, unless `submit` was called before, so that a
    refusal can still set the response's status. Leaving aborts unfinished sequences and writes
    metrics and log fields.

    Args:
        request: The HTTP request.
        model: The model that answers.
        prompts: Tokens of each engine request.
        params: Sampling parameters of all of them.
        priority, cache_salt: See `EngineRequest`.
        media: Media of the only prompt.
        stream_interval: Tokens per streamed chunk, if more than the server's setting.
        names: Maps the engine's field names to the request's (`errors.own_name`).

    Attributes:
        num_sent: Tokens of the pieces yielded so far.
    """

    def __init__(
        self,
        request: Request,
        model: ServedModel,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        media: PreparedMedia | None = None,
        names: Mapping[str, str] | None = None,
        stream_interval: int | None = None,
    ) -> None:
        self.context = context_of(request)
        self.model = model
        self._budget = budget_of(request.scope)
        self._headers = request.headers
        self.trace = request_log_of(request)
        self.prompts = prompts
        self.params = params
        self.num_sent = 0
        self._names = names or {}
        self._interval = max(self.context.config.stream_interval, stream_interval or 1)
        model.renderer.check_tokens("stop_token_ids", params.stop_token_ids or ())
        self._options: dict[str, Any] = {
            "priority": priority,
            "cache_salt": cache_salt,
            "lora_request": model.lora_request,
        }
        self._timeout = self.context.config.request_timeout
        if self.trace.background:
            self._options["background"] = True
            self._timeout = None  # Other requests may go first for any time.
        if media is not None:
            self._options["media"] = media
        self._streams: list[RequestStream] = []
        self._started = time.monotonic()
        self._first: float | None = None
        self._last: dict[tuple[str, int], float] = {}  # by engine request and sequence
        self._num_received = 0
        self._reasons: set[FinishReason] = set()
        self._is_aborted = False
        self._is_closed = False

    @property
    def outputs(self) -> list[RequestOutput]:
        """The engine's outputs, one for each prompt; complete when the generation has ended."""
        return [stream.output for stream in self._streams]

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return sum(output.num_cached_tokens for output in self.outputs)

    @property
    def relaxed(self) -> tuple[str, ...]:
        """Parts of the schema that are not enforced, once it is submitted."""
        relaxed = self._streams[0].relaxed if self._streams else ()
        return tuple(errors.own_name(path, self._names) for path in relaxed)

    async def submit(self) -> None:
        """Submits all prompts, or none.

        Raises:
            ApiError: The engine refuses one.
        """
        context, request_id = self.context, self.trace.request_id
        context.underway.add(self)
        try:
            for prompt in self.prompts:
                self._streams.append(
                    await self.model.engine.submit(
                        EngineRequest(
                            prompt,
                            self.params,
                            # Clients may use an id twice; in the engine it must be unique.
                            request_id=f"{request_id}-{next(_serial)}",
                            timeout=self._timeout,
                            **self._options,
                        )
                    )
                )
                if self._is_aborted:  # while the engine took the prompt
                    raise errors.aborted()
        except MlxPagedError as error:
            self._close_streams()
            if isinstance(error, EngineDeadError):
                context.check_takes_requests()  # Its error explains more.
            else:
                context.metrics.rejected.labels(errors.refusal_reason(error)).inc()
            raise errors.from_engine(error, request_id, self._names) from error
        except BaseException:
            self._close_streams()
            raise

        if self._budget is not None:
            self._budget.charge(self.num_prompt_tokens)

    async def __aenter__(self) -> Generation:
        if not self._streams:
            await self.submit()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Aborts unfinished sequences, and writes metrics and log fields, once."""
        if not self._is_closed:
            self._is_closed = True
            self._close_streams()
            self._account()

    async def abort(self) -> None:
        """Ends all sequences on behalf of another request. Their reader gets 499."""
        self._is_aborted = True
        for stream in self._streams:
            await self.model.engine.abort(stream.request_id)

    def _close_streams(self) -> None:
        self.context.underway.discard(self)
        for stream in self._streams:
            stream.close()

    async def finish(self) -> None:
        """Waits until all sequences have ended; `outputs` holds the results.

        Raises:
            ApiError: A sequence ended early, by a timeout, an abort or an error.
        """
        with self._engine_errors():
            async for delta in self._deltas():
                self._note(delta)
                for update in delta.updates:
                    _ = update.text  # Decode as it arrives, not all at the end.
            for output in self.outputs:
                for answer in output.outputs:
                    if answer.error is not None:  # such as text that cannot be decoded
                        raise answer.error

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields tokens as they arrive: the first one, then every `stream_interval`, then the rest.

        Raises:
            ApiError: A sequence ended early, by a timeout, an abort or an error.
        """
        interval = self._interval
        indices = {stream.request_id: index for index, stream in enumerate(self._streams)}
        waiting: dict[tuple[str, int], Piece] = {}
        num_sent: dict[tuple[str, int], int] = {}
        with self._engine_errors():
            async for delta in self._deltas():
                key = self._note(delta)
                piece = waiting.pop(key, None) if waiting else None
                if piece is None:
                    piece = Piece(indices[key[0]], key[1], num_sent.get(key, 0))
                piece.add(delta)
                count = len(piece.token_ids)
                if piece.num_before and count < interval and piece.finish_reason is None:
                    waiting[key] = piece
                    continue
                num_sent[key] = piece.num_before + count
                self.num_sent += count
                yield piece

    def _deltas(self) -> AsyncIterator[SequenceDelta]:
        # A single stream needs no merging generator in the path of every token.
        return self._streams[0] if len(self._streams) == 1 else _merged(self._streams)

    @contextlib.contextmanager
    def _engine_errors(self) -> Iterator[None]:
        """Converts the engine's errors to API errors."""
        try:
            yield
        except MlxPagedError as error:
            logger.error("%s", error, extra={"request_id": self.trace.request_id})
            if isinstance(error, EngineDeadError):
                self.context.check_takes_requests()
            raise errors.from_engine(error, self.trace.request_id, self._names) from error

    def _note(self, delta: SequenceDelta) -> tuple[str, int]:
        """Records the metrics of a delta; returns its (request id, sequence index).

        Raises:
            ApiError, StepError: The sequence ended early, by a timeout, an abort or an error.
        """
        first = delta.updates[0]
        key = first.request_id, first.index
        count = len(first.token_ids)
        for update in delta.updates[1:]:
            count += len(update.token_ids)
        if count:
            now, metrics = time.monotonic(), self.context.metrics
            if self._budget is not None:
                self._budget.charge(count)
            self._num_received += count
            if self._first is None:
                self._first = now
                metrics.time_to_first_token.observe(now - self._started)
            last = self._last.get(key)
            if last is not None:
                metrics.tokens(now - last, count)
            elif count > 1:
                metrics.tokens(0.0, count - 1)  # They arrived together.
            self._last[key] = now
        reason = delta.finish_reason
        if reason is not None:
            self._reasons.add(reason)
            if reason is FinishReason.TIMEOUT:
                raise errors.timed_out(self._timeout)
            if reason is FinishReason.ABORT:
                if self._is_aborted:
                    raise errors.aborted()
                self.context.check_takes_requests()
                raise errors.unavailable("the request was aborted", "aborted")
            if reason is FinishReason.ERROR:
                assert delta.error is not None
                raise delta.error
        return key

    def _account(self) -> None:
        """Writes metrics and log fields."""
        for output in self.outputs:
            ends = [answer.finish_reason for answer in output.outputs]
            reason = next((r for r in ends if r is not None), FinishReason.ABORT)
            if not output.finished:
                reason = FinishReason.ABORT  # The engine's thread will abort it.
            self.context.metrics.finish(output, reason, self.params.max_tokens)
            if self.context.tracing is not None:
                self.context.tracing.record(output, reason, self._headers, self.params)
        fields = self.trace.fields
        fields["prompt_tokens"] = self.num_prompt_tokens
        fields["cached_tokens"] = self.num_cached_tokens
        fields["completion_tokens"] = self._num_received
        if self._first is not None:
            fields["ttft"] = round(self._first - self._started, 4)
        reasons = sorted(reason.value for reason in self._reasons)
        fields["finish_reason"] = ",".join(reasons) or FinishReason.ABORT.value


async def _merged(streams: list[RequestStream]) -> AsyncIterator[SequenceDelta]:
    """Merges streams. Each waits while the reader is busy, so nothing accumulates."""
    queue: asyncio.Queue[SequenceDelta | Exception | None] = asyncio.Queue(1)

    async def pump(stream: RequestStream) -> None:
        try:
            async for delta in stream:
                await queue.put(delta)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        unfinished = len(tasks)
        while unfinished:
            item = await queue.get()
            if item is None:
                unfinished -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
