"""The OpenAPI document, made from the very schemas that validate."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged import __version__
from mlx_paged.server.routing import context_of
from mlx_paged.server.schemas import answers, requests

_REF = "#/components/schemas/{model}"
_ERRORS = {
    "400": "A field is wrong; `param` names it.",
    "401": "A valid API key is needed.",
    "404": "There is no such model.",
    "408": "It took longer than the server allows.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "The queue is full; see Retry-After.",
    "500": "The server failed; its log has more under the request's id.",
    "503": "Not now: loading, shutting down, or dead.",
}
_GENERATION = tuple(_ERRORS)
_BODY = ("400", "401", "404", "408", "413", "415", "500", "503")


class Operation(NamedTuple):
    """One method of one path."""

    path: str
    method: str
    summary: str
    answer: type[BaseModel] | None
    errors: tuple[str, ...] = ("401", "500")
    body: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None  # of its stream
    also: type[BaseModel] | None = None  # the answer's schema under status 503


OPERATIONS = (
    Operation(
        "/v1/chat/completions", "post", "Answer a conversation.", answers.ChatAnswer,
        _GENERATION, requests.ChatBody, answers.ChatChunk,
    ),
    Operation(
        "/v1/completions", "post", "Go on with prompts.", answers.CompletionAnswer,
        _GENERATION, requests.CompletionBody, answers.CompletionAnswer,
    ),
    Operation("/v1/models", "get", "All names of the model.", answers.ModelList),
    Operation(
        "/v1/models/{model}", "get", "One name of the model.", answers.Model,
        ("401", "404", "500"),
    ),
    Operation(
        "/tokenize", "post", "Tokens of a prompt or of messages.", answers.Tokens, _BODY,
        requests.TokenizeBody,
    ),
    Operation(
        "/detokenize", "post", "Text of tokens.", answers.Text, _BODY, requests.DetokenizeBody
    ),
    Operation("/health", "get", "Whether requests are answered.", answers.Status, (),
              also=answers.Status),
    Operation("/live", "get", "Whether the process should live on.", answers.Status, (),
              also=answers.Status),
    Operation("/ready", "get", "Whether new requests are taken.", answers.Status, (),
              also=answers.Status),
    Operation("/version", "get", "Versions.", answers.Version),
    Operation("/metrics", "get", "Metrics in Prometheus's format.", None),
    Operation("/server_info", "get", "Options and state.", answers.ServerInfo),
    Operation(
        "/reset_prefix_cache", "post", "Forget cached prefixes.", answers.Reset,
        ("401", "500", "503"),
    ),
)  # fmt: skip


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REF.format(model=model.__name__)}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": _schema(model)}}


def _operation(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if operation.answer is not None:
        content = _json(operation.answer)
    if operation.chunk is not None:
        description = f"Events of {operation.chunk.__name__}, then [DONE]."
        content["text/event-stream"] = {"schema": {"type": "string", "description": description}}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    for status in operation.errors:
        responses[status] = {
            "description": _ERRORS[status],
            "content": _json(answers.ErrorAnswer),
        }
    if operation.also is not None:
        responses["503"] = {"description": "No.", "content": _json(operation.also)}
    made: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.body is not None:
        made["requestBody"] = {"required": True, "content": _json(operation.body)}
    if "{model}" in operation.path:
        made["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if "401" in operation.errors:
        made["security"] = [{"key": []}, {}]
    return made


@lru_cache(maxsize=1)
def openapi() -> dict[str, Any]:
    """The document, without the servers' address."""
    models: list[type[BaseModel]] = [answers.ErrorAnswer]
    for operation in OPERATIONS:
        models += [
            m
            for m in (operation.body, operation.answer, operation.chunk, operation.also)
            if m is not None
        ]
    _, schemas = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(models)], ref_template=_REF
    )
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlx-paged",
            "version": __version__,
            "description": "OpenAI's API, with vLLM's extras.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


async def document(request: Request) -> Response:
    """`GET /openapi.json`."""
    root = context_of(request).config.root_path or "/"
    return JSONResponse({**openapi(), "servers": [{"url": root}]})
