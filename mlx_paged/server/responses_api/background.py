"""Responses in the background, which are generated with or without a reader."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic_core import to_json

from mlx_paged.server.errors import ApiError, unavailable
from mlx_paged.server.metrics import Metrics

if TYPE_CHECKING:  # It imports the context, which imports this module.
    from mlx_paged.server.responses_api.adapter import ResponseAdapter

access_logger = logging.getLogger("mlx_paged.access")

# Events that are dropped together from the beginning of a log.
_DROPPED = 64


class BackgroundRun:
    """One response in the background, and the log of its events.

    The log has events [first, first + len(events)); earlier ones have been dropped.

    Args:
        adapter: Its generation is submitted.
        events: Events of its stream.
        on_event: Called with the bytes of each new event.
        on_end: Called once it has ended.

    Attributes:
        id: Id of the response.
        adapter: Has the response so far; None once it has ended.
        has_ended: True if there will be no more events.
        num_readers: Number of streams that follow it.
        num_bytes: Size of the events in the log.
    """

    def __init__(
        self,
        adapter: ResponseAdapter,
        events: AsyncIterator[bytes],
        on_event: Callable[[BackgroundRun, int], None],
        on_end: Callable[[BackgroundRun], None],
    ) -> None:
        self.id = adapter.id
        self.adapter: ResponseAdapter | None = adapter
        self.has_ended = False
        self.num_readers = 0
        self.num_bytes = 0
        self._on_event = on_event
        self._on_end = on_end
        self._first = 0
        self._events: list[bytes] = []
        self._waiting: set[asyncio.Future[None]] = set()
        self._has_begun = False
        self._failure: ApiError | None = None  # why it was ended before its time
        self._is_stopped = False
        self._task = asyncio.create_task(self._run(adapter, events))

    async def stop(self, failure: ApiError | None = None) -> None:
        """Ends it, and waits until it has.

        Args:
            failure: Why it fails; None: the client has cancelled it.
        """
        self.end(failure)
        await asyncio.wait({self._task})

    def end(self, failure: ApiError | None) -> None:
        """`stop` without waiting."""
        if self.has_ended or self._is_stopped:
            return
        self._failure, self._is_stopped = failure, True
        if self._has_begun:  # A task that is cancelled before would never run.
            self._task.cancel()

    async def _run(self, adapter: ResponseAdapter, events: AsyncIterator[bytes]) -> None:
        self._has_begun = True
        try:
            if not self._is_stopped:
                async for event in events:
                    self._add(event)
        except asyncio.CancelledError:
            if not self._is_stopped:  # the event loop ends
                self._failure, self._is_stopped = _shutting_down(), True
        if self._is_stopped:
            adapter.generation.close()
            for event in adapter.stopped(self._failure):
                self._add(event)
        self.has_ended = True
        self._wake()
        self._on_end(self)
        self.adapter = None  # It holds the prompt and all tokens.

    def _add(self, event: bytes) -> None:
        self._events.append(event)
        self.num_bytes += len(event)
        self._on_event(self, len(event))
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for each in waiting:
            if not each.done():
                each.set_result(None)

    def drop(self, count: int = _DROPPED) -> int:
        """Drops its oldest events; returns their bytes."""
        dropped, self._events = self._events[:count], self._events[count:]
        self._first += len(dropped)
        size = sum(map(len, dropped))
        self.num_bytes -= size
        return size

    def drop_all(self) -> int:
        """Drops all its events; returns their bytes."""
        return self.drop(len(self._events))

    def check_has(self, sequence_number: int) -> None:
        """Refuses a stream from a sequence number whose event has been dropped.

        Raises:
            ApiError: 400.
        """
        if sequence_number < self._first:
            raise ApiError(
                400,
                f"the events before {self._first} of {self.id} are not kept any more "
                "(--max-stored-bytes): give a later starting_after, or retrieve it without stream",
                param="starting_after",
                code="events_not_kept",
            )

    async def follow(self, sequence_number: int) -> AsyncGenerator[bytes]:
        """Yields its events from a sequence number on, including future ones."""
        self.num_readers += 1
        try:
            while True:
                while sequence_number < self._first + len(self._events):
                    self.check_has(sequence_number)
                    event = self._events[sequence_number - self._first]
                    sequence_number += 1
                    yield event
                if self.has_ended:
                    return
                changed = asyncio.get_running_loop().create_future()
                self._waiting.add(changed)
                await changed
        except ApiError as error:  # The reader was too slow.
            yield _error(error, sequence_number)
        finally:
            self.num_readers -= 1


class BackgroundRuns:
    """The responses in the background by id. Only one thread uses it.

    Args:
        metrics: Unfinished responses count as the server's load.
        log: Write a line for each response that has ended.
        max_running: Maximum unfinished responses; 0 allows none.
        max_bytes: Maximum bytes of all logs. Logs of finished responses are dropped first, then the
            oldest events of the largest log.

    Attributes:
        on_count: Called with the number of unfinished responses when it has changed.
    """

    def __init__(
        self, metrics: Metrics, max_running: int, max_bytes: int, *, log: bool = True
    ) -> None:
        self.max_running = max_running
        self.num_bytes = 0
        self.on_count: Callable[[int], None] = lambda count: None
        self._metrics = metrics
        self._log = log
        self._max_bytes = max_bytes
        self._running: dict[str, BackgroundRun] = {}
        self._ended: OrderedDict[str, BackgroundRun] = OrderedDict()
        self._is_draining = False

    def check_room(self) -> None:
        """Refuses another one if too many run.

        Raises:
            ApiError: 429.
        """
        if len(self._running) >= self.max_running:
            raise ApiError(
                429,
                f"{len(self._running)} responses run in the background, and at most "
                f"{self.max_running} may (--max-stored-responses)",
                param="background",
                code="too_many_in_background",
                headers={"Retry-After": "1"},
            )

    def start(self, adapter: ResponseAdapter, events: AsyncIterator[bytes]) -> BackgroundRun:
        """Runs a response whose generation is submitted.

        Args:
            events: Events of its stream.
        """
        generation = adapter.generation
        # The line of the request that started it is written long before its end.
        fields = {**generation.trace.fields, "response": adapter.id}
        generation.trace = replace(generation.trace, fields=fields, held_bytes=0)
        run = BackgroundRun(adapter, events, self._on_event, self._on_end)
        self._running[run.id] = run
        self._metrics.server_load += 1
        self.on_count(len(self._running))
        if self._is_draining:
            run.end(_shutting_down())
        return run

    def running(self, response_id: str) -> BackgroundRun | None:
        """Returns an unfinished response, or None."""
        return self._running.get(response_id)

    def find(self, response_id: str) -> BackgroundRun | None:
        """Returns a response that runs or still has its events, or None."""
        if response_id in self._ended:
            self._ended.move_to_end(response_id)
        return self._running.get(response_id) or self._ended.get(response_id)

    async def forget(self, response_id: str) -> bool:
        """Ends a response, and drops its events; returns True if it was running."""
        run = self._running.get(response_id)
        if run is not None:
            await run.stop()
        if (ended := self._ended.pop(response_id, None)) is not None:
            self.num_bytes -= ended.drop_all()
        return run is not None

    def drain(self) -> None:
        """Ends those without a reader, because no other client can ask for them before the end."""
        self._is_draining = True
        for run in list(self._running.values()):
            if not run.num_readers:
                run.end(_shutting_down())

    async def close(self) -> None:
        """Ends all."""
        self._is_draining = True
        error = _shutting_down()
        await asyncio.gather(*(run.stop(error) for run in list(self._running.values())))

    def _on_event(self, run: BackgroundRun, size: int) -> None:
        self.num_bytes += size
        while self.num_bytes > self._max_bytes and self._ended:
            _, oldest = self._ended.popitem(last=False)
            self.num_bytes -= oldest.drop_all()
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= max(self._running.values(), key=lambda r: r.num_bytes).drop()

    def _on_end(self, run: BackgroundRun) -> None:
        del self._running[run.id]
        self._ended[run.id] = run
        self._metrics.server_load -= 1
        self.on_count(len(self._running))
        if self._log and run.adapter is not None:
            trace = run.adapter.generation.trace
            trace.fields["response_status"] = run.adapter.status
            fields = {name: v for name, v in trace.log_fields().items() if name != "status"}
            access_logger.info("a response in the background has ended", extra=fields)


def _shutting_down() -> ApiError:
    return unavailable("the server is shutting down", "shutting_down")


def _error(error: ApiError, sequence_number: int) -> bytes:
    """Returns an error of one reader's stream."""
    event = {
        "type": "error", "code": error.code, "message": error.message, "param": error.param,
        "sequence_number": sequence_number,
    }  # fmt: skip
    return b"event: error\ndata: " + to_json(event) + b"\n\n"
