"""BatchManager: runs the batches of a folder concurrently, and resumes them after a restart.

    validating --> in_progress --> finalizing --> completed, or expired when its time is over
         |              |
         |              +--> cancelling --> cancelled
         +--> failed

Every change is on disk before it is reported. Output lines are appended to journals. A restart
reads in them which lines are finished, and answers the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mlx_paged.errors import EngineDeadError, MlxPagedError
from mlx_paged.server.batches.folder import Folder, StoredFile, new_file_id
from mlx_paged.server.batches.journal import Journal
from mlx_paged.server.batches.lines import Line, LineError, parse, read_lines
from mlx_paged.server.batches.records import BatchRecord, Status
from mlx_paged.server.batches.runner import (
    BatchRunner,
    Counts,
    Endpoint,
    Output,
    Room,
    error_line,
)
from mlx_paged.server.body_bounds import BodyBounds
from mlx_paged.server.errors import ApiError

logger = logging.getLogger(__name__)

#: Seconds that a thread parses before it sleeps as long, so that other threads get the GIL.
TURN = 0.002
#: Maximum unfinished batches, and maximum batches kept; the oldest finished ones are deleted.
MAX_UNFINISHED, MAX_BATCHES = 100, 10_000
_MAX_ERRORS = 100  # of a failed batch
_LINES_PER_WRITE = 1000
_SCAN_BYTES = 1 << 16  # of a line at once

# Codes and reasons of lines that were not answered.
_UNANSWERED: dict[Status, LineError] = {
    "cancelled": LineError("batch_cancelled", "the batch was cancelled before it was answered"),
    "expired": LineError("batch_expired", "the batch expired before it was answered"),
}


class _Stopped(Exception):
    """The server shuts down; a restart resumes the work."""


class Outputs:
    """The output of a batch: answers in one journal, everything else in another."""

    def __init__(self, answers: Path, failures: Path) -> None:
        self._answers = Journal(answers, mode=0o600)
        try:
            self._failures = Journal(failures, mode=0o600)
        except BaseException:
            self._answers.close()
            raise

    @property
    def counts(self) -> Counts:
        """The numbers of lines that the journals already had when they were opened."""
        return Counts(self._answers.done.count, self._failures.done.count)

    def is_done(self, line: Line) -> bool:
        """True if a line has its output already."""
        return self._answers.is_done(line) or self._failures.is_done(line)

    def write(self, outputs: Sequence[Output]) -> None:
        """Appends output lines durably."""
        for journal, is_answer in ((self._answers, True), (self._failures, False)):
            lines = [output.content for output in outputs if output.is_answer is is_answer]
            if lines:
                journal.append(lines)

    def close(self) -> None:
        """Closes both."""
        self._answers.close()
        self._failures.close()


class Results(NamedTuple):
    """Open files with the results of a batch.

    Attributes:
        outputs: Output lines; those of a failed batch may be damaged.
        input: All input lines of a failed batch; None if every line has its output.
    """

    outputs: list[BinaryIO]
    input: BinaryIO | None

    def close(self) -> None:
        """Closes all files."""
        for file in self.outputs:
            file.close()
        if self.input is not None:
            self.input.close()


class BatchManager:
    """The batches of a folder.

    Args:
        folder: Stores the batches and their files; `close` closes it.
        post: Answers a request.
        now: Returns the Unix time.

    Attributes:
        max_line: Maximum bytes of a line.
        bounds: Creates a check of a line's size and nesting.
    """

    def __init__(
        self, folder: Folder, post: Endpoint, now: Callable[[], float] = time.time
    ) -> None:
        self.folder = folder
        self._post = post
        self._now = now
        self._records: dict[str, BatchRecord] = {}
        self._counts: dict[str, Counts] = {}  # of batches in progress
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._answering: dict[str, asyncio.Task[None]] = {}
        self._changing, self._validating = asyncio.Lock(), asyncio.Lock()
        self._room: Room | None = None
        self.max_line = 0
        self.bounds: Callable[[], BodyBounds] = BodyBounds
        self._closed = False
        found = [BatchRecord.of(record) for record in folder.batches()]
        for record in sorted(found, key=lambda record: (record.created_at, record.id)):
            self._records[record.id] = record
        unfinished = [record for record in found if not record.has_ended]
        folder.remove_leftovers({path for r in unfinished for path in self._output_paths(r)})
        for record in unfinished:
            if record.ending is None:  # Counts are reported even before the batch continues.
                try:
                    outputs = Outputs(*self._output_paths(record))
                except MlxPagedError as error:  # One damaged batch must not stop the others.
                    self._fail_at_start(record, error)
                    continue
                self._counts[record.id] = outputs.counts
                outputs.close()

    def start(
        self, max_lines: int, max_line: int, bounds: Callable[[], BodyBounds] = BodyBounds
    ) -> None:
        """Resumes unfinished batches, once the engine accepts requests.

        Args:
            max_lines: Maximum lines in flight, over all batches.
            max_line: Maximum bytes of a line.
            bounds: Creates a check of a line's size and nesting.
        """
        self._room, self.max_line, self.bounds = Room(max_lines), max_line, bounds
        for record in self._records.values():
            if not record.has_ended:
                self._begin(record.id)

    def stop(self) -> None:
        """Stops answering lines. A restart answers those that are in flight now."""
        self._closed = True
        for task in self._tasks.values():
            task.cancel()

    async def close(self) -> None:
        """Stops, and unlocks the folder for other servers."""
        self.stop()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self.folder.close()

    # Batches.

    def get(self, batch_id: str) -> BatchRecord | None:
        """Returns the current state of a batch, with the lines written so far."""
        record = self._records.get(batch_id)
        if record is None:
            return None
        counts = self._counts.get(batch_id)
        if counts is None or record.ending is not None:
            return record
        return replace(record, completed=counts.answered, failed=counts.failed)

    def batches(self, kind: str) -> list[BatchRecord]:
        """Returns all batches of an API, newest first."""
        found = (self.get(record.id) for record in reversed(self._records.values()))
        return [record for record in found if record is not None and record.kind == kind]

    def check_room(self) -> None:
        """Checks that another batch may be created.

        Raises:
            ApiError: 429, there are too many unfinished ones.
        """
        if sum(not record.has_ended for record in self._records.values()) >= MAX_UNFINISHED:
            message = f"there are {MAX_UNFINISHED} unfinished batches, which is the maximum"
            raise ApiError(429, message, code="too_many_batches", headers={"Retry-After": "60"})

    def uses(self, file_id: str) -> bool:
        """Returns True if an unfinished batch reads a file."""
        return any(
            record.input_file_id == file_id
            for record in self._records.values()
            if not record.has_ended
        )

    async def create(self, record: BatchRecord) -> BatchRecord:
        """Adds a batch whose input is on disk, and starts it.

        Raises:
            KeyError: Its input file has been deleted.
            ApiError: 429, there are too many unfinished batches.
        """
        if record.kind == "openai":
            record = replace(record, output_file_id=new_file_id(), error_file_id=new_file_id())
        async with self._changing:
            self.check_room()
            if record.input_file_id is not None:
                _ = self.folder.files[record.input_file_id]
            await asyncio.to_thread(self.folder.write_batch, record.id, record.stored())
            self._records[record.id] = record
            for old in list(self._records.values())[: max(0, len(self._records) - MAX_BATCHES)]:
                if old.has_ended:
                    await self._forget(old.id)
        if self._room is not None and not self._closed:
            self._begin(record.id)
        return record

    async def cancel(self, batch_id: str) -> BatchRecord:
        """Cancels an unfinished batch, whose status is "cancelling" until its output is written."""
        now = int(self._now())
        record = await self._change(
            batch_id, ("validating", "in_progress"), status="cancelling", cancelling_at=now
        )
        if record.status == "cancelling" and batch_id in self._answering:
            self._answering[batch_id].cancel()
        return record

    async def delete(self, batch_id: str) -> None:
        """Deletes a batch that has ended."""
        async with self._changing:
            await self._forget(batch_id)

    async def delete_file(self, file_id: str) -> bool:
        """Deletes a file unless a batch still reads it; returns True if it was deleted."""
        async with self._changing:
            if self.uses(file_id):
                return False
            await asyncio.to_thread(self.folder.delete, file_id)
            return True

    async def sweep(self) -> None:
        """Deletes expired files."""
        now = self._now()
        for file in self.folder.files.values():
            if file.expires_at is not None and file.expires_at <= now:
                with contextlib.suppress(OSError):  # Such as a read-only disk; retried later.
                    await self.delete_file(file.id)

    async def open_file(self, file_id: str) -> BinaryIO | None:
        """Opens a file, which stays readable even if it is deleted.

        Returns:
            None if there is no such file.
        """
        async with self._changing:
            if file_id not in self.folder.files:
                return None
            return await asyncio.to_thread(open, self.folder.data_path(file_id), "rb")

    async def open_results(self, batch_id: str) -> Results | None:
        """Opens the results of a batch without output files of the API; see `open_file`.

        Returns:
            None if there is no such batch.
        """
        async with self._changing:
            record = self._records.get(batch_id)
            return None if record is None else await asyncio.to_thread(self._opened, record)

    def _opened(self, record: BatchRecord) -> Results:
        paths = [path for path in self._output_paths(record) if path.exists()]
        outputs: list[BinaryIO] = [path.open("rb") for path in paths]
        # The input is deleted once every line has its output.
        input_path = self._input_path(record)
        return Results(outputs, input_path.open("rb") if input_path.exists() else None)

    async def _forget(self, batch_id: str) -> None:
        await asyncio.to_thread(self.folder.delete_batch, batch_id)
        self._records.pop(batch_id, None)

    async def _change(
        self, batch_id: str, among: tuple[Status, ...], **changes: Any
    ) -> BatchRecord:
        """Changes a batch if its status is one of `among`; returns its state afterwards."""
        async with self._changing:
            record = self._records[batch_id]
            if record.status in among:
                record = replace(record, **changes)
                await asyncio.to_thread(self.folder.write_batch, batch_id, record.stored())
                self._records[batch_id] = record
            return record

    # Running.

    def _begin(self, batch_id: str) -> None:
        task = asyncio.create_task(self._run(batch_id))
        self._tasks[batch_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch_id, None))

    async def _run(self, batch_id: str) -> None:
        try:
            if self._records[batch_id].status == "validating":
                await self._validate(batch_id)
            if not self._records[batch_id].has_ended:
                await self._finish(batch_id)
        except (EngineDeadError, _Stopped):
            pass  # A restart resumes it.
        except (MlxPagedError, OSError) as error:
            await self._fail(batch_id, [_described("storage_error", f"{error}")])
        except Exception:
            logger.exception("batch %s failed", batch_id)
            await self._fail(batch_id, [_described("internal_error", "see the server's log")])
        finally:
            self._counts.pop(batch_id, None)

    async def _validate(self, batch_id: str) -> None:
        """Counts and checks the lines. One invalid line fails the batch, as at OpenAI."""
        record = self._records[batch_id]
        async with self._validating:  # One at a time, because each slows down the server.
            total, errors = await asyncio.to_thread(self._checked, record)
        if errors:
            await self._fail(batch_id, errors)
            return
        now = int(self._now())
        changed = await self._change(
            batch_id, ("validating",), status="in_progress", in_progress_at=now, total=total
        )
        if changed.status == "cancelling":
            await self._change(batch_id, ("cancelling",), total=total)

    def _checked(self, record: BatchRecord) -> tuple[int, list[dict[str, Any]]]:
        """Returns the number of lines and the errors in them. Runs on a thread."""
        errors: list[dict[str, Any]] = []
        custom_ids: set[int] = set()
        total = 0
        with self._input_path(record).open("rb") as file:
            for line in self._lines(file):
                total += 1
                try:
                    self._check_bounds(line)
                    custom_id = parse(line, (record.endpoint,)).custom_id
                    if hash(custom_id) in custom_ids:
                        raise LineError("duplicate_custom_id", "an earlier line has this custom_id")
                    custom_ids.add(hash(custom_id))
                except LineError as error:
                    errors.append(_described(error.code, f"{error}", line.number))
                    if len(errors) == _MAX_ERRORS:
                        break
        if not total:
            errors.append(_described("empty_file", "the file has no lines"))
        return total, errors

    def _lines(self, file: BinaryIO) -> Iterator[Line]:
        """Yields all lines of an input, on a thread, without starving other threads.

        Raises:
            _Stopped: The server is shutting down and waits for the thread.
        """
        began = time.monotonic()
        for line in read_lines(file, self.max_line):
            if self._closed:
                raise _Stopped
            if time.monotonic() - began > TURN:
                time.sleep(TURN)
                began = time.monotonic()
            yield line

    def _check_bounds(self, line: Line) -> None:
        """Refuses a line that would take long to parse, which would stall the server."""
        if line.content is None:
            raise LineError("line_too_long", f"a line must be at most {self.max_line} bytes")
        bounds = self.bounds()
        try:
            for begin in range(0, len(line.content), _SCAN_BYTES):
                bounds.feed(line.content[begin : begin + _SCAN_BYTES])
        except ApiError as error:
            raise LineError("invalid_request", error.message) from None

    async def _finish(self, batch_id: str) -> None:
        """Answers the remaining lines, and ends the batch."""
        record = self._records[batch_id]
        outputs = await asyncio.to_thread(Outputs, *self._output_paths(record))
        try:
            if record.ending is None:
                counts = self._counts[batch_id] = outputs.counts
                ending = await self._answer(record, outputs, counts)
                record = await self._end(batch_id, ending, counts)
        finally:
            await _uninterrupted(asyncio.to_thread(outputs.close))
        if record.ending in _UNANSWERED and record.total:
            await _uninterrupted(asyncio.to_thread(self._write_rest, record))
        await self._publish(record)

    async def _answer(self, record: BatchRecord, outputs: Outputs, counts: Counts) -> Status:
        """Answers the lines without output; returns the final status of the batch."""
        assert self._room is not None
        runner = BatchRunner(
            self._post, outputs, room=self._room, urls=(record.endpoint,), counts=counts
        )
        with self._input_path(record).open("rb") as file:
            lines = read_lines(file, self.max_line)
            answering = asyncio.ensure_future(runner.run(lines))
            self._answering[record.id] = answering
            if self._records[record.id].status == "cancelling":
                answering.cancel()  # `cancel` came before there was anything to cancel.
            try:
                left = max(0.0, record.expires_at - self._now())
                await asyncio.wait({answering}, timeout=left)
                if answering.done() and not answering.cancelled():
                    answering.result()
                    return "completed"
                expired = not answering.done()
            finally:
                del self._answering[record.id]
                answering.cancel()
                await _uninterrupted(asyncio.wait({answering}))
        return "expired" if expired else "cancelled"

    async def _end(self, batch_id: str, ending: Status, counts: Counts) -> BatchRecord:
        """Records that no more lines will be answered."""
        results = {"ending": ending, "completed": counts.answered, "failed": counts.failed}
        now = int(self._now())
        record = await self._change(
            batch_id, ("in_progress",), status="finalizing", finalizing_at=now, **results
        )
        if record.status == "cancelling":
            results["ending"] = "cancelled"
            record = await self._change(batch_id, ("cancelling",), **results)
        return record

    def _write_rest(self, record: BatchRecord) -> None:
        """Writes error lines for the lines that were not answered. Runs on a thread."""
        assert record.ending is not None
        reason = _UNANSWERED[record.ending]
        rest: list[Output] = []
        outputs = Outputs(*self._output_paths(record))
        try:
            with self._input_path(record).open("rb") as file:
                for line in self._lines(file):
                    if outputs.is_done(line):
                        continue
                    custom_id = parse(line, (record.endpoint,)).custom_id
                    error = LineError(reason.code, f"{reason}", custom_id)
                    rest.append(Output(error_line(line, error), False))
                    if len(rest) == _LINES_PER_WRITE:
                        outputs.write(rest)
                        rest.clear()
            outputs.write(rest)
        finally:
            outputs.close()

    async def _publish(self, record: BatchRecord) -> None:
        """Publishes the output files of the API, and ends the batch."""
        assert record.ending is not None
        changes: dict[str, Any] = {"status": record.ending}
        now = int(self._now())
        changes[f"{record.ending}_at"] = now
        if record.kind == "openai":
            expires_after = record.output_expires_after
            expires_at = None if expires_after is None else now + expires_after
            for name, word in (("output_file_id", "output"), ("error_file_id", "error")):
                file_id = getattr(record, name)
                path = self.folder.data_path(file_id)
                size = path.stat().st_size if path.exists() else 0
                if size:
                    filename = f"{record.id}_{word}.jsonl"
                    file = StoredFile(file_id, filename, "batch_output", size, now, expires_at)
                    await asyncio.to_thread(self.folder.publish, file)
                else:
                    path.unlink(missing_ok=True)
                    changes[name] = None
        record = await self._change(record.id, ("finalizing", "cancelling"), **changes)
        if record.input_file_id is None:
            self._input_path(record).unlink(missing_ok=True)
        logger.info(
            "batch %s is %s: %d of %d lines answered, %d failed",
            record.id, record.status, record.completed, record.total, record.failed,
        )  # fmt: skip

    async def _fail(self, batch_id: str, errors: list[dict[str, Any]]) -> None:
        now = int(self._now())
        among: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
        record = self._records[batch_id]
        counts = self._counts.get(batch_id, Counts())
        changes: dict[str, Any] = {
            "status": "failed", "failed_at": now, "errors": errors, "output_file_id": None,
            "error_file_id": None, "completed": counts.answered, "failed": counts.failed,
        }  # fmt: skip
        try:
            await self._change(batch_id, among, **changes)
            if record.kind == "openai":  # Without ids, clients could not delete the output.
                for file_id in filter(None, (record.output_file_id, record.error_file_id)):
                    await asyncio.to_thread(self.folder.delete, file_id)
        except (
            OSError
        ):  # Such as a full disk. The batch has failed until a restart, which retries it.
            self._records[batch_id] = replace(record, **changes)
        logger.error("batch %s failed: %s", batch_id, errors[0]["message"])

    def _fail_at_start(self, record: BatchRecord, error: MlxPagedError) -> None:
        """Fails a batch whose output is damaged when the server starts."""
        record = replace(
            record, status="failed", failed_at=int(self._now()), output_file_id=None,
            error_file_id=None, errors=[_described("storage_error", f"{error}")],
        )  # fmt: skip
        self.folder.write_batch(record.id, record.stored())
        self._records[record.id] = record
        logger.error("batch %s failed: %s", record.id, error)

    # Paths.

    def _input_path(self, record: BatchRecord) -> Path:
        if record.input_file_id is None:
            return self.folder.batch_path(record.id, "input")
        return self.folder.data_path(record.input_file_id)

    def _output_paths(self, record: BatchRecord) -> tuple[Path, Path]:
        """Returns the paths of the answers and of the failures."""
        if record.kind == "openai":
            assert record.output_file_id is not None and record.error_file_id is not None
            of = self.folder.data_path
            return of(record.output_file_id), of(record.error_file_id)
        of_batch = self.folder.batch_path
        return of_batch(record.id, "answers"), of_batch(record.id, "failures")


def new_batch_id(prefix: str) -> str:
    """Returns an unguessable id."""
    return f"{prefix}_{uuid.uuid4().hex}"


def _described(code: str, message: str, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "line": line, "message": message, "param": None}


async def _uninterrupted(work: Any) -> None:
    """Awaits `work` even if the current task is cancelled; raises CancelledError afterwards."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
