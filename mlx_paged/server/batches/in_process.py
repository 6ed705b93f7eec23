"""InProcess: sends requests to the application without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp

from mlx_paged.errors import EngineDeadError
from mlx_paged.server.batches.runner import Reply
from mlx_paged.server.errors import SHORT_OF_MEMORY

# Statuses of a server that accepts no requests: OpenAI's and Anthropic's.
_UNAVAILABLE = (503, 529)
# Codes of such errors that are retried until there is memory again.
_WAITS = tuple(f'"{code}"'.encode() for code in SHORT_OF_MEMORY)
# Seconds before a retry when the server is busy: first, and maximum after doubling.
_FIRST_WAIT, _MAX_WAIT = 0.02, 1.0
# Maximum attempts per request when the process of its model ends.
_MAX_TRIES = 3


class InProcess:
    """A client of an ASGI application in the same process and event loop.

    Args:
        app: The application.
        has_ended: Called when the server is unavailable; returns True if it accepts no more
            requests. Otherwise the process of the model has ended, and a retry restarts it.
        state: Added to the state of each request's scope, which network clients cannot set.
    """

    def __init__(
        self, app: ASGIApp, has_ended: Callable[[], bool] = lambda: True, **state: Any
    ) -> None:
        self._app = app
        self._has_ended = has_ended
        self._state = state
        self._num_in_flight = 0  # requests that the application is answering

    async def post(self, url: str, body: bytes, request_id: str) -> Reply:
        """Sends a request; returns its answer. Waits and retries while the server is busy.

        Args:
            url: A path.
            body: JSON.

        Raises:
            EngineDeadError: The server accepts no more requests.
        """
        delay = _FIRST_WAIT
        num_failures = 0
        while True:
            self._num_in_flight += 1
            try:
                reply = await self._post(url, body, request_id)
            finally:
                self._num_in_flight -= 1
            unavailable = reply.status_code in _UNAVAILABLE
            waits_for_memory = unavailable and any(code in reply.body for code in _WAITS)
            if unavailable and not waits_for_memory:
                if self._has_ended():
                    raise EngineDeadError("it failed while it worked on the batch")
                num_failures += 1
                if num_failures == _MAX_TRIES:
                    return reply
            # A request that is refused although no other is in flight will never fit the queue.
            elif not waits_for_memory and (reply.status_code != 429 or not self._num_in_flight):
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
