"""Runs work for a client only while the client is connected."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientDisconnectedError(Exception):
    """The client closed its connection before the work was done."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits a coroutine; cancels it if the client disconnects first.

    Raises:
        ClientDisconnectedError: The client disconnected.
    """
    task = asyncio.ensure_future(work)
    departure = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({task, departure}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        for each in (task, departure):
            each.cancel()
        await asyncio.gather(task, departure, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected. Ignores the rest of the request's body."""
    while (await receive())["type"] != "http.disconnect":
        pass
