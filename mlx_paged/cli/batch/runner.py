"""Answers the lines of a batch, many at once, and writes each answer as soon as it is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mlx_paged.cli.batch.endpoint import Endpoint
from mlx_paged.cli.batch.journal import Journal
from mlx_paged.cli.batch.lines import Line, LineError, parse


@dataclass
class Counts:
    """What became of the lines of this run."""

    answered: int = 0
    failed: int = 0


class BatchRunner:
    """Keeps a bounded number of lines in flight; the engine batches them.

    Args:
        answer: who answers.
        journal: where to; lines that it has are skipped.
        max_in_flight: most lines that are worked on.
        on_line: called for each line that is written.
    """

    def __init__(
        self,
        answer: Endpoint,
        journal: Journal,
        *,
        max_in_flight: int,
        on_line: Callable[[], None] = lambda: None,
    ) -> None:
        self.counts = Counts()
        self._answer = answer
        self._journal = journal
        self._on_line = on_line
        self._free = asyncio.Semaphore(max_in_flight)
        self._unwritten: list[bytes] = []
        self._custom_ids: set[int] = set()  # hashes: a batch may have many lines

    async def run(self, lines: Iterable[Line]) -> None:
        """Answers all lines. However it ends, what was answered is written.

        Raises:
            MlxPagedError: the engine or the output failed; the rest can be resumed.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    await self._free.acquire()
                    if self._journal.is_done(line):
                        self._note(line)
                        self._free.release()
                    else:
                        group.create_task(self._do(line))
                        await asyncio.sleep(0)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self._flush()

    async def _do(self, line: Line) -> None:
        try:
            output = await self._output_of(line)
            self._unwritten.append(output)
            # Whatever else ended in this round of the loop is written, and synced, with it.
            await asyncio.sleep(0)
            self._flush()
        finally:
            self._free.release()

    async def _output_of(self, line: Line) -> bytes:
        try:
            request = parse(line)
            self._claim(request.custom_id)
        except LineError as error:
            self.counts.failed += 1
            return _error_line(line, error)
        reply = await self._answer(request.url, request.body, line.id)
        if reply.status_code == 200:
            self.counts.answered += 1
        else:
            self.counts.failed += 1
        # The body is JSON as the server made it: there is no need to read it.
        head = {"id": line.id, "custom_id": request.custom_id}
        response = {"status_code": reply.status_code, "request_id": reply.request_id}
        return b'%s, "response": %s, "body": %s}, "error": null}' % (
            json.dumps(head)[:-1].encode(),
            json.dumps(response)[:-1].encode(),
            reply.body,
        )

    def _note(self, line: Line) -> None:
        """Remembers the custom_id of a line that an earlier run has answered."""
        try:
            self._custom_ids.add(hash(parse(line).custom_id))
        except LineError:
            return

    def _claim(self, custom_id: str) -> None:
        key = hash(custom_id)
        if key in self._custom_ids:
            raise LineError("duplicate_custom_id", "an earlier line has this custom_id", custom_id)
        self._custom_ids.add(key)

    def _flush(self) -> None:
        lines, self._unwritten = self._unwritten, []
        if lines:
            self._journal.append(lines)
            for _ in lines:
                self._on_line()


def _error_line(line: Line, error: LineError) -> bytes:
    told = {"code": error.code, "message": f"line {line.number}: {error}"}
    made = {"id": line.id, "custom_id": error.custom_id, "response": None, "error": told}
    return json.dumps(made).encode()
