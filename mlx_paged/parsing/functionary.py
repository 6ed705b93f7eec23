"""Functionary 3.1 and 3.2: a name and JSON.

3.1: <function=get_weather>{"city": "Oslo"}</function>

3.2, where "all" stands for text, and the prompt ends with the first ``>>>``:
>>>all
Let me see.>>>get_weather
{"city": "Oslo"}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import CallArguments, CallBegin, CallEnd, ContentText, Event
from mlx_paged.parsing.format import Parser, ToolFormat, lark_arguments
from mlx_paged.parsing.json_value import JsonValue
from mlx_paged.parsing.lark import MORE_CALLS, Lark
from mlx_paged.parsing.lexer import Lexeme
from mlx_paged.parsing.named_json import Marks, NamedJsonParser

_MARKS = Marks(call="<function=", arguments="", call_end="</function>", block=("", ""))
_NAME = re.compile(r"([^\s{}<>]+)>\s*")
_NEXT, _TEXT = ">>>", "all"
_HEADER = re.compile(r"[\w.-]{0,256}")


class FunctionaryV31Format(ToolFormat):
    """A name in a tag, and JSON after it."""

    names = ("functionary_v3_1",)
    models = "Functionary 3.1"
    markers = _MARKS.all
    begins_call = (_MARKS.call,)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _MARKS.call in chat_template and "<parameter=" not in chat_template

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return NamedJsonParser(_MARKS, _name_of, tools)

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark = Lark(self.vocabulary)
        calls = []
        for tool in tools:
            calls.append(f"{lark.literal(f'{tool.name}>')} {lark.rule(lark_arguments(tool))}")
        call = lark.rule(f"({' | '.join(calls)}) {lark.literal(_MARKS.call_end)}")
        return lark.answer(_MARKS.call, call, required=required, parallel=parallel, between="")


def _name_of(head: str, tail: str) -> tuple[str, None] | None:
    found = _NAME.fullmatch(head)
    return (found[1], None) if found is not None else None


class FunctionaryV32Format(ToolFormat):
    """A recipient on its own line, then text or JSON."""

    names = ("functionary_v3_2",)
    models = "Functionary 3.2"
    markers = (_NEXT,)
    begins_call = (_NEXT,)
    frames_text = True

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return f"{_NEXT}{_TEXT}" in chat_template

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return FunctionaryParser(tools)

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark = Lark(self.vocabulary)
        calls = []
        for tool in tools:
            head = lark.literal(tool.name + "\n")
            calls.append(f"{head} {lark.rule(lark_arguments(tool))}")
        call = lark.rule(" | ".join(calls))
        marker = lark.literal(_NEXT)
        more = lark.rule(f"{call} ({marker} {call}){MORE_CALLS}") if parallel else call
        if required:
            lark.rule(f"({marker})? {more}", "start")
        else:
            header = lark.literal(f"{_TEXT}\n")
            text = lark.terminal(lark.without(self.markers))
            lark.rule(
                f"({marker})? ({more} | {header} {text} | {header} {lark.until(_NEXT)} {more})",
                "start",
            )
        return lark.text()


class FunctionaryParser:
    """Reads an answer that begins after ``>>>``. A header that does not name a tool is text."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._known = {tool.name for tool in tools}
        self._state: Callable[[Lexeme, list[Event]], None] = self._in_header
        self._header = ""
        self._marker = ""  # before the header
        self._value = JsonValue()

    def feed(self, lexeme: Lexeme) -> Iterable[Event]:
        out: list[Event] = []
        self._state(lexeme, out)
        return out

    def passes(self, text: str) -> bool:
        return self._state == self._in_text

    def finish(self) -> Iterable[Event]:
        out: list[Event] = []
        if self._state == self._in_header and self._header != _TEXT:
            self._no_header(out)
        elif self._state == self._in_call:
            self._end_call(out)
        return out

    def _no_header(self, out: list[Event]) -> None:
        text, self._header, self._marker = self._marker + self._header, "", ""
        if text:
            out.append(ContentText(text))
        self._state = self._in_text

    def _in_header(self, lexeme: Lexeme, out: list[Event]) -> None:
        if lexeme.is_marker:
            if self._marker or self._header:
                self._no_header(out)
            self._marker, self._state = lexeme.text, self._in_header
            return
        name, newline, rest = lexeme.text.partition("\n")
        self._header += name
        if _HEADER.fullmatch(self._header) is None:
            self._no_header(out)
            if newline + rest:
                out.append(ContentText(newline + rest))
        elif newline:
            name = self._header
            if name == _TEXT:
                self._header, self._state = "", self._in_text
            elif name in self._known:
                self._value, self._state = JsonValue(), self._in_call
            else:
                self._no_header(out)
                rest = newline + rest
            if rest:
                self._state(Lexeme(rest), out)

    def _in_text(self, lexeme: Lexeme, out: list[Event]) -> None:
        if lexeme.is_marker:
            self._marker, self._header, self._state = lexeme.text, "", self._in_header
        else:
            out.append(ContentText(lexeme.text))

    def _in_call(self, lexeme: Lexeme, out: list[Event]) -> None:
        if lexeme.is_marker and not self._value.in_string:
            self._end_call(out)
            self._marker, self._header, self._state = lexeme.text, "", self._in_header
            return
        text = lexeme.text
        if not self._value.has_begun and (bare := text.strip()):
            if bare[0] != "{":
                header, self._header = self._header, ""
                self._header = header + "\n" + text
                self._no_header(out)
                return
            self._begin(out)
        at, piece = self._value.take(text)
        if piece:
            out.append(CallArguments(piece))
        if self._value.has_ended and text[at:].strip():
            self._end_call(out)
            self._state = self._in_text
            out.append(ContentText(text[at:]))

    def _begin(self, out: list[Event]) -> None:
        out.append(CallBegin(self._header))
        self._header = self._marker = ""

    def _end_call(self, out: list[Event]) -> None:
        if not self._value.has_begun:
            self._begin(out)
            out += [CallArguments("{}"), CallEnd()]
        else:
            if rest := self._value.rest():
                out.append(CallArguments(rest))
            out.append(CallEnd(self._value.has_ended and not self._value.is_broken))
