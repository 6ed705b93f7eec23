"""`POST /v1/embeddings`, `/pooling`, `/score` and `/rerank`: texts and chats become vectors."""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from mlx_paged.content import sources_of
from mlx_paged.core import FinishReason
from mlx_paged.engine.client import EngineRequest
from mlx_paged.engine.outputs import RequestOutput
from mlx_paged.engine.pooling.outputs import cosine, pair_messages, pairs_of
from mlx_paged.engine.pooling.params import PoolingParams
from mlx_paged.engine.request_stream import RequestStream
from mlx_paged.errors import EngineDeadError, EngineOverloadedError, MlxPagedError
from mlx_paged.server import errors, pooling_bodies
from mlx_paged.server.bodies import contradiction
from mlx_paged.server.context import context_of, request_log_of
from mlx_paged.server.conversation import Conversation
from mlx_paged.server.conversions import template_kwargs_of, template_message
from mlx_paged.server.errors import ApiError, bad_request, context_exceeded
from mlx_paged.server.pooling_bodies import (
    ClassifyBody,
    EmbeddingBody,
    InputBody,
    PoolingBody,
    PoolingRequest,
    RerankBody,
    ScoreBody,
)
from mlx_paged.server.rate_limits import budget_of
from mlx_paged.server.requests import read_body
from mlx_paged.server.responses import Lazy
from mlx_paged.server.served_model import ServedModel
from mlx_paged.server.streaming import json_response, unless_disconnected

logger = logging.getLogger(__name__)

# Maximum texts of one HTTP request in the engine, or half of the queue if that is less, so that one
# request of many texts does not fill it.
_MAX_AT_ONCE = 256

# The two sides of a score, and their names.
_SIDES = (("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2"))

Text = str | list[int]


async def embeddings(request: Request) -> Response:
    """The vectors of texts."""
    body = await read_body(request, EmbeddingBody)
    run = await _embedded(request, body)

    def entries() -> Iterator[pooling_bodies.Embedding]:
        for i, vector in enumerate(run.vectors):
            yield {"object": "embedding", "index": i, "embedding": _encoded(vector, body)}

    answer: pooling_bodies.EmbeddingAnswer = {
        **run.head("embd"),
        "object": "list",
        "data": Lazy.list(entries()),
    }
    return await json_response(answer)


async def pooling(request: Request) -> Response:
    """The same in the form of vLLM's `/pooling`."""
    body = await read_body(request, PoolingBody)
    run = await _embedded(request, body)

    def entries() -> Iterator[pooling_bodies.Pooled]:
        for i, vector in enumerate(run.vectors):
            yield {"object": "pooling", "index": i, "data": _encoded(vector, body)}

    answer: pooling_bodies.PoolingAnswer = {
        **run.head("pool"),
        "object": "list",
        "data": Lazy.list(entries()),
    }
    return await json_response(answer)


async def classify(request: Request) -> Response:
    """The classes of texts."""
    body = await read_body(request, ClassifyBody)
    model = context_of(request).models.of(body.model)
    labels = model.info.labels
    if not labels:
        raise ApiError(
            400,
            "/classify needs a model that classifies texts (...ForSequenceClassification): this "
            "one makes embeddings",
            code="wrong_runner",
        )
    run = Embeddings(request, model, body, PoolingParams(normalize=body.use_activation))
    await _run(run, body)
    data: list[pooling_bodies.Classified] = [
        {
            "index": i,
            "label": labels[int(np.argmax(values))],
            "probs": values.tolist(),
            "num_classes": len(labels),
        }
        for i, values in enumerate(run.vectors)
    ]
    answer: pooling_bodies.ClassifyAnswer = {**run.head("classify"), "object": "list", "data": data}
    return await json_response(answer)


async def score(request: Request) -> Response:
    """How near texts are."""
    body = await read_body(request, ScoreBody)
    model = context_of(request).models.of(body.model)
    _check_scores(model)
    (first_name, first), (second_name, second) = (_side(body, names) for names in _SIDES)
    pairs = pairs_of(len(first), len(second), fields=(first_name, second_name))
    run = Embeddings(request, model, body, PoolingParams(normalize=True))
    if run.scores_pairs:
        await run.add_pairs(second_name, [(first[i], second[j]) for i, j in pairs])
    else:
        await run.add(first_name, first)
        await run.add(second_name, second)
    await unless_disconnected(request, run.finish())
    vectors = run.vectors
    scores = (
        [float(score) for [score] in vectors]
        if run.scores_pairs
        else [cosine(vectors[i], vectors[len(first) + j]) for i, j in pairs]
    )
    data: list[pooling_bodies.Score] = [
        {"object": "score", "index": i, "score": score} for i, score in enumerate(scores)
    ]
    answer: pooling_bodies.ScoreAnswer = {**run.head("score"), "object": "list", "data": data}
    return await json_response(answer)


async def rerank(request: Request) -> Response:
    """Documents, ordered by similarity to a query."""
    body = await read_body(request, RerankBody)
    model = context_of(request).models.of(body.model)
    _check_scores(model)
    texts = [given if isinstance(given, str) else given.text for given in body.documents]
    run = Embeddings(request, model, body, PoolingParams(normalize=True))
    if run.scores_pairs:
        kept = await run.cut(texts, body.max_tokens_per_doc)
        await run.add_pairs("documents", [(body.query, text) for text in kept])
    else:
        await run.add("query", [body.query])
        await run.add("documents", texts, first=body.max_tokens_per_doc)
    await unless_disconnected(request, run.finish())
    if run.scores_pairs:
        scores = [float(score) for [score] in run.vectors]
    else:
        query, *vectors = run.vectors
        scores = [cosine(query, vector) for vector in vectors]
    best = sorted(range(len(texts)), key=lambda i: (-scores[i], i))[: body.top_n or None]
    results: list[pooling_bodies.Ranked] = [
        {"index": i, "relevance_score": scores[i]} for i in best
    ]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    answer: pooling_bodies.RerankAnswer = {**run.head("rerank"), "results": results}
    return await json_response(answer)


def _side(body: ScoreBody, names: Sequence[str]) -> tuple[str, list[str]]:
    """One side of a score: the name that the body has it under, and its texts."""
    given = [name for name in names if getattr(body, name) is not None]
    if not given:
        raise ApiError(400, f"{names[0]} is missing", param=names[0], code="missing_field")
    if len(given) > 1:
        raise contradiction(given[1], given[0])
    texts = getattr(body, given[0])
    return given[0], [texts] if isinstance(texts, str) else texts


async def _embedded(request: Request, body: EmbeddingBody) -> Embeddings:
    """The vectors of `input`, or the one of `messages`."""
    normalize, same = body.normalize, body.use_activation
    if normalize is not None and same is not None and normalize != same:
        raise contradiction("use_activation", "normalize")
    params = PoolingParams(
        dimensions=body.dimensions, normalize=same if normalize is None else normalize
    )
    model = context_of(request).models.of(body.model)
    check_embeds(model)
    run = Embeddings(request, model, body, params)
    await _run(run, body)
    return run


async def _run(run: Embeddings, body: InputBody) -> None:
    """Computes the vectors of a body's texts."""
    conversation = _conversation(body)
    if conversation is None:
        await run.add("input", _texts(body.input))
    else:
        run.add_tokens("messages", 0, await run.model.renderer.render(conversation))
    await unless_disconnected(run.request, run.finish())


def check_embeds(model: ServedModel) -> None:
    """Refuses with 400 if the engine classifies texts or scores pairs of them."""
    if model.info.labels:
        does, path = "classifies texts", "/classify"
        if model.info.scores_pairs:
            does, path = "scores pairs of texts", "/score or /rerank"
        message = f"this server {does} and embeds none: use {path}"
        raise ApiError(400, message, code="wrong_runner")


def _check_scores(model: ServedModel) -> None:
    """Refuses with 400 if the engine has several classes, none of which is a score."""
    num_classes = len(model.info.labels)
    if num_classes > 1:
        message = f"this server classifies texts by {num_classes} classes: use /classify"
        raise ApiError(400, message, code="wrong_runner")


# Fields that are about messages.
_OF_CHATS = (
    "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
)  # fmt: skip


def _conversation(body: InputBody) -> Conversation | None:
    """The conversation of a body; None: it has texts.

    Raises:
        ApiError: 400 for both or neither, for media, and for fields that contradict each other.
    """
    if body.messages is None:
        for name in _OF_CHATS:
            if getattr(body, name) is not None:
                raise bad_request(name, f"{name} is about messages and means nothing to input")
        if body.input is None:
            raise ApiError(400, "input is missing", param="input", code="missing_field")
        return None
    if body.input is not None:
        raise bad_request("messages", "messages must not be given with input")
    messages = [template_message(message, i) for i, message in enumerate(body.messages)]
    if sources_of(messages):
        raise bad_request("messages", "messages must have no media: this server embeds texts")
    if body.continue_final_message and body.add_generation_prompt:
        name = "continue_final_message"
        raise bad_request(name, f"{name} needs add_generation_prompt to be false")
    return Conversation(
        messages,
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
        chat_template=body.chat_template,
        template_kwargs=template_kwargs_of(body.chat_template_kwargs),
    )


def _texts(given: Any) -> list[Text]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_request("input", "input must not be empty")
    return [given] if isinstance(given[0], int) else given


def _encoded(vector: np.ndarray, body: EmbeddingBody) -> list[float] | str:
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()  # type: ignore[no-any-return]


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
        if body.priority and not self.context.config.priority_scheduling:
            raise bad_request(
                "priority", "priority needs a server started with --scheduling-policy priority"
            )
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
            field, place: Its field and index in the body, for errors.

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
        """Waits until all are embedded: `vectors` has them.

        Raises:
            ApiError: the engine refuses one, or could not embed it.
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
        """A request that has ended with a vector.

        Raises:
            ApiError, StepError: it has none.
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
