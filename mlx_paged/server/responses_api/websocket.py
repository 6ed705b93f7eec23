"""The WebSocket transport of `/v1/responses`: one turn at a time on one connection.

The client sends ``response.create`` messages, which are bodies of `POST /v1/responses`. The server
answers each with the events of a stream, one per text message; errors are events, too. The
connection remembers its latest response, even with ``store: false``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any, Literal, cast

from pydantic import Field
from starlette.requests import Request
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from mlx_paged.server import requests
from mlx_paged.server.bodies import Body
from mlx_paged.server.context import Context, RequestLog
from mlx_paged.server.errors import ApiError, failed, shorten
from mlx_paged.server.lazy_json import json_bytes
from mlx_paged.server.middleware import log_end
from mlx_paged.server.rate_limits import budget_of
from mlx_paged.server.responses_api.adapter import ResponseAdapter
from mlx_paged.server.responses_api.body import ResponseBody
from mlx_paged.server.responses_api.endpoints import adapter_of, own_names
from mlx_paged.server.responses_api.store import LatestResponse
from mlx_paged.server.streaming import events_of
from mlx_paged.server.websocket import IDLE_SINCE

logger = logging.getLogger(__name__)

PATH = "/v1/responses"
#: Maximum lifetime of a connection in seconds, as in OpenAI's API.
MAX_AGE = 3600.0
#: Maximum waiting messages while a response is generated.
MAX_WAITING = 16
_GOING_AWAY, _NORMAL = 1001, 1000
_DATA = b"\ndata: "
# Headers of the handshake that name the client's span.
_CARRIED = (b"traceparent", b"tracestate")


class _Typed(Body):
    type: Literal["response.create"]


# In this order of bases, a wrong type is the first error that is reported.
class CreateMessage(ResponseBody, _Typed):
    """``response.create``: a body of `POST /v1/responses` with a type."""

    generate: bool | None = Field(
        None, description="false: only compute the prompt, so that its prefix is cached."
    )

    def unsupported(self) -> tuple[str, str] | None:
        if self.stream is False:
            return "stream", "stream must be true or null: a WebSocket streams every response"
        if self.background:
            return "background", "background must be false: a WebSocket has one response at a time"
        return super().unsupported()


async def responses_socket(socket: WebSocket) -> None:
    """Answers the messages of one connection until it ends."""
    context: Context = socket.app.state.context
    try:
        context.check_takes_requests()
        context.models.default.check_runner("generate", PATH)
    except ApiError as error:
        await error.response(socket.scope)(socket.scope, socket.receive, socket.send)
        return
    await socket.accept()
    with contextlib.suppress(WebSocketDisconnect):
        await _Session(socket, context).run()


async def no_socket(socket: WebSocket) -> None:
    """Refuses a WebSocket of another path."""
    shown = shorten(socket.url.path)
    error = ApiError(404, f"there is no WebSocket at {shown}, only at {PATH}", code="not_found")
    await error.response(socket.scope)(socket.scope, socket.receive, socket.send)


class _Session:
    """One connection."""

    def __init__(self, socket: WebSocket, context: Context) -> None:
        self._socket = socket
        self._context = context
        self._latest = LatestResponse(context.config.max_stored_bytes)
        self._inbox: asyncio.Queue[str] = asyncio.Queue()
        self._waiting = RequestLog("", "WEBSOCKET", PATH, "")  # counts waiting messages' memory
        self._num_waiting = 0  # characters
        self._ends_at = asyncio.get_running_loop().time() + MAX_AGE

    async def run(self) -> None:
        """Serves the connection until it ends.

        Raises:
            WebSocketDisconnect: The client left during a send.
        """
        reading = asyncio.create_task(self._read())
        try:
            while (message := await self._next(reading)) is not None:
                turn = asyncio.create_task(self._turn(message))
                try:
                    await asyncio.wait({turn, reading}, return_when=asyncio.FIRST_COMPLETED)
                    if not turn.done():
                        return
                    turn.result()
                finally:
                    turn.cancel()  # ends the request in the engine
                    await asyncio.gather(turn, return_exceptions=True)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self._context.release_body(self._waiting)

    async def _read(self) -> None:
        """Puts messages into the inbox, until the client leaves."""
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            if text is None:
                await self._send_error(_bad_message("messages must be text"))
            else:
                try:
                    self._hold(len(text))
                except ApiError as error:
                    await self._send_error(error)
                    continue
                self._inbox.put_nowait(text)

    def _hold(self, num_more: int) -> None:
        """Adds to the characters of waiting messages, which count as request bodies in memory.

        Args:
            num_more: Characters of a new message; negative for one that is taken.

        Raises:
            ApiError: 429 or 503, too many messages or bytes would wait.
        """
        limit = self._context.models.max_body_size
        is_full = self._inbox.qsize() >= MAX_WAITING or self._num_waiting + num_more > limit
        if num_more > 0 and is_full and self._num_waiting:
            raise ApiError(
                429,
                f"at most {MAX_WAITING} messages of {limit} bytes together may wait for the "
                "current response",
                code="too_many_messages",
            )
        if num_more < 0:
            self._context.release_body(self._waiting)
        self._context.hold_body(self._waiting, self._num_waiting + num_more)
        self._num_waiting += num_more

    async def _next(self, reading: asyncio.Task[None]) -> str | None:
        """Returns the next message; None if the connection ends."""
        loop = asyncio.get_running_loop()
        arriving = asyncio.create_task(self._inbox.get())
        draining = asyncio.create_task(self._context.drained.wait())
        self._socket.scope["state"][IDLE_SINCE] = loop.time()
        try:
            left = self._ends_at - loop.time()
            waiting = {arriving, draining, reading}
            await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return None
            if draining.done():
                await self._socket.close(_GOING_AWAY, "the server is shutting down")
                return None
            if not arriving.done() or loop.time() >= self._ends_at:
                await self._send_error(
                    ApiError(
                        400,
                        f"a connection may be used for {MAX_AGE / 60:g} minutes: open a new one",
                        code="websocket_connection_limit_reached",
                    )
                )
                await self._socket.close(_NORMAL)
                return None
            message = arriving.result()
            self._hold(-len(message))
            return message
        finally:
            self._socket.scope["state"][IDLE_SINCE] = None
            for task in (arriving, draining):
                task.cancel()
            await asyncio.gather(arriving, draining, return_exceptions=True)

    async def _turn(self, text: str) -> None:
        """Answers one message."""
        scope, context = self._socket.scope, self._context
        client = (scope.get("client") or ("",))[0]
        trace = RequestLog(uuid.uuid4().hex, "WEBSOCKET", PATH, client)
        trace.status = 200
        context.metrics.server_load += 1
        try:
            await self._answer(self._request(text, trace), trace)
        except ApiError as error:
            trace.status = error.status
            trace.fields["error"] = error.message
            await self._send_error(error)
        except (WebSocketDisconnect, asyncio.CancelledError):
            trace.status = 499
            raise
        except Exception:
            logger.exception("a response failed", extra={"request_id": trace.request_id})
            trace.status = 500
            await self._send_error(failed(trace.request_id))
        finally:
            context.metrics.server_load -= 1
            context.release_body(trace)
            log_end(trace, context.metrics, log=context.config.log_requests)

    async def _answer(self, request: Request, trace: RequestLog) -> None:
        if (budget := budget_of(request.scope)) is not None:
            budget.admit()
        body = await requests.read_body(request, CreateMessage)
        body.stream = trace.fields["stream"] = True
        try:
            with own_names(request):
                adapter = await adapter_of(request, body, self._latest)
                if body.generate is False:
                    params = replace(adapter.generation.params, max_tokens=1, min_tokens=0)
                    adapter.generation.params = params
                await adapter.generation.submit()
            events = _warming(adapter) if body.generate is False else events_of(adapter)
            async with contextlib.aclosing(cast(AsyncGenerator[bytes, None], events)):
                async for event in events:
                    await self._send(event.partition(_DATA)[2].rstrip())
        except ApiError:
            self._latest.forget(body.previous_response_id)
            raise
        if adapter.status == "failed":
            self._latest.forget(body.previous_response_id)
        else:
            remembered = adapter.remembered
            self._latest.put(adapter.now(), remembered.new_input, remembered.before)

    def _request(self, text: str, trace: RequestLog) -> Request:
        """Returns the HTTP request that a message stands for."""
        content = text.encode()
        parts = [content]

        async def receive() -> Message:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            await asyncio.Event().wait()  # `run` cancels the turn when the client leaves
            raise AssertionError

        scope = {
            **self._socket.scope,
            "type": "http",
            "method": "POST",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(content)).encode()),
                *(pair for pair in self._socket.scope["headers"] if pair[0] in _CARRIED),
            ],
            "state": {**self._socket.scope["state"], "trace": trace},
        }
        return Request(scope, receive)

    async def _send(self, event: bytes) -> None:
        """Sends an event.

        Raises:
            WebSocketDisconnect: The client has left, or does not read.
        """
        try:
            async with asyncio.timeout(self._context.config.read_timeout):
                await self._socket.send_text(event.decode())
        except TimeoutError:
            logger.warning("a client did not read")
            raise WebSocketDisconnect(1006) from None

    async def _send_error(self, error: ApiError) -> None:
        event: Any = {"type": "error", "status": error.status, **error.body}
        await self._send(json_bytes(event))


async def _warming(adapter: ResponseAdapter) -> AsyncIterator[bytes]:
    """Yields the events of a response that only computes its prompt."""
    async with adapter.generation as generation:
        for event in adapter.begin():
            yield event
        await generation.finish()
        for event in adapter.without_answer():
            yield event


def _bad_message(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_message")
