"""Spare: a process that has imported everything, and waits for the next model to be loaded.

Imports take most of the time of a load, seconds on a small machine, and disturb the streams of
other models. A spare does them in advance and slowly (`begin`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from mlx_paged.server.router.process import ModelProcess

logger = logging.getLogger(__name__)

#: Bytes that a spare takes; 94 MB were measured besides what it shares with other processes.
SPARE_BYTES = 128 << 20
# Minimum seconds between a spare that died and the next one.
_RETRY_DELAY = 5.0


class Spare:
    """Keeps at most one process without a model.

    Args:
        start: Starts such a process.
        is_useful: True if a model could use the process and memory allows it.
        may_start: True if now is a good moment to start one.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[ModelProcess]],
        is_useful: Callable[[], bool],
        may_start: Callable[[], bool],
    ) -> None:
        self._start = start
        self._is_useful = is_useful
        self._may_start = may_start
        self._process: ModelProcess | None = None
        self._next_start = 0.0  # time.monotonic

    @property
    def is_ready(self) -> bool:
        """True if a process has imported everything."""
        return self._process is not None and self._process.has_imported

    def take(self) -> ModelProcess | None:
        """Hands the process over; None if there is none. It may still be importing."""
        process, self._process = self._process, None
        return None if process is None or process.has_ended else process

    async def look(self) -> None:
        """Starts or ends the process if that is due. To be called regularly."""
        if self._process is not None and self._process.has_ended:
            logger.warning("the spare process has ended (%s)", await self._process.ended())
            await self.close()
            self._next_start = time.monotonic() + _RETRY_DELAY
        if not self._is_useful():
            await self.close()
        elif self._process is None and self._may_start() and time.monotonic() >= self._next_start:
            try:
                self._process = await self._start()
            except OSError as error:
                logger.warning("no spare process can be started: %s", error)
                self._next_start = time.monotonic() + _RETRY_DELAY
            if not self._is_useful():  # Such as when the server has begun to shut down.
                await self.close()

    async def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            await process.stop(0.0)
