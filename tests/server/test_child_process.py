"""Child processes of the server: pipes, statuses, and that nothing is forked."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import pytest
from support.waiting import TIMEOUT

from mlx_paged.server.child_process import PIPE, ChildProcess

uvloop = pytest.importorskip("uvloop")

forks: list[int] = []
os.register_at_fork(before=lambda: forks.append(os.getpid()))


def run(test: Callable[[], Awaitable[None]], loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(TIMEOUT):
            await test()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(limited())


async def python(code: str, **options: object) -> ChildProcess:
    command = [sys.executable, "-c", code]
    return await ChildProcess.start(command, environment=os.environ, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_pipes_and_statuses(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def test() -> None:
        before = len(forks)
        echo = await python(
            "import sys; sys.stdout.write(sys.stdin.read().upper()); sys.exit(3)",
            stdin=PIPE, stdout=PIPE,
        )  # fmt: skip
        assert echo.returncode is None
        assert await echo.communicate(b"abc" * 100_000) == b"ABC" * 100_000
        assert echo.returncode == await echo.wait() == 3

        deaf = await python("print('here')", stdin=PIPE, stdout=PIPE)
        assert await deaf.communicate(b"x" * (1 << 20)) == b"here\n"  # More than a pipe holds.

        talker = await python(
            "import os, sys; print(os.getpgid(0), flush=True); sys.stderr.write(input())",
            stdin=PIPE, stdout=PIPE, stderr=PIPE, process_group=0,
        )  # fmt: skip
        assert talker.stdin is not None and talker.stdout is not None and talker.stderr is not None
        assert await talker.stdout.readline() == b"%d\n" % talker.pid
        talker.stdin.write(b"heard\n")
        assert await talker.stderr.read() == b"heard"
        assert await talker.wait() == 0
        talker.kill()  # too late, and no error

        endless = await python(
            "import sys; print(flush=True); sys.stdin.read()", stdin=PIPE, stdout=PIPE
        )
        assert endless.stdout is not None
        await endless.stdout.readline()
        endless.send_signal(signal.SIGTERM)
        assert await endless.wait() == endless.returncode == -signal.SIGTERM
        assert len(forks) == before, "this process was copied"

    run(test, loop)


def test_a_program_that_cannot_be_run_is_an_error() -> None:
    async def test() -> None:
        with pytest.raises(FileNotFoundError):
            await ChildProcess.start(["/nowhere/program"], environment={})

    run(test, uvloop.new_event_loop)
