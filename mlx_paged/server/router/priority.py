"""LoweredPriority: lets a process load a model in the processor time that others leave."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from functools import cache
from pathlib import Path

# Added niceness: the process gets about a quarter of a processor that another one wants, too. With
# less, it would take many times as long to load on a machine without idle processors.
_STEP = 5
_LAST = 19
# Linux lets all users together raise a session ten times per second.
_RETRY = 0.1


class LoweredPriority:
    """Lowers the CPU priority of a process and its children until it is restored.

    Linux divides processors between sessions (autogroups) where no control groups do, and between
    threads otherwise. Every user may raise a session again, but a thread only with a privilege.
    Without it threads keep their priority, as everything does on other systems.

    Args:
        pid: The process, which must lead a session.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._session = _session_nice(pid)
        self._threads = _thread_nice(pid) if _may_raise_threads() else None
        if self._session is not None:
            with contextlib.suppress(OSError):
                _set_session(pid, min(_LAST, self._session + _STEP))
        if self._threads is not None:
            _set_threads(pid, min(_LAST, self._threads + _STEP))

    async def restore(self) -> None:
        """Gives the process the priority that it had. One that has ended needs none."""
        if self._threads is not None:
            _set_threads(self._pid, self._threads)
        while self._session is not None:
            try:
                _set_session(self._pid, self._session)
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    await asyncio.sleep(_RETRY)
                    continue
            self._session = None


def _session_file(pid: int) -> Path:
    return Path(f"/proc/{pid}/autogroup")


def _session_nice(pid: int) -> int | None:
    """The niceness of a process's session; None if this system has none."""
    try:
        return int(_session_file(pid).read_text().split()[-1])  # "/autogroup-7 nice 0"
    except (OSError, ValueError, IndexError):
        return None


def _set_session(pid: int, nice: int) -> None:
    _session_file(pid).write_text(str(nice))


def _threads_of(session: int) -> set[int]:
    """Those of all its processes: a model on several devices has one for each rank."""
    threads: set[int] = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # It has ended.
            if name.isdigit() and os.getsid(int(name)) == session:
                threads.update(map(int, os.listdir(f"/proc/{name}/task")))
    return threads


def _thread_nice(pid: int) -> int | None:
    """The niceness of a process's first thread; None if it cannot be told."""
    try:
        return os.getpriority(os.PRIO_PROCESS, pid)
    except OSError:
        return None


def _set_threads(session: int, nice: int) -> None:
    """Sets the niceness of all threads, including those that a thread starts before its turn."""
    done: set[int] = set()
    while found := _threads_of(session) - done:
        for thread in found:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, nice)
        done |= found


@cache
def _may_raise_threads() -> bool:
    """Tries it on a thread that ends."""
    may: list[bool] = []

    def attempt() -> None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        try:
            os.setpriority(os.PRIO_PROCESS, 0, min(_LAST, nice + 1))
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        except OSError:
            return
        may.append(True)

    if not Path("/proc/self/task").exists():  # There, it would change the whole process.
        return False
    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(may)
