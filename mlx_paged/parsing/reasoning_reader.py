"""ReasoningParser: separates reasoning from the answer by the markers of a reasoning format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from mlx_paged.parsing.events import CallBegin, CallEnd, ContentText, Event, ReasoningText
from mlx_paged.parsing.format import Parser
from mlx_paged.parsing.lexer import Lexeme
from mlx_paged.parsing.reasoning import ReasoningFormat


class ReasoningParser:
    """Reads reasoning up to its end marker; another parser reads the rest.

    It ends once: later markers are text, and so are those within a call. A marker that is text, not
    a token, opens reasoning only at the beginning of the answer; later it is a mention. Newlines
    that the template puts around reasoning belong to neither.

    A call within reasoning ends it, because some models forget to. The parser of calls decides if a
    marker begins one; if it finds text, that is reasoning.

    Args:
        format: Its markers.
        parser: Makes a parser of the answer.
        begins_inside: True if the prompt ends within the reasoning, as in many templates.
        begins_call: Markers with which a call may begin within reasoning.
        begins_text: Markers of the answer's text, which end reasoning without its own end marker.

    Attributes:
        in_reasoning: True if the last text is reasoning, including its end marker; None while it
            may be the beginning of a call.
    """

    def __init__(
        self,
        format: ReasoningFormat,
        parser: Callable[[], Parser],
        *,
        begins_inside: bool,
        begins_call: Collection[str] = (),
        begins_text: Collection[str] = (),
    ) -> None:
        self._start = Lexeme(format.start, True)
        self._end = Lexeme(format.end, True)
        self._is_spelled = format.tokens is not None and len(format.tokens.start) > 1
        self._parser = parser
        self._inner = parser()
        self._trial: Parser | None = None  # reads a possible call within the reasoning
        self._is_inside = begins_inside
        self._begins_call = begins_call
        self._begins_text = begins_text
        self._has_ended = False
        self._was_interrupted = False
        self._reasoning = _Trimmed()
        self._follows_reasoning = False  # the answer's first newlines are dropped
        self._has_answered = False
        self._in_call = False
        self.in_reasoning: bool | None = False

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        self.in_reasoning = self._is_inside
        if self._is_inside:
            yield from self._feed_reasoning(lexeme)
            return
        if lexeme.is_marker and not self._in_call:
            is_text = self._has_ended or (self._is_spelled and self._has_answered)
            if lexeme == self._start and not is_text:
                self._is_inside = True
                return
            if lexeme == self._end and (self._was_interrupted or not is_text):
                self._was_interrupted = False
                return
        if self._follows_reasoning and not lexeme.is_marker:
            lexeme = Lexeme(lexeme.text.lstrip("\n"))
            if not lexeme.text:
                return
        self._follows_reasoning = False
        self._has_answered = self._has_answered or lexeme.is_marker or not lexeme.text.isspace()
        yield from self._answer(self._inner.feed(lexeme))

    def passes(self, text: str) -> bool:
        return (
            not self._is_inside
            and not self._follows_reasoning
            and self._has_answered
            and self._inner.passes(text)
        )

    def finish(self) -> Iterator[Event]:
        if self._trial is not None:
            self.in_reasoning = True
            yield from self._tried(self._trial.finish())
        if not self._is_inside:
            yield from self._inner.finish()

    def _feed_reasoning(self, lexeme: Lexeme) -> Iterator[Event]:
        if lexeme == self._end:
            if self._trial is not None:
                yield from self._tried(self._trial.finish())
            self._trial = None
            self._leave()
            return
        if lexeme.is_marker and lexeme.text in self._begins_text and self._trial is None:
            self._leave()
            self._was_interrupted, self._follows_reasoning = True, False
            yield from self.feed(lexeme)
            self.in_reasoning = False
            return
        if self._trial is None and lexeme.is_marker and lexeme.text in self._begins_call:
            self._trial = self._parser()
        if self._trial is not None:
            self.in_reasoning = None
            yield from self._tried(self._trial.feed(lexeme))
        elif lexeme != self._start:
            yield from self._reason(lexeme.text)

    def _tried(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yields events of the trial parser: text is reasoning, and a call ends the reasoning."""
        for event in events:
            if isinstance(event, ContentText) and self._is_inside:
                self.in_reasoning = True
                yield from self._reason(event.text)
                continue
            if self._is_inside:
                assert self._trial is not None
                self._inner, self._trial = self._trial, None
                self._leave()
                self._was_interrupted = self._has_answered = True
                self._follows_reasoning = self.in_reasoning = False
            yield from self._answer((event,))

    def _reason(self, text: str) -> Iterator[Event]:
        if certain := self._reasoning.take(text):
            yield ReasoningText(certain)

    def _leave(self) -> None:
        self._is_inside = False
        self._has_ended = self._follows_reasoning = True

    def _answer(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, (CallBegin, CallEnd)):
                self._in_call = isinstance(event, CallBegin)
            yield event


class _Trimmed:
    """A growing text without whitespace at its ends."""

    def __init__(self) -> None:
        self._space = ""
        self._has_begun = False

    def take(self, text: str) -> str:
        """Returns the text that is certain to be reasoning."""
        if not self._has_begun:
            text = text.lstrip()
            self._has_begun = bool(text)
        text = self._space + text
        certain = text.rstrip()
        self._space = text[len(certain) :]
        return certain


class ContentTrimmer:
    """Holds back whitespace at the end of the answer's text until the next event is known.

    Whitespace between a text and a call belongs to the call's syntax.
    """

    def __init__(self) -> None:
        self._space = ""
        self._after_call = False
        self._has_call = False

    def passes(self, text: str) -> bool:
        """Returns True if a text is passed on unchanged and changes no state here."""
        return not (self._space or self._after_call or text[-1].isspace())

    def take(self, event: Event) -> Iterator[Event]:
        """Reads an event; returns those that are certain."""
        if not isinstance(event, ContentText):
            if not isinstance(event, ReasoningText):
                self._space = ""
                self._after_call = self._has_call = True
            yield event
            return
        text = self._space + event.text
        if self._after_call:
            text = text.lstrip()
        certain = text.rstrip()
        self._space = text[len(certain) :]
        if certain:
            self._after_call = False
            yield ContentText(certain)

    def finish(self) -> Iterator[Event]:
        """Ends the answer: whitespace at its end is text, unless there were calls."""
        if self._space and not self._has_call:
            yield ContentText(self._space)
        self._space = ""
