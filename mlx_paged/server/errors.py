"""Errors in the form that clients expect: a status, and a body that names the field.

There are three forms, OpenAI's, Anthropic's and Ollama's. The path decides which one a client gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Scope

from mlx_paged.errors import (
    AdapterError,
    ConstraintError,
    DuplicateRequestError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidMediaError,
    InvalidParameterError,
    MemoryPressureError,
    MlxPagedError,
    RequestTooLargeError,
)
from mlx_paged.server.messages.answers import MessageError
from mlx_paged.server.ollama.answers import OllamaError
from mlx_paged.server.responses import ErrorAnswer

#: Codes of requests that are refused because memory is short now: for the bodies of unfinished
#: requests, or in the whole system.
BODY_MEMORY, MEMORY_PRESSURE, MEMORY_BUDGET = SHORT_OF_MEMORY = (
    "body_memory", "memory_pressure", "memory_budget",
)  # fmt: skip
#: Seconds after which a refused client may retry.
RETRY_AFTER = 1

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "timeout_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    499: "cancelled_error",
    500: "server_error",
    503: "overloaded_error",
}
# Anthropic's names, if they differ from OpenAI's. Its SDK looks at the status, Claude Code at the
# type.
_MESSAGE_TYPES = {
    408: "invalid_request_error",
    413: "request_too_large",
    499: "invalid_request_error",
    500: "api_error",
    529: "overloaded_error",
}
_OVERLOADED = 529  # Anthropic's, for 503
#: Code for conversations that a server would have to store between requests.
THREADS = "thread_unsupported_request"
# Fields that have another name in the API than in the engine.
_PARAMS = {"prompt_token_ids": "prompt"}


class ApiError(Exception):
    """A request that ends with an error status.

    Args:
        status: HTTP status.
        message: For the client, so without internals.
        param: The field of the body that it is about.
        code: For programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorAnswer:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "server_error")
        return {
            "error": {
                "message": self.message, "type": kind, "param": self.param, "code": self.code,
            }
        }  # fmt: skip

    def body_for(self, scope: Scope) -> ErrorAnswer | MessageError | OllamaError:
        """Returns the body, in the form that the client of a request expects."""
        if speaks_ollama(scope):
            return {"error": self.message}
        if not speaks_anthropic(scope):
            return self.body
        trace = scope.get("state", {}).get("trace")
        return message_error(self, getattr(trace, "request_id", None))

    def response(self, scope: Scope) -> JSONResponse:
        """The whole answer, in the form that the client of a request expects."""
        is_anthropic = speaks_anthropic(scope)
        status = message_status(self.status) if is_anthropic else self.status
        return JSONResponse(self.body_for(scope), status, self.headers)


def speaks_anthropic(scope: Scope) -> bool:
    """True if a request is for Anthropic's API, by its path or by the header of its SDKs."""
    path = _path_of(scope)
    of_messages = path == "/v1/messages" or path.startswith("/v1/messages/")
    return of_messages or "anthropic-version" in Headers(scope=scope)


def speaks_ollama(scope: Scope) -> bool:
    """True if a request is for Ollama's API, by its path. (`/api/v0` is LM Studio's.)"""
    path = _path_of(scope)
    return path.startswith("/api/") and not path.startswith("/api/v0/")


def _path_of(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def message_error(error: ApiError, request_id: str | None) -> MessageError:
    """Anthropic's body of an error."""
    status = message_status(error.status)
    message = error.message
    if error.code == "context_length_exceeded" and not message.startswith("prompt is too long"):
        message = f"prompt is too long: {message}"  # Clients look for these words.
    kind = _MESSAGE_TYPES.get(status, _TYPES.get(status, "api_error"))
    body: MessageError = {"type": "error", "error": {"type": kind, "message": message}}
    if error.code in (THREADS, *SHORT_OF_MEMORY):
        # Upon `THREADS` the SDK sends the whole conversation.
        body["error"]["details"] = {"error_code": error.code}
    if request_id is not None:
        body["request_id"] = request_id
    return body


def message_status(status: int) -> int:
    """Returns the status of Anthropic's API for one of OpenAI's."""
    return _OVERLOADED if status == 503 else status


def bad_request(param: str, message: str, code: str | None = "invalid_value") -> ApiError:
    """Returns 400 for a field."""
    return ApiError(400, message, param=param, code=code)


def model_not_found(name: str, known: Iterable[str]) -> ApiError:
    """Returns 404: no model has this name.

    Args:
        known: The names of all models and adapters.
    """
    message = f"there is no model named {shorten(name, 64)!r} here, only: {', '.join(known)}"
    return ApiError(404, message, param="model", code="model_not_found")


def unavailable(message: str, code: str, retry_after: float = RETRY_AFTER) -> ApiError:
    """Returns 503: the server cannot answer now."""
    headers = {"Retry-After": str(math.ceil(retry_after))}
    return ApiError(503, message, code=code, headers=headers)


def refusal_reason(error: MlxPagedError) -> str:
    """Returns why the engine refused a request, as the metrics name it."""
    if isinstance(error, MemoryPressureError):
        return MEMORY_PRESSURE
    return "queue_full" if isinstance(error, EngineOverloadedError) else "invalid"


def timed_out(seconds: float | None) -> ApiError:
    """Returns 422: the request took longer than this server allows.

    Clients retry on their own after 408, which is for requests that arrive too slowly, and after
    5xx. A retry would take just as long. OpenAI's clients also heed the header.
    """
    limit = "" if seconds is None else f" within {seconds:g} s, the limit of this server"
    return ApiError(
        422,
        f"the request was not finished{limit}",
        code="request_timeout",
        headers={"x-should-retry": "false"},
    )


def aborted() -> ApiError:
    """Returns 499: another request has ended this one, and its client must not retry."""
    return ApiError(
        499,
        "the request was aborted (/abort_requests)",
        code="aborted",
        headers={"x-should-retry": "false"},
    )


def context_exceeded(limit: int, found: str, param: str = "prompt") -> ApiError:
    """Returns 400 for a request that is too long, in OpenAI's words, which clients look for.

    Args:
        limit: Maximum tokens of prompt and answer.
        found: The request's numbers, as the clause after "However, ".
    """
    message = (
        f"This model's maximum context length is {limit} tokens. However, {found}. "
        "Please reduce the length of the prompt or completion."
    )
    return bad_request(param, message, "context_length_exceeded")


def failed(request_id: str) -> ApiError:
    """Returns 500; the log has the details under the request's id."""
    message = f"the server failed on this request; its log has more under id {request_id}"
    return ApiError(500, message, code="internal_error")


def own_name(field: str, names: Mapping[str, str]) -> str:
    """Returns the request's name of a field.

    Args:
        names: The request's names of the engine's fields, which may be parts of their paths; the
            longest match counts.
    """
    fits = [name for name in names if field == name or field.startswith((f"{name}.", f"{name}["))]
    if not fits:
        return field
    longest = max(fits, key=len)
    return names[longest] + field.removeprefix(longest)


@contextmanager
def own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the engine's fields in errors to those of the request (`own_name`)."""
    try:
        yield
    except InvalidParameterError as error:
        field = own_name(error.field, names)
        if field == error.field:
            raise
        raise InvalidParameterError(field, error.expected, error.actual) from error


def from_engine(
    error: MlxPagedError, request_id: str, names: Mapping[str, str] | None = None
) -> ApiError:
    """Turns an error of the engine into one for clients.

    Args:
        names: See `own_name`.
    """
    if isinstance(error, ConstraintError):
        param = own_name(error.field, names or {})
        return bad_request(param, f"{param} must be {error.expected}, but {error.reason}")
    if isinstance(error, InvalidMediaError):
        return bad_request(error.field, f"{error}", "invalid_media")
    if isinstance(error, InvalidParameterError):
        param = own_name(error.field, {**_PARAMS, **(names or {})})
        # A prompt may be long.
        shown = "an empty one" if error.actual in ((), [], "") else shorten(repr(error.actual))
        return bad_request(param, f"{param} must be {error.expected} but got {shown}")
    if isinstance(error, RequestTooLargeError):
        num_prompt, num_answer = error.num_prompt_tokens, error.max_tokens
        found = (
            f"you requested {num_prompt + num_answer} tokens ({num_prompt} in the prompt, "
            f"{num_answer} in the completion)"
        )
        if error.limited_by == "kv_cache":
            found += ", and the KV cache of this server holds no more"
        too_long = num_prompt >= error.limit
        return context_exceeded(error.limit, found, "prompt" if too_long else "max_tokens")
    if isinstance(error, DuplicateRequestError):
        return bad_request("request_id", "request_id is in use by an unfinished request")
    if isinstance(error, MemoryPressureError):
        return unavailable(f"{error}", MEMORY_PRESSURE, error.retry_after)
    if isinstance(error, EngineOverloadedError):
        message = f"{error}"
        headers = {"Retry-After": str(RETRY_AFTER)}
        return ApiError(429, message, code="queue_full", headers=headers)
    if isinstance(error, AdapterError):  # It was read before, so its files have changed since.
        return unavailable("the files of the adapter cannot be read now", "adapter_unavailable")
    if isinstance(error, EngineDeadError):
        return unavailable("the engine takes no requests", "engine_unavailable")
    return failed(request_id)


def shorten(text: str, length: int = 200) -> str:
    """Returns at most `length` characters of a client's text."""
    return text if len(text) <= length else text[:length] + "..."
