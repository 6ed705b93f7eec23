"""`mlx-paged generate --input`: the whole run of a batch."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from mlx_paged.cli.batch.endpoint import LocalEndpoint
from mlx_paged.cli.batch.journal import Journal
from mlx_paged.cli.batch.lines import read_lines
from mlx_paged.cli.batch.runner import BatchRunner, Counts
from mlx_paged.cli.entry import tell
from mlx_paged.cli.progress import progress_bar
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.config import EngineConfig
from mlx_paged.errors import MlxPagedError
from mlx_paged.server.config import default_model_name

# Lines in flight beyond what the engine runs at once: there is always one to begin.
_SPARE = 32


@dataclass(frozen=True)
class Batch:
    """What to run.

    Attributes:
        input: JSONL; None: stdin.
        output: None: stdout.
        overwrite: Begin anew, whatever the output holds.
        model: As for `mlx_paged.load`.
        model_names: What a body may give as `model`; empty: the model's own name.
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


def run(batch: Batch) -> None:
    """Answers what is not answered yet.

    Raises:
        MlxPagedError: the input was changed since the output was begun, the output cannot be
            written, the model cannot be loaded, or no line of this run could be answered.
    """
    EngineConfig(**batch.engine_options)  # what is wrong is told before anything is opened
    with _open(batch.input) as file:
        journal = Journal(batch.output, overwrite=batch.overwrite)
        try:
            total = journal.check(file)
            if journal.num_torn_bytes:
                tell(f"the last line of {batch.output} was cut short: it is done again")
            if journal.done.count:
                tell(f"{journal.done.count} of {total} lines are done already")
            if journal.done.count < total:
                _run(batch, file, journal, total)
        finally:
            journal.close()


def _run(batch: Batch, file: BinaryIO, journal: Journal, total: int) -> None:
    done = journal.done.count
    counts = Counts()
    try:
        with progress_bar("lines", total, done=done, shown=batch.progress) as on_line:
            asyncio.run(_answer(batch, file, journal, counts, on_line))
    except KeyboardInterrupt:
        written = done + counts.answered + counts.failed
        resumed = "" if batch.output is None else "; the same command goes on with the rest"
        tell(f"{written} of {total} lines are done{resumed}")
        raise
    tell(f"{counts.answered} lines answered, {counts.failed} failed")
    if counts.failed and not counts.answered:
        raise MlxPagedError("no line could be answered: the output tells why")


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
        )
        runner.counts = counts
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
