"""LFM2: a list of calls in Python's notation between tokens.

<|tool_call_start|>[get_weather(city="Oslo", days=3)]<|tool_call_end|>

Some templates ask for an array of JSON objects there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import Event
from mlx_paged.parsing.format import Parser
from mlx_paged.parsing.json_blocks import CallBlockParser
from mlx_paged.parsing.json_calls import CallsReader, JsonCalls
from mlx_paged.parsing.lark import Lark
from mlx_paged.parsing.python_calls import PythonCalls
from mlx_paged.parsing.pythonic import PythonicFormat, python_calls

_BEGIN, _END = "<|tool_call_start|>", "<|tool_call_end|>"


class Lfm2Format(PythonicFormat):
    """One block of calls between ``<|tool_call_start|>`` and ``<|tool_call_end|>``."""

    names = ("lfm2",)
    models = "LFM2, LFM2.5"
    markers = (_BEGIN, _END)
    begins_call = (_BEGIN,)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return (
            _BEGIN in chat_template
            or "<|tool_list_start|>" in chat_template
            # Some templates do not name them.
            or {_BEGIN, _END} <= vocabulary.keys()
        )

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return CallBlockParser((_BEGIN,), (_END,), reader=lambda: _Calls(tools))

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark = Lark(self.vocabulary)
        calls = lark.rule(python_calls(lark, tools, parallel=parallel))
        # All calls are in one block.
        return lark.answer(
            _BEGIN, f"{calls} {lark.literal(_END)}", required=required, parallel=False
        )


class _Calls:
    """Calls in Python's notation, or JSON objects: the first character of a call tells."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools
        self._known = {tool.name for tool in tools}
        self._reader: CallsReader | None = None
        self._held = ""  # before that character
        self.num_calls = 0

    @property
    def has_failed(self) -> bool:
        return self._reader is not None and self._reader.has_failed

    @property
    def in_string(self) -> bool:
        return self._reader is not None and self._reader.in_string

    def feed(self, text: str, at: int, out: list[Event]) -> int:
        if self._reader is None:
            while at < len(text) and (text[at].isspace() or text[at] == "["):
                self._held += text[at]
                at += 1
            if at == len(text):
                return at
            self._reader = JsonCalls(self._known) if text[at] == "{" else PythonCalls(self._tools)
            self._reader.feed(self._held, 0, out)
        at = self._reader.feed(text, at, out)
        self.num_calls = self._reader.num_calls
        return at

    def finish(self, out: list[Event]) -> None:
        if self._reader is not None:
            self._reader.finish(out)
            self.num_calls = self._reader.num_calls

    def unread(self) -> str:
        held, self._held = self._held, ""
        return self._reader.unread() if self._reader is not None else held
