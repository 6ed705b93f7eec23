"""QuietGC: runs full garbage collections while the server is idle.

A full collection visits every object of hundreds of streams and stalls them all. Requests leave
nothing to collect, so it can wait for a quiet moment. Younger objects are collected as usual.

Modules and tokenizer live until the end, so they are not visited again: in a router, a collection
of them takes 75 ms.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

# Collections of the middle generation before a full one under load, instead of Python's 10.
_PATIENCE = 200


class QuietGC:
    """Collects when the server is idle, if Python would have collected by now.

    Args:
        is_quiet: Returns True if no request is unfinished.
    """

    def __init__(self, is_quiet: Callable[[], bool]) -> None:
        self._is_quiet = is_quiet
        self._was_quiet = False
        self._thresholds = gc.get_threshold()

    def __enter__(self) -> QuietGC:
        gc.collect()
        gc.freeze()
        young, middle, old = self._thresholds
        gc.set_threshold(young, middle, max(old, _PATIENCE))
        return self

    def __exit__(self, *_: object) -> None:
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    def look(self) -> None:
        """Collects on the second consecutive call that finds the server idle. Call it regularly."""
        is_quiet = self._is_quiet()
        if is_quiet and self._was_quiet and gc.get_count()[2] > self._thresholds[2]:
            gc.collect()
        self._was_quiet = is_quiet
