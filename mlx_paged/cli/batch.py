"""`mlx-paged generate --input`: answers a batch of requests, many at once.

The requests are answered by the server's own application, called in this process: a body means
what it means to `mlx-paged serve`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mlx_paged.cli.batch_files import Journal, Line, LineError, parse, read_lines
from mlx_paged.cli.entry import print_line
from mlx_paged.cli.progress import progress_bar
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.config import EngineConfig
from mlx_paged.errors import EngineDeadError, MlxPagedError
from mlx_paged.server.app import create_app
from mlx_paged.server.config import ServerConfig, default_model_name
from mlx_paged.server.context import Context

# Lines in flight beyond what the engine runs at once, so that it always has one to start.
_SPARE = 32


@dataclass(frozen=True)
class Batch:
    """What to run.

    Attributes:
        input: JSONL; None: stdin.
        output: None: stdout.
        overwrite: Empty the output first.
        model: As for `mlx_paged.load`.
        model_names: Names that a body may give as `model`; empty: the model's own name.
        progress: Whether to show a bar; None: on a terminal.
        engine_options: Fields of `EngineConfig`.
    """

    input: Path | None
    output: Path | None
    overwrite: bool = False
    model: str | None = None
    model_names: tuple[str, ...] = ()
    progress: bool | None = None
    engine_options: dict[str, Any] = field(default_factory=dict)


def run(batch: Batch) -> int:
    """Answers the lines that have no answer yet.

    Returns:
        How many lines of this run failed; their reasons are in the output.

    Raises:
        MlxPagedError: the input was changed since the output was begun, the output cannot be
            written, the model cannot be loaded, or no line of this run could be answered.
    """
    EngineConfig(**batch.engine_options)  # refuses wrong options before anything is opened
    with _open(batch.input) as file:
        journal = Journal(batch.output, overwrite=batch.overwrite)
        try:
            total = journal.check(file)
            if journal.num_torn_bytes:
                print_line(f"the last line of {batch.output} is incomplete: it is done again")
            if journal.done.count:
                print_line(f"{journal.done.count} of {total} lines are done already")
            return _run(batch, file, journal, total) if journal.done.count < total else 0
        finally:
            journal.close()


def _run(batch: Batch, file: BinaryIO, journal: Journal, total: int) -> int:
    done = journal.done.count
    counts = Counts()
    try:
        with progress_bar("lines", total, done=done, shown=batch.progress) as on_line:
            asyncio.run(_answer(batch, file, journal, counts, on_line))
    except KeyboardInterrupt:
        written = done + counts.answered + counts.failed
        resumed = "" if batch.output is None else "; run the same command again for the rest"
        print_line(f"{written} of {total} lines are done{resumed}")
        raise
    print_line(f"{counts.answered} lines answered, {counts.failed} failed")
    if counts.failed and not counts.answered:
        raise MlxPagedError("no line could be answered: see the errors in the output")
    return counts.failed


async def _answer(
    batch: Batch, file: BinaryIO, journal: Journal, counts: Counts, on_line: Any
) -> None:
    names = batch.model_names or (default_model_name(batch.model),)
    engine = AsyncEngine.from_model(batch.model, **batch.engine_options)
    try:
        endpoint = LocalEndpoint(engine, names)
        await endpoint.start()
        runner = BatchRunner(
            endpoint.post,
            journal,
            max_in_flight=engine.engine.config.max_num_seqs + _SPARE,
            on_line=on_line,
            counts=counts,
        )
        try:
            await runner.run(read_lines(file))
        finally:
            endpoint.close()
    finally:
        if engine.is_alive:
            await engine.shutdown()


def _open(path: Path | None) -> BinaryIO:
    """The input, which is read twice: a pipe is copied to a file first."""
    try:
        if path is not None and path.is_file():
            return path.open("rb")
        source = sys.stdin.buffer if path is None else path.open("rb")
        copy = tempfile.TemporaryFile()  # noqa: SIM115  (the caller closes it)
        shutil.copyfileobj(source, copy)
        return copy
    except OSError as error:
        raise MlxPagedError(f"cannot read {path or 'stdin'}: {error.strerror}") from error


@dataclass
class Counts:
    """Results of the lines of this run."""

    answered: int = 0
    failed: int = 0


class BatchRunner:
    """Keeps a bounded number of lines in flight; the engine batches them.

    Args:
        answer: answers a request.
        journal: the output; lines that it has are skipped.
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
        counts: Counts | None = None,
    ) -> None:
        self.counts = counts or Counts()
        self._answer = answer
        self._journal = journal
        self._on_line = on_line
        self._free = asyncio.Semaphore(max_in_flight)
        self._unwritten: list[bytes] = []
        self._custom_ids: set[int] = set()  # hashes: a batch may have many lines

    async def run(self, lines: Iterable[Line]) -> None:
        """Answers all lines. Whatever was answered is written, also after an error.

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
            # Lines that ended in the same round of the loop are written and synced together.
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
        # The body is already JSON: no need to parse it.
        head = {"id": line.id, "custom_id": request.custom_id}
        response = {"status_code": reply.status_code, "request_id": reply.request_id}
        return b'%s, "response": %s, "body": %s}, "error": null}' % (
            json.dumps(head)[:-1].encode(),
            json.dumps(response)[:-1].encode(),
            reply.body,
        )

    def _note(self, line: Line) -> None:
        """Records the custom_id of a line that an earlier run has answered."""
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
    described = {"code": error.code, "message": f"line {line.number}: {error}"}
    made = {"id": line.id, "custom_id": error.custom_id, "response": None, "error": described}
    return json.dumps(made).encode()


class Reply(NamedTuple):
    """An answer of the API.

    Attributes:
        body: JSON.
    """

    status_code: int
    request_id: str
    body: bytes


#: (url, body, request id) -> its answer.
Endpoint = Callable[[str, bytes, str], Awaitable[Reply]]


class LocalEndpoint:
    """The server's application, called without a network.

    Args:
        engine: the caller shuts it down.
        model_names: names that a body may give as `model`; the first one is in answers.
    """

    def __init__(self, engine: AsyncEngine, model_names: tuple[str, ...]) -> None:
        config = ServerConfig(served_model_names=model_names, log_requests=False, serve_page=False)
        self._app = create_app(engine, config)
        self._context: Context = self._app.state.context

    async def start(self) -> None:
        """Waits until the engine is ready; raises its failure."""
        await self._context.start()
        if self._context.failure is not None:
            raise self._context.failure

    def close(self) -> None:
        """Ends its threads."""
        self._context.close()

    async def post(self, url: str, body: bytes, request_id: str) -> Reply:
        """Answers a request.

        Raises:
            EngineDeadError: the engine has failed; it answers no further requests.
        """
        pending = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            if not pending:
                await asyncio.Event().wait()  # the client never disconnects
            return pending.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "raw_path": url.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (b"content-type", b"application/json"),
                (b"x-request-id", request_id.encode()),
            ],
            "client": None,
            "server": None,
        }
        await self._app(scope, receive, send)
        start, *parts = sent
        if start["status"] == 503:
            raise EngineDeadError("it failed while it worked on the batch")
        answer_id = dict(start["headers"]).get(b"x-request-id", b"").decode()
        return Reply(start["status"], answer_id, b"".join(part.get("body", b"") for part in parts))
