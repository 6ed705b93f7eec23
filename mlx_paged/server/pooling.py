"""`POST /v1/embeddings`, `/pooling`, `/score` and `/rerank`: texts and chats become vectors."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from mlx_paged.content import sources_of
from mlx_paged.engine.pooling.outputs import cosine, pairs_of
from mlx_paged.engine.pooling.params import PoolingParams
from mlx_paged.server import pooling_bodies
from mlx_paged.server.bodies import contradiction
from mlx_paged.server.context import context_of
from mlx_paged.server.conversation import Conversation
from mlx_paged.server.conversions import template_kwargs_of, template_message
from mlx_paged.server.embeddings import Embeddings, Text
from mlx_paged.server.errors import ApiError, bad_request
from mlx_paged.server.lazy_json import Lazy
from mlx_paged.server.pooling_bodies import (
    ClassifyBody,
    EmbeddingBody,
    InputBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from mlx_paged.server.requests import read_body
from mlx_paged.server.served_model import ServedModel
from mlx_paged.server.streaming import json_response, unless_disconnected

# The two sides of a score, and their names.
_SIDES = (("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2"))


async def embeddings(request: Request) -> Response:
    """Embeds texts."""
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
    """Embeds texts, in the form of vLLM's `/pooling`."""
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
    """Classifies texts."""
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
    """Scores the similarity of pairs of texts."""
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
    """Orders documents by similarity to a query."""
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
    """Returns one side of a score: its name in the body, and its texts."""
    given = [name for name in names if getattr(body, name) is not None]
    if not given:
        raise ApiError(400, f"{names[0]} is missing", param=names[0], code="missing_field")
    if len(given) > 1:
        raise contradiction(given[1], given[0])
    texts = getattr(body, given[0])
    return given[0], [texts] if isinstance(texts, str) else texts


async def _embedded(request: Request, body: EmbeddingBody) -> Embeddings:
    """Embeds a body's `input` or `messages`."""
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
    """Returns the conversation of a body; None if it has texts.

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
