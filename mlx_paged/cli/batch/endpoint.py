"""The server's own endpoint in this process, so that a batch's bodies mean what requests mean."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.errors import EngineDeadError
from mlx_paged.server.app import create_app
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.context import Context


class Reply(NamedTuple):
    """An answer of the API.

    Attributes:
        body: JSON.
    """

    status_code: int
    request_id: str
    body: bytes


#: (url, body, request id) -> its answer.
Endpoint = Callable[[str, bytes, str], Awaitable[Reply]]


class LocalEndpoint:
    """The server's application, called without a network.

    Args:
        engine: its end is the caller's business.
        model_names: what a body may give as `model`; the first one is in answers.
    """

    def __init__(self, engine: AsyncEngine, model_names: tuple[str, ...]) -> None:
        config = ServerConfig(served_model_names=model_names, log_requests=False, serve_page=False)
        self._app = create_app(engine, config)
        self._context: Context = self._app.state.context

    async def start(self) -> None:
        """Waits for the engine; raises what went wrong if it does not stand."""
        await self._context.start()
        if self._context.failure is not None:
            raise self._context.failure

    def close(self) -> None:
        """Lets go of threads."""
        self._context.close()

    async def post(self, url: str, body: bytes, request_id: str) -> Reply:
        """Answers a request.

        Raises:
            EngineDeadError: there is nobody to answer it, or the next one.
        """
        call = _Call(body)
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
                (b"content-type", b"application/json"),
                (b"x-request-id", request_id.encode()),
            ],
            "client": None,
            "server": None,
        }
        await self._app(scope, call.receive, call.send)
        if call.status == 503:
            raise EngineDeadError("it failed while it worked on the batch")
        return Reply(call.status, call.request_id, b"".join(call.pieces))


class _Call:
    """One request's two channels, as ASGI has them."""

    def __init__(self, body: bytes) -> None:
        self.status = 0
        self.request_id = ""
        self.pieces: list[bytes] = []
        self._body: bytes | None = body

    async def receive(self) -> dict[str, Any]:
        if self._body is None:
            await asyncio.Event().wait()  # the client never goes away
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = dict(message["headers"])
            self.request_id = headers.get(b"x-request-id", b"").decode()
        else:
            self.pieces.append(message.get("body", b""))
