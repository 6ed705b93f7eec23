"""The tests' own server: where it does not start they fail at once, and say why."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import pytest
from support import server_helpers
from support.hash_model import hash_model
from support.server_helpers import running, until

from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.server.served_model import ServedModel


def make() -> Engine:
    return Engine(hash_model(), EngineConfig(block_size=8, num_gpu_blocks_override=20))


def fail() -> Engine:
    raise RuntimeError("no such engine")


@pytest.fixture
def hanging() -> Iterator[tuple[threading.Event, AsyncEngine]]:
    """An engine whose thread waits for an event before it makes one."""
    go = threading.Event()

    def hang_until_told() -> Engine:
        go.wait(server_helpers.TIMEOUT)
        return make()

    yield go, AsyncEngine(hang_until_told)
    go.set()


def test_an_engine_that_cannot_be_made() -> None:
    with (
        pytest.raises(AssertionError, match=r"not made: RuntimeError\('no such engine'\)") as found,
        running(make_engine=lambda: AsyncEngine(fail)),
    ):
        pass
    assert isinstance(found.value.__cause__, RuntimeError)


def test_what_the_server_makes_of_an_engine_fails(monkeypatch) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("no such metrics")

    monkeypatch.setattr("mlx_paged.server.metrics.Metrics.attach", failing)
    with (
        pytest.raises(AssertionError, match="no such metrics"),
        running(make_engine=lambda: AsyncEngine(make)),
    ):
        pass


def test_an_engine_that_stops_before_the_server_is_ready(monkeypatch) -> None:
    async def start(*_: object) -> None:
        pass

    monkeypatch.setattr(ServedModel, "start", start)
    with running(make_engine=lambda: AsyncEngine(make), wait=False) as server:
        server.call(server.engine.shutdown())
        with pytest.raises(AssertionError, match="the engine stopped: it was shut down"):
            server.wait_ready()


def test_a_server_that_has_ended() -> None:
    with running(make_engine=lambda: AsyncEngine(make)) as server:
        server._server.should_exit = True
        server._thread.join(server_helpers.TIMEOUT)
        with pytest.raises(AssertionError, match="the server has ended"):
            server.wait_ready()


def test_an_engine_that_hangs(hanging) -> None:
    go, engine = hanging
    with running(make_engine=lambda: engine, wait=False) as server:
        with pytest.raises(AssertionError, match="did not happen in time") as found:
            server.wait_ready(timeout=0.2)
        stacks = str(found.value)
        # The engine's thread, where it waits; uvicorn's; this one.
        assert "in hang_until_told" in stacks and "in _run" in stacks
        assert "server_helpers.py" in stacks
        assert found.value.__notes__ == [
            "the engine is made: False; it is alive: True",
            '/ready: {"status":"loading"}',
        ]
        go.set()
        server.wait_ready()


def test_time_in_which_the_machine_stood_still_does_not_count(monkeypatch) -> None:
    calls = 0

    def condition() -> bool:
        nonlocal calls
        calls += 1
        if calls == 2:
            stopped = time.monotonic
            monkeypatch.setattr(time, "monotonic", lambda: stopped() + 10_000)
        return calls == 4

    until(condition, timeout=30.0)
    assert calls == 4


def test_an_engine_that_does_not_end(hanging) -> None:
    go, engine = hanging
    with running(make_engine=lambda: engine, wait=False) as server:
        with pytest.raises(AssertionError, match="the engine does not end") as found:
            server.close(timeout=0.2)
        assert "in hang_until_told" in str(found.value)
        go.set()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not list their threads")
def test_threads_without_a_stack_are_listed_too() -> None:
    mx.eval(mx.ones(3) + 1)  # (MLX has a thread for the stream)
    now = server_helpers.all_threads().splitlines()
    own = rf"{os.getpid()} .*: R, \d+ ticks of CPU time, in .*"
    assert any(re.fullmatch(own, line) for line in now)
    tasks = [x for x in now if "ticks of CPU time" in x]
    assert len(tasks) > sum(x.startswith(("Thread 0x", "Current thread 0x")) for x in now)
