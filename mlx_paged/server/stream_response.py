"""EventStream and LineStream: responses sent piece by piece.

Each stream has its own task, a task that waits for the client to disconnect, and a timer. In the
request's task, every piece would wake a dozen coroutines of middleware. A finished stream leaves no
reference cycles: with hundreds of streams, those of anyio's task groups made garbage collection
stall the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from datetime import UTC, datetime

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mlx_paged.server.config import ServerConfig
from mlx_paged.server.connection import send_now
from mlx_paged.server.context import RequestLog
from mlx_paged.server.disconnect import disconnected

logger = logging.getLogger(__name__)

#: Seconds between messages that keep an idle connection open, for proxies.
PING_INTERVAL = 15

_NOT_STORED = {"Cache-Control": "no-store"}


class LiveResponse(StreamingResponse):
    """Sends pieces of a body as they arrive. Stops if the client disconnects, or reads nothing for
    `read_timeout`.

    Args:
        pieces: The body.
        trace: Log record of the request that reads the stream.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes],
        trace: RequestLog,
        config: ServerConfig,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(pieces, headers={**_NOT_STORED, **(headers or {})})
        self._pieces = pieces
        self._trace = trace
        self._patience = config.read_timeout
        self._stream: asyncio.Task[None] | None = None  # until it has ended
        self._is_cut = False  # The client disconnected or does not read.
        self._sending_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":  # Starlette takes it wherever it takes GET.
            await self._send_head(send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        self._stream = asyncio.create_task(self._send_all(scope, send))
        watch = asyncio.create_task(self._await_departure(receive))
        self._schedule_check()
        try:
            await self._stream
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if not self._is_cut or (this is not None and this.cancelling()):
                raise
        finally:
            self._stream = None
            self._stop()
            # The response's end usually ends `receive` too, which is cheaper than canceling it.
            if not watch.done():
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)

    async def _send_head(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await self._send_head(send)
        self._begin(send)
        async with contextlib.aclosing(self._pieces) as pieces:
            async for piece in pieces:
                # A waiting ping goes first.
                if self._sending_since is not None or not send_now(scope, piece):
                    await self._send_body(send, piece)
        await self._send_body(send, b"", more_body=False)

    async def _send_body(self, send: Send, body: bytes, *, more_body: bool = True) -> None:
        if self._sending_since is None:  # A ping and a piece may both be waiting.
            self._sending_since = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": body, "more_body": more_body})
        self._sending_since = None

    def _begin(self, send: Send) -> None:
        """Called after the headers are sent."""

    def _stop(self) -> None:
        """Called at the end."""
        if self._timer is not None:
            self._timer.cancel()

    async def _await_departure(self, receive: Receive) -> None:
        await disconnected(receive)
        self._cut()

    def _cut(self) -> None:
        if self._stream is not None and not self._stream.done():
            self._is_cut = True
            self._stream.cancel()

    def _schedule_check(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._patience / 4, self._check_reader)

    def _check_reader(self) -> None:
        """Cuts the stream if the client does not read."""
        since = self._sending_since
        now = asyncio.get_running_loop().time()
        if since is None or now - since <= self._patience:
            self._schedule_check()
            return
        self._trace.fields["error"] = "the client did not read"
        logger.warning("a client did not read", extra={"request_id": self._trace.request_id})
        self._cut()


class LineStream(LiveResponse):
    """Newline-delimited JSON."""

    media_type = "application/x-ndjson"


class EventStream(LiveResponse):
    """Server-sent events.

    Args:
        pieces, trace: See `LiveResponse`. Each piece is one or more whole events.
        ping: An event that is sent every `PING_INTERVAL`; None sends a comment.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        pieces: AsyncGenerator[bytes],
        trace: RequestLog,
        config: ServerConfig,
        *,
        ping: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        unbuffered = {**(headers or {}), "Connection": "keep-alive", "X-Accel-Buffering": "no"}
        super().__init__(pieces, trace, config, headers=unbuffered)
        self._ping = ping
        self._ping_timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["filler"] = b":\n\n"  # see `server.connection`
        await super().__call__(scope, receive, send)

    def _begin(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._ping_timer = loop.call_later(PING_INTERVAL, self._send_ping, send)

    def _send_ping(self, send: Send) -> None:
        if self._sending_since is None:  # Otherwise the connection is not idle.
            body = self._ping or f": ping - {datetime.now(UTC)}\n\n".encode()
            self._pinging = asyncio.create_task(self._send_body(send, body))
        self._begin(send)

    def _stop(self) -> None:
        super()._stop()
        if self._ping_timer is not None:
            self._ping_timer.cancel()
        if self._pinging is not None:
            self._pinging.cancel()
