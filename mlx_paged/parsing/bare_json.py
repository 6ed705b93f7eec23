"""Calls as JSON without markers: Llama 3, xLAM, and models without a syntax of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import ContentText, Event
from mlx_paged.parsing.format import ToolFormat
from mlx_paged.parsing.json_blocks import CLOSERS, json_array, json_call
from mlx_paged.parsing.json_calls import CallsReader, JsonCalls
from mlx_paged.parsing.lark import MORE_CALLS, Lark
from mlx_paged.parsing.lexer import Lexeme

# Text allowed before a call on its line: space, and a line that opens a block of code.
_OPENING = re.compile(r"[ \t]*(?:```[a-zA-Z_]*[ \t]*\n[ \t]*)?")
_MAY_BE_OPENING = re.compile(r"[ \t]*(?:`{1,2}|```[a-zA-Z_]*[ \t]*(?:\n[ \t]*)?)?")
_MAX_OPENING_LENGTH = 200  # characters


class BareCallsParser:
    """Text, and calls without markers that begin on a new line.

    Args:
        reader: Makes a reader of calls. Without calls, it is text.
        first: First characters of calls.
        begin: Markers after which a call may also begin.
        end: Markers that may follow a call.
        within: A first character of calls anywhere in a line, and a factory of readers for those.
        line_starts: Markers after which a call may begin as on a new line.
    """

    def __init__(
        self,
        reader: Callable[[], CallsReader],
        first: str = "{[",
        begin: Collection[str] = (),
        end: Collection[str] = (),
        within: tuple[str, Callable[[], CallsReader]] | None = None,
        line_starts: Collection[str] = (),
    ) -> None:
        self._within = within
        self._behind = line_starts
        self._reader = reader
        self._first = first
        self._begin = begin
        self._end = end
        self._calls: CallsReader | None = None
        self._before = ""  # the opening of the calls that are read
        self._held = ""  # possible opening
        self._marker = ""  # marker before it
        self._at_line_start = True
        self._follows_call = False

    def feed(self, lexeme: Lexeme) -> Iterable[Event]:
        out: list[Event] = []
        text, is_marker = lexeme
        if is_marker and (self._calls is None or not self._calls.in_string):
            if text in self._begin:
                self._close(out)
                # Repeated, or after a call, it has no meaning.
                self._marker = self._marker + text if self._marker else text
                self._at_line_start = True
                return out
            if text in self._behind:
                self._close(out)
                self._add_text(text, out)
                self._at_line_start = True
                return out
            if text in self._end and (self._calls is not None or self._follows_call):
                self._close(out, text)
                return out
        text = self._held + text
        self._held = ""
        at = 0
        while at < len(text):
            at = (
                self._read_text(text, at, out) if self._calls is None else self._read(text, at, out)
            )
        return out

    def passes(self, text: str) -> bool:
        return (
            self._calls is None
            and not self._held
            and not self._at_line_start
            and not self._follows_call
            and "\n" not in text
            and (self._within is None or self._within[0] not in text)
        )

    def finish(self) -> Iterable[Event]:
        out: list[Event] = []
        if self._follows_call and self._calls is None and not self._held.strip():
            self._marker = ""  # a marker that nothing follows
        self._close(out)
        return out

    def _read_text(self, text: str, at: int, out: list[Event]) -> int:
        if not self._at_line_start:
            newline = text.find("\n", at)
            end = len(text) if newline < 0 else newline + 1
            inner = text.find(self._within[0], at, end) if self._within is not None else -1
            if self._within is not None and inner >= 0:
                self._add_text(text[at:inner], out)
                self._before = ""
                self._calls = self._within[1]()
                return inner
            self._at_line_start = newline >= 0
            self._add_text(text[at:end], out)
            return end
        end = _OPENING.match(text, at).end()  # type: ignore[union-attr]
        if end < len(text) and text[end] in self._first:
            self._before = self._marker + text[at:end]
            self._marker = ""
            self._calls = self._reader()
            return end
        if len(text) - at < _MAX_OPENING_LENGTH and _MAY_BE_OPENING.fullmatch(text, at):
            self._held = text[at:]
            return len(text)
        self._at_line_start = False
        return at

    def _read(self, text: str, at: int, out: list[Event]) -> int:
        calls = self._calls
        assert calls is not None
        at = calls.feed(text, at, out)
        if at == len(text) and not calls.has_failed:
            return at
        if calls.num_calls and not calls.has_failed:
            closers = CLOSERS + "`" if "`" in self._before else CLOSERS
            while at < len(text) and text[at] in closers:
                at += 1
            if at == len(text):
                return at
        self._close(out)
        self._at_line_start = False
        return at

    def _add_text(self, text: str, out: list[Event]) -> None:
        if self._marker:
            text, self._marker = self._marker + text, ""
        if text:
            out.append(ContentText(text))
            self._follows_call = self._follows_call and not text.strip()

    def _close(self, out: list[Event], marker: str = "") -> None:
        """Ends the calls that are read. Without a call they are text."""
        if self._calls is None:
            held, self._held = self._held, ""
            self._add_text(held, out)
            return
        calls, self._calls = self._calls, None
        calls.finish(out)
        unread = calls.unread()
        self._follows_call = calls.num_calls > 0
        if not calls.num_calls:
            unread = self._before + unread + marker
        if unread.strip():
            self._add_text(unread, out)


class BareJsonFormat(ToolFormat):
    """Call objects on separate lines, or an array of them.

    An object is a call if its name is a tool's. Anything else is text, such as an answer in JSON.

    Attributes:
        is_array: True if templates render calls as an array.
        arguments_key: Key of the arguments.
        within: First character of calls with arguments anywhere in a line; "" for none.
        line_starts: See `BareCallsParser`.
    """

    is_array: ClassVar[bool] = True
    arguments_key: ClassVar[str] = "arguments"
    within: ClassVar[str] = ""
    line_starts: ClassVar[tuple[str, ...]] = ()

    def parser(self, tools: Sequence[Tool]) -> BareCallsParser:
        others = (*self.begins_call, *self.line_starts)
        ends = [marker for marker in self.markers if marker not in others]
        known = {tool.name for tool in tools}

        def within() -> JsonCalls:  # Here, a name alone is only mentioned.
            return JsonCalls(known, is_bare=True, needs_arguments=True)

        return BareCallsParser(
            lambda: JsonCalls(known, is_bare=True),
            "{[",
            self.begins_call,
            ends,
            within=(self.within, within) if self.within else None,
            line_starts=self.line_starts,
        )

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark = Lark(self.vocabulary)
        call = json_call(lark, tools, self.arguments_key)
        calls = f'{call} ("; " {call}){MORE_CALLS}' if parallel else call
        if self.is_array:
            calls = json_array(call, parallel=parallel)
        return lark.bare_answer(
            lark.rule(calls),
            r"{\[",
            required=required,
            others=(*self.begins_call, *self.line_starts),
            within=self.within,
        )
