"""`POST /v2/embed`: embeddings in the form of Cohere's API."""

from __future__ import annotations

import base64
import builtins
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12.

from mlx_paged.engine.pooling.params import PoolingParams
from mlx_paged.server.bodies import Body, contradiction
from mlx_paged.server.context import context_of
from mlx_paged.server.conversation import Conversation
from mlx_paged.server.embeddings import Embeddings
from mlx_paged.server.errors import ApiError, bad_request, context_exceeded, shorten
from mlx_paged.server.lazy_json import Lazy
from mlx_paged.server.pooling import check_embeds
from mlx_paged.server.pooling_bodies import MAX_TEXTS, PoolingRequest
from mlx_paged.server.requests import read_body
from mlx_paged.server.streaming import json_response, unless_disconnected

EmbeddingType = Literal["float", "base64", "binary", "ubinary"]
# The API's uses of a text, with sentence-transformers' names of prompts. Models without prompts
# ignore them.
_USES = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
    "image": (),
}


class CohereContent(Body):
    """A part of an input."""

    type: Literal["text"]
    text: str


class CohereInput(Body):
    """An input in parts, which becomes a message of the chat template."""

    content: Annotated[list[CohereContent], Field(min_length=1, fail_fast=True)]


class CohereEmbedBody(PoolingRequest):
    """`POST /v2/embed`: texts, or inputs."""

    texts: (
        Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)] | None
    ) = None
    inputs: (
        Annotated[list[CohereInput], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
        | None
    ) = None
    images: Any = Field(None, description="Not supported: 400.")
    input_type: str | None = Field(
        None, description="Name of the model's prompt to put before each text."
    )
    output_dimension: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1)] | None = Field(
        None, description="float by default."
    )
    truncate: Literal["NONE", "START", "END"] | None = Field(
        None, description="Which end of a long text to cut; END by default."
    )
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = Field(
        None, description="Maximum tokens of a text; null: as many as fit."
    )


class CohereVectors(TypedDict, total=False):
    """The vectors by type."""

    float: list[list[builtins.float]]
    base64: list[str]
    binary: list[list[int]]
    ubinary: list[list[int]]


class CohereVersion(TypedDict):
    """The version of the API."""

    version: Literal["2"]


class CohereUnits(TypedDict):
    """Number of tokens of all texts."""

    input_tokens: int


class CohereMeta(TypedDict):
    """The version of the API, and the number of tokens of all texts."""

    api_version: CohereVersion
    billed_units: CohereUnits
    tokens: CohereUnits


class CohereAnswer(TypedDict):
    """The vectors by type, in the order of the texts."""

    id: str
    embeddings: CohereVectors
    texts: list[str]
    meta: CohereMeta
    response_type: Literal["embeddings_by_type"]


async def embed(request: Request) -> Response:
    """The vectors of texts."""
    body = await read_body(request, CohereEmbedBody)
    model = context_of(request).models.of(body.model)
    if body.images is not None:
        raise bad_request(
            "images", "images is not supported by this server: it embeds texts",
            "unsupported_parameter",
        )  # fmt: skip
    for name, own in (("truncate_prompt_tokens", "max_tokens"), ("truncation_side", "truncate")):
        if getattr(body, name) is not None:
            raise bad_request(name, f"{name} is called {own} here", "unsupported_parameter")
    if body.texts is not None and body.inputs is not None:
        raise contradiction("inputs", "texts")
    check_embeds(model)
    limit = model.info.max_request_len
    max_tokens = limit if body.max_tokens is None else min(body.max_tokens, limit)
    cuts = body.truncate != "NONE"
    side = "left" if body.truncate == "START" else "right"
    common = body.model_copy(
        update={"truncate_prompt_tokens": max_tokens if cuts else None, "truncation_side": side}
    )
    run = Embeddings(request, model, common, PoolingParams(dimensions=body.output_dimension))
    prompt = _prompt(body.input_type, model.info.prompts)
    texts: list[str] = []
    if body.texts is not None:
        texts = body.texts
        longest = model.renderer.max_characters if cuts else None
        await run.add("texts", [_cut(prompt + text, longest, body.truncate) for text in texts])
    elif body.inputs is not None:
        system = [{"role": "system", "content": prompt}] if prompt else []
        for i, given in enumerate(body.inputs):
            text = "\n".join(part.text for part in given.content)
            messages = [*system, {"role": "user", "content": text}]
            conversation = Conversation(messages, add_generation_prompt=False)
            run.add_tokens("inputs", i, await model.renderer.render(conversation))
    else:
        raise ApiError(400, "texts is missing", param="texts", code="missing_field")
    for index, count in enumerate(run.lengths if body.truncate == "NONE" else ()):
        if count > max_tokens:
            field = "texts" if texts else "inputs"
            raise context_exceeded(max_tokens, f"text {index} of {field} has {count}", field)
    await unless_disconnected(request, run.finish())
    units: CohereUnits = {"input_tokens": run.num_tokens}
    answer: CohereAnswer = {
        "id": run.head("embd")["id"],
        "embeddings": _vectors(run.vectors, body.embedding_types or ["float"]),
        "texts": texts,
        "meta": {"api_version": {"version": "2"}, "billed_units": units, "tokens": units},
        "response_type": "embeddings_by_type",
    }
    return await json_response(answer)


def _prompt(use: str | None, prompts: Mapping[str, str]) -> str:
    """Returns the prompt of the model for a use of texts.

    Raises:
        ApiError: 400 for a use that neither the API nor the model knows.
    """
    if use is None:
        return ""
    for name in (use, *_USES.get(use, ())):
        if name in prompts:
            return prompts[name]
    if use in _USES and not prompts:
        return ""
    known = ", ".join(prompts or _USES)
    raise bad_request("input_type", f"input_type must be of {known} but is {shorten(use, 64)!r}")


def _cut(text: str, max_characters: int | None, truncate: str | None) -> str:
    """Cuts characters of a text that cannot be part of the kept tokens."""
    if max_characters is None or len(text) <= max_characters:
        return text
    return text[-max_characters:] if truncate == "START" else text[:max_characters]


def _vectors(vectors: Sequence[np.ndarray], types: Sequence[EmbeddingType]) -> CohereVectors:
    """Returns the vectors in all requested formats.

    Raises:
        ApiError: 400 for bits of a vector whose size is no multiple of 8.
    """
    found: CohereVectors = {}
    if vectors[0].size % 8 and {"binary", "ubinary"} & set(types):
        raise bad_request(
            "embedding_types",
            f"embedding_types must not have bits of vectors of {vectors[0].size} numbers, which is "
            "no multiple of 8",
        )
    if "float" in types:
        found["float"] = Lazy.list(vector.tolist() for vector in vectors)
    if "base64" in types:
        found["base64"] = [base64.b64encode(v.astype("<f4").tobytes()).decode() for v in vectors]
    # A bit for each number that is not negative, the first one highest; binary is 128 less.
    bits = [np.packbits(vector >= 0).astype(int) for vector in vectors]
    if "ubinary" in types:
        found["ubinary"] = [each.tolist() for each in bits]
    if "binary" in types:
        found["binary"] = [(each - 128).tolist() for each in bits]
    return found
