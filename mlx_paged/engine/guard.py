"""EngineGuard: who may enter an engine. One thread at a time, not after a fork, not at the exit."""

from __future__ import annotations

import atexit
import os
import threading
from weakref import WeakSet

from mlx_paged.errors import ForkedProcessError

# Seconds that the interpreter's exit waits for a call that another thread has begun.
_EXIT_TIMEOUT = 60.0

_user: int | None = None  # the process that made the first engine


def check_process() -> None:
    """Refuses to work in a child of a process that has used MLX.

    `fork` copies the thread that calls it and none of MLX's: whatever waits for those waits for
    ever.

    Raises:
        ForkedProcessError: in such a child.
    """
    if _user is not None and _user != os.getpid():
        raise ForkedProcessError(_user)


class EngineGuard:
    """Lets one thread at a time into an engine::

        guard.check()
        with guard.lock:
            guard.check_reentry()
            with guard.busy:
                ...

    (Both are locks of the interpreter, and not a context manager of our own, because an exception
    that comes from outside cannot leave one of those locked.)

    Attributes:
        lock: Reentrant; held by the thread whose call runs.
        busy: Held while a call changes the engine.
    """

    def __init__(self) -> None:
        global _user
        check_process()
        _user = os.getpid()
        self.lock = threading.RLock()
        self.busy = threading.Lock()
        self._pid = os.getpid()
        self._is_closed = False
        _guards.add(self)

    def check(self) -> None:
        """To be called first.

        Does not return where the interpreter is about to exit and another thread than the one that
        exits calls: a thread that is in MLX then, or enters it, would abort the process.

        Raises:
            ForkedProcessError: in a child of the process that made the engine.
        """
        if os.getpid() != self._pid:
            raise ForkedProcessError(self._pid)
        if self._is_closed and threading.current_thread() is not threading.main_thread():
            threading.Event().wait()

    def check_reentry(self) -> None:
        """Refuses a call from within a call: a sink, a token mask or `on_launch` made it."""
        if self.busy.locked():
            raise RuntimeError("an engine was called from within its own step")

    def close(self, timeout: float) -> None:
        """Waits for the call that runs, and keeps every other thread out from now on."""
        if os.getpid() == self._pid:
            self._is_closed = True
            self.lock.acquire(timeout=timeout)


_guards: WeakSet[EngineGuard] = WeakSet()


@atexit.register
def _close_all() -> None:
    for guard in list(_guards):
        guard.close(_EXIT_TIMEOUT)
