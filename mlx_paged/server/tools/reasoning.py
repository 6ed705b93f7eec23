"""Tells reasoning from the answer, by the markers of the model's reasoning format."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from mlx_paged.engine.reasoning import ReasoningFormat
from mlx_paged.server.tools.events import CallBegin, CallEnd, ContentText, Event, ReasoningText
from mlx_paged.server.tools.format import Parser
from mlx_paged.server.tools.lexer import Lexeme


class ReasoningParser:
    """Reasoning up to its end marker; what follows is for another parser.

    It ends once: markers that come later are text, and so are those within a call. A marker that is
    text, not a token, opens reasoning only where the answer begins: later it is a mention. Newlines
    that the template puts around reasoning are part of neither.

    Args:
        format: its markers.
        inner: reads the answer.
        begins_inside: whether the prompt ends within the reasoning, as many templates do.
        interrupted_by: markers that end reasoning as well: those of calls, which some models begin
            without ending it.
    """

    def __init__(
        self,
        format: ReasoningFormat,
        inner: Parser,
        *,
        begins_inside: bool,
        interrupted_by: Collection[str] = (),
    ) -> None:
        self._start = Lexeme(format.start, True)
        self._end = Lexeme(format.end, True)
        self._is_spelled = format.tokens is not None and len(format.tokens.start) > 1
        self._inner = inner
        self._is_inside = begins_inside
        self._interrupted_by = interrupted_by
        self._has_ended = False
        self._was_interrupted = False
        self._reasoning = _Trimmed()
        self._follows_reasoning = False  # the answer's first newlines are dropped
        self._has_answered = False
        self._in_call = False

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        if self._is_inside:
            if lexeme == self._end:
                self._leave()
            elif lexeme.is_marker and lexeme.text in self._interrupted_by:
                self._leave()
                self._was_interrupted = True
                yield from self._answer(lexeme)
            elif lexeme != self._start and (text := self._reasoning.take(lexeme.text)):
                yield ReasoningText(text)
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
        yield from self._answer(lexeme)

    def passes(self, text: str) -> bool:
        return (
            not self._is_inside
            and not self._follows_reasoning
            and self._has_answered
            and self._inner.passes(text)
        )

    def finish(self) -> Iterable[Event]:
        return self._inner.finish()

    def _leave(self) -> None:
        self._is_inside = False
        self._has_ended = self._follows_reasoning = True

    def _answer(self, lexeme: Lexeme) -> Iterator[Event]:
        self._follows_reasoning = False
        self._has_answered = self._has_answered or lexeme.is_marker or not lexeme.text.isspace()
        for event in self._inner.feed(lexeme):
            if isinstance(event, (CallBegin, CallEnd)):
                self._in_call = isinstance(event, CallBegin)
            yield event


class _Trimmed:
    """A text without the space at its ends, as it grows."""

    def __init__(self) -> None:
        self._space = ""
        self._has_begun = False

    def take(self, text: str) -> str:
        """What is certain to be part of it."""
        if not self._has_begun:
            text = text.lstrip()
            self._has_begun = bool(text)
        text = self._space + text
        certain = text.rstrip()
        self._space = text[len(certain) :]
        return certain


class ContentTrimmer:
    """Holds back space at the end of the answer's text until it is known what follows it.

    Space between a text and a call belongs to the call's syntax.
    """

    def __init__(self) -> None:
        self._space = ""
        self._after_call = False

    def passes(self, text: str) -> bool:
        """Whether a text comes out as it is, and changes nothing here."""
        return not (self._space or self._after_call or text[-1].isspace())

    def take(self, event: Event) -> Iterator[Event]:
        """An event in, those that are certain out."""
        if not isinstance(event, ContentText):
            if not isinstance(event, ReasoningText):
                self._space = ""
                self._after_call = True
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
        """The answer has ended: the space at its end is text."""
        if self._space and not self._after_call:
            yield ContentText(self._space)
        self._space = ""
