"""A progress bar on stderr, for people: none where stderr is no terminal."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def progress_bar(
    name: str, total: int, *, done: int = 0, shown: bool | None = None
) -> Iterator[Callable[[], None]]:
    """Yields what advances the bar by one. Log lines are printed above it.

    Args:
        done: how many of `total` were done before.
        shown: None: on a terminal.
    """
    console = Console(stderr=True, highlight=False)
    if shown is None:
        shown = console.is_terminal
    handler = RichHandler(console=console, show_path=False, markup=False)
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("mlx_paged")
    logger.addHandler(handler)
    columns = TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    try:
        with Progress(*columns, console=console, disable=not shown) as progress:
            bar = progress.add_task(name, total=total, completed=done)
            yield lambda: progress.advance(bar)
    finally:
        logger.removeHandler(handler)
