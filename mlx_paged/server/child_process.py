"""ChildProcess: runs a program without first copying this process.

uvloop forks, which copies the page tables of this process and stalls its event loop until the
program starts: 17 ms for a process of 250 MB. Python's `subprocess` uses vfork on Linux, which
takes less than a millisecond for any size.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO

PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL


class ChildProcess:
    """A child process of an event loop, with the names of `asyncio.subprocess.Process`.

    Attributes:
        pid: Its process id.
        stdin: Pipe to its standard input; this and the others are None unless requested.
        stdout: Pipe from its standard output.
        stderr: Pipe from its standard error.
    """

    stdin: asyncio.StreamWriter | None = None
    stdout: asyncio.StreamReader | None = None
    stderr: asyncio.StreamReader | None = None

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._status: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._watch, name="child process", daemon=True).start()

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        process_group: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> ChildProcess:
        """Runs a program; takes the arguments of `subprocess.Popen`.

        Raises:
            OSError: The program cannot be run.
        """
        process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            process_group=process_group,
            pass_fds=pass_fds,
        )
        child = cls(process)
        try:
            if process.stdin is not None:
                child.stdin = await _writer(process.stdin)
            if process.stdout is not None:
                child.stdout = await reader_of(process.stdout)
            if process.stderr is not None:
                child.stderr = await reader_of(process.stderr)
        except BaseException:  # Such as a cancellation: nobody else knows the process.
            child.kill()
            raise
        return child

    @property
    def returncode(self) -> int | None:
        """Its exit status, or the negative number of the signal that ended it; None if running."""
        return self._status.result() if self._status.done() else None

    async def wait(self) -> int:
        """Waits for it to end; returns `returncode`."""
        return await asyncio.shield(self._status)

    async def communicate(self, content: bytes) -> bytes:
        """Sends its whole input; returns its whole output once it has ended."""
        assert self.stdin is not None and self.stdout is not None
        self.stdin.write(content)
        self.stdin.close()  # Sends the rest first.
        printed = await self.stdout.read()
        await self.wait()
        return printed

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal. A process that has ended gets none."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kills it without waiting."""
        self.send_signal(signal.SIGKILL)

    def _watch(self) -> None:
        """Waits on a thread, because only on Linux can an event loop do that."""
        status = self._process.wait()
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._end, status)

    def _end(self, status: int) -> None:
        self._status.set_result(status)
        if self.stdin is not None:
            self.stdin.close()


async def reader_of(pipe: IO[bytes], max_line: int = 1 << 16) -> asyncio.StreamReader:
    """Returns a reader of a pipe.

    Args:
        pipe: The reader owns it.
        max_line: Maximum bytes of a line.
    """
    reader = asyncio.StreamReader(max_line)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


async def _writer(pipe: IO[bytes]) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader())  # It reads nothing.
    transport, _ = await loop.connect_write_pipe(lambda: protocol, pipe)
    return asyncio.StreamWriter(transport, protocol, None, loop)
