"""QuietGC: full garbage collections while the server has nothing to do.

A full collection visits every object that a load of hundreds of streams has made, and stops them
all meanwhile. Requests leave nothing to collect, so it can wait for a pause between loads. Younger
objects are collected as ever.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

# How many collections of the middle generation come before a full one under load, instead of
# Python's 10.
_PATIENCE = 200


class QuietGC:
    """Collects when the server is quiet, if Python would have done so.

    Args:
        is_quiet: Returns True if no request is unfinished.
    """

    def __init__(self, is_quiet: Callable[[], bool]) -> None:
        self._is_quiet = is_quiet
        self._was_quiet = False
        self._thresholds = gc.get_threshold()

    def __enter__(self) -> QuietGC:
        young, middle, old = self._thresholds
        gc.set_threshold(young, middle, max(old, _PATIENCE))
        return self

    def __exit__(self, *_: object) -> None:
        gc.set_threshold(*self._thresholds)

    def look(self) -> None:
        """Call it at intervals: collects at the second one in a row that finds the server quiet."""
        is_quiet = self._is_quiet()
        if is_quiet and self._was_quiet and gc.get_count()[2] > self._thresholds[2]:
            gc.collect()
        self._was_quiet = is_quiet
