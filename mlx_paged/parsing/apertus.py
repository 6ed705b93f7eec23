"""Apertus: an array of objects, each with a tool's name as its only key.

<|tools_prefix|>[{"get_weather": {"city": "Oslo"}}]<|tools_suffix|>
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import CallArguments, CallBegin, CallEnd, Event
from mlx_paged.parsing.format import Parser, ToolFormat, lark_arguments
from mlx_paged.parsing.json_blocks import CallBlockParser, json_array
from mlx_paged.parsing.json_value import JsonValue
from mlx_paged.parsing.lark import Lark

_BEGIN, _END = "<|tools_prefix|>", "<|tools_suffix|>"


class ApertusFormat(ToolFormat):
    """One array of calls."""

    names = ("apertus",)
    models = "Apertus"
    markers = (_BEGIN, _END)
    begins_call = (_BEGIN,)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _BEGIN in chat_template

    def parser(self, tools: Sequence[Tool]) -> Parser:
        known = {tool.name for tool in tools}
        return CallBlockParser((_BEGIN,), (_END,), lambda: KeyedCalls(known))

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark = Lark(self.vocabulary)
        calls = []
        for tool in tools:
            head = f"{{{json.dumps(tool.name, ensure_ascii=False)}: "
            calls.append(f'{json.dumps(head)} {lark.rule(lark_arguments(tool))} "}}"')
        array = json_array(lark.rule(" | ".join(calls)), parallel=parallel)
        rest = lark.rule(f"{array} {lark.literal(_END)}")
        return lark.answer(_BEGIN, rest, required=required, parallel=False)


class KeyedCalls:
    """Reads ``[{name: arguments}, ...]``; see `CallsReader`.

    Args:
        known: Names of the tools that may be called. A call of another one ends the calls.

    Attributes:
        num_calls: Number of calls that have begun.
        has_failed: True if the last text was not a call.
    """

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self._state: Callable[[str, int, list[Event]], int] = self._before_object
        self._key = JsonValue()
        self._key_text: list[str] = []
        self._value = JsonValue()
        self._in_call = False
        self._has_ended = False
        self._raw: list[str] = []  # text before the first call, in case there is none
        self.num_calls = 0
        self.has_failed = False

    @property
    def in_string(self) -> bool:
        """True while a string is open: a marker in it is text."""
        value = self._value if self._in_call else self._key
        return value.in_string and not self._has_ended and not self.has_failed

    def feed(self, text: str, at: int, out: list[Event]) -> int:
        """Continues from an index; adds events to `out`, returns the index where it stopped."""
        start = at
        while at < len(text) and not self._has_ended and not self.has_failed:
            at = self._state(text, at, out)
        if not self.num_calls:
            self._raw.append(text[start:at])
        return at

    def finish(self, out: list[Event]) -> None:
        """Ends the block, and with it an open call."""
        if self._in_call:
            self._in_call = False
            if rest := self._value.rest():
                out.append(CallArguments(rest))
            out.append(CallEnd(self._value.has_ended and not self._value.is_broken))
        self._has_ended = True

    def unread(self) -> str:
        """Returns text that was read and is not a call, and forgets it."""
        raw, self._raw = "".join(self._raw), []
        return raw

    # States: each continues from an index and returns where it stopped.

    def _before_object(self, text: str, at: int, out: list[Event]) -> int:
        c = text[at]
        if c == "{":
            self._key, self._key_text = JsonValue(), []
            self._state = self._in_key
        elif c == "]" and self.num_calls:
            self._has_ended = True
        elif not (c.isspace() or c in "[,"):
            self.has_failed, self._has_ended = not self.num_calls, self.num_calls > 0
            return at
        return at + 1

    def _in_key(self, text: str, at: int, out: list[Event]) -> int:
        if not self._key.has_begun and text[at] not in ' \t\r\n"':
            self.has_failed, self._has_ended = not self.num_calls, self.num_calls > 0
            return at
        at, piece = self._key.take(text, at)
        self._key_text.append(piece)
        if self._key.has_ended:
            self._state = self._before_value
        return at

    def _before_value(self, text: str, at: int, out: list[Event]) -> int:
        c = text[at]
        name = json.loads("".join(self._key_text))
        if name not in self._known:
            if self.num_calls:
                self._raw = ["{", *self._key_text]
            self.has_failed, self._has_ended = not self.num_calls, self.num_calls > 0
            return at
        if c == "{":
            self._in_call = True
            self._value = JsonValue()
            self.num_calls += 1
            self._raw = []
            out.append(CallBegin(name))
            self._state = self._in_value
            return at
        if not (c.isspace() or c == ":"):
            self.has_failed, self._has_ended = not self.num_calls, self.num_calls > 0
            return at
        return at + 1

    def _in_value(self, text: str, at: int, out: list[Event]) -> int:
        at, piece = self._value.take(text, at)
        if piece:
            out.append(CallArguments(piece))
        if self._value.has_ended:
            self._state = self._after_value
        return at

    def _after_value(self, text: str, at: int, out: list[Event]) -> int:
        if not text[at].isspace():
            self._in_call = False
            out.append(CallEnd(not self._value.is_broken))
            self._state = self._before_object
            return at + (text[at] == "}")
        return at + 1
