"""Renders an answer while it is generated, without its control characters.

Finished blocks of Markdown are printed once. Only the unfinished one is redrawn, cut to the height
of the screen.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text

from mlx_paged.cli.options import Markup

_REDRAWS_PER_SECOND = 10
_UNPRINTABLE = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {0x09, 0x0A})


def printable(text: str) -> str:
    """Removes control characters, with which an answer could control the terminal."""
    return text.translate(_UNPRINTABLE)


def parser() -> MarkdownIt:
    """Returns a Markdown parser that keeps HTML as text, because answers may have ``<think>``."""
    return MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


class _Markdown(Markdown):
    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)  # links are shown, not hidden behind their text
        self.markup, self.parsed = text, parser().parse(text)


def rendered(text: str, markup: Markup) -> RenderableType:
    """Renders a text that has no control characters."""
    if markup == "markdown":
        return _Markdown(text)
    if markup == "code":
        return Syntax(text.rstrip("\n"), "python", background_color="default", word_wrap=True)
    return Text(text.rstrip("\n"))


def finished_part(text: str, markup: Markup) -> int:
    """Returns the length of the beginning whose rendering later text cannot change."""
    if markup == "plain":
        return text.rfind("\n") + 1
    if markup == "code":
        return 0  # The highlighting of a line may depend on everything before it.
    blocks = [token.map for token in parser().parse(text) if token.level == 0 and token.map]
    if len(blocks) < 2:
        return 0
    lines = text.split("\n")
    return sum(len(line) + 1 for line in lines[: blocks[-1][0]])


class LiveAnswer:
    """Shows an answer on a terminal as it arrives. A context manager.

    Args:
        console: Console of the terminal.
        markup: Not "auto".
    """

    def __init__(self, console: Console, markup: Markup) -> None:
        self._console = console
        self._markup = markup
        self._text = ""  # not printed permanently yet
        self._is_first = True
        self._parsed_at = 0.0  # when finished blocks were last looked for
        # Rich's own refresh thread may redraw in the middle of a print, which leaves stray lines.
        self._live = Live(
            console=console, transient=True, auto_refresh=False, get_renderable=self._unfinished
        )
        self._lock = threading.Lock()  # held while drawing
        self._has_ended = threading.Event()
        self._redrawing = threading.Thread(target=self._redraw, daemon=True)

    def __enter__(self) -> LiveAnswer:
        self._live.__enter__()
        self._redrawing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        with self._lock:
            text, self._text = self._text, ""
            self._live.__exit__(None, None, None)  # clears the temporary drawing
        if text.strip():
            self._print(text)

    def feed(self, piece: str) -> None:
        """Adds text to the answer."""
        now = time.monotonic()
        with self._lock:
            self._text += printable(piece)
            if "\n" in piece and now - self._parsed_at >= 1 / _REDRAWS_PER_SECOND:
                self._parsed_at = now
                self._print_finished()

    def _redraw(self) -> None:
        while not self._has_ended.wait(1 / _REDRAWS_PER_SECOND):
            with self._lock:
                if not self._has_ended.is_set():
                    self._live.refresh()

    def _print_finished(self) -> None:
        end = finished_part(self._text, self._markup)
        done, self._text = self._text[:end], self._text[end:]
        if done.strip():
            self._print(done)

    def _print(self, text: str) -> None:
        if self._markup == "markdown" and not self._is_first:
            self._console.print()
        self._is_first = False
        self._console.print(rendered(text, self._markup))

    def _unfinished(self) -> RenderableType:
        return _Bottom(rendered(self._text, self._markup)) if self._text.strip() else Text("")


class _Bottom:
    """The last lines of a renderable, as many as fit on the screen."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._content, options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


class TerminalView:
    """See `View`."""

    def __init__(self, console: Console, markup: Markup) -> None:
        self.console = console
        self._markup = markup

    def answer(self, pieces: Iterator[str]) -> None:
        """See `View`."""
        with LiveAnswer(self.console, self._markup) as answer:
            for piece in pieces:
                answer.feed(piece)

    def note(self, what: RenderableType) -> None:
        """See `View`."""
        self.console.print(_clean(what), style="dim", markup=False)

    def error(self, message: str) -> None:
        """See `View`."""
        self.console.print(_clean(" ".join(message.split())), style="red", markup=False)


class PlainView:
    """Prints answers to stdout unchanged, everything else to stderr."""

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
