"""One connection: HTTP/1.1 with time limits, a limited head, and half-closed clients.

uvicorn limits the time of idle connections between requests, and the application that of bodies and
readers. `TimeoutProtocol` limits everything before: connections that send nothing, heads that
arrive byte by byte, and bodies that continue after their answer.

**Clients that close only their sending side** (``shutdown(SHUT_WR)``) get their answers. TCP does
not tell the server if a client has closed one side or both. Sending something does, because a
client that is gone answers with a reset. A streamed answer finds out with its next chunk, and
comments are sent between chunks. Before an answer has begun, HTTP/1.1 clients get ``100 Continue``,
which they skip. HTTP/1.0 has no such response; there, the kernel's keep-alive finds out about a
minute later.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import weakref
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from mlx_paged.server.deadline import Deadline
from mlx_paged.server.errors import ApiError

#: Maximum bytes of a request's line and headers.
MAX_HEAD_SIZE = 64 << 10
# Bytes of a request's line besides method and target, and of the empty line after the headers.
_REST_OF_HEAD = len("  HTTP/1.1\r\n" "\r\n")  # fmt: skip
_REST_OF_HEADER = len(": \r\n")
# Seconds between checks that a half-closed client is still there: the first, and the longest.
_FIRST_LOOK, _MAX_LOOK = 0.01, 1.0
# Seconds between bytes sent for that check, and between the kernel's probes.
_INTERIM_INTERVAL = 15.0
_PROBE_INTERVAL = 5


class TimeoutProtocol(HttpToolsProtocol):
    """A connection whose client has limited time to send a request; see `with_timeouts`.

    Attributes:
        head_timeout: Seconds from the connection, or from the first byte after an answer, to the
            end of a request's head.
        idle_since: Loop time since when the connection is idle; None while a request is sent or
            answered.
    """

    head_timeout = 60.0
    idle_since: float | None = None
    _in_head = False
    _is_new_head = False
    # Bytes of the head so far: parsed bytes (exact at its end), and whole received chunks, because
    # a header without an end is not parsed.
    _parsed_size = 0
    _received_size = 0
    _is_refused = False
    _is_upgraded = False
    _look: asyncio.Handle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline = Deadline(self.loop, self._on_deadline)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.idle_since = self.loop.time()
        self._deadline.set(self.head_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.close()
        if self._look is not None:
            self._look.cancel()
        self.idle_since = None
        super().connection_lost(exc)

    # Data from the client.

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._is_new_head = False
        super().data_received(data)
        if self._is_refused or self._is_upgraded or self.transport.is_closing():
            return
        if not self._deadline.is_pending and not self._is_answering:
            self._deadline.set(self.head_timeout)
        if self._in_head:
            if not self._is_new_head:
                self._received_size += len(data)
            if max(self._parsed_size, self._received_size) > MAX_HEAD_SIZE:
                self._refuse_head()

    def on_message_begin(self) -> None:
        self._in_head = self._is_new_head = True
        self._parsed_size = self._received_size = 0
        self.idle_since = None
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._parsed_size += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parsed_size += len(name) + len(value) + _REST_OF_HEADER
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_refused:
            return
        self._deadline.clear()
        self._parsed_size += len(self.parser.get_method()) + _REST_OF_HEAD
        hosts = sum(name == b"host" for name, _ in self.headers)
        if self._parsed_size > MAX_HEAD_SIZE:
            self._refuse_head()
        elif hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            self._refuse(400, f"a request needs one Host header but has {hosts}")
        else:
            self._in_head = False
            super().on_headers_complete()
            if self.cycle is not None and self.cycle.scope is self.scope:  # no upgrade
                # Weak, because the response refers to its scope.
                self.scope["state"]["cycle"] = weakref.ref(self.cycle)

    def handle_websocket_upgrade(self) -> None:
        """Hands the connection over to another protocol."""
        if self._is_refused:
            return
        if self._is_answering:
            self._refuse(400, "a WebSocket must not be asked for before earlier answers have come")
            return
        self._is_upgraded = True
        super().handle_websocket_upgrade()

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering:
            self.idle_since = self.loop.time()

    # Clients that stop sending.

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keeps the connection for the answers of whole requests. TLS cannot be half-closed."""
        if not self._is_answering or self.cycle.more_body or self.scheme == "https":
            return None
        self.cycle.keep_alive = False  # it closes the connection after the last answer
        sock = self._socket
        for name in ("TCP_KEEPIDLE", "TCP_KEEPALIVE", "TCP_KEEPINTVL"):
            if hasattr(socket, name):
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), _PROBE_INTERVAL)
        # Not now, because the transport must not be closed while it handles the end of the input.
        self._look = self.loop.call_soon(self._look_after_client, _FIRST_LOOK, self.loop.time())
        return True

    def _look_after_client(self, delay: float, interim_at: float) -> None:
        """Ends the connection if the client is gone; checks again after `delay` seconds, then at
        longer intervals. Nothing else would notice, because nothing is read any more."""
        if self.transport.is_closing():
            return
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        now = self.loop.time()
        if now >= interim_at and not self.pipeline:
            interim_at = now + _INTERIM_INTERVAL
            self._send_filler()
        self._look = self.loop.call_later(
            delay, self._look_after_client, min(2 * delay, _MAX_LOOK), interim_at
        )

    def _send_filler(self) -> None:
        """Sends bytes that the client skips. A stream that allows them has a ``filler`` in its
        scope's state."""
        cycle = self.cycle
        filler: bytes | None = cycle.scope["state"].get("filler")
        if cycle.response_started and cycle.chunked_encoding and filler:
            self.transport.write(b"%x\r\n%b\r\n" % (len(filler), filler))
        elif not cycle.response_started and cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    @property
    def _socket(self) -> socket.socket:
        found: socket.socket = self.transport.get_extra_info("socket")
        return found

    # Time.

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _on_deadline(self) -> None:
        if self._is_answering:
            # The next request may wait while this one is answered.
            self._deadline.set(self.head_timeout)
        elif self._in_head:
            message = f"the head of the request did not come within {self.head_timeout:g} s"
            self._refuse(408, message, "read_timeout")
        else:
            self.transport.close()  # it never sent a request

    # Refusals.

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not HTTP as this server understands it")

    def _refuse_head(self) -> None:
        self._refuse(431, f"the head must be at most {MAX_HEAD_SIZE} bytes")

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        """Reads no more, and closes the connection when earlier requests have their answers. Sends
        the reason, unless that would be in the middle of an answer or after it."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._deadline.clear()
        cycle = self.cycle
        in_body = not self._in_head and cycle is not None and cycle.more_body
        if self._is_answering and not in_body:
            cycle.keep_alive = False
            return
        if in_body and not cycle.response_complete:
            # It is about the request that is being answered.
            cycle.disconnected = True
            cycle.message_event.set()
        if not in_body or not (cycle.response_started or self.pipeline):
            error = ApiError(status, message, code=code)
            answer = error.body_for(cast(Scope, cycle.scope)) if in_body else error.body
            body = json.dumps(answer).encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(body) + b"\r\n" + body)
        self.transport.close()


def send_now(scope: Scope, body: bytes) -> bool:
    """Sends a part of a streamed body past the middleware, which only looks at heads and ends.

    Returns:
        False if nothing is sent, because the application must send it: this is no connection of
        ours, or the client does not keep up.
    """
    found = scope.get("state", {}).get("cycle")
    cycle = None if found is None else found()
    if cycle is None or cycle.flow.write_paused or not cycle.chunked_encoding or not body:
        return False
    if not cycle.disconnected:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True


def with_timeouts(head_timeout: float) -> type[TimeoutProtocol]:
    """Returns the protocol with a timeout for uvicorn, which makes one for each connection."""
    return type("Protocol", (TimeoutProtocol,), {"head_timeout": head_timeout})
