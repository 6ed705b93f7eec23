"""WebSocket connections of uvicorn, adapted to this server.

A WebSocket connection ends when its client leaves, by the application at shutdown, or to make room
when the process runs out of descriptors (`server.listener`).
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from mlx_paged.server.deadline import Deadline

#: Key in a connection's state for the loop time since when it is idle; None while a request is
#: answered.
IDLE_SINCE = "idle_since"
#: Options of uvicorn. Like bodies, messages must not be compressed, because a small one may be
#: huge.
SETTINGS: dict[str, Any] = {"ws_per_message_deflate": False}
# Seconds for a client to answer when the server closes the connection.
_CLOSE_TIMEOUT = 1.0
# Close code: a rule of the server is broken.
_TOO_SLOW = 1008


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket connection; see `websockets`.

    Attributes:
        message_timeout: Seconds for a message to arrive, from its first byte.
    """

    message_timeout = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.close_timeout = _CLOSE_TIMEOUT
        self._deadline = Deadline(self.loop, self._on_deadline)
        app = self.app

        async def run_app(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, send)
            if self.initial_response is not None:  # refused: no error, as uvicorn would log it
                self.handshake_complete = True

        self.app = run_app

    @property
    def idle_since(self) -> float | None:
        """See `TimeoutProtocol.idle_since`."""
        if not self.handshake_complete or not hasattr(self, "scope"):
            return None
        state: dict[str, Any] = self.scope["state"]
        return state.get(IDLE_SINCE)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_partial = bool(self.frames or self.conn.reader.buffer)
        if not is_partial or self.transport.is_closing():
            self._deadline.clear()
        elif not self._deadline.is_pending:
            self._deadline.set(self.message_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.clear()
        super().connection_lost(exc)

    def _on_deadline(self) -> None:
        if self.close_sent or self.transport.is_closing():
            return
        if self.handshake_complete:
            reason = f"a message did not come within {self.message_timeout:g} s"
            self.conn.fail(_TOO_SLOW, reason)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
        self.transport.close()

    def shutdown(self) -> None:
        """Leaves the closing to the application, which lets a response finish first."""
        if not self.handshake_complete or self.close_sent:
            super().shutdown()


def websockets(message_timeout: float) -> type[WebSocketProtocol]:
    """Returns the protocol with a timeout for uvicorn, which makes one for each connection."""
    return type("Protocol", (WebSocketProtocol,), {"message_timeout": message_timeout})
