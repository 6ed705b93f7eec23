"""Background responses, which are generated whether or not a client reads them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic_core import to_json

from mlx_paged.server.errors import ApiError, failed, unavailable
from mlx_paged.server.metrics import Metrics

if TYPE_CHECKING:  # It imports the context, which imports this module.
    from mlx_paged.server.responses_api.adapter import ResponseAdapter

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("mlx_paged.access")

# Oldest events of a log that are dropped at once.
_DROPPED = 64


class BackgroundRun:
    """Generates one background response, and keeps a log of its events.

    The log holds events [first, first + len(events)); earlier ones have been dropped.

    Args:
        adapter: Adapter of the response; its generation is submitted.
        events: The events of its stream.
        on_event: Called with the size of each new event in bytes.
        on_end: Called once the response has ended.

    Attributes:
        id: Id of the response.
        adapter: Adapter with the response so far; None once it has ended.
        has_ended: True if there will be no more events.
        num_readers: Number of streams that follow the log.
        num_bytes: Bytes of the events in the log.
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
        self._failure: ApiError | None = None  # why the response was stopped; None: cancelled
        self._is_stopped = False
        self._task = asyncio.create_task(self._run(adapter, events))

    async def stop(self, failure: ApiError | None = None) -> None:
        """Stops the response, and waits until it has ended.

        Args:
            failure: Why the response fails; None: the client has cancelled it.
        """
        self.end(failure)
        await asyncio.wait({self._task})

    def end(self, failure: ApiError | None) -> None:
        """Stops the response without waiting."""
        if self.has_ended or self._is_stopped:
            return
        self._failure, self._is_stopped = failure, True
        if self._has_begun:  # A task that is cancelled earlier would not run at all.
            self._task.cancel()

    async def _run(self, adapter: ResponseAdapter, events: AsyncIterator[bytes]) -> None:
        try:
            await self._log_events(adapter, events)
        except Exception:  # A fault of the adapter; `events_of` reports those of the generation.
            request_id = adapter.generation.trace.request_id
            logger.exception("a background response failed", extra={"request_id": request_id})
            adapter.generation.close()
            with contextlib.suppress(Exception):
                self._add(adapter.failed(failed(request_id)))
        finally:
            self.has_ended = True
            self._wake()
            self._on_end(self)
            self.adapter = None  # frees the prompt and all tokens

    async def _log_events(self, adapter: ResponseAdapter, events: AsyncIterator[bytes]) -> None:
        """Logs the events of the stream, or of its end if the response is stopped."""
        self._has_begun = True
        try:
            if not self._is_stopped:
                async for event in events:
                    self._add(event)
        except asyncio.CancelledError:
            if not self._is_stopped:  # The event loop is ending.
                self._failure, self._is_stopped = _shutting_down(), True
        if self._is_stopped:
            adapter.generation.close()
            for event in adapter.stopped(self._failure):
                self._add(event)

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
        """Drops the oldest events; returns their bytes."""
        dropped, self._events = self._events[:count], self._events[count:]
        self._first += len(dropped)
        size = sum(map(len, dropped))
        self.num_bytes -= size
        return size

    def drop_all(self) -> int:
        """Drops all events; returns their bytes."""
        return self.drop(len(self._events))

    def check_has(self, sequence_number: int) -> None:
        """Checks that the log still has the events from a sequence number on.

        Raises:
            ApiError: 400, the event has been dropped.
        """
        if sequence_number < self._first:
            raise ApiError(
                400,
                f"the events of {self.id} before {self._first} are no longer kept "
                "(--max-stored-bytes): give a later starting_after, or retrieve it without stream",
                param="starting_after",
                code="events_not_kept",
            )

    async def follow(self, sequence_number: int) -> AsyncGenerator[bytes]:
        """Yields the events from a sequence number on, including future ones."""
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
        except ApiError as error:  # The reader was too slow: events were dropped.
            yield _error(error, sequence_number)
        finally:
            self.num_readers -= 1


class BackgroundRuns:
    """The background responses by id. Not thread-safe.

    Args:
        metrics: Unfinished responses count toward the server's load.
        max_running: Maximum unfinished responses; 0 allows none.
        max_bytes: Maximum bytes of all logs. Logs of finished responses are dropped first, then the
            oldest events of the largest log.
        log: Write an access log line for each response that has ended.

    Attributes:
        num_bytes: Bytes of all logs.
        on_count: Called with the number of unfinished responses whenever it changes.
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
        """Checks that another background response may start.

        Raises:
            ApiError: 429, too many are running.
        """
        if len(self._running) >= self.max_running:
            raise ApiError(
                429,
                f"{len(self._running)} background responses are running, and at most "
                f"{self.max_running} may run (--max-stored-responses)",
                param="background",
                code="too_many_in_background",
                headers={"Retry-After": "1"},
            )

    def start(self, adapter: ResponseAdapter, events: AsyncIterator[bytes]) -> BackgroundRun:
        """Runs a response whose generation is submitted.

        Args:
            events: The events of its stream.
        """
        generation = adapter.generation
        # The log line of the request that started the response is written long before this one.
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
        """Returns a response that is running or whose events are still kept, or None."""
        if response_id in self._ended:
            self._ended.move_to_end(response_id)
        return self._running.get(response_id) or self._ended.get(response_id)

    async def forget(self, response_id: str) -> bool:
        """Stops a response and drops its events; returns True if it was running."""
        run = self._running.get(response_id)
        if run is not None:
            await run.stop()
        if (ended := self._ended.pop(response_id, None)) is not None:
            self.num_bytes -= ended.drop_all()
        return run is not None

    def drain(self) -> None:
        """Stops responses without a reader, since no client can ask for them during shutdown."""
        self._is_draining = True
        for run in list(self._running.values()):
            if not run.num_readers:
                run.end(_shutting_down())

    async def close(self) -> None:
        """Stops all responses."""
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
            access_logger.info("a background response has ended", extra=fields)


def _shutting_down() -> ApiError:
    return unavailable("the server is shutting down", "shutting_down")


def _error(error: ApiError, sequence_number: int) -> bytes:
    """Returns the event that ends the stream of one reader with an error."""
    event = {
        "type": "error", "code": error.code, "message": error.message, "param": error.param,
        "sequence_number": sequence_number,
    }  # fmt: skip
    return b"event: error\ndata: " + to_json(event) + b"\n\n"
