"""Mistral: a JSON array after ``[TOOL_CALLS]`` (old), or name and arguments of each call (new).

[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}]
[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Oslo"}
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterable, Mapping, Sequence

from mlx_paged.server.tools.definitions import Tool
from mlx_paged.server.tools.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    Event,
)
from mlx_paged.server.tools.format import ToolFormat, lark_arguments
from mlx_paged.server.tools.json_blocks import CallBlockParser, json_array, json_call
from mlx_paged.server.tools.json_calls import JsonValue
from mlx_paged.server.tools.lark import Lark
from mlx_paged.server.tools.lexer import Lexeme

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_CHARACTERS = string.ascii_letters + string.digits
_LONGEST_NAME = 256  # characters, with space around it


def new_id() -> str:
    """An id as Mistral's templates demand them: nine letters and digits."""
    return "".join(random.choices(_ID_CHARACTERS, k=9))


class MistralFormat(ToolFormat):
    """Both forms are read. The vocabulary says which one is forced: only new ones have [ARGS]."""

    names = ("mistral",)
    models = "Mistral, Mixtral, Ministral, Magistral, Devstral"
    markers = (_CALLS, _ID, _ARGUMENTS)
    begins_call = (_CALLS,)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _CALLS in chat_template or _CALLS in vocabulary

    def parser(self, tools: Sequence[Tool]) -> MistralParser:
        return MistralParser()

    def forced(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
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
    """Text, then calls. What follows ``[TOOL_CALLS]`` shows which form it is."""

    def __init__(self) -> None:
        self._array: CallBlockParser | None = None  # reads the old form
        self._state: Callable[[Lexeme, list[Event]], None] = self._in_text
        self._raw: list[str] = []  # of a call whose name is not known yet
        self._name = ""
        self._id = ""
        self._value = JsonValue()

    @property
    def _in_string(self) -> bool:
        if self._array is not None:
            return self._array.in_string
        return self._value.in_string

    def feed(self, lexeme: Lexeme) -> Iterable[Event]:
        out: list[Event] = []
        if lexeme == (_CALLS, True) and not self._in_string:
            self._close(out)
            self._raw, self._name, self._id = [_CALLS], "", ""
            self._state = self._in_name
        else:
            self._state(lexeme, out)
        return out

    def passes(self, text: str) -> bool:
        return self._state == self._in_text and self._array is None

    def finish(self) -> Iterable[Event]:
        out: list[Event] = []
        self._close(out)
        return out

    def _close(self, out: list[Event]) -> None:
        """Ends an open call."""
        if self._array is not None:
            out.extend(self._array.finish())
            self._array = None
        elif self._state == self._in_arguments:
            if not self._value.has_begun:
                out.append(CallArguments("{}"))
            out.append(CallEnd(is_complete=False))
        elif self._state == self._in_id:
            out.append(CallBegin(self._name.strip(), new_id()))
            out.append(CallEnd(is_complete=False))
        elif self._raw:
            out.append(ContentText("".join(self._raw)))
        self._raw = []
        self._value = JsonValue()
        self._state = self._in_text

    def _in_text(self, lexeme: Lexeme, out: list[Event]) -> None:
        out.append(ContentText(lexeme.text))

    def _in_array(self, lexeme: Lexeme, out: list[Event]) -> None:
        assert self._array is not None
        out.extend(self._array.feed(lexeme))

    def _in_name(self, lexeme: Lexeme, out: list[Event]) -> None:
        text, is_marker = lexeme
        name = self._name.strip()
        if is_marker and name:
            self._state = self._in_id
            if text == _ARGUMENTS:
                self._begin_arguments(out)
            return
        bracket = -1 if is_marker else text.find("{")
        if not is_marker and not name and text.lstrip()[:1] in ("[", "{"):
            self._array = CallBlockParser(_CALLS)
            self._array.feed(Lexeme(_CALLS, True))
            out.extend(self._array.feed(Lexeme(self._name + text)))
            self._state, self._raw = self._in_array, []
            return
        self._name += text if bracket < 0 else text[:bracket]
        self._raw.append(text if bracket < 0 else text[:bracket])
        name = self._name.strip()
        if is_marker or len(name.split(maxsplit=1)) > 1 or len(self._name) > _LONGEST_NAME:
            self._close(out)  # it is no call
            if bracket >= 0:
                out.append(ContentText(text[bracket:]))
        elif bracket >= 0:  # (without [ARGS])
            self._begin_arguments(out)
            self._in_arguments(Lexeme(text[bracket:]), out)

    def _in_id(self, lexeme: Lexeme, out: list[Event]) -> None:
        if lexeme == (_ARGUMENTS, True):
            self._begin_arguments(out)
        else:
            self._id += lexeme.text

    def _begin_arguments(self, out: list[Event]) -> None:
        out.append(CallBegin(self._name.strip(), self._id.strip() or new_id()))
        self._raw = []
        self._state = self._in_arguments

    def _in_arguments(self, lexeme: Lexeme, out: list[Event]) -> None:
        at, piece = self._value.take(lexeme.text)
        if piece:
            out.append(CallArguments(piece))
        if self._value.has_ended:
            out.append(CallEnd())
            self._state = self._in_text
            if at < len(lexeme.text):
                out.append(ContentText(lexeme.text[at:]))
