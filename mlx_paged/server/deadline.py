"""Deadline: a delayed call on an event loop that can be cleared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """At most one pending call.

    Args:
        on_passed: Called when the time has passed and the deadline is no longer pending.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_passed: Callable[[], None]) -> None:
        self._loop = loop
        self._on_passed = on_passed
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_pending(self) -> bool:
        """True between `set` and the call, or `clear`."""
        return self._handle is not None

    def set(self, seconds: float) -> None:
        """Schedules the call, replacing an earlier one."""
        self.clear()
        self._handle = self._loop.call_later(seconds, self._pass)

    def clear(self) -> None:
        """Cancels the call if it is pending."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def close(self) -> None:
        """Clears it for good, and drops the callee, which usually refers back to the deadline."""
        self.clear()
        self._on_passed = _nothing

    def _pass(self) -> None:
        self._handle = None
        self._on_passed()


def _nothing() -> None:
    pass
