"""Llama 4 and other models that call in Python's notation.

[get_weather(city="Oslo", days=3), get_time(zone="Europe/Oslo")]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from mlx_paged.parsing.bare_json import BareCallsParser
from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.format import Parser
from mlx_paged.parsing.json_blocks import json_array
from mlx_paged.parsing.lark import Lark
from mlx_paged.parsing.parameter_format import ParameterFormat
from mlx_paged.parsing.parameters import parameter_lists
from mlx_paged.parsing.python_calls import PythonCalls
from mlx_paged.parsing.schemas import Schema, types_of

_BEGIN, _END = "<|python_start|>", "<|python_end|>"


class PythonicFormat(ParameterFormat):
    """A list of calls on its own line."""

    names = ("pythonic",)
    models = "Llama 3.2 (small ones), ToolACE, with a template that asks for it"

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return "[func_name1(" in chat_template

    def parser(self, tools: Sequence[Tool]) -> Parser:
        ends = [marker for marker in self.markers if marker not in self.begins_call]
        return BareCallsParser(lambda: PythonCalls(tools), "[", self.begins_call, ends)

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark = Lark(self.vocabulary)
        calls = lark.rule(python_calls(lark, tools, parallel=parallel))
        return lark.bare_answer(calls, r"\[", required=required, others=self.begins_call)


class Llama4PythonicFormat(PythonicFormat):
    """As above; some answers put it between two tokens."""

    names = ("llama4_pythonic",)
    models = "Llama 4"
    markers = (_BEGIN, _END)
    begins_call = (_BEGIN,)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return super().matches(chat_template, vocabulary) and "<|header_start|>" in chat_template


def python_calls(lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
    """Returns a list of calls in Python's notation, in Lark.

    Args:
        lark: Destination of the rules.
        tools: Tools that may be called.
        parallel: Allow several calls.
    """
    call = lark.rule(" | ".join(python_call(lark, tool) for tool in tools))
    return json_array(call, parallel=parallel)


def python_call(lark: Lark, tool: Tool, *, has_json_words: bool = False) -> str:
    """Returns a call: required parameters, and any optional ones, in the order of the schema.

    Args:
        has_json_words: True for JSON's words: ``true`` and ``null``.
    """
    branches = []
    for parameters, root in parameter_lists(tool.parameters):
        first: list[str] = []
        items = [
            (
                f"{json.dumps(name + '=')} {_value(lark, schema, root, tool, has_json_words)}",
                is_required,
            )
            for name, schema, is_required in parameters
        ]
        for i, (item, is_required) in enumerate(items):
            rest = "".join(
                f' (", " {later})' + ("" if needed else "?") for later, needed in items[i + 1 :]
            )
            first.append(item + rest)
            if is_required:
                break
        else:
            first.append('""')
        branches.append(lark.rule(" | ".join(first)))
    return f'{json.dumps(tool.name + "(")} {lark.rule(" | ".join(branches))} ")"'


def _value(
    lark: Lark, schema: Schema, root: Schema, tool: Tool, has_json_words: bool = False
) -> str:
    """Returns a value in JSON, except for Python's words (``True``, ``None``)."""
    types = types_of(schema, root if isinstance(root, Mapping) else {})
    words = {frozenset({"boolean"}): '"True" | "False"', frozenset({"null"}): '"None"'}
    if has_json_words:
        words = {}
    if types in words and not (isinstance(schema, Mapping) and schema.keys() & {"enum", "const"}):
        return lark.rule(words[types])
    return lark.json(schema, root, strict=tool.strict)
