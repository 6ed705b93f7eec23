"""Operation: one method of one path, and the OpenAPI document of all."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, TypeAdapter

from mlx_paged import __version__
from mlx_paged.server import responses
from mlx_paged.server.shell import Endpoint

#: Descriptions of the statuses of errors.
ERRORS = {
    "400": "A field is wrong; `param` names it.",
    "401": "No valid API key.",
    "403": "Sent by a page of another site, or to an unknown Host.",
    "404": "No such model, stored response, file or batch.",
    "408": "The body arrived too slowly.",
    "413": "The body or the file is too large.",
    "415": "The body has the wrong type, or is compressed.",
    "422": "The answer took longer than this server allows.",
    "429": "The queue is full, or a rate limit is reached; see Retry-After.",
    "500": "The server failed; its log has details under the request's id.",
    "507": "The disk is full or read-only.",
    "503": "Unavailable: loading, shutting down, or failed.",
    "529": "Unavailable: loading, shutting down, or failed.",
}
#: Type of streams with a JSON object on each line.
NDJSON = "application/x-ndjson"
# Events of OpenAI's older APIs.
_UNNAMED = (responses.ChatChunk, responses.CompletionAnswer)


class Operation(NamedTuple):
    """One method of one path.

    Attributes:
        answer: Body of status 200; None means text of `answer_type`.
        errors: Statuses with an `ErrorAnswer`.
        chunk: An event of its stream.
        refusal: Body of status 503, if that is no `ErrorAnswer`.
        runner: The runner that the engine must have; None means any. Streams need "generate".
        query: Names that the query may have.
        error: Body of its errors.
        content: Type of its body.
        stream_type: Type of a stream; "application/x-ndjson" has an answer on each line.
        of_catalog: It needs no engine, only the models' states (`server.catalog`), so a server of
            several models answers it itself.
    """

    path: str
    method: str
    endpoint: Endpoint
    summary: str
    answer: type | None
    errors: tuple[str, ...] = ("401", "403", "500")
    body: type[BaseModel] | None = None
    chunk: type | None = None
    refusal: type | None = None
    runner: str | None = None
    query: tuple[str, ...] = ()
    error: type = responses.ErrorAnswer
    content: str = "application/json"
    answer_type: str = "text/plain"
    stream_type: str = "text/event-stream"
    of_catalog: bool = False

    @property
    def needs_runner(self) -> str | None:
        """The runner that the path needs; None means any."""
        generates = self.chunk is not None and not self.of_catalog
        return "generate" if generates else self.runner


@lru_cache(maxsize=2)
def document_of(operations: tuple[Operation, ...]) -> dict[str, Any]:
    """Returns the OpenAPI document of operations, without the servers' address."""
    kinds: dict[type, None] = {}
    for operation in operations:
        used = (
            operation.body, operation.answer, operation.chunk, operation.refusal, operation.error,
        )  # fmt: skip
        kinds |= {_entry(kind): None for kind in used if kind is not None}
    _, schemas = TypeAdapter.json_schemas(
        [(kind, "validation", TypeAdapter(kind)) for kind in kinds],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for operation in operations:
        path = operation.path.replace("{model:path}", "{model}")
        paths.setdefault(path, {})[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlx-paged",
            "version": __version__,
            "description": "OpenAI's, Anthropic's and Ollama's APIs, with vLLM's extras.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.answer_type: {"schema": {"type": "string"}}}
    if operation.answer is not None:
        content = _json(operation.answer)
    if operation.chunk is not None:
        # A chat's last event is not JSON. Events of the other APIs have names.
        ending = ", then [DONE]" if operation.chunk in _UNNAMED else ""
        kind = "Lines" if operation.stream_type == NDJSON else "Events"
        description = f"{kind} of {operation.chunk.__name__}{ending}."
        content[operation.stream_type] = {"schema": {"description": description}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": {"description": "Done.", "content": content}},
    }
    for status in operation.errors:
        error = {"description": ERRORS[status], "content": _json(operation.error)}
        described["responses"][status] = error
    if operation.refusal is not None:
        refusal = {"description": "No.", "content": _json(operation.refusal)}
        described["responses"]["503"] = refusal
    if operation.body is not None:
        content = _json(operation.body, operation.content)
        described["requestBody"] = {"required": True, "content": content}
    in_path = [name.partition(":")[0] for name in re.findall(r"{([^}]+)}", operation.path)]
    parameters = [(name, "path") for name in in_path] + [(n, "query") for n in operation.query]
    if parameters:
        described["parameters"] = [
            {
                "name": name,
                "in": location,
                "required": location == "path",
                "schema": {"type": "string"},
            }
            for name, location in parameters
        ]
    if "401" in operation.errors:
        described["security"] = [{"key": []}, {}]
    return described


def _json(kind: type, content: str = "application/json") -> dict[str, Any]:
    schema: dict[str, Any] = {"$ref": f"#/components/schemas/{_entry(kind).__name__}"}
    if _entry(kind) is not kind:
        schema = {"type": "array", "items": schema}
    return {content: {"schema": schema}}


def _entry(kind: type) -> type:
    """Returns the type of a list's entries; any other type itself."""
    return get_args(kind)[0] if get_origin(kind) is list else kind
