"""Runs the server: the socket, HTTP/1.1 with time limits, signals, and the end of the process.

uvicorn times idle connections between requests, and the application times bodies and readers.
`ImpatientProtocol` times what comes before: connections that send nothing, heads that come byte by
byte, bodies that continue after their answer was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.errors import InvalidParameterError, MlxPagedError
from mlx_paged.server.app import create_app
from mlx_paged.server.config import GenerationDefaults, ServerConfig
from mlx_paged.server.context import Context
from mlx_paged.server.errors import ApiError

logger = logging.getLogger(__name__)

#: Most bytes of a request's line and headers.
MAX_HEAD_SIZE = 64 << 10
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds between checks of the engine's thread.
_WATCH_INTERVAL = 0.25
# Seconds that responses have to end after the engine has ended their requests.
_RESPONSE_GRACE = 5.0
_KEEP_ALIVE = 75  # above the 60 s of most proxies, or they would use closed connections


class ImpatientProtocol(HttpToolsProtocol):
    """A connection whose client has limited time to send a request; see `impatient`.

    Attributes:
        head_timeout: Seconds from the connection, or from the first byte after an answer, to the
            end of a request's head.
    """

    head_timeout = 60.0
    _deadline: asyncio.TimerHandle | None = None
    _in_head = False
    _head_size = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._deadline is None and not self._is_answering:
            self._set_deadline()
        if self._in_head:
            self._head_size += len(data)
            if self._head_size > MAX_HEAD_SIZE:
                self._hang_up(431, f"the head must be at most {MAX_HEAD_SIZE} bytes")

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_size = False, 0
        self._clear_deadline()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._hang_up(400, "this is not HTTP as this server understands it")

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(self.head_timeout, self._on_deadline)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self._is_answering:
            self._set_deadline()  # the next request may wait while this one is answered
        elif self._in_head:
            message = f"the head of the request did not come within {self.head_timeout:g} s"
            self._hang_up(408, message, "read_timeout")
        else:
            self.transport.close()  # it never sent a request

    def _hang_up(self, status: int, message: str, code: str | None = None) -> None:
        """Closes the connection; sends the reason, unless an answer has begun."""
        if self.transport.is_closing():
            return
        if not self._is_answering:
            body = json.dumps(ApiError(status, message, code=code).body).encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(body) + b"\r\n" + body)
        self.transport.close()


def impatient(head_timeout: float) -> type[ImpatientProtocol]:
    """The protocol with a timeout, for uvicorn, which makes one for each connection."""
    return type("Protocol", (ImpatientProtocol,), {"head_timeout": head_timeout})


class _Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers.

    uvicorn raises a signal again when it has ended, which would end the process by that signal
    instead of with status 0.
    """

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        original = {sig: signal.signal(sig, self.handle_exit) for sig in _SIGNALS}
        try:
            yield
        finally:
            for sig, handler in original.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_signal(sig)


def bind(host: str, port: int, silence_limit: float) -> socket.socket:
    """A listening socket.

    Args:
        silence_limit: seconds until a connection is closed whose other end is gone, or accepts no
            data; the kernel's own limits are 15 minutes and none.

    Raises:
        InvalidParameterError: the address cannot be used; the message says why.
    """
    try:
        kind, protocol, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0][0:5]
        sock = socket.socket(kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise InvalidParameterError(
            "host and port", f"an address to listen on ({error.strerror})", f"{host}:{port}"
        ) from error
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


def serve(
    make_engine: Callable[[], AsyncEngine],
    config: ServerConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    ssl_keyfile: Path | None = None,
    ssl_certfile: Path | None = None,
) -> int:
    """Serves until a signal arrives or the engine fails.

    Args:
        make_engine: called when the socket is bound.

    Returns:
        The process's exit status: 0 after SIGINT or SIGTERM, 1 if the engine failed.

    Raises:
        InvalidParameterError: the address or the certificates cannot be used.

    If a signal arrives while the model is being loaded, the process ends without returning.
    """
    sock = bind(host, port, config.read_timeout)
    with contextlib.closing(sock), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        service = _Service(make_engine(), config, sock, ssl_keyfile, ssl_certfile)
        status = runner.run(service.run())
    if service.is_loading:
        _leave(status)
    return status


def _leave(status: int) -> None:
    """Ends the process while a model is being loaded, on a thread that nothing can interrupt.

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


class _Service:
    """One run of the server."""

    def __init__(
        self,
        engine: AsyncEngine,
        config: ServerConfig,
        sock: socket.socket,
        ssl_keyfile: Path | None,
        ssl_certfile: Path | None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._socket = sock
        app = create_app(engine, config)
        self._context: Context = app.state.context
        settings = uvicorn.Config(
            app,
            http=impatient(config.read_timeout),
            lifespan="on",
            ws="none",
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
        self._server = _Server(settings, self._on_signal)
        self._draining: asyncio.Future[None] | None = None
        self._status = 0

    @property
    def is_loading(self) -> bool:
        """Whether the engine is neither ready nor failed."""
        return not self._context.is_loaded and self._engine.is_alive

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        watching = asyncio.create_task(self._watch())
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self._context.draining = True
            await self._drain(0.0)
        return self._status

    def _on_signal(self, sig: int) -> None:
        """Runs on the main thread, between two instructions, so it only schedules the work."""
        self._loop.call_soon_threadsafe(self._stop, signal.Signals(sig).name)

    def _stop(self, cause: str) -> None:
        if self._context.draining:
            logger.warning("%s again: ending at once", cause)
            self._server.force_exit = True
            self._draining = asyncio.ensure_future(self._drain(0.0))
            return
        seconds = self._config.shutdown_timeout
        logger.info("%s: finishing running requests, for at most %g s", cause, seconds)
        self._context.draining = True
        self._server.should_exit = True
        self._draining = asyncio.ensure_future(self._drain(seconds))

    async def _drain(self, seconds: float) -> None:
        if self._context.is_loaded:
            await self._engine.shutdown(seconds)

    async def _watch(self) -> None:
        """Logs that the engine is ready; ends the process when it fails."""
        await self._context.started_or_failed()
        if self._context.failure is None:
            host, port = self._socket.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            logger.info(
                "ready: model %s at %s://%s:%d", self._config.model_name, self._scheme, shown, port
            )
            defaults = self._context.defaults
            if defaults != GenerationDefaults():
                limit = defaults.max_new_tokens
                logger.info(
                    "where requests are silent: %s",
                    {**defaults.sampling, **({} if limit is None else {"max_new_tokens": limit})},
                )
            while self._engine.is_alive:
                await asyncio.sleep(_WATCH_INTERVAL)
            if self._context.draining:
                return
        failure = self._context.failure
        expected = isinstance(failure, MlxPagedError)
        reason = str(failure) if failure is not None else "see the log above"
        self._status = 1
        if expected:
            print(f"mlx-paged: {reason}", file=sys.stderr)
        else:
            logger.critical("the engine has stopped (%s): this process ends", reason)
        await asyncio.sleep(2 * _WATCH_INTERVAL)  # streams send their errors
        self._server.should_exit = True
