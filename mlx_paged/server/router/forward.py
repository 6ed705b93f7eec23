"""Forwards requests to the model processes and relays the responses.

A request for an unloaded model waits for it. Streaming clients get comments meanwhile, which keep
them and the proxies in between from giving up on the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_paged.server import lazy_json, requests
from mlx_paged.server.context import RequestLog, request_log_of
from mlx_paged.server.disconnect import ClientDisconnectedError, while_connected
from mlx_paged.server.errors import (
    ApiError,
    bad_request,
    message_error,
    shorten,
    speaks_anthropic,
    speaks_ollama,
    unavailable,
)
from mlx_paged.server.messages.answers import MessageError
from mlx_paged.server.ollama.bodies import seconds_of
from mlx_paged.server.ollama.endpoints import answer_to_unload
from mlx_paged.server.rate_limits import budget_of
from mlx_paged.server.responses import ErrorAnswer
from mlx_paged.server.router.context import RouterContext, router_of
from mlx_paged.server.router.link import ACCOUNT, BACKGROUND
from mlx_paged.server.router.pool import KeepAlive, Lease, PooledModel
from mlx_paged.server.router.routing import RoutedRequest
from mlx_paged.server.router.transport import Header, Upstream, UpstreamError

# Seconds before a waiting stream gets its first comment, and between later ones. The first one
# commits the response to status 200, so later errors are events.
_PATIENCE, _COMMENT_INTERVAL = 1.0, 5.0
# Request headers that are not forwarded: the router has already checked keys and origins, and
# connection headers apply to a single hop.
_OWN_HEADERS = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"),
        *(b"transfer-encoding", b"content-length", b"expect", b"accept-encoding"),
        *(b"authorization", b"x-api-key", b"origin", b"x-request-id", b"x-forwarded-for"),
        *(b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest", b"cookie"),
        *(BACKGROUND, ACCOUNT),
    }
)
# Response headers that the router's middleware sets itself.
_SET_AGAIN = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server"}) | {
    b"x-content-type-options"
}
BeforeAnswer = Callable[[PooledModel], Awaitable[None]]


class Routed(BaseModel):
    """The fields of a body that the router needs. The model's process validates the rest."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    stream: Any = None
    keep_alive: Any = None


async def forward(request: Request, *, before_answer: BeforeAnswer | None = None) -> Response:
    """Forwards a request with a JSON body to the model that its field `model` names.

    Args:
        before_answer: Called with the model once its response begins, before the client sees any.

    Raises:
        ApiError: 400 for a body without JSON, 404 for an unknown model; see `requests.read_bytes`.
    """
    body = await requests.read_bytes(request)
    routed = routed_of(body)
    keep_alive = keep_alive_of(routed.keep_alive)
    pool = router_of(request).pool
    model = pool.find(routed.model)
    if keep_alive == 0:
        answer = answer_to_unload(_path_of(request), body, model.name)
        if answer is not None:
            pool.begin_unloading(model)
            return answer
    # Ollama's streams are lines of JSON, which have no comments.
    comments = routed.stream is True and not speaks_ollama(request.scope)
    return ForwardedResponse(
        request, routed.model, body, keep_alive, comments=comments, before_answer=before_answer
    )


async def forward_to_owner(request: Request) -> Response:
    """Forwards a request for a stored object, such as a response, to the process that has it.

    Raises:
        ApiError: 404, no loaded model has it; 503, the server is shutting down.
    """
    context = router_of(request)
    context.check_takes_requests()
    asked = [(model, each) for model in context.pool.models for each in model.replicas]
    for model, replica in asked:
        lease = context.pool.lease(model.name)
        try:
            lease.enter(replica)
            upstream = await _send(request, replica.socket, b"")
            if upstream.status == 404 and replica is not asked[-1][1]:
                upstream.close()
                lease.release()
                continue
        except UpstreamError:  # It has just died, and its stored objects with it.
            lease.release()
            continue
        except BaseException:
            lease.release()
            raise
        return ForwardedResponse(request, None, b"", KeepAlive.AS_BEFORE, begun=(lease, upstream))
    path = _path_of(request)
    raise ApiError(404, f"no loaded model has the object {path!r}", code="not_found")


def routed_of(body: bytes) -> Routed:
    """Parses the fields of a body that the router needs.

    Raises:
        ApiError: 400, it is not a JSON object, or `model` is not a string.
    """
    try:
        return Routed.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["loc"]:
            raise bad_request("model", f"model: {first['msg']}") from None
        raise ApiError(
            400, f"the body is not a JSON object: {first['msg']}", code="invalid_json"
        ) from None


def keep_alive_of(given: Any) -> float | KeepAlive | None:
    """Reads Ollama's `keep_alive`: seconds as a number, or a text such as "5m" or "1h30m".

    Returns:
        Seconds; None: forever, for a negative value.

    Raises:
        ApiError: 400.
    """
    if given is None:
        return KeepAlive.AS_BEFORE
    try:
        if isinstance(given, bool) or not isinstance(given, (int, float, str)):
            raise ValueError("must be seconds or a text")
        seconds = seconds_of(given)
        if not math.isfinite(seconds):
            raise ValueError("must be finite")
    except ValueError:
        raise bad_request(
            "keep_alive",
            f"keep_alive must be seconds, or a time such as '5m', but is {shorten(repr(given))}",
        ) from None
    return None if seconds < 0 else seconds


class ForwardedResponse(Response):
    """Relays the response of a model's process, or an error if there is none.

    Args:
        model: The name that the request gave; None: the first model.
        comments: Send SSE comments while the model loads.
        before_answer: See `forward`.
        begun: The lease and the response, if a process is already answering.
    """

    def __init__(
        self,
        request: Request,
        model: str | None,
        body: bytes,
        keep_alive: float | KeepAlive | None,
        *,
        comments: bool = False,
        before_answer: BeforeAnswer | None = None,
        begun: tuple[Lease, Upstream] | None = None,
    ) -> None:
        self.background = None
        self._request = request
        self._model = model
        self._body = body
        self._keep_alive = keep_alive
        self._comments = comments
        self._before_answer = before_answer
        self._begun = begun
        self._upstream: Upstream | None = None
        self._lease: Lease
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response. Disconnecting cancels the wait for a model, or aborts the request."""
        if self._begun is None:
            self._lease = router_of(self._request).pool.lease(self._model, self._keep_alive)
        else:
            self._lease, self._upstream = self._begun
        try:
            with contextlib.suppress(ClientDisconnectedError):
                await while_connected(receive, self._answer(scope, receive, send))
        finally:
            if self._upstream is not None:
                self._upstream.close()
            self._lease.release()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace = request_log_of(self._request)
        try:
            if self._upstream is None:
                await self._wait(send)
                routed = RoutedRequest(self._request.headers, self._body)
                socket = await self._lease.place(routed)
                self._upstream = await _send(self._request, socket, self._body)
            if self._before_answer is not None:
                await self._before_answer(self._lease.model)
            trace.is_forwarded = True  # The model's process logs it.
            await self._relay(self._upstream, scope, send)
        except (ApiError, UpstreamError) as error:
            if isinstance(error, UpstreamError):
                error = unavailable(str(error), "model_failed")
            trace.fields |= {"model": self._lease.model.name, "error": error.message}
            trace.is_forwarded = False
            if not self._has_begun:
                router_of(self._request).metrics.rejected.labels(_reason(error)).inc()
                await error.response(scope)(scope, receive, send)
            elif scope["state"].get("filler"):
                await send(_body(_error_events(error, scope, trace), is_last=True))
            else:
                raise RuntimeError(error.message) from error  # Closes the connection mid-body.

    async def _wait(self, send: Send) -> None:
        """Waits for the model; sends comments to streaming clients."""
        ready = asyncio.ensure_future(self._lease.ready())
        patience = _PATIENCE if self._comments else None
        try:
            while True:
                done, _ = await asyncio.wait({ready}, timeout=patience)
                if done:
                    break
                patience = _COMMENT_INTERVAL
                if not self._has_begun:
                    kind = (b"content-type", b"text/event-stream; charset=utf-8")
                    await self._begin(200, [kind, (b"cache-control", b"no-store")], send)
                await send(_body(b": the model is being loaded\n\n"))
            ready.result()
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)

    async def _relay(self, upstream: Upstream, scope: Scope, send: Send) -> None:
        """Relays a response chunk by chunk."""
        headers = [header for header in upstream.headers if header[0] not in _SET_AGAIN]
        kind = dict(headers).get(b"content-type", b"")
        if (own := dict(headers).get(b"x-request-id")) is not None:
            request_log_of(self._request).request_id = own.decode()  # The body may have set it.
        await asyncio.sleep(0)  # First charge the tokens that the process has already reported.
        if not self._has_begun:
            await self._begin(upstream.status, headers, send)
        elif not kind.startswith(b"text/event-stream"):
            trace = request_log_of(self._request)
            events = _as_events(await upstream.read(), scope, trace)
            await send(_body(events, is_last=True))
            return
        async for chunk in upstream.chunks():
            await send(_body(chunk))
        await asyncio.sleep(0)
        await send(_body(b"", is_last=True))

    async def _begin(self, status: int, headers: list[Header], send: Send) -> None:
        self._has_begun = True
        if dict(headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            self._request.scope["state"]["filler"] = b":\n\n"  # see `server.connection`
        await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send(request: Request, socket: Path, body: bytes) -> Upstream:
    """Sends a request to a process of a model.

    Raises:
        UpstreamError: There is no response.
    """
    target = quote(_path_of(request), safe="/:@!$&'()*+,;=~")
    query = request.scope.get("query_string", b"").decode("latin-1")
    return await Upstream.send(
        socket,
        "GET" if request.method == "HEAD" else request.method,  # uvicorn drops the body.
        f"{target}?{query}" if query else target,
        [
            *(header for header in request.headers.raw if header[0].lower() not in _OWN_HEADERS),
            *marks_of(request.scope),
        ],
        body,
    )


def marks_of(scope: Scope) -> list[Header]:
    """Returns the headers that this router adds to a forwarded request."""
    trace: RequestLog = scope["state"]["trace"]
    marks = [(b"x-request-id", trace.request_id.encode())]
    if trace.client:
        marks.append((b"x-forwarded-for", trace.client.encode()))
    if trace.background:
        marks.append((BACKGROUND, b"1"))
    if (budget := budget_of(scope)) is not None:
        context: RouterContext = scope["app"].state.context
        marks.append((ACCOUNT, str(context.ledger.number_of(budget)).encode()))
    return marks


def _path_of(request: Request) -> str:
    path: str = request.scope["path"]
    return path.removeprefix(request.scope.get("root_path", "")) or "/"


def _body(chunk: bytes, *, is_last: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": chunk, "more_body": not is_last}


def _reason(error: ApiError) -> str:
    """Returns the metrics label for a refused request."""
    return {"queue_full": "queue_full", "shutting_down": "draining"}.get(
        error.code or "", "loading"
    )


def _error_events(error: ApiError, scope: Scope, trace: RequestLog) -> bytes:
    """Formats an error as the last events of a stream, in the format of its API."""
    if speaks_anthropic(scope):
        return _named_event("error", message_error(error, trace.request_id))
    return _last_events(error.body, scope)


def _as_events(body: bytes, scope: Scope, trace: RequestLog) -> bytes:
    """Converts an error body to the last events of a stream."""
    trace.fields["error"] = shorten(body.decode(errors="replace"))
    if speaks_anthropic(scope):
        return _named_event("error", json.loads(body))
    return _last_events(json.loads(body), scope)


def _last_events(body: ErrorAnswer, scope: Scope) -> bytes:
    if scope["path"].endswith("/responses"):
        error = body["error"]
        event = {"type": "error", "sequence_number": 0}
        return _named_event(
            "error",
            {**event, **{k: error[k] for k in ("code", "message", "param")}},  # type: ignore[literal-required]
        )
    return b"data: " + lazy_json.json_bytes(body) + b"\n\ndata: [DONE]\n\n"


def _named_event(name: str, body: MessageError | dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), lazy_json.json_bytes(body))
