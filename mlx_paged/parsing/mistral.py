"""Mistral: a JSON array after ``[TOOL_CALLS]`` (old), or each call's name and arguments (new).

[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}]
[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Oslo"}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from mlx_paged.parsing.call_ids import new_call_id
from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    Event,
)
from mlx_paged.parsing.format import ToolFormat, lark_arguments
from mlx_paged.parsing.json_blocks import CallBlockParser, json_array, json_call
from mlx_paged.parsing.json_calls import JsonArguments, JsonCalls
from mlx_paged.parsing.lark import Lark
from mlx_paged.parsing.lexer import Lexeme

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_CALL_ID = re.compile("[a-zA-Z0-9]{9}")
_MAX_NAME_LENGTH = 256  # characters, with space around it


class MistralFormat(ToolFormat):
    """Reads both forms. The vocabulary determines the forced one: only new ones have [ARGS]."""

    names = ("mistral",)
    models = "Mistral, Mixtral, Ministral, Magistral, Devstral"
    markers = (_CALLS, _ID, _ARGUMENTS)
    begins_call = (_CALLS,)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _CALLS in chat_template or _CALLS in vocabulary

    def parser(self, tools: Sequence[Tool]) -> MistralParser:
        return MistralParser(tools)

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark = Lark(self.vocabulary)
        if _ARGUMENTS in self.vocabulary or _ARGUMENTS in self.chat_template:
            before = self.literal(_ARGUMENTS)
            if _ID in self.chat_template:
                before = f"{self.literal(_ID)} {lark.terminal('/[a-zA-Z0-9]{9}/')} {before}"
            calls = [
                f"{self.literal(tool.name)} {before} {lark.rule(lark_arguments(tool))}"
                for tool in tools
            ]
            call = lark.rule("\n  | ".join(calls))
            return lark.answer(_CALLS, call, required=required, parallel=parallel, between="")
        array = json_array(json_call(lark, tools), parallel=parallel)
        if f"{_CALLS} [" in self.chat_template:
            array = f'" " {array}'
        return lark.answer(_CALLS, lark.rule(array), required=required, parallel=False)


class MistralParser:
    """Text, then calls. The text after ``[TOOL_CALLS]`` shows their form.

    Args:
        tools: Tools that may be called; a call of another one is text.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._known = {tool.name for tool in tools}
        self._array: CallBlockParser | None = None  # reads the old form
        self._state: Callable[[Lexeme, list[Event]], None] = self._in_text
        self._raw: list[str] = []  # of a possible call
        self._name = ""
        self._id = ""
        self._arguments = JsonArguments()
        self._has_begun = False  # the open call
        self._follows_call = False

    @property
    def _in_string(self) -> bool:
        if self._array is not None:
            return self._array.in_string
        return self._state == self._in_arguments and self._arguments.in_string

    def feed(self, lexeme: Lexeme) -> Iterable[Event]:
        out: list[Event] = []
        if lexeme == (_CALLS, True) and self._array is not None:
            self._state(lexeme, out)
        elif lexeme == (_CALLS, True) and not self._in_string:
            if self._state == self._in_name and not self._name.strip():  # once more
                self._raw.append(_CALLS)
            else:
                self._close(out)
                self._raw = [_CALLS]
            self._name, self._id = "", ""
            self._state = self._in_name
        else:
            self._state(lexeme, out)
        return out

    def passes(self, text: str) -> bool:
        return self._state == self._in_text and self._array is None and not self._follows_call

    def finish(self) -> Iterable[Event]:
        out: list[Event] = []
        self._close(out)
        return out

    def _close(self, out: list[Event]) -> None:
        """Ends an open call."""
        has_name = self._name.strip() in self._known
        if self._array is not None:
            out.extend(self._array.finish())
            self._array = None
        elif self._state == self._in_arguments or (self._state == self._in_id and has_name):
            if not self._has_begun:
                self._begin(out)
            if rest := self._arguments.rest():
                out.append(CallArguments(rest))
            out.append(CallEnd(is_complete=False))
            self._follows_call = True
        elif self._raw and not (self._follows_call and not self._name.strip()):
            self._as_text(out)
        self._raw = []
        self._state = self._in_text

    def _in_text(self, lexeme: Lexeme, out: list[Event]) -> None:
        self._follows_call = self._follows_call and not lexeme.text.strip()
        out.append(ContentText(lexeme.text))

    def _as_text(self, out: list[Event]) -> None:
        """Returns text that turned out to be no call."""
        out.append(ContentText("".join(self._raw)))
        self._raw = []
        self._follows_call = False
        self._state = self._in_text

    def _in_array(self, lexeme: Lexeme, out: list[Event]) -> None:
        assert self._array is not None
        if lexeme == (_CALLS, True) and not self._array.in_string and self._array.passes("x"):
            self._array = None
            self._raw, self._name, self._id = [_CALLS], "", ""
            self._state = self._in_name
            return
        out.extend(self._array.feed(lexeme))

    def _begin_array(self) -> CallBlockParser:
        known = self._known
        array = CallBlockParser((_CALLS,), (), lambda: JsonCalls(known, one=True))
        for raw in self._raw:
            list(array.feed(Lexeme(raw, raw == _CALLS)))
        self._raw = []
        return array

    def _in_name(self, lexeme: Lexeme, out: list[Event]) -> None:
        text, is_marker = lexeme
        name = self._name.strip()
        if is_marker and name in self._known:
            self._raw.append(text)
            self._state = self._in_id
            if text == _ARGUMENTS:
                self._begin_arguments()
            return
        if is_marker:
            self._raw.append(text)
            self._as_text(out)
            return
        if not name and text.lstrip()[:1] in ("[", "{"):
            self._array = self._begin_array()
            self._state = self._in_array
            self._in_array(lexeme, out)
            return
        bracket = text.find("{")
        before = text if bracket < 0 else text[:bracket]
        self._name += before
        self._raw.append(before)
        name = self._name.strip()
        if bracket >= 0 and name in self._known:  # without [ARGS]
            self._begin_arguments()
            self._in_arguments(Lexeme(text[bracket:]), out)
        elif bracket >= 0 or len(name.split(maxsplit=1)) > 1 or len(self._name) > _MAX_NAME_LENGTH:
            self._as_text(out)
            if bracket >= 0:
                self._in_text(Lexeme(text[bracket:]), out)

    def _in_id(self, lexeme: Lexeme, out: list[Event]) -> None:
        if lexeme == (_ARGUMENTS, True):
            self._raw.append(lexeme.text)
            self._begin_arguments()
            return
        before, bracket, rest = lexeme.text.partition("{")
        self._raw.append(before)
        self._id += before
        if bracket:  # without [ARGS]
            self._begin_arguments()
            self._in_arguments(Lexeme(bracket + rest), out)
        elif len(self._id) > _MAX_NAME_LENGTH:
            self._as_text(out)

    def _begin_arguments(self) -> None:
        self._arguments, self._has_begun = JsonArguments(), False
        self._state = self._in_arguments

    def _begin(self, out: list[Event]) -> None:
        name = self._name.strip()
        # One of several words is the id; the others are text.
        words = self._id.split()
        call_id = next((word for word in words if _CALL_ID.fullmatch(word)), "")
        call_id = call_id or (words[0] if len(words) == 1 else "")
        if rest := " ".join(word for word in words if word != call_id):
            out.append(ContentText(rest))
        out.append(CallBegin(name, call_id or new_call_id(name, 0, "nine")))
        self._raw = []
        self._has_begun = True

    def _in_arguments(self, lexeme: Lexeme, out: list[Event]) -> None:
        arguments, text = self._arguments, lexeme.text
        at, piece = arguments.take(text)
        if arguments.has_failed:
            self._raw += arguments.raw
            self._as_text(out)
            if at < len(text):
                self._in_text(Lexeme(text[at:]), out)
            return
        if arguments.has_begun and not self._has_begun:
            self._begin(out)
        if piece:
            out.append(CallArguments(piece))
        if arguments.has_ended:
            out.append(CallEnd(arguments.is_complete))
            self._follows_call = True
            self._state = self._in_text
            if at < len(text):
                self._in_text(Lexeme(text[at:]), out)
