"""Tunnels the WebSocket of `/v1/responses` to the process of the model in its first message.

The model stays loaded while the connection is open. Its process answers the messages, and closes
the connection after its time limit or at shutdown (`responses_api.websocket`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from mlx_paged.server.context import RequestLog
from mlx_paged.server.errors import ApiError, bad_request, shorten, unavailable
from mlx_paged.server.lazy_json import json_bytes
from mlx_paged.server.rate_limits import budget_of
from mlx_paged.server.responses_api.websocket import MAX_WAITING, PATH
from mlx_paged.server.router.context import RouterContext
from mlx_paged.server.router.forward import keep_alive_of, marks_of, routed_of
from mlx_paged.server.router.pool import Lease
from mlx_paged.server.router.routing import RoutedRequest
from mlx_paged.server.websocket import IDLE_SINCE

_GOING_AWAY, _FAILED = 1001, 1011
# Matches the last event of a turn.
_LAST = re.compile(r'\{"type":\s*"(?:error|response\.(?:completed|incomplete|failed))"')
# Handshake headers that name the client's span.
_CARRIED = (b"traceparent", b"tracestate")


async def responses_socket(socket: WebSocket) -> None:
    """Tunnels one connection until it ends."""
    context: RouterContext = socket.app.state.context
    try:
        context.check_takes_requests()
    except ApiError as error:
        await error.response(socket.scope)(socket.scope, socket.receive, socket.send)
        return
    await socket.accept()
    with contextlib.suppress(WebSocketDisconnect):
        await _Tunnel(socket, context).run()


class _Tunnel:
    """One connection."""

    def __init__(self, socket: WebSocket, context: RouterContext) -> None:
        self._socket = socket
        self._context = context
        self._lease: Lease | None = None
        self._inbox: asyncio.Queue[str | bytes] = asyncio.Queue()
        self._waiting = RequestLog("", "WEBSOCKET", PATH, "")  # counts waiting messages' memory
        self._num_waiting = 0  # characters
        self._num_turns = 0  # begun, and not ended

    async def run(self) -> None:
        """Serves the connection until it ends.

        Raises:
            WebSocketDisconnect: The client left during a send.
        """
        reading = asyncio.create_task(self._read())
        working = asyncio.create_task(self._work())
        try:
            await asyncio.wait({reading, working}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            await _cancel(reading, working)
            if self._lease is not None:
                self._lease.release()
            self._context.release_body(self._waiting)

    async def _read(self) -> None:
        """Puts messages into the inbox, until the client leaves."""
        while True:
            received = await self._socket.receive()
            if received["type"] == "websocket.disconnect":
                return
            message = received.get("text")
            if message is None:
                message = received.get("bytes", b"")
            try:
                self._hold(len(message))
            except ApiError as error:
                await self._send_error(error)
                continue
            self._inbox.put_nowait(message)

    def _hold(self, num_more: int) -> None:
        """Counts waiting messages among the bodies in memory.

        Raises:
            ApiError: 429 or 503, too many messages or bytes would wait.
        """
        if num_more > 0 and self._inbox.qsize() >= MAX_WAITING:
            message = f"at most {MAX_WAITING} messages may wait for the response before them"
            raise ApiError(429, message, code="too_many_messages")
        if num_more < 0:
            self._context.release_body(self._waiting)
        self._context.hold_body(self._waiting, self._num_waiting + num_more)
        self._num_waiting += num_more

    async def _take(self) -> str | bytes:
        message = await self._inbox.get()
        self._hold(-len(message))
        return message

    async def _work(self) -> None:
        """Connects to the model's process, and forwards messages in both directions."""
        while True:
            self._note_idleness()
            message = await self._first()
            if message is None:
                await self._socket.close(_GOING_AWAY, "the server is shutting down")
                return
            self._num_turns = 1
            self._note_idleness()
            try:
                upstream = await self._connect(message)
                break
            except ApiError as error:
                self._num_turns = 0
                if self._lease is not None:
                    self._lease.release()
                    self._lease = None
                await self._send_error(error)
        async with upstream:
            with contextlib.suppress(ConnectionClosed):  # `_return` passes its close code on.
                await upstream.send(message)
            sending = asyncio.create_task(self._send_on(upstream))
            returning = asyncio.create_task(self._return(upstream))
            try:
                await asyncio.wait({sending, returning}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
                await returning
            finally:
                await _cancel(sending, returning)

    async def _first(self) -> str | bytes | None:
        """Returns the next message; None if the server shuts down."""
        taking = asyncio.create_task(self._take())
        draining = asyncio.create_task(self._context.drained.wait())
        try:
            await asyncio.wait({taking, draining}, return_when=asyncio.FIRST_COMPLETED)
            return taking.result() if taking.done() else None
        finally:
            await _cancel(taking, draining)

    async def _connect(self, message: str | bytes) -> ClientConnection:
        """Connects to the model that a message names, and waits until it is loaded.

        Raises:
            ApiError: There is no such model, it cannot be loaded, or it does not take messages.
        """
        if isinstance(message, bytes):
            raise ApiError(400, "messages must be text", code="invalid_message")
        routed = routed_of(message.encode())
        self._admit()
        self._lease = self._context.pool.lease(routed.model, keep_alive_of(routed.keep_alive))
        path = await self._lease.place(RoutedRequest(self._socket.headers, message.encode()))
        headers = [header for header in self._socket.headers.raw if header[0] in _CARRIED]
        headers += marks_of(self._socket.scope)
        try:
            return await unix_connect(
                str(path),
                f"ws://localhost{PATH}",
                additional_headers=[(k.decode(), v.decode("latin-1")) for k, v in headers],
                compression=None,
                max_size=None,
                ping_interval=None,  # The client's connection has pings.
                user_agent_header=None,
            )
        except InvalidStatus as refused:
            body = refused.response.body
            try:
                error = json.loads(body or b"")["error"]
                raise ApiError(
                    refused.response.status_code,
                    error["message"],
                    param=error["param"],
                    code=error["code"],
                ) from None
            except (ValueError, KeyError, TypeError):
                raise _gone() from refused
        except (OSError, WebSocketException) as error:
            raise _gone() from error

    async def _send_on(self, upstream: ClientConnection) -> None:
        """Forwards the client's messages to the process."""
        assert self._lease is not None
        own = self._lease.model
        while True:
            message = await self._take()
            try:
                if isinstance(message, str):
                    name = routed_of(message.encode()).model
                    if name is not None and self._context.pool.find(name) is not own:
                        raise bad_request(
                            "model",
                            f"model must be of {own.name!r}, which this connection uses, but is "
                            f"{shorten(name, 64)!r}: open another connection for it",
                        )
                self._admit()
            except ApiError as error:
                await self._send_error(error)
                continue
            self._num_turns += 1
            self._note_idleness()
            try:
                await upstream.send(message)
            except ConnectionClosed:
                return

    async def _return(self, upstream: ClientConnection) -> None:
        """Forwards the process's events, and finally its close code, to the client."""
        try:
            while True:
                event = await upstream.recv()
                assert isinstance(event, str)
                await self._send(event)
                if _LAST.match(event):
                    self._num_turns = max(0, self._num_turns - 1)
                    self._note_idleness()
        except ConnectionClosed as closed:
            if closed.rcvd is None:
                await self._send_error(_gone())
                await self._socket.close(_FAILED)
            else:
                await self._socket.close(closed.rcvd.code, closed.rcvd.reason)

    def _admit(self) -> None:
        """Counts a turn; the process reports its tokens.

        Raises:
            ApiError: 429, the client has used up its rate limit.
        """
        budget = budget_of(self._socket.scope)
        if budget is not None:
            budget.admit()

    def _note_idleness(self) -> None:
        """Marks a connection without a turn as idle: the listener may close it."""
        now = asyncio.get_running_loop().time()
        self._socket.scope["state"][IDLE_SINCE] = None if self._num_turns else now

    async def _send(self, event: str) -> None:
        """Sends an event.

        Raises:
            WebSocketDisconnect: The client has left, or does not read.
        """
        try:
            async with asyncio.timeout(self._context.config.read_timeout):
                await self._socket.send_text(event)
        except TimeoutError:
            raise WebSocketDisconnect(1006) from None

    async def _send_error(self, error: ApiError) -> None:
        event: Any = {"type": "error", "status": error.status, **error.body}
        await self._send(json_bytes(event).decode())


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _gone() -> ApiError:
    return unavailable("the process of the model has ended", "model_failed")
