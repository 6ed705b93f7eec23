"""`mlx-paged generate --input`: answers a batch of requests concurrently.

The server's own application answers the requests in this process, so a body means the same as for
`mlx-paged serve`.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from mlx_paged.cli.entry import print_line
from mlx_paged.cli.progress import progress_bar
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.config import EngineConfig
from mlx_paged.errors import MlxPagedError
from mlx_paged.server.app import create_app
from mlx_paged.server.batches.in_process import InProcess
from mlx_paged.server.batches.journal import Journal
from mlx_paged.server.batches.lines import read_lines
from mlx_paged.server.batches.runner import SPARE, BatchRunner, Counts, Room
from mlx_paged.server.config import ServerConfig, default_model_name
from mlx_paged.server.context import Context


@dataclass(frozen=True)
class Batch:
    """The options of a batch.

    Attributes:
        input: JSONL file; None: stdin.
        output: JSONL file; None: stdout.
        overwrite: Empty the output first.
        model: See `mlx_paged.load`.
        model_names: Names that a body may give as `model`; empty means the model's own name.
        progress: Show a progress bar; None: if stderr is a terminal.
        engine_options: Fields of `EngineConfig`.
        dtype: Data type of the weights; see `load`.
    """

    input: Path | None
    output: Path | None
    overwrite: bool = False
    model: str | None = None
    model_names: tuple[str, ...] = ()
    progress: bool | None = None
    engine_options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "auto"


def run(batch: Batch) -> int:
    """Answers the lines that the output does not answer yet.

    Returns:
        The number of lines that failed in this run; the output has the reasons.

    Raises:
        MlxPagedError: The input was changed since the output was begun, the output cannot be
            written, the model cannot be loaded, or no line of this run could be answered.
    """
    EngineConfig(**batch.engine_options)  # validates options before any file is opened
    with _open(batch.input) as file:
        journal = Journal(batch.output, overwrite=batch.overwrite)
        try:
            total = journal.check(file)
            if journal.num_torn_bytes:
                print_line(f"the last line of {batch.output} is incomplete and is answered again")
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
    engine = AsyncEngine.from_model(batch.model, dtype=batch.dtype, **batch.engine_options)
    try:
        config = ServerConfig(served_model_names=names, log_requests=False, serve_page=False)
        app = create_app(engine, config)
        context: Context = app.state.context
        model = context.models.default
        await model.start(context.metrics)
        if model.failure is not None:
            raise model.failure
        runner = BatchRunner(
            InProcess(app).post,
            journal,
            room=Room(engine.info.config.max_num_seqs + SPARE),
            on_line=on_line,
            counts=counts,
        )
        try:
            await runner.run(read_lines(file))
        finally:
            model.close()
    finally:
        if engine.is_alive:
            await engine.shutdown()


def _open(path: Path | None) -> BinaryIO:
    """Opens the input. A pipe is copied to a file, because the input is read twice."""
    try:
        if path is not None and path.is_file():
            return path.open("rb")
        source = sys.stdin.buffer if path is None else path.open("rb")
        copy = tempfile.TemporaryFile()  # noqa: SIM115  (the caller closes it)
        shutil.copyfileobj(source, copy)
        return copy
    except OSError as error:
        raise MlxPagedError(f"cannot read {path or 'stdin'}: {error.strerror}") from error
