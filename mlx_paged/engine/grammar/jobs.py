"""Jobs: runs work on threads of its own, each within a limit of CPU time.

The time is the thread's own, so that a busy machine makes an answer late but changes none.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, Generic, TypeVar

from mlx_paged.errors import GrammarsBusyError

T = TypeVar("T")

# Seconds between two looks at work that has almost used up its time, or has not begun.
_LOOK = 0.05


class Job(Generic[T]):
    """Work that is begun, or waits for its turn.

    Attributes:
        future: What it returns or raises.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._work: Callable[[], T] | None = work
        self._clock: Callable[[], float] | None = None
        self._began = 0.0

    @property
    def seconds(self) -> float:
        """CPU seconds that it has used; 0 while it waits, or once it is done."""
        clock = self._clock
        if clock is None:
            return 0.0
        try:
            return clock() - self._began
        except OSError:  # (its thread has just ended)
            return 0.0

    def run(self) -> None:
        """Does the work, on the thread that calls."""
        clock, work = _clock_of_this_thread(), self._work
        assert work is not None
        self._began, self._clock, self._work = clock(), clock, None
        try:
            result = work()
        except BaseException as error:
            self._clock = None
            self.future.set_exception(error)
        else:
            self._clock = None
            self.future.set_result(result)


class Jobs:
    """Threads that do one job after another; the interpreter's exit does not wait for them.

    (A job cannot be interrupted, and may take long: an executor's threads are joined.)

    Args:
        most: jobs at the same time; others wait, without a limit.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._waiting: deque[Job[Any]] = deque()
        self._running: set[Job[Any]] = set()

    def start(self, work: Callable[[], T]) -> Job[T]:
        """Begins work as soon as it has its turn."""
        job = Job(work)
        with self._lock:
            if len(self._running) == self._most:
                self._waiting.append(job)
                return job
            self._running.add(job)
        threading.Thread(
            target=self._run, args=(job,), name="mlx-paged-grammar", daemon=True
        ).start()
        return job

    def _run(self, job: Job[Any] | None) -> None:
        while job is not None:
            job.run()
            with self._lock:
                self._running.discard(job)
                job = self._waiting.popleft() if self._waiting else None
                if job is not None:
                    self._running.add(job)

    def wait(self, job: Job[T], limit: float, too_slow: Callable[[], Exception]) -> T:
        """Waits for a job and returns its result.

        Args:
            limit: most CPU seconds.
            too_slow: the error of a job that takes longer.

        Raises:
            GrammarsBusyError: it has not begun, and whatever runs is beyond the limit.
        """
        while True:
            pause = self._pause(job, limit, too_slow)
            try:
                return job.future.result(pause)
            except FutureTimeoutError:
                if job.future.done():  # (then it is the work's own)
                    raise

    async def wait_async(self, job: Job[T], limit: float, too_slow: Callable[[], Exception]) -> T:
        """The same; no thread waits."""
        waiting = asyncio.wrap_future(job.future)
        # (Where nobody waits any more, its failure is nobody's.)
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        while not waiting.done():
            pause = self._pause(job, limit, too_slow)
            await asyncio.wait([waiting], timeout=pause)
        return waiting.result()

    def _pause(self, job: Job[Any], limit: float, too_slow: Callable[[], Exception]) -> float:
        """Seconds after which to look at a job again."""
        if job.future.done():
            return _LOOK
        left = limit - job.seconds
        if left <= 0:
            raise too_slow()
        with self._lock:
            waits = job in self._waiting
            running = list(self._running)
        if waits:
            if len(running) == self._most and all(each.seconds > limit for each in running):
                raise GrammarsBusyError(len(running))
            return _LOOK
        return max(left, _LOOK)  # (it cannot use more CPU time than passes)


def _clock_of_this_thread() -> Callable[[], float]:
    """CPU seconds of the calling thread, for other threads to read; real time where the system does
    not tell. It raises OSError once the thread has ended."""
    if hasattr(time, "pthread_getcpuclockid"):
        clock = time.pthread_getcpuclockid(threading.get_ident())
        return lambda: time.clock_gettime(clock)
    if sys.platform == "darwin":
        with suppress(AttributeError, OSError):
            return _mach_clock(ctypes.CDLL(None), threading.get_ident())
    return time.monotonic


def _mach_clock(library: Any, thread: int) -> Callable[[], float]:
    """macOS's: ``thread_info`` with THREAD_BASIC_INFO, which begins with the seconds and
    microseconds of user time, and those of system time."""
    port_of, info_of = library.pthread_mach_thread_np, library.thread_info
    port_of.argtypes, port_of.restype = [ctypes.c_void_p], ctypes.c_uint32
    port, flavor, size = port_of(thread), 3, 10

    def read() -> float:
        values, count = (ctypes.c_int32 * size)(), ctypes.c_uint32(size)
        status = info_of(
            ctypes.c_uint32(port), ctypes.c_uint32(flavor), values, ctypes.byref(count)
        )
        if status != 0:
            raise OSError("the thread has ended")
        return values[0] + values[2] + (values[1] + values[3]) / 1e6

    read()
    return read
