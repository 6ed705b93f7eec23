"""Live responses: what ends them early, and that their pieces are closed then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from mlx_paged.server import stream_response
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.context import RequestLog
from mlx_paged.server.stream_response import EventStream, LineStream, LiveResponse


class Exchange:
    """One request to a response, and its client.

    Args:
        reads: False blocks the sender of the first piece, as if buffers were full.
    """

    def __init__(self, kind: type[LiveResponse], *, reads: bool = True, patience: float = 60.0):
        self.trace = RequestLog("id", "POST", "/", "")
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.is_closed = False
        self._reads = reads
        self.more = asyncio.Event()
        config = ServerConfig(read_timeout=patience)
        response = kind(self._pieces(), self.trace, config)
        scope = {"type": "http", "method": "POST", "state": {}}
        self.task = asyncio.create_task(response(scope, self._receive, self._send))

    async def _pieces(self) -> AsyncGenerator[bytes]:
        try:
            yield b"first"
            await self.more.wait()
            yield b"last"
        finally:
            self.is_closed = True

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body" and not self._reads:
            await asyncio.Event().wait()
        self.sent.append(message)

    async def has_sent(self, body: bytes) -> None:
        """Waits for a piece."""
        while body not in self.bodies:
            await asyncio.sleep(0)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if "body" in message]


@pytest.mark.parametrize("kind", [EventStream, LineStream])
def test_a_stream_ends_with_its_pieces(kind: type[LiveResponse]) -> None:
    async def run() -> None:
        exchange = Exchange(kind)
        exchange.more.set()
        await exchange.task
        assert exchange.bodies == [b"first", b"last", b""]
        assert [message.get("more_body") for message in exchange.sent] == [None, True, True, False]
        assert exchange.is_closed

    asyncio.run(run())


def test_a_client_that_leaves_ends_it_quietly() -> None:
    async def run() -> None:
        exchange = Exchange(EventStream)
        await exchange.has_sent(b"first")
        exchange.gone.set()
        await exchange.task
        assert exchange.is_closed and exchange.bodies == [b"first"]

    asyncio.run(run())


def test_a_client_that_does_not_read_is_dropped() -> None:
    async def run() -> None:
        exchange = Exchange(LineStream, reads=False, patience=0.01)
        await exchange.task
        assert exchange.is_closed and exchange.bodies == []
        assert exchange.trace.fields["error"] == "the client did not read"

    asyncio.run(run())


def test_cancelling_the_request_is_not_mistaken_for_a_client_that_left() -> None:
    async def run() -> None:
        exchange = Exchange(EventStream)
        await exchange.has_sent(b"first")
        exchange.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange.task
        assert exchange.is_closed

    asyncio.run(run())


def test_a_silent_stream_is_pinged_and_no_ping_follows_its_end(monkeypatch) -> None:
    monkeypatch.setattr(stream_response, "PING_INTERVAL", 0.001)

    async def run() -> None:
        exchange = Exchange(EventStream)
        while not any(body.startswith(b": ping - ") for body in exchange.bodies):
            await asyncio.sleep(0)
        exchange.more.set()
        await exchange.task
        count = len(exchange.sent)
        await asyncio.sleep(0.01)
        assert len(exchange.sent) == count and exchange.bodies[-1] == b""

    asyncio.run(run())
