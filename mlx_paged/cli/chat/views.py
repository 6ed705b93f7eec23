"""The two places where a chat is shown: a terminal, and plain streams."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Console, RenderableType

from mlx_paged.cli.chat.markup import Markup
from mlx_paged.cli.chat.render import draw, printable


class TerminalView:
    """See `View`."""

    def __init__(self, console: Console, markup: Markup) -> None:
        self.console = console
        self._markup = markup

    def answer(self, pieces: Iterator[str]) -> None:
        """See `View`."""
        draw(self.console, self._markup, pieces)

    def note(self, what: RenderableType) -> None:
        """See `View`."""
        self.console.print(_clean(what), style="dim", markup=False)

    def error(self, message: str) -> None:
        """See `View`."""
        self.console.print(_clean(" ".join(message.split())), style="red", markup=False)


class PlainView:
    """Answers on stdout as they are, everything else on stderr."""

    def __init__(self) -> None:
        self._notes = Console(stderr=True, highlight=False, soft_wrap=True)
        self._to_terminal = sys.stdout.isatty()

    def answer(self, pieces: Iterator[str]) -> None:
        """See `View`."""
        try:
            for piece in pieces:
                sys.stdout.write(printable(piece) if self._to_terminal else piece)
                sys.stdout.flush()
        finally:
            sys.stdout.write("\n")
            sys.stdout.flush()

    def note(self, what: RenderableType) -> None:
        """See `View`."""
        self._notes.print(what, markup=False)

    def error(self, message: str) -> None:
        """See `View`."""
        self._notes.print(f"mlx-paged: {' '.join(message.split())}", markup=False)


def _clean(what: RenderableType) -> RenderableType:
    return printable(what) if isinstance(what, str) else what
