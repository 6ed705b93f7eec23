"""BatchRunner: answers the lines of a batch, a bounded number at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mlx_paged.server.batches.lines import URLS, Line, LineError, parse

#: Lines in flight beyond those that the engine runs, so that it always has a next one.
SPARE = 32
#: Maximum bytes of the lines in flight; a longer line is in flight alone.
MAX_BYTES_IN_FLIGHT = 256 << 20


class Reply(NamedTuple):
    """The API's answer to a line.

    Attributes:
        body: JSON.
    """

    status_code: int
    request_id: str
    body: bytes


#: Answers a request: (url, body, request id) -> reply.
Endpoint = Callable[[str, bytes, str], Awaitable[Reply]]


class Output(NamedTuple):
    """An output line.

    Attributes:
        content: JSON, without the line break.
        is_answer: False for an error, and for a line without a valid request.
    """

    content: bytes
    is_answer: bool


class Sink(Protocol):
    """The destination of output lines."""

    def is_done(self, line: Line) -> bool:
        """Returns True if a line has its output already."""

    def write(self, outputs: Sequence[Output]) -> None:
        """Writes output lines durably. Called on a thread.

        Raises:
            MlxPagedError: The lines could not be written.
        """


@dataclass
class Counts:
    """Numbers of answered and failed lines."""

    answered: int = 0
    failed: int = 0


class Room:
    """Limits the number and bytes of lines in flight; admits waiting lines in order.

    Args:
        max_lines: Maximum lines.
        max_bytes: Maximum bytes; a single line may exceed them.
    """

    def __init__(self, max_lines: int, max_bytes: int = MAX_BYTES_IN_FLIGHT) -> None:
        self._max_lines, self._max_bytes = max_lines, max_bytes
        self._num_lines = self._num_bytes = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def acquire(self, size: int) -> None:
        """Waits until there is room for a line of this size, and reserves it."""
        async with self._turn:
            while self._num_lines and (
                self._num_lines >= self._max_lines or self._num_bytes + size > self._max_bytes
            ):
                self._freed.clear()
                await self._freed.wait()
            self._num_lines += 1
            self._num_bytes += size

    def release(self, size: int) -> None:
        """Releases the room of a line."""
        self._num_lines -= 1
        self._num_bytes -= size
        self._freed.set()


class BatchRunner:
    """Keeps a bounded number of lines in flight, which the engine batches.

    Args:
        answer: Answers a request.
        sink: Receives the output. Lines whose output it has are skipped.
        room: Limits the lines in flight; several runners may share it.
        urls: Paths that a line may name.
        on_line: Called for each written line.
        counts: Counts the results; None starts new counts.
    """

    def __init__(
        self,
        answer: Endpoint,
        sink: Sink,
        *,
        room: Room,
        urls: Sequence[str] = URLS,
        on_line: Callable[[], None] = lambda: None,
        counts: Counts | None = None,
    ) -> None:
        self.counts = counts or Counts()
        self._answer = answer
        self._sink = sink
        self._room = room
        self._urls = urls
        self._on_line = on_line
        self._unwritten: list[tuple[Output, int]] = []  # with the sizes of their lines
        self._has_unwritten = asyncio.Event()
        self._custom_ids: set[int] = set()  # hashes, to save memory in large batches

    async def run(self, lines: Iterable[Line]) -> None:
        """Answers all lines. Writes the answers it has even after an error.

        Raises:
            MlxPagedError: The engine or the output failed; another run can answer the rest.
        """
        try:
            async with asyncio.TaskGroup() as writing:
                writer = writing.create_task(self._write())
                async with asyncio.TaskGroup() as answering:
                    for line in lines:
                        if self._sink.is_done(line):
                            self._note(line)
                        else:
                            size = len(line.content or b"")
                            await self._room.acquire(size)
                            answering.create_task(self._answer_line(line, size))
                        await asyncio.sleep(0)
                writer.cancel()
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        finally:
            await self._flush()

    async def _answer_line(self, line: Line, size: int) -> None:
        try:
            output = await self._output_of(line)
        except BaseException:
            self._room.release(size)
            raise
        self._unwritten.append((output, size))
        self._has_unwritten.set()

    async def _write(self) -> None:
        """Writes answers as they arrive; those that arrive during a write are written together."""
        while True:
            await self._has_unwritten.wait()
            self._has_unwritten.clear()
            await asyncio.sleep(0)  # Other answers may arrive in the same iteration of the loop.
            await self._flush()

    async def _output_of(self, line: Line) -> Output:
        try:
            request = parse(line, self._urls)
            self._claim(request.custom_id)
        except LineError as error:
            return Output(error_line(line, error), False)
        reply = await self._answer(request.url, request.body, line.id)
        # The body is already JSON: no need to parse it.
        head = {"id": line.id, "custom_id": request.custom_id}
        response = {"status_code": reply.status_code, "request_id": reply.request_id}
        content = b'%s, "response": %s, "body": %s}, "error": null}' % (
            json.dumps(head)[:-1].encode(),
            json.dumps(response)[:-1].encode(),
            reply.body,
        )
        return Output(content, reply.status_code == 200)

    def _note(self, line: Line) -> None:
        """Records the custom_id of a line that an earlier run answered."""
        try:
            self._custom_ids.add(hash(parse(line, self._urls).custom_id))
        except LineError:
            return

    def _claim(self, custom_id: str) -> None:
        key = hash(custom_id)
        if key in self._custom_ids:
            raise LineError("duplicate_custom_id", "an earlier line has this custom_id", custom_id)
        self._custom_ids.add(key)

    async def _flush(self) -> None:
        """Writes pending answers on a thread; waits for it even if cancelled."""
        lines, self._unwritten = self._unwritten, []
        if not lines:
            return
        outputs = [output for output, _ in lines]
        writing = asyncio.ensure_future(asyncio.to_thread(self._sink.write, outputs))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            while not writing.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({writing})
            raise
        finally:
            for output, size in lines:
                self._room.release(size)
                if writing.exception() is None:
                    self._count(output)

    def _count(self, output: Output) -> None:
        if output.is_answer:
            self.counts.answered += 1
        else:
            self.counts.failed += 1
        self._on_line()


def _first(failures: BaseExceptionGroup) -> BaseException:
    """Returns the first error within nested groups."""
    failure = failures.exceptions[0]
    return _first(failure) if isinstance(failure, BaseExceptionGroup) else failure


def error_line(line: Line, error: LineError) -> bytes:
    """Returns the output of a line that was not answered."""
    described = {"code": error.code, "message": f"line {line.number}: {error}"}
    made = {"id": line.id, "custom_id": error.custom_id, "response": None, "error": described}
    return json.dumps(made).encode()
