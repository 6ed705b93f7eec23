"""HTTP/1.1 by uvicorn, without patience for heads that do not end.

uvicorn times idle connections between requests, and the application times bodies and readers.
Nobody else times what comes before: connections that say nothing, heads that come byte by byte,
bodies that go on when their answer is out.
"""

from __future__ import annotations

import asyncio
import json

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from mlx_paged.server.errors import ApiError

#: Most bytes of a request's line and headers.
MAX_HEAD_SIZE = 64 << 10


class ImpatientProtocol(HttpToolsProtocol):
    """A connection whose client has so long to say what it wants; see `impatient`.

    Attributes:
        head_timeout: Seconds from the connection, or from the first byte after an answer, to the
            end of a request's head.
    """

    head_timeout = 60.0
    _deadline: asyncio.TimerHandle | None = None
    _in_head = False
    _head_size = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._deadline is None and not self._is_answering:
            self._set_deadline()
        if self._in_head:
            self._head_size += len(data)
            if self._head_size > MAX_HEAD_SIZE:
                self._hang_up(431, f"the head must be at most {MAX_HEAD_SIZE} bytes")

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_size = False, 0
        self._clear_deadline()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._hang_up(400, "this is not HTTP as this server understands it")

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(self.head_timeout, self._on_deadline)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self._is_answering:
            self._set_deadline()  # the next request may wait while this one is answered
        elif self._in_head:
            message = f"the head of the request did not come within {self.head_timeout:g} s"
            self._hang_up(408, message, "read_timeout")
        else:
            self.transport.close()  # it never asked for anything

    def _hang_up(self, status: int, message: str, code: str | None = None) -> None:
        """Closes the connection; says why, unless that would be in the middle of an answer."""
        if self.transport.is_closing():
            return
        if not self._is_answering:
            body = json.dumps(ApiError(status, message, code=code).body).encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(body) + b"\r\n" + body)
        self.transport.close()


def impatient(head_timeout: float) -> type[ImpatientProtocol]:
    """The protocol with a timeout, for uvicorn, which makes one for each connection."""
    return type("Protocol", (ImpatientProtocol,), {"head_timeout": head_timeout})
