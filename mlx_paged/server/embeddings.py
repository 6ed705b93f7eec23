"""Embeddings: submits the texts of one HTTP request to an engine that pools."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable

import numpy as np
from starlette.requests import Request

from mlx_paged.core import FinishReason
from mlx_paged.engine.client import EngineRequest
from mlx_paged.engine.outputs import RequestOutput
from mlx_paged.engine.pooling.outputs import pair_messages
from mlx_paged.engine.pooling.params import PoolingParams
from mlx_paged.engine.request_stream import RequestStream
from mlx_paged.errors import EngineDeadError, EngineOverloadedError, MlxPagedError
from mlx_paged.server import errors, pooling_bodies
from mlx_paged.server.context import context_of, request_log_of
from mlx_paged.server.conversation import Conversation
from mlx_paged.server.conversions import check_priority
from mlx_paged.server.errors import ApiError, bad_request, context_exceeded
from mlx_paged.server.pooling_bodies import PoolingRequest
from mlx_paged.server.rate_limits import budget_of
from mlx_paged.server.served_model import ServedModel

logger = logging.getLogger(__name__)

# Maximum texts of one HTTP request in the engine, or half of the queue if that is less, so that one
# request of many texts does not fill it.
_MAX_AT_ONCE = 256

#: A text, or its tokens.
Text = str | list[int]

_serial = itertools.count()


class Embeddings:
    """The texts of one HTTP request in the engine.

    Args:
        request: The HTTP request.
        model: The model that pools.
        body: The body, whose common fields apply to all its texts.
        params: Parameters of all texts.
    """

    def __init__(
        self, request: Request, model: ServedModel, body: PoolingRequest, params: PoolingParams
    ) -> None:
        self.request = request
        self.context = context_of(request)
        self.model = model
        self._budget = budget_of(request.scope)
        self._headers = request.headers
        self.trace = request_log_of(request)
        self.trace.request_id = body.request_id or self.trace.request_id
        self.trace.fields["model"] = body.model
        if body.user is not None:
            self.trace.fields["user"] = body.user
        check_priority(body.priority, self.context.config)
        if body.truncate_prompt_tokens == 0:
            raise bad_request("truncate_prompt_tokens", "truncate_prompt_tokens must not be 0")
        self._body = body
        self._params = params
        self._cut = PoolingParams(
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side or "left",
        )
        self.scores_pairs = model.info.scores_pairs
        self._prompts: list[list[int]] = []
        self._outputs: list[RequestOutput] = []
        self._started = time.monotonic()
        self._num_underway = self._num_ended = 0
        self._progress = asyncio.Event()
        self._streams: set[RequestStream] = set()
        self._is_aborted = False

    async def add(self, field: str, texts: Iterable[Text], *, first: int | None = None) -> None:
        """Tokenizes texts.

        Args:
            field: Their field in the body, for errors.
            first: Keep only this many leading tokens of each.

        Raises:
            ApiError: One is empty or too long, or has a token that the model does not have.
        """
        for i, text in enumerate(texts):
            tokens = await self._encoded(field, text)
            self.add_tokens(field, i, tokens[:first])

    async def add_pairs(self, field: str, pairs: Iterable[tuple[str, str]]) -> None:
        """Tokenizes pairs of a query and a document, with the server's template if it has one.

        Args:
            field: The field of the documents, for errors.

        Raises:
            ApiError: See `add`.
        """
        for i, (query, document) in enumerate(pairs):
            if self.context.config.chat_template is None:
                tokens = await self._encoded(field, query + document)
            else:
                messages = pair_messages(query, document)
                pair = Conversation(messages, add_generation_prompt=False)
                tokens = await self.model.renderer.render(pair)
            self.add_tokens(field, i, tokens)

    async def cut(self, texts: list[str], first: int | None) -> list[str]:
        """Cuts texts to a number of leading tokens."""
        if first is None:
            return texts
        renderer = self.model.renderer
        tokens = [await renderer.encode(text, add_special_tokens=False) for text in texts]
        return [
            text if len(ids) <= first else await renderer.decode(ids[:first])
            for text, ids in zip(texts, tokens)
        ]

    async def _encoded(self, field: str, text: Text) -> list[int]:
        special = self._body.add_special_tokens is not False
        try:
            return await self.model.renderer.encode(text, add_special_tokens=special)
        except ApiError as error:
            error.param = field
            raise

    def add_tokens(self, field: str, index: int, tokens: list[int]) -> None:
        """Adds the tokens of a text.

        Args:
            field, index: Its field and index in the body, for errors.

        Raises:
            ApiError: There are none, or too many.
        """
        limit = self.model.info.max_request_len
        tokens = self._cut.truncated(tokens, limit)
        if not tokens:
            raise bad_request(field, f"{field} must have no empty text, but text {index} is empty")
        if len(tokens) > limit:
            raise context_exceeded(limit, f"text {index} of {field} has {len(tokens)}", field)
        self._prompts.append(tokens)

    async def finish(self) -> None:
        """Waits until all texts are embedded; then `vectors` has the results.

        Raises:
            ApiError: The engine refuses a text, or could not embed it.
        """
        if self._budget is not None:
            self._budget.charge(self.num_tokens)
        outputs: dict[int, RequestOutput] = {}
        queue = iter(list(enumerate(self._prompts)))

        async def work() -> None:
            for i, prompt in queue:
                outputs[i] = await self._embed(prompt)

        max_waiting = self.model.info.config.max_num_waiting
        at_once = _MAX_AT_ONCE if max_waiting is None else min(_MAX_AT_ONCE, -(-max_waiting // 2))
        self.context.underway.add(self)
        try:
            # Concurrently, so that they share steps.
            async with asyncio.TaskGroup() as group:
                for _ in range(min(at_once, len(self._prompts))):
                    group.create_task(work())
        except BaseExceptionGroup as several:
            error = several.exceptions[0]
            if isinstance(error, MlxPagedError):
                raise self._refusal(error) from error
            raise error from None
        finally:
            self.context.underway.discard(self)
            self._account()
        self._outputs = [outputs[i] for i in range(len(self._prompts))]

    async def abort(self) -> None:
        """Ends all unfinished texts, for another request. The client gets 499."""
        self._is_aborted = True
        for stream in list(self._streams):
            await self.model.engine.abort(stream.request_id)

    async def _embed(self, prompt: list[int]) -> RequestOutput:
        context = self.context
        while True:
            if self._is_aborted:
                raise errors.aborted()
            limit = None if self.trace.background else context.config.request_timeout
            left = None if limit is None else limit - (time.monotonic() - self._started)
            if left is not None and left <= 0:
                raise errors.timed_out(limit)
            num_ended = self._num_ended
            self._num_underway += 1
            try:
                stream = await self.model.engine.submit(
                    EngineRequest(
                        prompt,
                        self._params,
                        request_id=f"{self.trace.request_id}-{next(_serial)}",
                        priority=self._body.priority or 0,
                        background=self.trace.background,
                        timeout=left,
                        cache_salt=self._body.cache_salt,
                        lora_request=self.model.lora_request,
                    )
                )
                output = await self._result(stream)
                self._num_ended += 1
                self._progress.set()
                return output
            except EngineOverloadedError:
                if self._num_ended == num_ended:
                    if self._num_underway == 1:
                        raise
                    self._progress.clear()
            finally:
                self._num_underway -= 1
            # Others of these texts are being embedded, and make room.
            await self._progress.wait()

    async def _result(self, stream: RequestStream) -> RequestOutput:
        """Waits for a request, and returns its output, which has a vector.

        Raises:
            ApiError, StepError: It ended without one.
        """
        metrics = self.context.metrics
        async with stream:
            self._streams.add(stream)
            try:
                output = await stream.result()
            except BaseException:
                metrics.finish(stream.output, FinishReason.ABORT, None)
                self._trace(stream.output, FinishReason.ABORT)
                raise
            finally:
                self._streams.discard(stream)
        [answer] = output.outputs
        reason = answer.finish_reason
        assert reason is not None
        metrics.finish(output, reason, None)
        self._trace(output, reason)
        if answer.error is not None:
            raise answer.error
        if reason is FinishReason.TIMEOUT:
            raise errors.timed_out(self.context.config.request_timeout)
        if output.pooled is None:
            if self._is_aborted:
                raise errors.aborted()
            self.context.check_takes_requests()
            raise errors.unavailable("the request was aborted", "aborted")
        return output

    def _trace(self, output: RequestOutput, reason: FinishReason) -> None:
        if self.context.tracing is not None:
            self.context.tracing.record(output, reason, self._headers, None)

    def _refusal(self, error: MlxPagedError) -> ApiError:
        request_id = self.trace.request_id
        if isinstance(error, EngineDeadError):
            self.context.check_takes_requests()  # knows more about the cause
        elif isinstance(error, EngineOverloadedError):
            self.context.metrics.rejected.labels(errors.refusal_reason(error)).inc()
        else:
            logger.error("%s", error, extra={"request_id": request_id})
        return errors.from_engine(error, request_id)

    def _account(self) -> None:
        """Writes the fields of the log."""
        fields = self.trace.fields
        fields["texts"] = len(self._prompts)
        fields["prompt_tokens"] = self.num_tokens

    @property
    def vectors(self) -> list[np.ndarray]:
        """``[dimensions]`` float32 for each text, in the order of `add`."""
        return [output.pooled for output in self._outputs if output.pooled is not None]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text."""
        return list(map(len, self._prompts))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(map(len, self._prompts))

    def head(self, id_prefix: str) -> pooling_bodies.PoolingAnswerBase:
        """Fields that every answer begins with."""
        cached = sum(output.num_cached_tokens for output in self._outputs)
        self.trace.fields["cached_tokens"] = cached
        return {
            "id": f"{id_prefix}-{self.trace.request_id}",
            "created": int(time.time()),
            "model": self._body.model or self.model.name,
            "usage": {
                "prompt_tokens": self.num_tokens,
                "completion_tokens": 0,
                "total_tokens": self.num_tokens,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }
