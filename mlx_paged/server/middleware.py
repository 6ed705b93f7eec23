"""Middleware of every request: id, key, log line, and unexpected errors."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_paged.server.context import RequestLog
from mlx_paged.server.errors import ApiError, failed, speaks_anthropic
from mlx_paged.server.metrics import Metrics

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("mlx_paged.access")

_PREFIX = "v1"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# Polled every few seconds by machines: logged only at level debug.
_QUIET_PATHS = frozenset(
    {"/health", "/ping", "/live", "/ready", "/metrics", "/load", "/server_info"}
)


_STARTS = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})


class RequestMiddleware:
    """Outermost: a log line for each request, and a 500 without internals for unexpected errors.

    Args:
        log: Write a line for each request.
        paths: Paths that metrics distinguish.
        generating: Paths that count as the server's load.
        on_end: Called with the log of each request that has ended.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        *,
        log: bool,
        paths: Sequence[str],
        generating: Sequence[str],
        on_end: Callable[[RequestLog], None],
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._log = log
        self._paths = frozenset(paths)
        self._generating = frozenset(generating)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        trace = RequestLog(
            given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex,
            scope.get("method", "WEBSOCKET"),
            _path(scope),
            (scope.get("client") or ("",))[0],
        )
        state = scope.setdefault("state", {})
        trace.background = state.get("background", False)
        state["trace"] = trace
        is_anthropic = speaks_anthropic(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] in _STARTS:
                trace.status = message.get("status", 101)
                message.setdefault("headers", [])
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = trace.request_id
                if is_anthropic:
                    headers["request-id"] = trace.request_id
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        # A WebSocket counts its turns instead.
        is_load = scope["type"] == "http" and not trace.background
        load = int(is_load and trace.path in self._generating)
        self._metrics.server_load += load
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("a request failed", extra={"request_id": trace.request_id})
            if not trace.status:
                response = failed(trace.request_id).response(scope)
                await response(scope, receive, send_with_id)
            # Otherwise, the head of the response is out, and the connection is closed.
        finally:
            self._metrics.server_load -= load
            self._on_end(trace)
            self._log_end(trace)

    def _log_end(self, trace: RequestLog) -> None:
        known = trace.path in self._paths
        log = self._log and not trace.background
        log_end(trace, self._metrics, log=log, path=trace.path if known else "other")


def log_end(trace: RequestLog, metrics: Metrics, *, log: bool, path: str | None = None) -> None:
    """Counts a request that has ended, and writes its line.

    Args:
        log: Write the line.
        path: The path in metrics; None keeps it.
    """
    metrics.responses.labels(path or trace.path, str(trace.status)).inc()
    if log:
        is_quiet = trace.is_forwarded or trace.path in _QUIET_PATHS
        level = logging.DEBUG if is_quiet else logging.INFO
        access_logger.log(level, "request", extra=trace.log_fields())


class PrefixMiddleware:
    """Accepts API paths without `/v1`, for clients whose base URL lacks it.

    Args:
        paths: All paths. Those below `/v1` are also accepted without it, unless that is the
            beginning of another one.
    """

    def __init__(self, app: ASGIApp, paths: Sequence[str]) -> None:
        self._app = app
        first = [path.split("/")[1] for path in paths]
        below = {path.split("/")[2] for path, name in zip(paths, first) if name == _PREFIX}
        self._names = frozenset(below.difference(first))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "path" in scope and (path := _path(scope)).split("/")[1] in self._names:
            root = scope["path"].removesuffix(path)
            scope = {**scope, "path": f"{root}/{_PREFIX}{path}"}
        await self._app(scope, receive, send)


class KeyMiddleware:
    """Requires a key, whose digest goes into the request's state, except for `open_paths`.

    Args:
        keys: Valid keys; if empty, all paths are open.
        open_paths: Exact paths, and prefixes that end with "/".
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Sequence[str]) -> None:
        self._app = app
        self._keys = [digest(key) for key in keys]
        self._open = frozenset(open_paths)
        self._open_below = tuple(p for p in open_paths if p.endswith("/") and p != "/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_request = scope["type"] in ("http", "websocket")
        if not is_request or self._is_open(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "a valid API key is needed: Authorization: Bearer <key>, or x-api-key: <key>",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response(scope)(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = _path(scope)
        if not self._keys or scope.get("method") == "OPTIONS":
            return True
        return path in self._open or path.startswith(self._open_below or ("\0",))

    def _has_key(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = [digest(key.strip())] if kind.lower() == "bearer" else []
        if "x-api-key" in headers:  # as Anthropic's clients send it
            given.append(digest(headers["x-api-key"].strip()))
        # All are compared, each in constant time, so that timing reveals nothing.
        matches = [hmac.compare_digest(g, known) for g in given for known in self._keys]
        if not any(matches):
            return False
        scope["state"]["key"] = self._keys[matches.index(True) % len(self._keys)]
        return True


def _path(scope: Scope) -> str:
    """Returns the path as routes know it, without `root_path`."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def digest(key: str) -> bytes:
    """Returns the digest that identifies a key within the server."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
