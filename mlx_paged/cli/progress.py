"""Progress bars on stderr, if stderr is a terminal."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@contextlib.contextmanager
def progress_bar(
    name: str, total: int | None, *, done: int = 0, shown: bool | None = None, passive: bool = False
) -> Iterator[Callable[..., None]]:
    """Yields ``advance(steps=1, name=...)``. Log lines are printed above the bar.

    Args:
        total: Steps; None: unknown.
        done: Steps of `total` done before.
        shown: None: on a terminal.
        passive: Draw only in `advance`, without a thread that would disturb measurements, and
            remove the bar at the end.
    """
    console = Console(stderr=True, highlight=False)
    if shown is None:
        shown = console.is_terminal
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not shown,
        transient=passive,
        auto_refresh=not passive,
    )
    handler = _LogsAbove(progress)
    logger = logging.getLogger("mlx_paged")
    logger.addHandler(handler)
    try:
        with progress:
            bar = progress.add_task(name, total=total, completed=done)

            def advance(steps: int = 1, name: str | None = None) -> None:
                progress.update(bar, advance=steps, description=name, refresh=passive)

            yield advance
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def loading_bar(
    num_stages: int, *, shown: bool | None = None, console: Console | None = None
) -> Iterator[Callable[..., None]]:
    """Yields ``begin(stage)``, to be called before each stage of a start.

    A stage with steps may call ``begin(step, done, total)`` before each. The bar disappears at the
    end.

    Args:
        shown: None: if the console is a terminal.
        console: Where to draw; None means stderr.
    """
    console = console or Console(stderr=True, highlight=False)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        console=console,
        disable=not (console.is_terminal if shown is None else shown),
        transient=True,
    )
    with progress, _without_collection():
        bar = progress.add_task("loading", total=num_stages)
        begun = -1

        def begin(stage: str, done: int = 0, total: int = 0) -> None:
            nonlocal begun
            if total:
                stage = f"{stage} {min(done + 1, total)} of {total}"
            else:
                begun += 1
            completed = begun + (done / total if total else 0)
            progress.update(bar, description=f"loading {stage}", completed=completed)

        yield begin


@contextlib.contextmanager
def download_bar(name: str, *, shown: bool | None = None) -> Iterator[Callable[[int, int], None]]:
    """Yields ``on_bytes(done, total)``. The bar appears with the first call."""
    console = Console(stderr=True, highlight=False)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not (console.is_terminal if shown is None else shown),
        transient=True,
    )
    with progress:
        bar = progress.add_task(name, total=None, visible=False)

        def on_bytes(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total, visible=True)

        yield on_bytes


@contextlib.contextmanager
def kernel_bar(*, shown: bool | None = None) -> Iterator[Callable[[int, int], None]]:
    """Yields an engine's `on_kernel`, which shows a bar from the first kernel to the last."""
    with contextlib.ExitStack() as bar:
        advance: list[Callable[..., None]] = []

        def on_kernel(done: int, total: int) -> None:
            if done == 0:
                made = bar.enter_context(progress_bar("preparing the GPU", total, shown=shown))
                advance[:] = [made]
            else:
                advance[0]()
            if done == total:
                bar.close()

        yield on_kernel


class _LogsAbove(RichHandler):
    """Prints log lines above a bar, and ends the bar with logging.

    Processes that end while another thread computes skip its context managers, but not
    `logging.shutdown`. The terminal would stay without a cursor.
    """

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING, progress.console, show_path=False, markup=False)
        self._progress = progress

    def close(self) -> None:
        if self._progress.live.is_started:
            self._progress.stop()
        super().close()


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Pauses the garbage collector, which would take a tenth of the time and free nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
