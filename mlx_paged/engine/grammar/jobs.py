"""Jobs: runs work on daemon threads, with a limit on the CPU time of each job.

The limit is on the thread's own time, so a busy machine delays answers without changing them.
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

# Interval for polling a job that has not started, or has almost used up its time.
_POLL_SECONDS = 0.05


class Job(Generic[T]):
    """Work that runs, or waits for its turn.

    Attributes:
        future: Its result or exception.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._work: Callable[[], T] | None = work
        self._clock: Callable[[], float] | None = None
        self._start = 0.0

    @property
    def seconds(self) -> float:
        """CPU seconds used so far; 0 before the job starts and after it ends."""
        clock = self._clock
        if clock is None:
            return 0.0
        try:
            return clock() - self._start
        except OSError:  # Its thread has just ended.
            return 0.0

    def run(self) -> None:
        """Runs the work on the calling thread."""
        clock, work = _clock_of_this_thread(), self._work
        assert work is not None
        self._start, self._clock, self._work = clock(), clock, None
        try:
            result = work()
        except BaseException as error:
            self._clock = None
            self.future.set_exception(error)
        else:
            self._clock = None
            self.future.set_result(result)


class Jobs:
    """Runs jobs on a bounded number of daemon threads.

    A job cannot be interrupted, so the interpreter's exit must not wait for one. It would join the
    threads of a `ThreadPoolExecutor`.

    Args:
        max_jobs: Maximum running jobs; the number of waiting jobs is not limited.
    """

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._lock = threading.Lock()
        self._waiting: deque[Job[Any]] = deque()
        self._running: set[Job[Any]] = set()

    def start(self, work: Callable[[], T]) -> Job[T]:
        """Queues work, and starts it as soon as a thread is free.

        Raises:
            RuntimeError: The system has no more threads.
        """
        job = Job(work)
        with self._lock:
            if len(self._running) == self._max_jobs:
                self._waiting.append(job)
                return job
            self._running.add(job)
        thread = threading.Thread(
            target=self._run, args=(job,), name="mlx-paged-grammar", daemon=True
        )
        try:
            thread.start()
        except Exception as error:
            self._drop_unstarted(job, error)
            raise
        return job

    def _drop_unstarted(self, job: Job[Any], error: Exception) -> None:
        """Drops a job that has no thread, and fails those that wait if no other thread is left."""
        stranded: list[Job[Any]] = []
        with self._lock:
            self._running.discard(job)
            if not self._running:
                stranded.extend(self._waiting)
                self._waiting.clear()
        for each in stranded:
            each.future.set_exception(error)

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
            limit: Maximum CPU seconds.
            too_slow: The error for a job that takes longer.

        Raises:
            GrammarsBusyError: The job has not started, and all running ones exceed the limit.
            Exception: `too_slow`, or an exception of the work.
        """
        while True:
            pause = self._pause(job, limit, too_slow)
            try:
                return job.future.result(pause)
            except FutureTimeoutError:
                # It may have ended since the pause, or the work itself raised this error.
                if job.future.done():
                    return job.future.result()

    async def wait_async(self, job: Job[T], limit: float, too_slow: Callable[[], Exception]) -> T:
        """Like `wait`, without blocking a thread."""
        waiting = asyncio.wrap_future(job.future)
        # Retrieve its exception even if no caller waits any more: asyncio would log it.
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        while not waiting.done():
            pause = self._pause(job, limit, too_slow)
            await asyncio.wait([waiting], timeout=pause)
        return waiting.result()

    def _pause(self, job: Job[Any], limit: float, too_slow: Callable[[], Exception]) -> float:
        """Returns the seconds to wait before looking at a job again."""
        if job.future.done():
            return _POLL_SECONDS
        left = limit - job.seconds
        if left <= 0:
            raise too_slow()
        with self._lock:
            waits = job in self._waiting
            running = list(self._running)
        if waits:
            if len(running) == self._max_jobs and all(each.seconds > limit for each in running):
                raise GrammarsBusyError(len(running))
            return _POLL_SECONDS
        return max(left, _POLL_SECONDS)  # CPU time does not pass faster than real time.


def _clock_of_this_thread() -> Callable[[], float]:
    """Returns a clock of the calling thread's CPU seconds, for other threads to read; real time if
    the system has none. The clock raises OSError once the thread has ended."""
    if hasattr(time, "pthread_getcpuclockid"):
        clock = time.pthread_getcpuclockid(threading.get_ident())
        return lambda: time.clock_gettime(clock)
    if sys.platform == "darwin":
        with suppress(AttributeError, OSError):
            return _mach_clock(ctypes.CDLL(None), threading.get_ident())
    return time.monotonic


def _mach_clock(library: Any, thread: int) -> Callable[[], float]:
    """Returns a clock for macOS.

    It calls ``thread_info`` with THREAD_BASIC_INFO, whose first four fields are the seconds and
    microseconds of user time, then those of system time.
    """
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
