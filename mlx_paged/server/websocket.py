"""WebSocket connections of uvicorn, as this server needs them.

A connection that has become a WebSocket ends when its client leaves, by the application at
shutdown, or to make room where the process runs out of descriptors (`server.listener`).
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

#: Where the application notes in a connection's state since when nothing is asked: a time of the
#: event loop, or None while a request is answered.
IDLE_SINCE = "idle_since"
#: Options of uvicorn. Compressed messages are refused, as compressed bodies are: a small one may be
#: huge.
SETTINGS: dict[str, Any] = {"ws_per_message_deflate": False}
# Seconds that a client has to answer when the server closes the connection.
_CLOSE_TIMEOUT = 1.0


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.close_timeout = _CLOSE_TIMEOUT

    @property
    def idle_since(self) -> float | None:
        """See `ImpatientProtocol.idle_since`."""
        if not self.handshake_complete or not hasattr(self, "scope"):
            return None
        state: dict[str, Any] = self.scope["state"]
        return state.get(IDLE_SINCE)

    def shutdown(self) -> None:
        """Leaves the end to the application, which lets a response finish first."""
        if not self.handshake_complete or self.close_sent:
            super().shutdown()
