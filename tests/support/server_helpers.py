"""A server on a free loopback port in this process, for tests of the API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import uvicorn
from pydantic import TypeAdapter

from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.stats import EngineStats
from mlx_paged.server.app import create_app
from mlx_paged.server.catalog import ModelCatalog
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.context import Context
from mlx_paged.server.run import bind, with_timeouts
from mlx_paged.server.websocket import SETTINGS, websockets
from support.hangs import all_threads
from support.waiting import TIMEOUT, until

ENGINE: dict[str, Any] = {"block_size": 8, "num_gpu_blocks_override": 1000, "max_num_seqs": 64}


def drained(sock: socket.socket) -> bytes:
    """Reads until the other end closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


class RunningServer:
    """uvicorn on its own thread, with an engine behind it."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self.engine = engine
        app = create_app(engine, config)
        self.context: Context = app.state.context
        self.catalog: ModelCatalog = app.state.catalog
        self._socket = bind("127.0.0.1", 0, config.read_timeout)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        settings = uvicorn.Config(
            app,
            http=with_timeouts(config.read_timeout),
            log_config=None,
            access_log=False,
            lifespan="on",
            ws=websockets(config.read_timeout),
            **SETTINGS,
            timeout_graceful_shutdown=2,
            root_path=config.root_path,
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(
            target=lambda: self._server.run(sockets=[self._socket]), daemon=True
        )
        self._thread.start()
        self.until(lambda: self._answer("/live").status_code)

    until = staticmethod(until)

    def _answer(self, path: str) -> httpx.Response:
        assert self._thread.is_alive(), "the server has ended"
        return httpx.get(f"{self.url}{path}")

    def wait_ready(self, timeout: float = TIMEOUT) -> None:
        """Waits until the server accepts requests.

        Raises:
            AssertionError: The engine failed, chained to its error; or timeout, with the state of
                the engine and all threads.
        """
        answers = []

        def is_ready() -> bool:
            made = self.engine._thread.ready
            failure = self.context.models.default.failure
            failure = failure or (made.exception() if made.done() else None)
            if failure is not None:
                raise AssertionError(f"the engine was not made: {failure!r}") from failure
            assert self.engine.is_alive, f"the engine stopped: {self.engine._thread.dead}"
            answers[:] = [self._answer("/ready")]
            return answers[0].status_code == 200

        try:
            self.until(is_ready, timeout)
        except AssertionError as error:
            made = self.engine._thread.ready
            error.add_note(
                f"the engine is made: {made.done()}; it is alive: {self.engine.is_alive}"
            )
            error.add_note(f"/ready: {answers[0].text if answers else 'no answer'}")
            raise

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=TIMEOUT, **options)

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Calls a method of the engine from this thread."""
        return run_elsewhere(asyncio.wait_for(coroutine, TIMEOUT))

    def stats(self) -> EngineStats:
        return self.call(self.engine.stats())

    def num_ended(self, reason: str) -> float:
        """Number of requests that ended for a reason, from /metrics."""
        text = httpx.get(f"{self.url}/metrics").text
        pattern = rf'request_success_total{{.*finished_reason="{reason}".*}} (\S+)'
        [found] = re.findall(pattern, text)
        return float(found)

    def wait_idle(self) -> EngineStats:
        """Waits until no sequence runs or waits, and no block is in use."""

        def idle() -> bool:
            stats = self.stats()
            return not (stats.num_running or stats.num_waiting or stats.usage.num_used_blocks)

        self.until(idle)
        return self.stats()

    def close(self, timeout: float = TIMEOUT) -> None:
        """Ends the server and its engine.

        Raises:
            AssertionError: One of them does not end; the message has the stacks of all threads.
        """
        self._server.should_exit = True
        self._thread.join(timeout)
        engine = self.engine._thread
        engine.stop(0.0)
        engine.join(timeout)  # `shutdown` would wait forever
        for name, thread in (("engine", engine._thread), ("server", self._thread)):
            if thread.is_alive():
                raise AssertionError(f"the {name} does not end\n{all_threads()}")
        run_elsewhere(self.engine.shutdown())


def run_elsewhere(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` on another thread, because the caller's may have a loop (Playwright's)."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


@contextlib.contextmanager
def running(
    config: ServerConfig | None = None,
    make_engine: Callable[[], AsyncEngine] | None = None,
    *,
    wait: bool = True,
    **engine: Any,
) -> Iterator[RunningServer]:
    """Starts a server and waits until it is ready; engine options by name."""
    made = make_engine() if make_engine else AsyncEngine.from_model(**{**ENGINE, **engine})
    server = RunningServer(made, config or ServerConfig())
    try:
        if wait:
            server.wait_ready()
        yield server
    finally:
        server.close()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a whole stream, which must end with [DONE]."""
    blocks = [b for b in response.text.replace("\r\n", "\n").split("\n\n") if b]
    data = [b.removeprefix("data: ") for b in blocks if not b.startswith(":")]
    assert data[-1] == "[DONE]", data[-1]
    return [json.loads(d) for d in data[:-1]]


def validate(kind: type, body: Any) -> None:
    """Checks parsed JSON against its declaration in `server.responses`."""
    TypeAdapter(kind).validate_python(body, strict=True)


@contextlib.contextmanager
def process(
    *options: str, code: str | None = None, until: str = "ready", scheme: str = "http", **env: str
) -> Iterator[tuple[Any, str]]:
    """Runs `mlx-paged serve` on a free port; yields it with its address when ready, or live."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    main = code or "from mlx_paged.cli.main import main; main()"
    path = options[options.index("--uds") + 1] if "--uds" in options else None
    place = () if path else ("--port", port)
    command = [sys.executable, "-c", main, "serve", *place,
               "--num-gpu-blocks-override", "200", *options]  # fmt: skip
    started = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    url = f"{scheme}://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        with httpx.Client(transport=httpx.HTTPTransport(uds=path, verify=False)) as client:
            while started.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{url}/{until}").status_code == 200:
                        break
                time.sleep(0.05)
        yield started, url
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate()
