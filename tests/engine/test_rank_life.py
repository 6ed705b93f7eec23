"""How ranks end together, seen from rank 0: the others are sockets and short-lived processes."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import pytest
from support.models import embedded_twin
from support.waiting import TIMEOUT

from mlx_paged import private_folder
from mlx_paged.core import StepBatch, StepResult
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.ranks import launch, life
from mlx_paged.engine.ranks.channel import Channel
from mlx_paged.engine.ranks.lead import Ranks, RanksExecutor
from mlx_paged.engine.ranks.life import Follower, Followers, last_words
from mlx_paged.engine.ranks.messages import JOIN, READY, RESET, Message
from mlx_paged.errors import EngineDeadError


class Other:
    """Another rank: its ends of both sockets."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes] | None = None) -> None:
        ours, theirs = socket.socketpair()
        our_life, self.life = socket.socketpair()
        self.channel = Channel(theirs)
        self.follower = Follower(rank, Channel(ours), our_life, process)

    def end(self) -> None:
        self.life.close()
        self.channel.close()


@pytest.fixture(scope="session", autouse=True)
def no_deadline() -> Iterator[None]:
    """Otherwise, the process that runs the tests would have one for its own end.

    Until the end of all tests, because followers may notice the end of a rank after their test.
    """
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(life.runtime, "exit_unless_extended", lambda seconds, message: None)
        patches.setattr(life, "_exit_if_hung", lambda message: None)
        yield


@pytest.fixture
def two() -> Iterator[tuple[Followers, list[Other]]]:
    others = [Other(1), Other(2)]
    followers = Followers([other.follower for other in others])
    yield followers, others
    followers.close()


def failure_of(followers: Followers) -> str:
    assert followers._failed.wait(TIMEOUT)
    assert followers.failure is not None
    return followers.failure


def test_messages_reach_all_in_order(two: tuple[Followers, list[Other]]) -> None:
    followers, others = two
    for i in range(3):
        followers.send(Message(RESET, {"i": i}).encode())
    for other in others:
        assert [other.channel.receive().fields["i"] for _ in range(3)] == [0, 1, 2]


def test_ranks_join_when_all_are_ready(two: tuple[Followers, list[Other]]) -> None:
    """Before that, rank 0 waits where it notices that one of them ends."""
    followers, others = two
    waiting = threading.Thread(target=followers.gather)
    waiting.start()
    others[1].channel.send(Message(READY).encode())
    assert not others[1].channel.wait(0)
    others[0].channel.send(Message(READY).encode())
    assert [other.channel.receive().kind for other in others] == [JOIN, JOIN]
    waiting.join(TIMEOUT)
    others[1].end()
    with pytest.raises(EngineDeadError, match="rank 2 of 3 ended"):
        followers.gather()


def test_the_last_words_of_a_rank_are_the_reason(two: tuple[Followers, list[Other]]) -> None:
    followers, others = two
    last_words(others[1].life, MemoryError("no room\nfor a pool"))
    others[1].end()
    assert failure_of(followers) == "rank 2 of 3 failed: MemoryError: no room for a pool"
    with pytest.raises(EngineDeadError, match="no room for a pool"):
        followers.send(Message(RESET).encode())
    assert others[0].life.recv(1) == b"", "the others are told by the end of their sockets"
    with pytest.raises(EOFError):
        others[0].channel.receive()


def test_an_error_of_rank_0_that_another_one_caused(two: tuple[Followers, list[Other]]) -> None:
    followers, others = two
    others[0].end()
    error = followers.failed(RuntimeError("[ring] connection to a peer was lost"))
    assert error.reason == "rank 1 of 3 ended"


def test_an_error_of_rank_0_itself(
    two: tuple[Followers, list[Other]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "_CAUSE_TIMEOUT", 0.0)
    followers, others = two
    assert followers.failed(ValueError("bad")).reason == "rank 0 of 3 failed: ValueError: bad"
    assert others[0].life.recv(1) == b""


def test_closing_is_no_failure() -> None:
    other = Other(1)
    followers = Followers([other.follower])
    followers.close()
    other.end()
    assert not followers._failed.is_set()
    with pytest.raises(EngineDeadError, match="the other ranks were ended"):
        followers.check()


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import sys; sys.exit(7)", "ended with status 7"),
        ("import os; os.kill(os.getpid(), 11)", "was ended by SIGSEGV"),
    ],
)
def test_how_a_process_ended_that_left_no_words(code: str, how: str) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    process.wait()
    other = Other(1, process)
    followers = Followers([other.follower])
    other.end()
    assert failure_of(followers) == f"rank 1 of 2 {how}"


class Dying:
    """A process whose socket is closed, and whose exit is reported when the test says so."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.reported = threading.Event()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and timeout is not None:
            raise subprocess.TimeoutExpired("a rank", timeout)
        assert self.reported.wait(TIMEOUT)
        self.returncode = -9
        return self.returncode

    def kill(self) -> None: ...


def test_a_late_report_of_an_exit_is_still_the_reason() -> None:
    process = Dying()
    other = Other(1, process)  # type: ignore[arg-type]
    followers = Followers([other.follower])
    found: list[str] = []
    lost = RuntimeError("[ring] connection to a peer was lost")
    failing = threading.Thread(target=lambda: found.append(followers.failed(lost).reason))
    other.end()
    failing.start()
    assert followers._has_ended.wait(TIMEOUT) and followers.failure is None
    process.reported.set()
    failing.join(TIMEOUT)
    assert found == [failure_of(followers)] == ["rank 1 of 2 was ended by SIGKILL"]
    followers.close()


def test_a_step_that_never_ends_is_told_and_ends_the_process(
    two: tuple[Followers, list[Other]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "_NOTICE_TIMEOUT", 0.0)
    monkeypatch.setattr(life, "_ANSWER_TIMEOUT", 0.0)
    told: list[str] = []
    ended = threading.Event()
    monkeypatch.setattr(life.os, "_exit", lambda status: ended.set())
    followers, others = two
    followers.on_stuck = told.append
    with followers.operation():
        others[0].end()
        assert ended.wait(TIMEOUT)
    assert told == ["rank 1 of 3 ended"]


RANK_0 = """
import ctypes, socket, sys
from mlx_paged.engine.ranks import life
from mlx_paged.engine.ranks.channel import Channel

life._HUNG_TIMEOUT = float(sys.argv[1])
(ours, _), (our_life, their_life) = socket.socketpair(), socket.socketpair()
followers = life.Followers([life.Follower(1, Channel(ours), our_life)])
their_life.close()
followers._failed.wait()
libc = ctypes.PyDLL(None)  # which keeps the GIL
"""


@pytest.mark.parametrize(
    "hang",
    [
        pytest.param("libc.pause()", id="with-the-gil"),
        pytest.param("ctypes.pythonapi.Py_AtExit(libc.pause)", id="after-the-interpreter"),
        pytest.param("libc.__cxa_atexit(libc.pause, None, None)", id="as-the-last"),
    ],
)
def test_a_process_that_hangs_since_a_rank_ended(hang: str) -> None:
    """As one does that waits for a GPU which waits for the lost rank."""
    ended = subprocess.run(
        [sys.executable, "-c", RANK_0 + hang, "1"], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("mlx-paged: rank 1 of 2 ended; rank 0 hung and exits too\n")


def test_a_process_may_go_on_after_a_rank_ended() -> None:
    code = RANK_0 + "import time; time.sleep(life._HUNG_TIMEOUT + 1); sys.exit(3)"
    command = [sys.executable, "-c", code, str(life._HUNG_TIMEOUT)]
    assert subprocess.run(command, timeout=TIMEOUT).returncode == 3


def test_a_process_that_loads_waits_for_no_answers(
    two: tuple[Followers, list[Other]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "_NOTICE_TIMEOUT", 0.0)
    monkeypatch.setattr(life, "_ANSWER_TIMEOUT", float("inf"))
    ended = threading.Event()
    monkeypatch.setattr(life.os, "_exit", lambda status: ended.set())
    followers, others = two
    with followers.loading():
        others[0].end()
        assert ended.wait(TIMEOUT)


def test_rank_0_waits_for_others_that_may_end(two: tuple[Followers, list[Other]]) -> None:
    followers, others = two
    assert followers.wait(lambda: 7) == 7
    with pytest.raises(EngineDeadError, match="rank 2 of 3 ended"):
        followers.wait(partial(waiting_for_no_one, others[1].end))


def waiting_for_no_one(begin: Callable[[], object]) -> None:
    begin()
    threading.Event().wait(TIMEOUT)
    raise AssertionError("the wait went on")


def test_rank_0_does_not_wait_forever(
    two: tuple[Followers, list[Other]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "_CONNECT_TIMEOUT", 0.01)
    monkeypatch.setattr(life, "_CAUSE_TIMEOUT", 0.0)
    followers, _ = two
    ended = threading.Event()
    with pytest.raises(EngineDeadError, match="the ranks did not connect within"):
        followers.wait(ended.wait)
    ended.set()


def test_what_fails_while_rank_0_waits(
    two: tuple[Followers, list[Other]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "_CAUSE_TIMEOUT", 0.0)
    followers, _ = two

    def fail() -> None:
        raise RuntimeError("[ring] Couldn't bind socket")

    with pytest.raises(EngineDeadError, match="rank 0 of 3 failed: RuntimeError: "):
        followers.wait(fail)


# --- Engines --------------------------------------------------------------------------------------


class Steps:
    """An executor over another one, whose ranks may end."""

    def __init__(self, inner: Any, followers: Followers) -> None:
        self._inner, self._followers = inner, followers
        self.num_faults = 0

    def launch(self, batch: StepBatch) -> None:
        self._followers.check()
        self._inner.launch(batch)

    def read(self) -> StepResult:
        result: StepResult = self._inner.read()
        return result

    def reset(self) -> None:
        self._inner.reset()

    def check(self) -> None:
        self._followers.check()


def test_an_idle_engine_notices_the_end_of_a_rank() -> None:
    asyncio.run(_idle_engine())


async def _idle_engine() -> None:
    other = Other(1)
    followers = Followers([other.follower])

    def make() -> Engine:
        engine = Engine(embedded_twin())
        engine._executor = Steps(engine._executor, followers)
        engine._ranks = Ranks(followers, None)  # type: ignore[arg-type]
        return engine

    engine = AsyncEngine(make)
    await engine.ready()
    assert engine.is_alive
    other.end()
    engine._thread.join(TIMEOUT)
    assert not engine.is_alive
    with pytest.raises(EngineDeadError) as caught:
        await engine.add_request([1, 2, 3])
    assert str(caught.value) == "the engine has stopped: rank 1 of 2 ended"


def test_a_fault_is_not_run_again_in_parts(
    two: tuple[Followers, list[Other]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks may wait in the collectives of the step that failed."""
    monkeypatch.setattr(life, "_CAUSE_TIMEOUT", 0.0)
    followers, _ = two
    engine = Engine(embedded_twin())
    executor = RanksExecutor(engine._runner, Ranks(followers, None))  # type: ignore[arg-type]
    engine._executor = executor
    calls: list[int] = []

    def fail(*_: object) -> None:
        calls.append(1)
        raise RuntimeError("a device is lost")

    monkeypatch.setattr(engine._runner, "launch", fail)
    engine.add_request("r", [1, 2, 3])
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="rank 0 of 3 failed: RuntimeError: a device is"):
            engine.step()
    assert len(calls) == 1


def test_a_rank_that_cannot_be_started_leaves_no_others(monkeypatch) -> None:
    others: list[Other] = []

    def start_one(rank: int, *_: Any) -> Follower:
        if others:
            raise OSError("no more processes")
        sleeping = "import time; time.sleep(300)"
        others.append(Other(rank, subprocess.Popen([sys.executable, "-c", sleeping])))
        return others[0].follower

    monkeypatch.setattr(launch, "_start_one", start_one)
    folders = set(private_folder._locks)
    with pytest.raises(OSError, match="no more processes"):
        launch.start(3, "tensor_parallel_size")
    [other] = others
    assert other.follower.process is not None and other.follower.process.poll() is not None
    assert set(private_folder._locks) == folders  # nor the file of the ring's addresses
    other.end()
