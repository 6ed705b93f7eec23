"""`mlx-paged serve` with several models in this process: the router and each model on a thread.

Everything is that of the command line but the processes, whose start would take most of the time.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import uvicorn
from typer.testing import CliRunner

from mlx_paged.cli.main import app
from mlx_paged.cli.serve.one_model import OneModel
from mlx_paged.errors import MlxPagedError
from mlx_paged.server.child_process import reader_of
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.router import endpoints
from mlx_paged.server.router.link import RouterLink
from mlx_paged.server.router.pool import ModelPool
from mlx_paged.server.router.process import ModelProcess, OnBackground, OnUsed
from mlx_paged.server.router.spare import Spare
from mlx_paged.server.router.spec import ModelSpec
from mlx_paged.server.run import Service, bind, bound_unix, with_timeouts
from mlx_paged.server.websocket import SETTINGS, websockets
from support.server_helpers import TIMEOUT, until


class ServiceThread:
    """Runs a service on a thread, as `server.run` does on the main one.

    Args:
        make_service: Called on the thread.
    """

    def __init__(
        self, make_service: Callable[[], Service], config: ServerConfig, sock: socket.socket
    ) -> None:
        self._make_service, self._config, self._socket = make_service, config, sock
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._drain_timeout = 30.0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def stop(self, drain_timeout: float) -> None:
        """Ends it; called from any thread."""

        def stop() -> None:
            self._drain_timeout = drain_timeout
            self._stopped.set()

        if self.thread.is_alive():
            self._loop.call_soon_threadsafe(stop)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        service = self._make_service()
        settings = uvicorn.Config(
            service.app, http=with_timeouts(60.0), ws=websockets(60.0), lifespan="on", **SETTINGS,
            log_config=None, access_log=False, forwarded_allow_ips="*",
            timeout_graceful_shutdown=10,
        )  # fmt: skip
        server = uvicorn.Server(settings)
        serving = asyncio.create_task(server.serve(sockets=[self._socket]))
        watching = asyncio.create_task(service.watch(""))
        stopping = asyncio.create_task(self._stopped.wait())
        await asyncio.wait({watching, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        service.drain()
        server.should_exit = True
        await service.finish(self._drain_timeout)
        await serving
        watching.cancel()
        stopping.cancel()


class _Thread:
    """Stands for the `ChildProcess` of a `ModelProcess`."""

    def __init__(self, spec: ModelSpec, path: Path) -> None:
        self.stdin = None
        self.pid = 0
        self._path = path
        reading, writing = os.pipe()
        self._reading, self._pipe = os.fdopen(reading, "rb", 0), os.fdopen(writing, "w")
        self.reports: asyncio.StreamReader
        self._ended: asyncio.Future[int] = asyncio.Future()
        self._served: ServiceThread | None = None
        self._loop = asyncio.get_running_loop()
        model, options, server = pickle.loads(spec.launch)
        link = RouterLink(self._pipe)
        try:
            one = OneModel.of(model, options, server)
        except MlxPagedError as error:
            link.failed(error)
            self._end()
            return
        listening = bound_unix(path)
        sock = listening.__enter__()
        self._served = ServiceThread(lambda: one.service("", link), one.config, sock)
        threading.Thread(target=self._wait, args=(listening,), daemon=True).start()

    async def start(self) -> None:
        self.reports = await reader_of(self._reading)

    def _wait(self, listening: Any) -> None:
        assert self._served is not None
        self._served.thread.join()
        listening.__exit__(None, None, None)
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._pipe.close()
        self._ended.set_result(0)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: signal.Signals) -> None:
        if self._served is not None:
            self._served.stop(0.0 if number is signal.SIGINT else 30.0)

    def kill(self) -> None:
        raise AssertionError("a thread cannot be killed")


async def _started(
    entry: str,
    spec: ModelSpec,
    path: Path,
    on_used: OnUsed,
    on_background: OnBackground,
    environment: Mapping[str, str],
) -> ModelProcess:
    """Stands for `ModelProcess.start`."""
    thread = _Thread(spec, path)
    await thread.start()
    return ModelProcess(thread, thread.reports, path, on_used, on_background)  # type: ignore[arg-type]


class Router:
    """A router that runs.

    Attributes:
        url: Its address.
        pool: Its models, which belong to its thread.
    """

    def __init__(self, url: str, pool: ModelPool) -> None:
        self.url, self.pool = url, pool


@contextmanager
def running_router(*arguments: str) -> Iterator[Router]:
    """Runs `mlx-paged serve` with arguments about several models; yields it when it listens."""
    made: list[Any] = []
    serve, configure = "mlx_paged.server.run.serve", "mlx_paged.server.logs.configure"
    with mock.patch(serve, lambda *given, **_: made.append(given) or 0), mock.patch(configure):
        command = ["serve", "--num-gpu-blocks-override", "200", *arguments]
        result = CliRunner().invoke(app, command)
    assert made, result.output + str(result.exception)
    [(make_service, config)] = made
    services: list[Any] = []

    def make() -> Service:
        services.append(make_service("127.0.0.1"))
        return services[0]  # type: ignore[no-any-return]

    sock = bind("127.0.0.1", 0, config.read_timeout)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    # A busy machine may answer late, and answers that are late are left out of sums.
    patience = mock.patch.object(endpoints, "_TIMEOUT", TIMEOUT)
    started = mock.patch.object(ModelProcess, "start", _started)
    no_spare = mock.patch.object(Spare, "look", mock.AsyncMock())  # It would be a process.
    with started, no_spare, patience:
        served = ServiceThread(make, config, sock)
        try:
            until(lambda: httpx.get(f"{url}/live").status_code)
            yield Router(url, services[0]._pool)
        finally:
            served.stop(10.0)
            served.thread.join(TIMEOUT)
            sock.close()
    assert not served.thread.is_alive(), "the router does not end"
