"""EngineGuard: lets one thread into an engine at a time; refuses forked children and late calls."""

from __future__ import annotations

import atexit
import os
import threading
from weakref import WeakSet

import mlx.core as mx

from mlx_paged import runtime
from mlx_paged.errors import ForkedProcessError

# Seconds that interpreter exit waits for another thread's running call.
_EXIT_TIMEOUT = 60.0

_user: int | None = None  # the process that made the first engine or the drop-in's store


class _Thread(threading.local):
    is_protected = False  # by `protect_thread`


this_thread = _Thread()


def check_process() -> None:
    """Refuses to work in a forked child of a process that has used MLX.

    `fork` copies only the calling thread, so waiting for MLX's threads would take forever.

    Raises:
        ForkedProcessError: This is such a child.
    """
    if is_forked():
        assert _user is not None
        raise ForkedProcessError(_user)
    protect_thread()


def protect_thread() -> None:
    """Lets this thread end safely at any time, even as a daemon during interpreter exit.

    Otherwise, a thread that has used `mx.compile` or `mx.random` could abort the exiting process;
    see csrc/thread_end.h.
    """
    if not this_thread.is_protected:
        _ = mx.random.state
        runtime.outlast_interpreter()
        this_thread.is_protected = True


def is_forked() -> bool:
    """True in a forked child of a process that has used MLX."""
    return _user is not None and _user != os.getpid()


def claim_process() -> None:
    """Records that this process uses MLX.

    Raises:
        ForkedProcessError: This is a forked child of a process that has used it.
    """
    global _user
    check_process()
    _user = os.getpid()


class EngineGuard:
    """Lets one thread at a time into an engine::

        if guard.is_closed or os.getpid() != guard.pid:
            guard.refuse()
        with guard.lock, guard.busy:
            ...

    Callers use the interpreter's locks directly rather than a context manager in Python, because
    an exception such as Ctrl-C cannot leave those locked.

    Attributes:
        lock: Reentrant; held by the thread whose call runs.
        busy: Held while a call changes the engine.
        pid: The process that made the engine.
        is_closed: True if the interpreter is about to exit.
    """

    def __init__(self) -> None:
        claim_process()
        self.lock = threading.RLock()
        self.busy = threading.Lock()
        self.pid = os.getpid()
        self.is_closed = False
        _guards.add(self)

    def refuse(self) -> None:
        """Refuses a call.

        During interpreter exit, only the exiting thread returns from this: any other thread inside
        MLX would abort the process.

        Raises:
            ForkedProcessError: This is a child of the process that made the engine.
        """
        if os.getpid() != self.pid:
            raise ForkedProcessError(self.pid)
        if self.is_closed and threading.current_thread() is not threading.main_thread():
            threading.Event().wait()

    def close(self, timeout: float) -> None:
        """Waits for the running call, then keeps every other thread out."""
        if os.getpid() == self.pid:
            self.is_closed = True
            self.lock.acquire(timeout=timeout)


_guards: WeakSet[EngineGuard] = WeakSet()


@atexit.register
def _close_all() -> None:
    for guard in list(_guards):
        guard.close(_EXIT_TIMEOUT)
