"""Ctrl-C while an engine runs on the main thread."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C only sets the event, for whoever drives the engine to look at between two steps.

    An exception in the middle of a step would leave the engine's books half written.
    """
    interrupted = threading.Event()

    def handle(_: int, __: FrameType | None) -> None:
        interrupted.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
