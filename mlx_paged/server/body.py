"""Reads and validates the body of a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from mlx_paged.server.config import ServerConfig
from mlx_paged.server.errors import ApiError, bad_request, shorten
from mlx_paged.server.schemas.base import Unsupported

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=BaseModel)

_MAX_NAMED_FIELDS = 8
_BRANCHES = frozenset({"str", "int", "float", "bool"})


async def read_body(request: Request, schema: type[B], config: ServerConfig) -> B:
    """The body of a request, checked.

    Raises:
        ApiError: 400 with the field, 408 or 413.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    # A page of any origin can have a browser send other types without being asked first.
    if kind.lower() != "application/json" and not kind.lower().endswith("+json"):
        raise ApiError(
            415, f"Content-Type must be application/json but is {shorten(kind, 64)!r}",
            code="unsupported_media_type", headers={"Connection": "close"},
        )  # fmt: skip
    raw = await _read_bytes(request, config)
    try:
        body = schema.model_validate_json(raw)
    except ValidationError as error:
        raise _from_validation(error) from None
    _judge_unknown(body, config, request.scope["state"]["trace"].request_id)
    if isinstance(body, Unsupported):
        unsupported = body.unsupported()
        if unsupported is not None:
            raise bad_request(*unsupported, code="unsupported_parameter")
    return body


async def _read_bytes(request: Request, config: ServerConfig) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > config.max_body_size:
        raise _too_large(config)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(config.read_timeout):
            async for chunk in request.stream():
                size += len(chunk)
                if size > config.max_body_size:
                    raise _too_large(config)
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not come within {config.read_timeout:g} s", code="read_timeout",
            headers={"Connection": "close"},
        ) from None  # fmt: skip
    except ClientDisconnect:
        raise ApiError(499, "the client has gone", code="client_closed") from None
    return b"".join(chunks)


def _too_large(config: ServerConfig) -> ApiError:
    return ApiError(
        413,
        f"the body must be at most {config.max_body_size} bytes",
        code="body_too_large",
        headers={"Connection": "close"},  # what is still on its way is not read
    )


def _from_validation(error: ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_context=False)
    # Of the branches of a union, the one that came furthest is what the client meant.
    top = [e for e in found if e["loc"][:1] == found[0]["loc"][:1]]
    first = max(top, key=lambda e: len(_param(e["loc"]).split(".")))
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    param = _param(first["loc"]) or None
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_field")
    # A union tells what each of its branches expected.
    same = [e["msg"] for e in found if _param(e["loc"]) == (param or "")]
    expected = ", or ".join(dict.fromkeys(m[:1].lower() + m[1:] for m in same))
    given = "" if isinstance(first["input"], (dict, list)) else f" but got {first['input']!r}"
    where = param or "the body"
    return ApiError(400, f"{where}: {shorten(expected + given)}", param=param, code="invalid_value")


def _param(path: Sequence[int | str]) -> str:
    """The path of a field as the client wrote it: without the branches of unions."""
    names = [p for p in path if isinstance(p, int) or (p.isidentifier() and p not in _BRANCHES)]
    return ".".join(map(str, names[:4]))


def _judge_unknown(body: BaseModel, config: ServerConfig, request_id: str) -> None:
    names = list(_unknown(body))[:_MAX_NAMED_FIELDS]
    if not names:
        return
    shown = [shorten(name, 64) for name in names]
    if config.strict_requests:
        raise ApiError(400, f"unknown field {shown[0]!r}", param=shown[0], code="unknown_parameter")
    logger.warning("unknown fields %s", shown, extra={"request_id": request_id})


def _unknown(body: BaseModel) -> Any:
    yield from body.model_extra or ()
    options = getattr(body, "stream_options", None)
    if options is not None:
        yield from (f"stream_options.{name}" for name in options.model_extra or ())
