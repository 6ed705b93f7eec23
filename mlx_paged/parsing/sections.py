"""SectionParser: omits the texts around all calls of an answer, and between two calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from mlx_paged.parsing.events import CallBegin, CallEnd, ContentText, Event
from mlx_paged.parsing.format import Parser
from mlx_paged.parsing.lexer import Lexeme


class SectionParser:
    """Omits text around all calls of an answer, and between two of them.

    A section without a call is text, and so is a separator without a following call.

    Args:
        inner: Reads the rest.
        begin, end: Markers of a section; "" if there are none.
        lead: Text between the section's marker and the first call.
        between: Texts between two calls, or between a call and the section's end.
        begins: Markers that begin calls.
        ends: Markers before these texts; if empty, the texts follow the call.
    """

    def __init__(
        self,
        inner: Parser,
        begin: str = "",
        end: str = "",
        *,
        lead: str = "",
        between: Collection[str] = (),
        begins: Collection[str] = (),
        ends: Collection[str] = (),
    ) -> None:
        self._inner = inner
        self._begin = begin
        self._end = end
        self._lead = "".join(lead.split())
        self._between = [bare for text in between if (bare := "".join(text.split()))]
        self._begins = begins
        self._ends = ends
        self._held: list[str] = []  # of a section without a call so far
        self._gap: str | None = None  # a possible separator; None: there can be none here
        self._is_open = False
        self._in_call = False
        self._follows_call = False

    @property
    def in_string(self) -> bool:
        """Returns True if a marker may be a part of a call."""
        return self._in_call or bool(getattr(self._inner, "in_string", False))

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        text, is_marker = lexeme
        if self._gap is not None and not self._in_call:
            bare = "".join((self._gap + text).split())
            if not is_marker and any(between.startswith(bare) for between in self._between):
                self._gap += text
                return
            gap, self._gap = self._gap, None
            if gap and not (is_marker and text in (*self._begins, self._end)):
                yield from self._events(self._inner.feed(Lexeme(gap)))
        if is_marker and not self.in_string:
            if text == self._begin:
                yield from self._flush()
                self._held, self._is_open = [text], False
                return
            if self._begin and text == self._end and (self._held or self._is_open):
                yield from self._events(self._inner.finish())
                if self._held:
                    yield from self._flush(text)
                self._is_open = False
                return
        elif self._held and self._inner.passes(text):
            bare = "".join("".join([*self._held[1:], text]).split())
            if self._lead.startswith(bare):
                self._held.append(text)
                return
        yield from self._events(self._inner.feed(lexeme))
        if self._between and self._follows_call and not self._in_call:
            self._gap = "" if not self._ends or (is_marker and text in self._ends) else self._gap

    def finish(self) -> Iterator[Event]:
        gap, self._gap = self._gap, None
        if gap:
            yield from self._events(self._inner.feed(Lexeme(gap)))
        yield from self._events(self._inner.finish())
        yield from self._flush()

    def passes(self, text: str) -> bool:
        return self._gap is None and not self._held and self._inner.passes(text)

    def _events(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, CallBegin):
                self._is_open = self._is_open or bool(self._held)
                self._held = []
                self._in_call = True
            elif isinstance(event, CallEnd):
                self._in_call, self._follows_call = False, True
            elif isinstance(event, ContentText):
                yield from self._flush()
                self._follows_call = self._follows_call and event.text.isspace()
            yield event

    def _flush(self, more: str = "") -> Iterator[Event]:
        held, self._held = "".join(self._held) + more, []
        if held:
            yield ContentText(held)
