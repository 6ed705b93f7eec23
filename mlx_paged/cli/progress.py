"""A progress bar on stderr: none where stderr is not a terminal."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def progress_bar(
    name: str, total: int, *, done: int = 0, shown: bool | None = None, passive: bool = False
) -> Iterator[Callable[..., None]]:
    """Yields ``advance(steps=1, name=...)``. Log lines are printed above the bar.

    Args:
        done: how many of `total` were done before.
        shown: None: on a terminal.
        passive: draw only when it advances, without a thread that would slow what is
            measured, and remove the bar in the end.
    """
    console = Console(stderr=True, highlight=False)
    if shown is None:
        shown = console.is_terminal
    handler = RichHandler(console=console, show_path=False, markup=False)
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("mlx_paged")
    logger.addHandler(handler)
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
    try:
        with progress:
            bar = progress.add_task(name, total=total, completed=done)

            def advance(steps: int = 1, name: str | None = None) -> None:
                progress.update(bar, advance=steps, description=name, refresh=passive)

            yield advance
    finally:
        logger.removeHandler(handler)
