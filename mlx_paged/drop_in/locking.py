"""Locking: lets one thread into a store at a time, and defers Ctrl-C until its operation ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from mlx_paged.engine.guard import check_process

P = ParamSpec("P")
R = TypeVar("R")


class _HasStore(Protocol):
    @property
    def store(self) -> Any: ...


S = TypeVar("S", bound=_HasStore)


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorates a method of a store, or of an object with a `store`, to hold the store's lock.

    The lock is reentrant. In a forked child of a process that has used a store, the method raises
    `ForkedProcessError`. After a method raised any exception, the next one to take the lock first
    repairs the store with `PagedStore.recover`.
    """

    @wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        store = self.store
        lock = store.lock
        check_process()  # before the lock, whose owner may not exist in a forked child
        if lock._is_owned():  # private, but `threading.Condition` uses it too
            return method(self, *args, **kwargs)
        # `with` takes the lock last, so an interrupt can never leave it held.
        with InterruptsDeferred(), lock:
            if store.is_interrupted:
                store.recover()
            store.is_interrupted = True
            result = method(self, *args, **kwargs)
            store.leave()
            store.is_interrupted = False
            return result

    return run


class InterruptsDeferred:
    """Context manager that defers Ctrl-C. Only the main thread receives it."""

    __slots__ = ("_came", "_handler")

    def __init__(self) -> None:
        self._handler: Any = None
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler) and getattr(handler, "__func__", None) is not _NOTE:
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
            if self._came is not None:
                handler(*self._came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame


_NOTE = InterruptsDeferred._note
