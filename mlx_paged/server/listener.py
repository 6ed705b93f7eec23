"""The listening socket, which survives a lack of file descriptors.

Without descriptors, uvloop silently drops new connections, and asyncio writes a traceback for each
attempt. `Listener` accepts connections itself. It reserves some descriptors for files, closes the
longest idle connections to make room, and otherwise lets new ones wait in the kernel's queue until
others have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import logging
import os
import socket
import ssl
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from mlx_paged import descriptors
from mlx_paged.errors import InvalidParameterError, MlxPagedError
from mlx_paged.server.connection import TimeoutProtocol

logger = logging.getLogger(__name__)

# Connections accepted before others get the loop.
_MAX_AT_ONCE = 64
# Maximum descriptors reserved for files.
_RESERVE = 64
# Seconds until it retries: after connections were closed, and if none could be.
_SHORT_PAUSE, _LONG_PAUSE = 0.05, 0.25
# Seconds between lines in the log.
_LOG_INTERVAL = 10.0


def _refused(host: str, port: int, error: OSError) -> MlxPagedError:
    """Returns why an address is unusable, and what to change."""
    if error.errno == errno.EADDRINUSE:
        return MlxPagedError(
            f"port {port} of {host} is in use: end the program that listens there, or choose "
            "another with --port"
        )
    if error.errno == errno.EACCES:
        return MlxPagedError(
            f"port {port} may not be used by this user: choose one above 1023 with --port"
        )
    expected = f"an address of this machine ({error.strerror or error})"
    return InvalidParameterError("host", expected, host)


def bind(host: str, port: int, silence_limit: float) -> socket.socket:
    """Returns a listening socket.

    Args:
        silence_limit: Seconds until a connection is closed whose other end is gone or accepts no
            data. The kernel's own limits are 15 minutes, and none.

    Raises:
        InvalidParameterError: The host is no address of this machine.
        MlxPagedError: The port is unusable; the message gives the reason.
    """
    try:
        kind, protocol, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0][0:5]
        sock = socket.socket(kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise _refused(host, port, error) from error
    # Accepted sockets inherit these.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, int(silence_limit))),
        ("TCP_KEEPINTVL", max(1, int(silence_limit) // 4)),
        ("TCP_USER_TIMEOUT", int(silence_limit * 1000)),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    sock.listen(2048)
    sock.setblocking(False)
    return sock


@contextlib.contextmanager
def bound_unix(path: Path) -> Iterator[socket.socket]:
    """Opens a listening Unix domain socket, and removes its file at the end.

    The process's umask decides who may connect. A file left by an earlier server is replaced.

    Raises:
        InvalidParameterError: The path is unusable; the message gives the reason.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            if _is_listening(path):
                raise FileExistsError(errno.EADDRINUSE, "another server listens there")
            path.unlink()
        sock.bind(str(path))
    except (OSError, ValueError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or str(error).lower()
        raise InvalidParameterError("uds", f"a path to listen on ({reason})", str(path)) from error
    own = path.stat().st_ino
    sock.listen(2048)
    sock.setblocking(False)
    try:
        yield sock
    finally:
        sock.close()
        with contextlib.suppress(OSError):
            if path.stat().st_ino == own:  # Another server may have taken the path.
                path.unlink()


def _is_listening(path: Path) -> bool:
    """True unless nothing listens at the path for sure: a server may refuse this user, or have as
    many connections waiting as it accepts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        return client.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


class Listener:
    """Accepts connections for uvicorn's server, which closes it like one of asyncio's.

    Args:
        sock: Bound, listening and non-blocking; the caller closes it.
        make_protocol: Makes the protocol of a connection.
        connections: The open connections; idle ones may be closed.
        context: For HTTPS.
    """

    def __init__(
        self,
        sock: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        connections: Collection[TimeoutProtocol],
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self._make_protocol = make_protocol
        self._connections = connections
        self._context = context
        self._starting: dict[asyncio.Task[None], socket.socket] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._num_closed = 0  # since the last line in the log
        self._reason: str | None = None
        self._loop.add_reader(sock, self._accept)

    def close(self) -> None:
        """Accepts no more connections. Open ones continue, except those that are just starting.

        Those get the end of their input, as if their clients had left. If their tasks were canceled
        instead, uvloop would not tell a protocol that its connection is lost.
        """
        self._loop.remove_reader(self._socket)
        for accepted in self._starting.values():
            with contextlib.suppress(OSError):  # It has failed already.
                accepted.shutdown(socket.SHUT_RDWR)
        for timer in (self._pause, self._silence):
            if timer is not None:
                timer.cancel()

    async def wait_closed(self) -> None:
        """Waits until no connection is starting."""
        await asyncio.gather(*self._starting, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(_MAX_AT_ONCE):
            try:
                if self._num_open() > descriptors.limit() - self._reserve:
                    self._run_out("too many open files")
                    return
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._run_out(str(error.strerror or error).lower())
                return
            accepted.setblocking(False)
            starting = self._loop.create_task(self._start(accepted))
            self._starting[starting] = accepted
            starting.add_done_callback(self._starting.pop)

    async def _start(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, accepted, ssl=self._context
            )
        except (OSError, TimeoutError) as error:  # OSError includes a failed handshake.
            logger.debug("a connection could not be started: %s", error)
            accepted.close()

    @property
    def _reserve(self) -> int:
        return min(_RESERVE, descriptors.limit() // 8)

    def _num_open(self) -> int:
        """Descriptors in use: a new one is always the lowest number that is free."""
        free = os.dup(self._socket.fileno())
        os.close(free)
        return free

    def _run_out(self, reason: str) -> None:
        """Closes the sixteenth of the idle connections that has been idle longest; tries later."""
        idle = [(c.idle_since, id(c), c) for c in self._connections if c.idle_since is not None]
        oldest = heapq.nsmallest(-(-len(idle) // 16), idle)
        for _, _, connection in oldest:
            connection.transport.abort()
        self._num_closed += len(oldest)
        self._reason = reason
        self._tell()
        self._loop.remove_reader(self._socket)
        self._pause = self._loop.call_later(
            _SHORT_PAUSE if oldest else _LONG_PAUSE,
            self._loop.add_reader, self._socket, self._accept,
        )  # fmt: skip

    def _tell(self) -> None:
        """Logs an event; events of the next seconds are combined in one line."""
        if self._silence is not None or self._reason is None:
            return
        logger.error(
            "cannot accept connections: %s (limit %d, see `ulimit -n`); %d connections are open, "
            "%d idle ones were closed to make room, new ones wait",
            self._reason, descriptors.limit(), len(self._connections), self._num_closed,
        )  # fmt: skip
        self._num_closed, self._reason = 0, None
        self._silence = self._loop.call_later(_LOG_INTERVAL, self._end_silence)

    def _end_silence(self) -> None:
        self._silence = None
        self._tell()
