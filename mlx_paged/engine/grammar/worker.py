"""MaskWorker: makes the masks of a step while its forward is built and encoded."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_Jobs = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class MaskWorker(Generic[T]):
    """A thread that runs one job after another, and ends with this object.

    Waiting for newest tokens, filling masks and encoding the forward pass all release the
    interpreter's lock. The work that holds the lock is short.
    """

    def __init__(self) -> None:
        self._jobs: _Jobs | None = None

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Begins `work`, after all that was begun before."""
        if self._jobs is None:
            jobs: _Jobs = SimpleQueue()
            # A daemon, because the engine's guard waits for the step at the interpreter's exit.
            threading.Thread(target=_run, args=(jobs,), name="mlx-paged-masks", daemon=True).start()
            weakref.finalize(self, jobs.put, None)
            self._jobs = jobs
        future: Future[T] = Future()
        self._jobs.put((future, work))
        return future

    def wait(self) -> None:
        """Waits until all jobs are done, including that of an interrupted call."""
        if self._jobs is not None:
            self.start(lambda: None).result()  # type: ignore[arg-type, return-value]


def _run(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        future, work = job
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        del job, future, work  # so that it keeps nothing alive while it waits
        result = None
