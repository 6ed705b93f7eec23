"""A server on a free port of loopback, in this process, for the tests of the API."""

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
from mlx_paged.engine.engine import EngineStats
from mlx_paged.server.app import create_app
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.context import Context
from mlx_paged.server.run import bind, impatient

TIMEOUT = 300.0
ENGINE: dict[str, Any] = {"block_size": 8, "num_gpu_blocks_override": 1000, "max_num_seqs": 64}


def until(condition: Callable[[], Any]) -> None:
    """Waits for a condition; a connection error counts as false."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        with contextlib.suppress(httpx.TransportError):
            if condition():
                return
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def drained(sock: socket.socket) -> bytes:
    """All that comes until the other end hangs up."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


class RunningServer:
    """uvicorn on a thread of its own, an engine behind it."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self.engine = engine
        app = create_app(engine, config)
        self.context: Context = app.state.context
        self._socket = bind("127.0.0.1", 0, config.read_timeout)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        settings = uvicorn.Config(
            app,
            http=impatient(config.read_timeout),
            log_config=None,
            access_log=False,
            ws="none",
            timeout_graceful_shutdown=2,
            root_path=config.root_path,
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(
            target=lambda: self._server.run(sockets=[self._socket]), daemon=True
        )
        self._thread.start()
        self.until(lambda: httpx.get(f"{self.url}/live").status_code)

    until = staticmethod(until)

    def wait_ready(self) -> None:
        self.until(lambda: httpx.get(f"{self.url}/ready").status_code == 200)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=TIMEOUT, **options)

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs something of the engine's from this thread."""
        return run_elsewhere(asyncio.wait_for(coroutine, TIMEOUT))

    def stats(self) -> EngineStats:
        return self.call(self.engine.stats())

    def num_ended(self, reason: str) -> float:
        """Requests that ended for a reason, as /metrics counts them."""
        text = httpx.get(f"{self.url}/metrics").text
        pattern = rf'request_success_total{{.*finished_reason="{reason}".*}} (\S+)'
        [found] = re.findall(pattern, text)
        return float(found)

    def wait_idle(self) -> EngineStats:
        """Waits until no sequence runs or waits, and no block is held."""

        def idle() -> bool:
            stats = self.stats()
            return not (stats.num_running or stats.num_waiting or stats.usage.num_used_blocks)

        self.until(idle)
        return self.stats()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(TIMEOUT)
        run_elsewhere(self.engine.shutdown())


def run_elsewhere(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` on another thread: the caller's may have a loop of its own (Playwright's)."""
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
    """A server, ready; engine options by name."""
    made = make_engine() if make_engine else AsyncEngine.from_model(**{**ENGINE, **engine})
    server = RunningServer(made, config or ServerConfig())
    try:
        if wait:
            server.wait_ready()
        yield server
    finally:
        server.close()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a whole stream; it must end with [DONE]."""
    blocks = [b for b in response.text.replace("\r\n", "\n").split("\n\n") if b]
    data = [b.removeprefix("data: ") for b in blocks if not b.startswith(":")]
    assert data[-1] == "[DONE]", data[-1]
    return [json.loads(d) for d in data[:-1]]


def validate(kind: type, body: Any) -> None:
    """Checks a body that was read from JSON against its declaration in `server.responses`."""
    TypeAdapter(kind).validate_python(body, strict=True)


@contextlib.contextmanager
def process(
    *options: str, code: str | None = None, until: str = "ready", **env: str
) -> Iterator[tuple[Any, str]]:
    """`mlx-paged serve` on a free port; yields it and its address when it is ready, or live."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    main = code or "from mlx_paged.cli.main import main; main()"
    command = [sys.executable, "-c", main, "serve", "--port", port,
               "--num-gpu-blocks-override", "200", *options]  # fmt: skip
    started = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while started.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/{until}").status_code == 200:
                    break
            time.sleep(0.05)
        yield started, url
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate()
