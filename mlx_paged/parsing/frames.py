"""FramedParser: drops markers around the text of an answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from mlx_paged.parsing.events import ContentText, Event
from mlx_paged.parsing.format import Parser
from mlx_paged.parsing.lexer import Lexeme


class FramedParser:
    """Drops markers around text, and newlines next to them.

    Args:
        inner: Reads everything else.
        begin, end: The markers.
        leads: Markers that are omitted only before any text.
    """

    def __init__(
        self,
        inner: Parser,
        *,
        begin: Collection[str] = (),
        end: Collection[str] = (),
        leads: Collection[str] = (),
    ) -> None:
        self._inner = inner
        self._leads = frozenset(leads)
        self._has_text = False
        self._begin, self._end = frozenset(begin), frozenset(end)
        self._follows_marker = False
        self._newlines = ""  # at the end of the text so far

    def feed(self, lexeme: Lexeme) -> Iterable[Event]:
        text, is_marker = lexeme
        if is_marker and not getattr(self._inner, "in_string", False):
            if text in self._leads and not self._has_text:
                self._follows_marker = True
                return
            if text in self._begin:
                yield from self._give()
                self._follows_marker = True
                return
            if text in self._end:
                self._newlines, self._follows_marker = "", True
                return
        yield from self._trimmed(self._inner.feed(lexeme))

    def passes(self, text: str) -> bool:
        is_plain = not self._newlines and not self._follows_marker and not text.endswith("\n")
        return is_plain and self._inner.passes(text)

    def finish(self) -> Iterable[Event]:
        yield from self._trimmed(self._inner.finish())
        yield from self._give()

    def _trimmed(self, events: Iterable[Event]) -> Iterable[Event]:
        for event in events:
            if not isinstance(event, ContentText):
                self._follows_marker = False
                yield from self._give()
                yield event
                continue
            text = self._newlines + event.text
            if self._follows_marker:
                text = text.lstrip("\n")
                self._follows_marker = not text
            certain = text.rstrip("\n")
            self._newlines = text[len(certain) :]
            self._has_text = self._has_text or bool(certain.strip())
            if certain:
                yield ContentText(certain)

    def _give(self) -> Iterable[Event]:
        """Emits the newlines that were held back."""
        if self._newlines:
            yield ContentText(self._newlines)
        self._newlines = ""
