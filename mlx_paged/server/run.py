"""Runs the server: limits of the process, signals, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol

import uvicorn
from starlette.types import ASGIApp

from mlx_paged import descriptors
from mlx_paged.errors import InvalidParameterError
from mlx_paged.server.batches.folder import Folder
from mlx_paged.server.config import MAX_MEDIA_BODY_SIZE, ServerConfig
from mlx_paged.server.connection import with_timeouts
from mlx_paged.server.listener import Listener, bind, bound_unix
from mlx_paged.server.sites import is_loopback, known_hosts
from mlx_paged.server.websocket import SETTINGS, websockets

logger = logging.getLogger(__name__)

# Seconds that the event loop may hold Python's lock while the engine's thread waits for it, some
# fifty times in each step. With Python's 5 ms, steps took 0.3 s while a large answer was
# serialized.
_SWITCH_INTERVAL = 0.0005
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds for streams to send their errors when the service has failed.
_LAST_WORDS = 0.5
# Seconds for responses to end after the engine has ended their requests.
_RESPONSE_GRACE = 5.0
# Minimum seconds for clients to end a TLS connection that this server has closed.
_GOODBYE = 1.0
_KEEP_ALIVE = 75  # More than the 60 s of most proxies, which could use closed connections.


class _Server(uvicorn.Server):
    """uvicorn's server with our `Listener`, and without its signal handlers.

    uvicorn raises a signal again after its end, which would end the process by that signal instead
    of with status 0.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        config, state = self.config, self.server_state

        def make_protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg, assignment]
                config=config, server_state=state, app_state=self.lifespan.state
            )
            return made

        for sock in sockets or ():
            listener = Listener(sock, make_protocol, state.connections, config.ssl)  # type: ignore[arg-type]
            self.servers.append(listener)  # type: ignore[arg-type]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        leaving = asyncio.create_task(self._leave_silent_clients())
        try:
            await super().shutdown(sockets)
        finally:
            leaving.cancel()
        if self.force_exit:
            # uvicorn leaves the application's end out then; the loop would cancel it, loudly.
            await self.lifespan.shutdown()

    async def _leave_silent_clients(self) -> None:
        """Ends closed connections whose data is sent, but whose client sends no TLS goodbye.

        TLS waits half a minute for it, and a client with an idle connection reads nothing.
        """
        closed: set[object] = set()
        while True:
            await asyncio.sleep(_GOODBYE)
            found: set[object] = set()
            for connection in list(self.server_state.connections):
                transport = connection.transport
                if not transport.is_closing() or transport.get_write_buffer_size():
                    continue
                if connection in closed:
                    transport.abort()
                found.add(connection)
            closed = found


def serve(
    make_service: Callable[[str], Service],
    config: ServerConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    ssl_keyfile: Path | None = None,
    ssl_certfile: Path | None = None,
    uds: Path | None = None,
    is_behind_router: bool = False,
) -> int:
    """Serves until a signal arrives or the service fails.

    Args:
        make_service: Called when the socket is bound, with the address that it listens on ("" for a
            Unix domain socket).
        uds: A Unix domain socket to listen on, instead of an address.
        is_behind_router: Take the addresses of clients from the router's headers.

    Returns:
        The process's exit status: 0 after SIGINT or SIGTERM, 1 if the service failed.

    Raises:
        InvalidParameterError: The address or the certificates cannot be used.

    If a signal arrives while the model is being loaded, the process ends without returning. So it
    does at a third signal. The handlers of signals stay in place: the process is about to end.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL)
    limit = descriptors.raise_limit()
    logger.info("at most %d connections and files may be open at once", limit)
    listening = (
        contextlib.closing(bind(host, port, config.read_timeout))
        if uds is None
        else bound_unix(uds)
    )
    with listening as sock, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        if config.files_dir is not None:
            Folder(Path(config.files_dir)).close()  # Refuses a bad folder before loading.
        is_unix = sock.family == socket.AF_UNIX
        service = make_service("" if is_unix else sock.getsockname()[0])
        status = runner.run(
            _Run(
                service, config, sock, ssl_keyfile, ssl_certfile, is_behind_router=is_behind_router
            ).run()
        )
    if service.is_loading:
        _leave(status)
    return status


def warn_if_open_to_all(sock: socket.socket, config: ServerConfig) -> None:
    """Logs a warning if other machines can use the server, and need no key."""
    if sock.family == socket.AF_UNIX:  # the file's permissions decide
        return
    host, port = sock.getsockname()[:2]
    if config.needs_key or is_loopback(host):
        return
    names = ""
    if known_hosts(host, config.allowed_hosts) is None:
        names = (
            " So may web pages, through the browser of anyone who can reach it: the names by which "
            "it is called are not checked; set --allowed-hosts, too."
        )
    logger.warning(
        "everyone who can reach port %d of this machine may use this server: it listens on %s, and "
        "no key is needed; set --api-key (or MLX_PAGED_API_KEY), or listen on 127.0.0.1.%s",
        port, host, names,
    )  # fmt: skip


def _leave(status: int) -> NoReturn:
    """Ends the process while a thread loads a model or computes, which cannot be interrupted.

    The interpreter would wait for that thread, or shut down while it runs.
    """
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


class Service(Protocol):
    """The application of a process, and what must end in order before the process does.

    `server.engine_service` has that of one model, `server.router.service` that of several.
    """

    @property
    def app(self) -> ASGIApp:
        """The application."""

    @property
    def is_draining(self) -> bool:
        """True once it takes no more requests."""

    @property
    def is_loading(self) -> bool:
        """True while a thread of this process loads a model, which cannot be interrupted."""

    def drain(self) -> None:
        """Takes no more requests."""

    async def finish(self, seconds: float) -> None:
        """Ends the running requests: lets them finish for some seconds, then aborts them."""

    async def watch(self, address: str) -> int | None:
        """Returns when the process must end, with its status; None if it is about to end anyway.

        Args:
            address: The server's address, for the log.
        """


class _Run:
    """One run of the server."""

    def __init__(
        self,
        service: Service,
        config: ServerConfig,
        sock: socket.socket,
        ssl_keyfile: Path | None,
        ssl_certfile: Path | None,
        *,
        is_behind_router: bool,
    ) -> None:
        self._service = service
        self._config = config
        self._socket = sock
        settings = uvicorn.Config(
            service.app,
            http=with_timeouts(config.read_timeout),
            lifespan="on",
            ws=websockets(config.read_timeout),
            ws_max_size=config.max_body_size or MAX_MEDIA_BODY_SIZE,
            **SETTINGS,
            forwarded_allow_ips="*" if is_behind_router else None,
            access_log=False,
            log_config=None,
            server_header=False,
            root_path=config.root_path,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=int(config.shutdown_timeout + _RESPONSE_GRACE),
            ssl_keyfile=None if ssl_keyfile is None else str(ssl_keyfile),
            ssl_certfile=None if ssl_certfile is None else str(ssl_certfile),
        )
        self._scheme = "https" if ssl_certfile is not None else "http"
        try:
            settings.load()  # certificates are read here
        except OSError as error:
            raise InvalidParameterError(
                "ssl_certfile and ssl_keyfile", f"readable PEM files ({error})", str(ssl_certfile)
            ) from error
        self._server = _Server(settings)
        self._draining: asyncio.Future[None] | None = None
        self._num_signals = 0
        self._has_ended = False
        self._status = 0

    @property
    def _address(self) -> str:
        """Its address, for the log."""
        name = self._socket.getsockname()
        if self._socket.family == socket.AF_UNIX:
            return f"{self._scheme}+unix:{name}"
        host, port = name[:2]
        return f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        for sig in _SIGNALS:
            signal.signal(sig, self._on_signal)
        warn_if_open_to_all(self._socket, self._config)
        watching = asyncio.create_task(self._watch())
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self._service.drain()
            # After a signal the service is ending in order, which must not be cut short.
            await (self._draining or self._service.finish(0.0))
            self._has_ended = True
        return self._status

    def _on_signal(self, sig: int, _: FrameType | None) -> None:
        """Runs on the main thread, between two instructions, so it only schedules the work."""
        self._num_signals += 1
        if self._has_ended or self._num_signals > 2:
            # No flush: it raises RuntimeError if the main thread is writing a line of the log.
            os._exit(self._status)
        self._loop.call_soon_threadsafe(self._stop, signal.Signals(sig).name)

    def _stop(self, cause: str) -> None:
        if self._service.is_draining:
            logger.warning("%s again: ending at once", cause)
            self._server.force_exit = True
            self._draining = asyncio.ensure_future(self._service.finish(0.0))
            return
        seconds = self._config.shutdown_timeout
        logger.info("%s: finishing running requests, for at most %g s", cause, seconds)
        self._service.drain()
        self._server.should_exit = True
        self._draining = asyncio.ensure_future(self._service.finish(seconds))

    async def _watch(self) -> None:
        """Ends the process when the service cannot continue."""
        status = await self._service.watch(self._address)
        if status is not None:
            self._status = status
            await asyncio.sleep(_LAST_WORDS)
            self._server.should_exit = True
