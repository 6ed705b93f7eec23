"""Locking: lets one thread into a store at a time, and defers Ctrl-C until its operation ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from mlx_paged.engine.guard import check_process
from mlx_paged.interrupts import InterruptsDeferred

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
