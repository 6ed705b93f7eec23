"""Waiting for events in tests.

A limit only ends a test that hangs. It is the same for all waits, and far above what they take on a
machine with many times more work than cores; `test_waits.py` holds that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

from support.hangs import all_threads

TIMEOUT = 300.0  # seconds
_LONGEST_TURN = 10.0  # a request may wait 5 s


def until(condition: Callable[[], Any], timeout: float = TIMEOUT) -> None:
    """Waits for a condition; a connection error counts as false.

    Raises:
        AssertionError: Timeout; the message has the stacks of this process's threads.
    """
    waited, error = 0.0, None
    while True:
        start = time.monotonic()
        try:
            if condition():
                return
        except httpx.TransportError as failed:
            error = failed
        if waited >= timeout:
            # Not an `assert`, because pytest would truncate the text.
            raise AssertionError(f"it did not happen in time\n{all_threads()}") from error
        time.sleep(0.02)
        # Time in which the whole machine stood still does not count.
        waited += min(time.monotonic() - start, _LONGEST_TURN)
