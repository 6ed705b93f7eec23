"""A model's process takes only the processor time that others leave, until it is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_paged.server.router import priority
from mlx_paged.server.router.priority import LoweredPriority
from mlx_paged.server.router.process import ModelProcess
from mlx_paged.server.router.spec import ModelSpec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems change nothing")

# Starts a thread or a child for each line that it reads, and prints the child's id.
STARTS = """
import subprocess, sys, threading
for line in sys.stdin:
    child = None
    if line == "child\\n":
        child = subprocess.Popen(["sleep", "60"])
    else:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    print(child.pid if child else "", flush=True)
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A leader of a session with two threads."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", STARTS], stdin=pipe, stdout=pipe, start_new_session=True
    ) as started:
        start(started, "thread")
        yield started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)


def start(process: subprocess.Popen[bytes], what: str) -> bytes:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{what}\n".encode())
    process.stdin.flush()
    return process.stdout.readline()


def niceness(pid: int) -> list[int]:
    """That of each thread."""
    threads = map(int, os.listdir(f"/proc/{pid}/task"))
    return [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads]


def session_niceness(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
    except OSError:
        pytest.skip("this system does not group tasks by session")


def test_threads_are_lowered_and_restored(process: subprocess.Popen[bytes]) -> None:
    if not priority._may_raise_threads():
        pytest.skip("raising threads takes a privilege")
    [before] = set(niceness(process.pid))
    lowered = LoweredPriority(process.pid)
    assert niceness(process.pid) == [min(19, before + priority._STEP)] * 2
    start(process, "thread")  # inherits what it must not keep
    child = int(start(process, "child"))  # so does this
    assert niceness(process.pid) == [min(19, before + priority._STEP)] * 3
    assert niceness(child) == [min(19, before + priority._STEP)]
    asyncio.run(lowered.restore())
    assert niceness(process.pid) == [before] * 3 and niceness(child) == [before]


def test_threads_that_could_not_be_raised_again_stay(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = niceness(process.pid)
    setpriority = os.setpriority

    def unprivileged(which: int, who: int, nice: int) -> None:
        if nice < os.getpriority(which, who):
            raise PermissionError(errno.EACCES, "Permission denied")
        setpriority(which, who, nice)

    monkeypatch.setattr(os, "setpriority", unprivileged)
    may_raise = priority._may_raise_threads.__wrapped__
    monkeypatch.setattr(priority, "_may_raise_threads", may_raise)
    assert not may_raise()
    lowered = LoweredPriority(process.pid)
    assert niceness(process.pid) == before
    asyncio.run(lowered.restore())
    assert niceness(process.pid) == before


def test_a_session_is_restored_when_linux_lets_it(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = session_niceness(process.pid)
    lowered = LoweredPriority(process.pid)
    assert session_niceness(process.pid) == min(19, before + priority._STEP)
    set_session, refusals = priority._set_session, [errno.EAGAIN] * 2

    def busy(pid: int, nice: int) -> None:
        if refusals:
            raise OSError(refusals.pop(), "Resource temporarily unavailable")
        set_session(pid, nice)

    monkeypatch.setattr(priority, "_set_session", busy)
    monkeypatch.setattr(priority, "_RETRY", 0)
    asyncio.run(lowered.restore())
    assert not refusals and session_niceness(process.pid) == before


CHILD = """
import sys

def main():
    sys.stdin.buffer.read(8)
    sys.stdin.buffer.read(1)  # Until then, it is loading.
    told = '{"memory": 1, "max_model_len": 2, "input_modalities": [], "adapters": []}'
    print(told, flush=True)
    sys.stdin.buffer.read()
"""


def test_a_model_has_its_priority_back_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loads_nothing.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    restored: list[int] = []
    restore = LoweredPriority.restore

    async def watched(lowered: LoweredPriority) -> None:
        await restore(lowered)
        restored.append(lowered._pid)

    monkeypatch.setattr(LoweredPriority, "restore", watched)

    async def run() -> None:
        spec = ModelSpec("m", None)
        process = await ModelProcess.start("loads_nothing", spec, tmp_path / "s", print, {})
        process.yield_processors()
        loading = asyncio.create_task(process.loaded())
        await asyncio.sleep(0)
        assert not loading.done() and not restored
        stdin = process._process.stdin
        assert stdin is not None
        stdin.write(b"\n")
        assert (await loading).max_model_len == 2
        assert restored == [process._process.pid]
        stdin.close()
        await process.stop(0)

    asyncio.run(run())


def test_a_process_that_has_ended_needs_no_priority(process: subprocess.Popen[bytes]) -> None:
    lowered = LoweredPriority(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    asyncio.run(lowered.restore())
    asyncio.run(LoweredPriority(process.pid).restore())
