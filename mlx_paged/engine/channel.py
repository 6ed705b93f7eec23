"""The way of a request's tokens from the engine's thread to its reader, at the reader's pace.

The engine puts and never waits. A reader that lags finds what came meanwhile in one piece, so
nothing is lost, and what is kept for it is never more than the answer itself.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

from mlx_paged.core import FinishReason
from mlx_paged.engine.outputs import PositionReport, SequenceUpdate
from mlx_paged.errors import StepError


@dataclass(frozen=True)
class SequenceDelta:
    """What one sequence gained since its reader last looked: one token, or more where it lagged.

    Attributes:
        updates: One for each step, oldest first; never empty.
    """

    updates: tuple[SequenceUpdate, ...]

    @property
    def request_id(self) -> str:
        """The request."""
        return self.updates[0].request_id

    @property
    def index(self) -> int:
        """Which of the request's `n` answers."""
        return self.updates[0].index

    @property
    def token_ids(self) -> list[int]:
        """The tokens it gained."""
        return [update.token_id for update in self.updates if update.token_id is not None]

    @property
    def logprobs(self) -> list[PositionReport] | None:
        """Of each of `token_ids`, as in `CompletionOutput`; None where they were not asked for."""
        found = [update.logprobs for update in self.updates if update.logprobs is not None]
        return found or None

    @property
    def text(self) -> str:
        """The text that became certain."""
        return "".join(update.text for update in self.updates)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ended; None while it goes on."""
        return self.updates[-1].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended it."""
        return self.updates[-1].stop_reason

    @property
    def error(self) -> StepError | None:
        """What happened, where `finish_reason` is "error"."""
        return self.updates[-1].error


class Channel:
    """One writer, the engine's thread; one reader, a task of `loop`.

    Args:
        loop: the reader's event loop.
        num_sequences: the channel ends when so many have finished.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, num_sequences: int) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._pending: dict[int, list[SequenceUpdate]] = {}  # by index of the sequence
        self._num_unfinished = num_sequences
        self._error: Exception | None = None
        self._reader_sleeps = False
        self._alarm: asyncio.Future[None] | None = None  # of a reader that sleeps; its loop's only

    # The engine's side.

    def put(self, update: SequenceUpdate) -> bool:
        """Takes an update; returns whether the reader must be woken (`wake`, on its loop)."""
        with self._lock:
            self._pending.setdefault(update.index, []).append(update)
            self._num_unfinished -= update.finish_reason is not None
            return self._take_sleeper()

    def fail(self, error: Exception) -> bool:
        """Ends the channel with an error, after what it holds."""
        with self._lock:
            self._error = error
            return self._take_sleeper()

    def _take_sleeper(self) -> bool:
        sleeps, self._reader_sleeps = self._reader_sleeps, False
        return sleeps

    # The reader's side.

    def wake(self) -> None:
        """Lets the reader look again."""
        if self._alarm is not None and not self._alarm.done():
            self._alarm.set_result(None)

    async def get(self) -> SequenceDelta | None:
        """Waits for the next delta; None when all sequences have ended.

        Raises:
            EngineDeadError: the engine stopped before they did.
        """
        while True:
            with self._lock:
                if self._pending:
                    index = next(iter(self._pending))
                    return SequenceDelta(tuple(self._pending.pop(index)))
                if self._num_unfinished == 0:
                    return None
                if self._error is not None:
                    raise self._error
                self._reader_sleeps = True
                self._alarm = self.loop.create_future()
            await self._alarm
