"""Streams a request's tokens from the engine's thread to its reader, at the reader's pace.

The engine never waits for a reader. A slow reader gets all pending updates in one piece, so nothing
is lost, and memory holds no more for it than the answer itself.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mlx_paged.core import FinishReason
from mlx_paged.engine.outputs import PositionReport, RequestOutput, SequenceUpdate
from mlx_paged.errors import StepError

#: Maximum updates per delta, because a reader handles one without yielding to its loop.
MAX_UPDATES = 512

# Seconds after which a reader with more to read lets other tasks of its loop run.
_TURN = 0.002


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """New output of one sequence since the last delta: one token, or more if the reader was slow.

    Attributes:
        updates: One per step, oldest first; 1 to `MAX_UPDATES`.
    """

    updates: tuple[SequenceUpdate, ...]

    @property
    def request_id(self) -> str:
        """The request."""
        return self.updates[0].request_id

    @property
    def index(self) -> int:
        """Index among the request's `n` answers."""
        return self.updates[0].index

    @property
    def token_ids(self) -> list[int]:
        """The new tokens."""
        return [token for update in self.updates for token in update.token_ids]

    @property
    def logprobs(self) -> list[PositionReport] | None:
        """Log-probabilities of `token_ids`, as in `CompletionOutput`; None if not requested."""
        found = [report for update in self.updates for report in update.reports or ()]
        return found or None

    @property
    def text(self) -> str:
        """The text that became certain."""
        return "".join(update.text for update in self.updates)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ended; None while it continues."""
        return self.updates[-1].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended it."""
        return self.updates[-1].stop_reason

    @property
    def error(self) -> StepError | None:
        """The error, if `finish_reason` is "error"."""
        return self.updates[-1].error


class Channel:
    """A queue with one writer, the engine's thread, and one reader, a task of `loop`.

    Args:
        loop: The reader's event loop.
        num_sequences: The channel ends when this many have finished.
        sleepers: The channel adds itself here when its reader must be woken. After a step, the
            engine's thread wakes all of them with one call into each loop (`wake_readers`).
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, num_sequences: int, sleepers: list[Channel]
    ) -> None:
        self.loop = loop
        self._sleepers = sleepers
        self._lock = threading.Lock()
        self._pending: dict[int, list[SequenceUpdate]] = {}  # by index of the sequence
        self._unfinished = set(range(num_sequences))
        self._error: Exception | None = None
        self._reader_sleeps = False
        self._alarm: asyncio.Future[None] | None = None  # of a sleeping reader; only on its loop
        self._turn_began = 0.0

    # The engine's side.

    def put(self, update: SequenceUpdate) -> None:
        """Adds an update."""
        with self._lock:
            if update.index in self._unfinished:  # See `UpdateSink.put`.
                self._pending.setdefault(update.index, []).append(update)
                if update.finish_reason is not None:
                    self._unfinished.remove(update.index)
            self._note_sleeper()

    def fail(self, error: Exception) -> None:
        """Ends the channel with an error, after its pending updates."""
        with self._lock:
            self._error = error
            self._note_sleeper()

    def _note_sleeper(self) -> None:
        if self._reader_sleeps:
            self._sleepers.append(self)  # First, because waking a reader twice does no harm.
            self._reader_sleeps = False

    # The reader's side.

    def wake(self) -> None:
        """Wakes the reader."""
        if self._alarm is not None and not self._alarm.done():
            self._alarm.set_result(None)

    async def get(self) -> SequenceDelta | None:
        """Waits for the next delta; None when all sequences have ended.

        Raises:
            EngineDeadError: The engine stopped first.
        """
        # A reader that is behind on hundreds of sequences never waits; let other tasks run.
        if self._pending and time.monotonic() - self._turn_began > _TURN:
            await asyncio.sleep(0)
            self._turn_began = time.monotonic()
        while True:
            with self._lock:
                if self._pending:
                    index = next(iter(self._pending))
                    updates = self._pending.pop(index)
                    if len(updates) > MAX_UPDATES:
                        self._pending[index] = updates[MAX_UPDATES:]  # after the others'
                        del updates[MAX_UPDATES:]
                    return SequenceDelta(tuple(updates))
                if not self._unfinished:
                    return None
                if self._error is not None:
                    raise self._error
                self._reader_sleeps = True
                self._alarm = self.loop.create_future()
            await self._alarm
            self._turn_began = time.monotonic()


def wake_readers(sleepers: list[Channel]) -> list[asyncio.AbstractEventLoop]:
    """Wakes readers with one call into each loop; returns the loops that are closed."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Channel]] = {}
    for channel in sleepers:
        by_loop.setdefault(channel.loop, []).append(channel)
    closed = [loop for loop, channels in by_loop.items() if not _wake(loop, channels)]
    sleepers.clear()  # Last, because waking a reader twice does no harm.
    return closed


def _wake(loop: asyncio.AbstractEventLoop, channels: list[Channel]) -> bool:
    """Wakes readers on their loop; returns False if the loop is closed."""

    def wake() -> None:
        for channel in channels:
            channel.wake()

    try:
        loop.call_soon_threadsafe(wake)
    except RuntimeError:
        return False
    return True


class RequestStream:
    """The deltas of one request, for ``async for`` on the event loop that submitted it.

    Abandoning the stream ends the request: by canceling the task that reads, by `aclose` (or
    ``async with``), or by dropping the last reference.

    Attributes:
        request_id: The request.
        output: The request and its answers so far. The engine's thread fills it, so read it once
            the stream has ended.
    """

    def __init__(self, request_id: str, channel: Channel, abort: Callable[[], None]) -> None:
        self.request_id = request_id
        self.output: RequestOutput
        self._channel = channel
        self._abort = abort
        self._open = True
        self._is_read = False

    @property
    def relaxed(self) -> tuple[str, ...]:
        """`RequestOutput.relaxed`; available from the start."""
        return self.output.relaxed

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> SequenceDelta:
        """Returns the next delta.

        Raises:
            EngineDeadError: The engine stopped before the request finished.
            RuntimeError: Another task is reading, or this is not the stream's event loop.
        """
        if not self._open:
            raise StopAsyncIteration
        if self._is_read:
            raise RuntimeError(
                f"the stream of request {self.request_id!r} is being read by another task"
            )
        if self._channel.loop is not asyncio.get_running_loop():
            raise RuntimeError(
                f"the stream of request {self.request_id!r} belongs to another event loop"
            )
        self._is_read = True
        try:
            delta = await self._channel.get()
        except BaseException:
            self.close()
            raise
        finally:
            self._is_read = False
        if delta is None:
            self._open = False
            self.output.decode_text()
            raise StopAsyncIteration
        return delta

    async def result(self) -> RequestOutput:
        """Reads to the end; returns the whole answer."""
        async for _ in self:
            pass
        return self.output

    def close(self) -> None:
        """Ends the request if it is unfinished. Never blocks."""
        if self._open:
            self._open = False
            self._abort()

    async def aclose(self) -> None:
        """Like `close`, under the name that asyncio's tools expect."""
        self.close()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        try:  # noqa: SIM105 (globals such as contextlib may be None at exit)
            self.close()
        except Exception:
            pass
