"""A model's process, seen from its router: its reports, and how loading ends without one."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support.waiting import TIMEOUT

from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.memory import MemoryUsage, served_memory
from mlx_paged.server import child_process
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.router.link import RouterLink
from mlx_paged.server.router.process import LoadedModel, ModelProcess, ProcessFailedError
from mlx_paged.server.router.routing import Replica
from mlx_paged.server.router.spec import ModelSpec
from mlx_paged.server.served_model import ServedModel

LOADED = {"memory": 7, "max_model_len": 64, "input_modalities": ["text"], "adapters": []}
CHILD = """
import json, os, sys, time

def import_ahead():
    pass

def main(options, socket, reports):
    def report(text):
        os.write(reports, text.encode())

    assert options == b"options"
{body}
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModelProcess]:
    """Starts a process that runs some lines."""
    monkeypatch.syspath_prepend(str(tmp_path))

    async def start(
        body: str, used: Callable[[int, int], None] = lambda account, num_tokens: None
    ) -> ModelProcess:
        lines = "\n".join(f"    {line}" for line in body.splitlines())
        (tmp_path / "model_child.py").write_text(CHILD.format(body=lines))

        def ignore(replica: Replica, count: int) -> None: ...

        # The path of a socket must be short, and no child here listens on it.
        spec, path = ModelSpec("m", None, launch=b"options"), Path("/nowhere/socket")
        return await ModelProcess.start("model_child", spec, path, used, ignore, {})

    return start  # type: ignore[return-value]


async def loaded(process: ModelProcess) -> LoadedModel:
    async with asyncio.timeout(TIMEOUT):
        return await process.loaded()


async def failure(process: ModelProcess) -> str:
    with pytest.raises(ProcessFailedError) as failed:
        await loaded(process)
    async with asyncio.timeout(TIMEOUT):
        await process.ended()
    return str(failed.value)


def test_prints_of_libraries_are_no_reports(started, capfd) -> None:
    async def run() -> None:
        process = await started(
            "print('a library says:', end=' ', flush=True)\n"
            "os.system('echo so does a program')\n"
            f"report({json.dumps(LOADED)!r} + chr(10))\n"
            "os.read(0, 1)"
        )
        assert await loaded(process) == LoadedModel(7, 64)
        process.kill()
        await process.ended()

    asyncio.run(run())
    printed, logged = capfd.readouterr()
    assert "a library says: so does a program" in logged and printed == ""


def test_a_report_may_be_long(started) -> None:
    names = [f"adapter-{i:05}" for i in range(20_000)]

    async def run() -> None:
        process = await started(
            "names = [f'adapter-{i:05}' for i in range(20_000)]\n"
            f"whole = {{**{LOADED!r}, 'adapters': names}}\n"
            "report(json.dumps(whole) + chr(10))"
        )
        assert (await loaded(process)).adapters == tuple(names)
        await process.ended()

    asyncio.run(run())


@pytest.mark.parametrize("report", ["no JSON", '{"memory": 7, "unknown": 1}', "[]"])
def test_an_unusable_report_fails_the_model(started, report: str) -> None:
    async def run() -> None:
        process = await started(f"report({report!r} + chr(10))\nos.read(0, 1)")
        assert "a report of its process cannot be used" in await failure(process)
        assert "SIGKILL" in await process.ended()

    asyncio.run(run())


def test_an_unusable_report_of_a_loaded_model_ends_its_process(started) -> None:
    used: list[tuple[int, int]] = []

    async def run() -> None:
        reports = [json.dumps(LOADED), '{"used": {"3": 4}}', '{"used": {"3": "many"}}']
        text = "".join(f"{line}\n" for line in reports)
        process = await started(
            f"report({text!r})\nos.read(0, 1)",
            lambda account, num_tokens: used.append((account, num_tokens + 0)),
        )
        await loaded(process)
        async with asyncio.timeout(TIMEOUT):
            assert "SIGKILL" in await process.ended()

    asyncio.run(run())
    assert used == [(3, 4)]


def test_a_process_that_dies_within_a_report(started) -> None:
    async def run() -> None:
        process = await started("report('{\"memory\": ')\nsys.exit(3)")
        assert await failure(process) == "its process ended while it was loading (exit status 3)"

    asyncio.run(run())


def test_a_canceled_start_leaves_no_process(started, monkeypatch) -> None:
    async def cancel(_: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    monkeypatch.setattr(child_process, "_writer", cancel)
    before = psutil.Process().children()

    async def run() -> None:
        with pytest.raises(asyncio.CancelledError):
            await started("time.sleep(600)")

    asyncio.run(run())
    own = [each for each in psutil.Process().children() if each not in before]
    _, alive = psutil.wait_procs(own, timeout=TIMEOUT)
    for each in alive:
        each.kill()
    assert not alive


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_process_that_dies_while_one_that_it_forked_lives(started, tmp_path: Path) -> None:
    """The forked one keeps the pipe open."""

    async def run() -> None:
        process = await started(
            "forked = os.fork()\n"
            "if forked == 0:\n"
            "    time.sleep(600)\n"
            f"open({str(tmp_path / 'forked')!r}, 'w').write(str(forked))\n"
            "os._exit(3)"
        )
        try:
            assert "(exit status 3)" in await failure(process)
        finally:
            os.kill(int((tmp_path / "forked").read_text()), signal.SIGKILL)

    asyncio.run(run())


class Engine:
    """An engine that is loaded on some ranks."""

    media = None
    memory = MemoryUsage(active=1000, cached=0, peak=0, cache_limit=500)

    def __init__(self, num_ranks: int) -> None:
        self.info = SimpleNamespace(config=EngineConfig(tensor_parallel_size=num_ranks))

    async def stats(self) -> Any:
        return SimpleNamespace(memory=self.memory)


@pytest.mark.parametrize(
    ("num_ranks", "is_separate", "num_processes"),
    [(1, False, 1), (1, True, 2), (2, False, 2), (2, True, 3)],
)
def test_the_memory_of_all_processes_is_reported(
    num_ranks: int, is_separate: bool, num_processes: int
) -> None:
    engine: Any = Engine(num_ranks)
    model = ServedModel(engine, ServerConfig(frontend_multiprocessing=is_separate))
    model._renderer = SimpleNamespace(max_model_len=64)  # type: ignore[assignment]
    pipe = io.StringIO()
    asyncio.run(RouterLink(pipe).started(model))
    memory = json.loads(pipe.getvalue())["memory"]
    assert memory == served_memory(engine.memory, num_ranks, num_processes)
