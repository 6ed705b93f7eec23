"""InProcess: sends requests to the application without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp

from mlx_paged.errors import EngineDeadError
from mlx_paged.server.batches.runner import Reply
from mlx_paged.server.errors import SHORT_OF_MEMORY

# Statuses of a server that takes no requests: OpenAI's and Anthropic's.
_UNAVAILABLE = (503, 529)
# Codes of those that wait until there is memory again.
_WAITS = tuple(f'"{code}"'.encode() for code in SHORT_OF_MEMORY)
# Seconds until a request that found the server busy is retried: the first time, and at most.
_FIRST_WAIT, _MAX_WAIT = 0.02, 1.0
# Attempts per request while the server runs without the model that should answer it.
_MAX_TRIES = 3


class InProcess:
    """A client of an ASGI application in the same process and event loop.

    Args:
        app: The application.
        has_ended: Called when a request is refused; True if the server takes no more of them.
            Otherwise the model's process has ended, and the next request starts it again.
        state: Added to the scope of each request, which no client of the network can do.
    """

    def __init__(
        self, app: ASGIApp, has_ended: Callable[[], bool] = lambda: True, **state: Any
    ) -> None:
        self._app = app
        self._has_ended = has_ended
        self._state = state
        self._num_inside = 0  # requests that the application has

    async def post(self, url: str, body: bytes, request_id: str) -> Reply:
        """Sends a request, and returns its answer. If the server is busy, it waits and retries.

        Args:
            url: A path.
            body: JSON.

        Raises:
            EngineDeadError: The server takes no more requests.
        """
        delay = _FIRST_WAIT
        num_failures = 0
        while True:
            self._num_inside += 1
            try:
                reply = await self._post(url, body, request_id)
            finally:
                self._num_inside -= 1
            unavailable = reply.status_code in _UNAVAILABLE
            waits_for_memory = unavailable and any(code in reply.body for code in _WAITS)
            if unavailable and not waits_for_memory:
                if self._has_ended():
                    raise EngineDeadError("it failed while it worked on the batch")
                num_failures += 1
                if num_failures == _MAX_TRIES:
                    return reply
            # It is alone and still too much for the queue, so it will never fit.
            elif not waits_for_memory and (reply.status_code != 429 or not self._num_inside):
                return reply
            await asyncio.sleep(delay)
            delay = min(2 * delay, _MAX_WAIT)

    async def _post(self, url: str, body: bytes, request_id: str) -> Reply:
        pending = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            if not pending:
                await asyncio.Event().wait()  # the client never disconnects
            return pending.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "raw_path": url.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                (b"x-request-id", request_id.encode()),
            ],
            "client": None,
            "server": None,
            "state": dict(self._state),
        }
        await self._app(scope, receive, send)
        start, *parts = sent
        answer_id = dict(start["headers"]).get(b"x-request-id", b"").decode()
        return Reply(start["status"], answer_id, b"".join(part.get("body", b"") for part in parts))
