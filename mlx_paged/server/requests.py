"""Reads and validates the bodies of requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from mlx_paged.server.bodies import GenerationBody, Unsupported
from mlx_paged.server.body_bounds import MAX_TOKEN_IDS, BodyBounds
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.context import request_log_of, server_context_of
from mlx_paged.server.documents import read_documents
from mlx_paged.server.errors import ApiError, bad_request, shorten, speaks_anthropic

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=BaseModel)

_MAX_NAMED_FIELDS = 8
_SCANNED_AT_ONCE = 1 << 13  # bytes of a body
_SMALL_BODY = 1 << 16  # bytes
_TURN = 0.002  # seconds of scanning after which other tasks run
# Names that pydantic puts into the path of a field for the branches of a union.
_BRANCHES = frozenset(
    {"str", "int", "float", "bool", "ToolChoiceBody", "ToolChoiceObject", "NamedFunction"}
)


async def read_body(request: Request, model: type[B]) -> B:
    """Reads and validates the body of a request.

    Raises:
        ApiError: 400 with the field, 404 for a model that is not served, 408, 413 or 415, 503 while
            the server takes no requests.
    """
    context, trace = server_context_of(request), request_log_of(request)
    body = validated(request, await read_bytes(request), model)
    if isinstance(body, Unsupported):
        unsupported = body.unsupported()
        if unsupported is not None:
            raise bad_request(*unsupported, code="unsupported_parameter")
    if (name := getattr(body, "model", None)) is not None:
        setattr(body, "model", context.served_name(name))  # noqa: B010 (not every body has it)
    await read_documents(body, context.documents)
    if isinstance(body, GenerationBody):
        trace.request_id = body.request_id or trace.request_id
        trace.fields |= {"model": body.model, "stream": bool(body.stream)}
        for name in ("user", "safety_identifier", "metadata"):
            if getattr(body, name) is not None:
                trace.fields[name] = getattr(body, name)
    return body


async def read_small_body(request: Request, model: type[B]) -> B:
    """Reads the body of a request about models, which needs no engine; ignores unknown fields.

    Raises:
        ApiError: 400 with the field, 413 or 415.
    """
    check_content(request)
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > _SMALL_BODY:
            raise too_large(_SMALL_BODY)
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise _from_validation(error, is_openai=True) from None


async def read_bytes(request: Request) -> bytes:
    """Reads the body of a request without validating it.

    Raises:
        ApiError: 408, 413 or 415, 503 while the server takes no requests.
    """
    context = server_context_of(request)
    context.check_takes_requests()
    check_content(request)
    limit = context.max_model_len
    bounds = BodyBounds(max(MAX_TOKEN_IDS, limit or 0), limit)
    async with context.reading_body():
        return await _received(request, bounds)


def validated(request: Request, raw: bytes | bytearray, model: type[B]) -> B:
    """Parses and validates a body, or a part of one.

    Raises:
        ApiError: 400 with the field.
    """
    try:
        body = model.model_validate_json(raw)
    except ValidationError as error:
        raise _from_validation(error, is_openai=not speaks_anthropic(request.scope)) from None
    _check_unknown(body, server_context_of(request).config, request_log_of(request).request_id)
    return body


def has_body(request: Request) -> bool:
    """True if a request announces a body."""
    headers = request.headers
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""


def check_content(request: Request) -> None:
    """Refuses a body that is not declared as JSON, or is compressed.

    Pages of any site may send bodies without a type or with those of forms. For other types, the
    browser asks this server first.

    Raises:
        ApiError: 415, which says what to send.
    """
    kind = request.headers.get("content-type")
    if kind is None or kind.partition(";")[0].strip().lower() != "application/json":
        shown = "missing" if kind is None else repr(shorten(kind, 64))
        raise unsupported_content(
            f"Content-Type must be application/json but is {shown}: send the header "
            "'Content-Type: application/json' (with curl: -H 'Content-Type: application/json')"
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise unsupported_content(
            f"Content-Encoding must be identity but is {shorten(encoding, 64)!r}: send the body "
            "uncompressed",
            {"Accept-Encoding": "identity"},
        )


def unsupported_content(message: str, headers: Mapping[str, str] | None = None) -> ApiError:
    """Returns 415. The connection is closed, because the body is not read."""
    return ApiError(
        415, message, code="unsupported_media_type",
        headers={"Connection": "close", **(headers or {})},
    )  # fmt: skip


async def _received(request: Request, bounds: BodyBounds) -> bytes:
    context, trace = server_context_of(request), request_log_of(request)
    limit, read_timeout = context.max_body_size, context.config.read_timeout
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(read_timeout):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise too_large(limit)
                context.hold_body(trace, size)
                chunks.append(chunk)
                began = time.monotonic()
                for begin in range(0, len(chunk), _SCANNED_AT_ONCE):
                    if time.monotonic() - began > _TURN:
                        await asyncio.sleep(0)
                        began = time.monotonic()
                    bounds.feed(chunk[begin : begin + _SCANNED_AT_ONCE])
    except TimeoutError:
        raise ApiError(
            408, f"the body did not come within {read_timeout:g} s", code="read_timeout",
            headers={"Connection": "close"},
        ) from None  # fmt: skip
    except ClientDisconnect:
        raise ApiError(499, "the client disconnected", code="client_closed") from None
    except ApiError as error:
        error.headers.setdefault("Connection", "close")  # the rest of the body is not read
        raise
    return b"".join(chunks)


def too_large(limit: int, what: str = "the body") -> ApiError:
    """Returns 413 with the limit."""
    return ApiError(
        413,
        f"{what} must be at most {limit} bytes",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def _from_validation(error: ValidationError, *, is_openai: bool) -> ApiError:
    found = error.errors(include_url=False, include_context=False)
    # The client meant the branch of the union that matched furthest.
    top = [e for e in found if e["loc"][:1] == found[0]["loc"][:1]]
    first = max(top, key=lambda e: (e["type"] == "too_long", len(_path_of(e["loc"]))))
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    path = _path_of(first["loc"])
    param = _spelled(path, is_openai=is_openai) or None
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_field")
    # Each branch of a union reports its expectation.
    same = [e["msg"] for e in found if _path_of(e["loc"]) == path]
    expected = ", or ".join(dict.fromkeys(m[:1].lower() + m[1:] for m in same))
    value = first["input"]
    if isinstance(value, str):
        value = shorten(value)  # before its repr is made
    given = "" if isinstance(value, (dict, list)) else f" but got {value!r}"
    where = param or "the body"
    return ApiError(400, f"{where}: {shorten(expected + given)}", param=param, code="invalid_value")


def _path_of(path: Sequence[int | str]) -> list[int | str]:
    """Returns the path of a field as the client wrote it, without the branches of unions."""
    names = [p for p in path if isinstance(p, int) or (p.isidentifier() and p not in _BRANCHES)]
    return names[:8]


def _spelled(path: Sequence[int | str], *, is_openai: bool) -> str:
    """Returns a path in the notation of an API: ``messages[0].role`` in OpenAI's,
    ``messages.0.role`` in Anthropic's."""
    text = ".".join(map(str, path))
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", text) if is_openai else text


def _check_unknown(body: BaseModel, config: ServerConfig, request_id: str) -> None:
    names = list(itertools.islice(_unknown(body), _MAX_NAMED_FIELDS))
    if not names:
        return
    shown = [shorten(name, 64) for name in names]
    if config.strict_requests:
        raise ApiError(400, f"unknown field {shown[0]!r}", param=shown[0], code="unknown_parameter")
    logger.warning("unknown fields %s", shown, extra={"request_id": request_id})


def _unknown(body: BaseModel) -> Iterator[str]:
    yield from body.model_extra or ()
    for field in ("stream_options", "reasoning", "options"):
        options = getattr(body, field, None)
        if isinstance(options, BaseModel):
            yield from (f"{field}.{name}" for name in options.model_extra or ())
