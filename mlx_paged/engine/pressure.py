"""MemoryPressure: smooths the system's memory pressure for an engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from mlx_paged.engine.pressure_sources import PressureLevel, PressureSource

logger = logging.getLogger(__name__)

#: Seconds between readings of a source.
POLL_SECONDS = 1.0
#: Seconds at a lower level before the level in effect drops.
QUIET_SECONDS = 10.0


@dataclass(frozen=True)
class PressureStats:
    """Memory pressure, and how much was given back because of it.

    Attributes:
        level: 0 normal, 1 warning, 2 critical.
        seconds: Time since the level last changed.
        num_bytes: Bytes given back to the system since the engine was made.
        num_blocks: Cached blocks evicted for it.
    """

    level: int = 0
    seconds: float = 0.0
    num_bytes: int = 0
    num_blocks: int = 0


class MemoryPressure:
    """The level of a source, with hysteresis.

    A higher level takes effect at once; a lower one after `QUIET_SECONDS`, one level at a time, so
    that memory does not move back and forth. A source that raises is never read again.

    Args:
        source: None means there is never pressure.
        clock: Returns seconds.

    Attributes:
        clock: See above.
        level: The level in effect.
        since: Time of its last change.
        num_bytes, num_blocks: See `PressureStats`; the engine adds to them.
    """

    def __init__(
        self, source: PressureSource | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self.clock = clock
        self.level = PressureLevel.NORMAL
        self.since = self._last_high = self._next_poll = clock()
        self.num_bytes = self.num_blocks = 0

    @property
    def is_on(self) -> bool:
        """True while there is a source."""
        return self._source is not None

    @property
    def is_due(self) -> bool:
        """True if `poll` would read the source."""
        return self._source is not None and self.clock() >= self._next_poll

    def poll(self) -> bool:
        """Reads the source unless the last reading is less than a second old; returns True if it
        did."""
        if self._source is None:
            return False
        now = self.clock()
        if now < self._next_poll:
            return False
        self._next_poll = now + POLL_SECONDS
        try:
            found = self._source.read()
        except Exception as error:
            logger.debug("memory pressure is not followed any more: %s", error)
            self._source, found = None, PressureLevel.NORMAL
            self._last_high = float("-inf")
        if found >= self.level:
            self._last_high = now
        if found > self.level:
            self.level, self.since = found, now
        elif found < self.level and now - self._last_high >= QUIET_SECONDS:
            lower = found if self._source is None else PressureLevel(self.level - 1)
            self.level, self.since, self._last_high = lower, now, now
        return True

    @property
    def stats(self) -> PressureStats:
        """The current numbers."""
        seconds = max(0.0, self.clock() - self.since)
        return PressureStats(int(self.level), seconds, self.num_bytes, self.num_blocks)
