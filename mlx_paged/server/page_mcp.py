"""PageServers: connections to the MCP servers that users add on the chat page.

A page sends its list of servers with each request, because browsers keep lists and tokens. So a
connection is found by its settings, and survives reloads, other tabs and restarts of this server.
Connections that have been idle for a while are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlx_paged.addresses import Reach
from mlx_paged.server.errors import ApiError

if TYPE_CHECKING:
    from mlx_paged.mcp import McpServers, ServerSpec

_Key = tuple[str, str | None, tuple[tuple[str, str], ...]]

logger = logging.getLogger(__name__)

MAX_SERVERS = 32  # of all pages
IDLE_SECONDS = 600.0
_CALL_TIMEOUT = 120.0  # seconds


@dataclass
class _Connection:
    servers: McpServers  # one
    starting: asyncio.Task[McpServers]
    used: float = field(default_factory=time.monotonic)
    num_users: int = 0  # requests


class PageServers:
    """The servers of all pages. The first request that names one connects to it.

    Args:
        reach: Addresses that they may have.
    """

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._connections: dict[_Key, _Connection] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None  # set while there are connections

    def spec_of(self, name: str, url: str, headers: dict[str, str]) -> ServerSpec:
        """Returns how to reach a page's server."""
        from mlx_paged.mcp import ServerSpec

        return ServerSpec(name, url=url, headers=headers, timeout=_CALL_TIMEOUT, reach=self._reach)

    @contextlib.asynccontextmanager
    async def using(self, spec: ServerSpec) -> AsyncIterator[McpServers]:
        """Returns a connection and keeps it open. It may still be starting, or have failed.

        Raises:
            ApiError: Too many servers are in use.
        """
        connection = self._connection(spec)
        connection.num_users += 1
        try:
            yield connection.servers
        finally:
            connection.num_users -= 1
            connection.used = time.monotonic()

    async def started(self, specs: Iterable[ServerSpec], seconds: float) -> None:
        """Waits until these have started or failed, for at most `seconds`."""
        self._close_idle()
        starting = [self._connection(spec).starting for spec in specs]
        if starting:
            await asyncio.wait(starting, timeout=seconds)

    def _connection(self, spec: ServerSpec) -> _Connection:
        key = _key_of(spec)
        found = self._connections.get(key)
        if found is not None:
            found.used = time.monotonic()
            return found
        if len(self._connections) >= MAX_SERVERS:
            idle = [k for k, c in self._connections.items() if not c.num_users]
            if not idle:
                raise ApiError(
                    503, f"{MAX_SERVERS} MCP servers of pages are in use", code="too_many_servers"
                )
            self._close(min(idle, key=lambda k: self._connections[k].used))
        from mlx_paged.mcp import McpServers

        servers = McpServers(
            [spec],
            lambda name, reason: logger.info("a page's MCP server %r: %s", name, reason),
        )
        starting = asyncio.create_task(servers.__aenter__())
        self._connections[key] = made = _Connection(servers, starting)
        self._close_idle()  # This sets the timer.
        return made

    def _close_idle(self) -> None:
        now = time.monotonic()
        for key, connection in list(self._connections.items()):
            if not connection.num_users and now - connection.used > IDLE_SECONDS:
                self._close(key)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._connections:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(IDLE_SECONDS, 1.0), self._close_idle)

    def _close(self, key: _Key) -> None:
        connection = self._connections.pop(key)
        task = asyncio.create_task(_closed(connection))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes all connections."""
        if self._timer is not None:
            self._timer.cancel()
        for key in list(self._connections):
            self._close(key)
        await asyncio.gather(*self._closing, return_exceptions=True)


async def _closed(connection: _Connection) -> None:
    connection.starting.cancel()
    await asyncio.gather(connection.starting, return_exceptions=True)
    await connection.servers.__aexit__(None, None, None)


def _key_of(spec: ServerSpec) -> _Key:
    return spec.name, spec.url, tuple(sorted(spec.headers.items()))
