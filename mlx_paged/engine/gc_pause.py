"""Python's garbage collection waits while a step is built, and comes between two steps.

A step makes thousands of objects that the next one frees. The collector counts them, and would walk
them, and now and then everything that the process has, while the device waits for the step: at 32
sequences that cost 1.7 of 6.4 ms. Between two steps most of them are gone, nothing asks for a
collection, and one that comes all the same takes no time of the device, which runs the next step.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from types import TracebackType

# Reentrant: a stream that is garbage-collected while this thread holds it lets go, too.
_lock = threading.RLock()
_threads: set[int] = set()  # that are in a step
_was_enabled = True  # before the first of them


def _hold_back() -> None:
    global _was_enabled
    this = threading.get_ident()
    with _lock:
        if not _threads:
            _was_enabled = gc.isenabled()
        # (Before: what comes in between, as an exception or a collection, lets go. It may have.)
        _threads.add(this)
        gc.disable()
        _threads.add(this)


def resume_gc() -> None:
    """Ends what this thread holds back, if anything: also after a step that was broken off."""
    this = threading.get_ident()
    with _lock:
        if this in _threads:
            if _was_enabled and len(_threads) == 1:
                gc.enable()
            _threads.discard(this)  # (last: where that was broken off, the next call does it)


class _Pause:
    def __enter__(self) -> None:
        _hold_back()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        resume_gc()


_pause = _Pause()


def gc_paused() -> contextlib.AbstractContextManager[None]:
    """Pauses collections, around a step.

    Of several threads the last one to leave lets collections come again. A process that switched
    them off keeps them off.
    """
    return _pause


def _forked() -> None:
    """In a child, no thread is in a step."""
    global _lock
    _lock = threading.RLock()
    if _threads and _was_enabled:
        gc.enable()
    _threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
