"""The router's spare process: when it starts, which load gets it, how it imports and ends."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.server_helpers import process, until
from support.waiting import TIMEOUT

from mlx_paged.cli.serve.model_options import ModelOptions
from mlx_paged.cli.serve.server_options import ServerOptions
from mlx_paged.demo import model_path
from mlx_paged.server.router import spare as spares
from mlx_paged.server.router.pool import ModelPool
from mlx_paged.server.router.process import LoadedModel, ModelProcess
from mlx_paged.server.router.spare import Spare
from mlx_paged.server.router.spec import ModelSpec

MIB = 1 << 20
MODELS = (f"--model=a={model_path()}", f"--model=b={model_path()}")
GREEDY = {"prompt": "def add(a, b):\n", "max_tokens": 8, "temperature": 0}


# When there is one.


class Waiting:
    """A process without a model."""

    def __init__(self) -> None:
        self.has_ended = self.has_imported = self.is_killed = False

    async def ended(self) -> str:
        return "SIGKILL"

    def kill(self) -> None:
        self.is_killed = self.has_ended = True

    async def stop(self, drain_timeout: float) -> None:
        assert self.has_ended


class Keeper:
    """A `Spare` and what it does."""

    def __init__(self) -> None:
        self.is_useful = self.may_start = True
        self.failure: OSError | None = None
        self.started: list[Waiting] = []
        start: Any = self._start
        self.spare = Spare(start, lambda: self.is_useful, lambda: self.may_start)

    async def _start(self) -> Waiting:
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        self.started.append(Waiting())
        return self.started[-1]


def test_a_spare_is_replaced_once_it_is_taken() -> None:
    async def run() -> None:
        keeper = Keeper()
        assert keeper.spare.take() is None
        keeper.may_start = False
        await keeper.spare.look()
        assert not keeper.started
        keeper.may_start = True
        await keeper.spare.look()
        await keeper.spare.look()
        [first] = keeper.started
        assert not keeper.spare.is_ready
        first.has_imported = True
        assert keeper.spare.is_ready
        keeper.may_start = False  # Another model is loading: a spare that runs stays.
        await keeper.spare.look()
        taken: Any = keeper.spare.take()
        assert taken is first and keeper.spare.take() is None and not keeper.spare.is_ready
        keeper.may_start = True
        await keeper.spare.look()
        assert len(keeper.started) == 2 and not first.is_killed
        await keeper.spare.close()
        assert keeper.started[1].is_killed

    asyncio.run(run())


def test_a_spare_that_nothing_can_use_ends() -> None:
    async def run() -> None:
        keeper = Keeper()
        await keeper.spare.look()
        keeper.is_useful = False
        await keeper.spare.look()
        assert keeper.started[0].is_killed and keeper.spare.take() is None
        await keeper.spare.look()
        assert len(keeper.started) == 1

    asyncio.run(run())


def test_a_spare_that_starts_while_the_server_ends_is_killed() -> None:
    async def run() -> None:
        keeper = Keeper()
        looking = asyncio.create_task(keeper.spare.look())
        await asyncio.sleep(0)  # It is being started.
        keeper.is_useful = False
        await keeper.spare.close()
        await looking
        assert keeper.started[0].is_killed

    asyncio.run(run())


def test_a_dead_spare_is_replaced_later(caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        keeper = Keeper()
        await keeper.spare.look()
        keeper.started[0].has_ended = True
        assert keeper.spare.take() is None  # The load starts a process of its own.
        await keeper.spare.look()
        keeper.started[-1].has_ended = True
        monkeypatch.setattr(spares, "_RETRY_DELAY", 3600)
        with caplog.at_level(logging.WARNING):
            await keeper.spare.look()
        assert "the spare process has ended (SIGKILL)" in caplog.text
        await keeper.spare.look()
        assert len(keeper.started) == 2  # Not at once, or a broken one would never rest.

    asyncio.run(run())


def test_a_spare_that_cannot_be_started(caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "_RETRY_DELAY", 0)

    async def run() -> None:
        keeper = Keeper()
        keeper.failure = OSError("too many processes")
        await keeper.spare.look()
        assert "no spare process can be started: too many processes" in caplog.text
        keeper.failure = None
        await keeper.spare.look()
        assert len(keeper.started) == 1

    asyncio.run(run())


def pool(*specs: ModelSpec, budget: int) -> ModelPool:
    class Loaded:
        async def loaded(self) -> LoadedModel:
            return LoadedModel(100 * MIB)

        async def ended(self) -> str:
            await asyncio.Event().wait()
            return ""

        async def stop(self, drain_timeout: float) -> None: ...

    async def start(_: ModelSpec) -> Any:
        return Loaded()

    return ModelPool(specs, start, budget=budget)


def test_a_spare_is_useful_while_a_model_is_not_running_and_memory_allows_it() -> None:
    async def run() -> None:
        made = pool(ModelSpec("a", "nowhere/a"), ModelSpec("b", "nowhere/b"), budget=1024 * MIB)
        assert made.has_use_for_spare(924 * MIB)
        await made.load("a")
        assert made.has_use_for_spare(924 * MIB) and not made.has_use_for_spare(925 * MIB)
        await made.load("b")
        assert not made.has_use_for_spare(0)
        await made.unload("a")
        assert made.has_use_for_spare(0)
        made.drain()
        assert not made.has_use_for_spare(0)

    asyncio.run(run())


@pytest.mark.parametrize(
    "fields",
    [
        {"environments": ({}, {})},
        {"environments": ({"CUDA_VISIBLE_DEVICES": "1"},)},
        {"num_processes": 2},
    ],
)
def test_replicas_and_ranks_use_no_spare(fields: dict[str, Any]) -> None:
    spec = ModelSpec("a", None, **fields)
    assert not spec.can_use_spare and ModelSpec("a", None).can_use_spare

    async def run() -> None:
        assert not pool(spec, budget=1 << 40).has_use_for_spare(0)

    asyncio.run(run())


# Its program.

ENTRY = """
import json, os, select, signal, sys
from pathlib import Path

FOLDER = Path({folder!r})

def import_ahead():
{ahead}

def main(model, socket, reports):
    (FOLDER / "model").write_bytes(model)
    os.write(reports, b'{{"memory": 7}}' + bytes([10]))
    os.read(0, 1)
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Starts a process without a model, which runs some lines ahead of it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    async def start(ahead: str = "pass") -> ModelProcess:
        lines = "\n".join(f"    {line}" for line in ahead.splitlines())
        (tmp_path / "spare_entry.py").write_text(ENTRY.format(folder=str(tmp_path), ahead=lines))
        (tmp_path / "sockets").mkdir()
        return await ModelProcess.start_without_model(
            "spare_entry", tmp_path / "sockets" / "0.sock", lambda account, num_tokens: None, {}
        )

    return start


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_process_imports_and_then_gets_its_model(started, tmp_path: Path) -> None:
    model = os.urandom(1 << 20)  # More than a pipe holds.

    async def run() -> None:
        made = await started()
        await eventually(lambda: made.has_imported)
        assert not (tmp_path / "model").exists()
        made.launch(ModelSpec("m", None, launch=model), lambda replica, count: None)
        async with asyncio.timeout(TIMEOUT):
            assert await made.loaded() == LoadedModel(7)
        assert (tmp_path / "model").read_bytes() == model
        made.kill()
        await made.ended()

    asyncio.run(run())


# It ends once the timer of the bursts has been on, and is off in five looks that follow each other.
HURRIES = """
(FOLDER / "importing").touch()
num_on = num_off = 0
while not num_on or num_off < 5:
    is_on = signal.getitimer(signal.ITIMER_REAL)[0] > 0
    num_on += is_on
    num_off = 0 if is_on else num_off + 1
    if num_on > 100:
        (FOLDER / "in bursts").touch()
"""


def test_a_process_imports_in_bursts_until_its_model_arrives(started, tmp_path: Path) -> None:
    async def run() -> None:
        made = await started(HURRIES)
        await eventually((tmp_path / "in bursts").exists)
        assert not made.has_imported
        made.launch(ModelSpec("m", None, launch=b"model"), lambda replica, count: None)
        async with asyncio.timeout(TIMEOUT):
            assert await made.loaded() == LoadedModel(7)
        made.kill()
        await made.ended()

    asyncio.run(run())


@pytest.mark.parametrize("ahead", ["pass", '(FOLDER / "importing").touch()\nwhile True: pass'])
def test_a_process_without_a_model_ends_with_its_router(started, ahead: str, tmp_path) -> None:
    async def run() -> None:
        made = await started(ahead)
        await eventually(lambda: made.has_imported or (tmp_path / "importing").exists())
        made._process.stdin.close()
        async with asyncio.timeout(TIMEOUT):
            assert await made.ended() == "exit status 0"
        assert not (tmp_path / "model").exists() and not (tmp_path / "sockets").exists()

    asyncio.run(run())


NEW_MODULES = """
import os, pickle, sys
from pathlib import Path
from mlx_paged.cli.serve import child

child.import_ahead()
before = set(sys.modules)

async def started(self, model):
    assert model.failure is None, model.failure
    print(*sorted(set(sys.modules) - before), flush=True)
    os._exit(0)

from mlx_paged.server.router.link import RouterLink
RouterLink.started = started
child.main(bytes.fromhex(sys.argv[1]), Path(sys.argv[2]), os.open(os.devnull, os.O_WRONLY))
"""


def test_everything_but_the_parts_of_one_model_is_imported_ahead(tmp_path: Path) -> None:
    options = ModelOptions(num_gpu_blocks_override=50)
    model = pickle.dumps((None, options, ServerOptions(log_level="error")))
    socket = tmp_path / "s"
    command = [sys.executable, "-c", NEW_MODULES, model.hex(), str(socket)]
    # stdin stays open, because its end would end the process.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as ran:
        assert ran.stdout is not None
        names = ran.stdout.read().split()
    assert ran.returncode == 0
    # transformers and PIL import further parts for some tokenizers and processors.
    packages = {name.split(".")[0] for name in names if name != "mlx_paged.demo"}
    others = packages - set(sys.stdlib_module_names) - {"encodings"}
    assert others <= {"transformers", "PIL"}, " ".join(names)


# In a server.


@pytest.mark.parametrize(
    "is_whole", [pytest.param(True, id="killed and replaced", marks=pytest.mark.long), False]
)
def test_the_next_model_is_loaded_by_the_spare(is_whole: bool) -> None:
    with (
        process(*MODELS, "--log-level", "warning") as (server, url),
        httpx.Client(base_url=url, timeout=300) as client,
    ):

        def children() -> list[psutil.Process]:
            found = psutil.Process(server.pid).children()
            return [each for each in found if each.status() != psutil.STATUS_ZOMBIE]

        def has_spare() -> bool:
            return "mlx_paged:spare_process 1.0" in client.get("/metrics").text

        def complete(model: str) -> str:
            answer = client.post("/v1/completions", json={**GREEDY, "model": model})
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        expected = complete("a")
        [of_a] = [each for each in children() if "0.sock" in " ".join(each.cmdline())]
        until(has_spare)
        if is_whole:
            [killed] = set(children()) - {of_a}
            killed.kill()
            until(lambda: set(children()) - {of_a, killed})
            until(has_spare)
        [spare] = set(children()) - {of_a}
        assert complete("b") == expected
        assert set(children()) == {of_a, spare} and not has_spare()
        last = spare
        if is_whole:
            client.post("/models/unload", json={"model": "b"})
            until(lambda: spare not in children())
            until(lambda: len(children()) == 2)  # A model is not running, so there is a spare.
            [last] = set(children()) - {of_a}
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=300)
        assert server.returncode == 0, log
        assert ("the spare process has ended (SIGKILL" in log) == is_whole
        assert not last.is_running() and not of_a.is_running()
