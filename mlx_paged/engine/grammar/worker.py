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
    """A thread that does one thing after another; it ends with this object.

    The newest tokens are awaited and the masks are filled without the interpreter's lock, and so is
    the forward encoded. What has to be computed with the lock is short.
    """

    def __init__(self) -> None:
        self._jobs: _Jobs | None = None

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Begins `work`, after all that was begun before."""
        if self._jobs is None:
            jobs: _Jobs = SimpleQueue()
            # (A daemon: at the interpreter's exit the engine's guard waits for the step.)
            threading.Thread(target=_run, args=(jobs,), name="mlx-paged-masks", daemon=True).start()
            weakref.finalize(self, jobs.put, None)
            self._jobs = jobs
        future: Future[T] = Future()
        self._jobs.put((future, work))
        return future

    def wait(self) -> None:
        """Waits until nothing is left to do, what an interrupted call had begun included."""
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
        del job, future, work  # (while it waits, it keeps nothing)
        result = None
