"""Answers made of messages, whose headers mark them as reasoning, text, or calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum

from mlx_paged.parsing.events import ContentText, Event, ReasoningText
from mlx_paged.parsing.format import Parser
from mlx_paged.parsing.lark import Lark
from mlx_paged.parsing.lexer import Lexeme


class Body(Enum):
    """The kind of a message."""

    REASONING = "reasoning"
    TEXT = "text"
    CALLS = "calls"


def message_rules(
    lark: Lark, markers: Collection[str], end: str, again: str
) -> Callable[[str], str]:
    """Makes rules for messages that another one follows.

    Args:
        lark: Destination of the rules.
        markers: The format's markers, which no message's text contains.
        end: Marker that ends a message.
        again: Beginning of the next one.

    Returns:
        A function from the text that opens a message to its rule.
    """
    others = [marker for marker in markers if marker != end]
    begin = lark.literal(again)

    def message(opening: str) -> str:
        return lark.rule(f"{lark.literal(opening)} {lark.until(end, others=others)} {begin}")

    return message


def channel_answer(
    lark: Lark, markers: Collection[str], *, thoughts: str, texts: str, last: str, calls: str
) -> str:
    """Returns the grammar of an answer in messages: reasoning and texts, then calls or a text.

    Args:
        lark: Destination of the rules.
        markers: The format's markers.
        thoughts, texts: Rules of messages that others follow.
        last: Text that opens the last message; "": only calls may be last.
        calls: Rule of calls.
    """
    if not last:
        lark.rule(f"{thoughts}* {calls}", "start")
        return lark.text()
    text = lark.terminal(lark.without(markers))
    final = f"{lark.literal(last)} {text}"
    lark.rule(f"({thoughts} | {texts})* ({calls} | {final})", "start")
    return lark.text()


class ChannelParser:
    """Reads messages: a header, a marker that opens the body, the body, and a marker that ends it.

    Text that cannot be a header is the answer's text. Two texts, or two parts of the reasoning, are
    joined by a newline.

    Args:
        opens: Markers that open a body.
        ends: Markers that end a body. Without an open body, one begins a new header.
        header: Matches every header, and every beginning of one.
        body_of: Returns the kind of a body from its header and its opening marker.
        calls: Reads bodies of calls, including their opening marker if that is in `begins_call`.
        begins_call: Markers that begin a call, whether a body is open or not.
        begins_with: The body that the prompt has opened; None: the prompt ends within a header.

    Attributes:
        in_reasoning: True if the last lexeme is reasoning, including its end marker.
    """

    def __init__(
        self,
        *,
        opens: Collection[str],
        ends: Collection[str],
        header: re.Pattern[str],
        body_of: Callable[[str, str], Body],
        calls: Parser,
        begins_call: Collection[str] = (),
        begins_with: Body | None = None,
    ) -> None:
        self._opens = frozenset(opens)
        self._ends = frozenset(ends)
        self._pattern = header
        self._body_of = body_of
        self._calls = calls
        self._begins_call = frozenset(begins_call)
        self._body = begins_with
        self._header = ""
        self._is_first = True  # until the first marker
        self._made: Mapping[Body, Callable[[str], Event]] = {
            Body.REASONING: ReasoningText,
            Body.TEXT: ContentText,
        }
        self._has_written: set[Body] = set()  # kinds with text so far
        self._separates = False  # True if a newline must precede the next text of this kind
        self.in_reasoning = False

    def feed(self, lexeme: Lexeme) -> Iterable[Event]:
        out: list[Event] = []
        text, is_marker = lexeme
        self.in_reasoning = self._body is Body.REASONING
        self._is_first = self._is_first and not is_marker
        if self._body is Body.CALLS:
            ends = is_marker and text in (self._ends | self._opens) - self._begins_call
            if not ends or self._in_string:
                self._add_calls(lexeme, out)
                return out
            self._close(out)
        if not is_marker:
            self._add(text, out)
        elif text in self._begins_call:
            self._body = Body.CALLS
            self._add_calls(lexeme, out)
        elif text in self._opens:
            header = self._header if self._body is None else ""
            self._open(self._body_of(header, text))
        elif text in self._ends:
            self._close(out)
        return out

    def passes(self, text: str) -> bool:
        return self._body is Body.TEXT and not self._separates and Body.TEXT in self._has_written

    def finish(self) -> Iterable[Event]:
        out: list[Event] = []
        if self._is_first:  # no marker came
            self._flush(out)
        self._close(out)
        return out

    @property
    def _in_string(self) -> bool:
        """True while a string of a call is open: a marker in it is text."""
        return bool(getattr(self._calls, "in_string", False))

    def _open(self, body: Body) -> None:
        self._body, self._header = body, ""
        self._separates = body in self._has_written

    def _close(self, out: list[Event]) -> None:
        """Ends the open body: a header follows."""
        if self._body is Body.CALLS:
            self._give(self._calls.finish(), out)
        self._body, self._header = None, ""

    def _add(self, text: str, out: list[Event]) -> None:
        """Text of the open body, or of a header."""
        if self._body is None:
            self._header += text
            if self._pattern.fullmatch(self._header) is None:
                self._flush(out)
            return
        if not text:
            return
        if self._separates:
            text, self._separates = "\n" + text, False
        self._has_written.add(self._body)
        out.append(self._made[self._body](text))

    def _flush(self, out: list[Event]) -> None:
        """Emits a held header as text, because it turned out not to be one."""
        header, self._header = self._header, ""
        if self._body is None and header.strip():
            self._open(Body.TEXT)
            self._add(header, out)

    def _add_calls(self, lexeme: Lexeme, out: list[Event]) -> None:
        self._give(self._calls.feed(lexeme), out)

    def _give(self, events: Iterable[Event], out: list[Event]) -> None:
        for event in events:
            if isinstance(event, ContentText):
                if Body.TEXT not in self._has_written:
                    event = ContentText(event.text.lstrip())
                    if not event.text:
                        continue
                self._has_written.add(Body.TEXT)
            out.append(event)
