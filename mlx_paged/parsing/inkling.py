"""Inkling: messages of typed blocks. A call repeats its name in front of the block.

<|content_thinking|>I look it up.<|end_message|><|message_model|><|content_text|>Let me see.
<|end_message|><|message_model|>get_weather<|content_invoke_tool_json|>
{"name":"get_weather","args":{"city":"Oslo"}}<|end_message|>  (without the newlines)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_paged.parsing.channels import Body, ChannelParser, message_rules
from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.format import Parser, ToolFormat, lark_arguments
from mlx_paged.parsing.json_blocks import CallBlockParser
from mlx_paged.parsing.json_calls import JsonCalls
from mlx_paged.parsing.lark import MORE_CALLS, Lark

_THINK, _TEXT, _CALL = "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"
_AGAIN, _END, _END_OF_ALL = "<|message_model|>", "<|end_message|>", "<|content_model_end_sampling|>"


class InklingFormat(ToolFormat):
    """One call in each message. Its JSON has no whitespace, and sorted keys.

    The prompt may leave the first header to the model.
    """

    names = ("inkling",)
    models = "Inkling"
    markers = (_THINK, _TEXT, _CALL, _AGAIN, _END, _END_OF_ALL)
    begins_call = (_CALL,)
    reads_everything = True

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _CALL in chat_template or _CALL in vocabulary

    def parser(self, tools: Sequence[Tool]) -> Parser:
        known = {tool.name for tool in tools}
        return ChannelParser(
            opens=(_THINK, _TEXT, _CALL),
            ends=(_AGAIN, _END, _END_OF_ALL),
            header=re.compile(r"\s*[\w.-]{0,256}\s*"),
            body_of=lambda header, marker: Body.REASONING if marker == _THINK else Body.TEXT,
            calls=CallBlockParser((_CALL,), (), lambda: JsonCalls(known, one=True)),
            begins_call=(_CALL,),
        )

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        """See the base. It begins at the answer's first token: the reasoning is a part of it."""
        lark = Lark(self.vocabulary)
        again = lark.literal(_AGAIN)
        message = message_rules(lark, self.markers, _END, _AGAIN)
        calls = []
        for tool in tools:
            name = json.dumps(tool.name, ensure_ascii=False)
            marks = lark.literal(tool.name + _CALL)
            head = json.dumps('{"name":' + name + ',"args":')
            calls.append(f'{marks} {head} {lark.rule(_arguments(tool))} "}}"')
        call = lark.rule(" | ".join(calls))
        more = f"({lark.literal(_END + _AGAIN)} {call}){MORE_CALLS}" if parallel else ""
        if required:
            lark.rule(f"({again})? {message(_THINK)}* {call} {more}", "start")
        else:
            text = lark.terminal(lark.without(self.markers))
            final = f"{lark.literal(_TEXT)} {text}"
            messages = f"({message(_THINK)} | {message(_TEXT)})*"
            lark.rule(f"({again})? {messages} ({call} {more} | {final})", "start")
        return lark.text()


def _arguments(tool: Tool) -> str:
    sorted_tool = replace(tool, parameters=_with_sorted_keys(tool.parameters))
    return lark_arguments(sorted_tool, (",", ":"))


def _with_sorted_keys(schema: Any) -> Any:
    """Returns a schema whose properties are in the chat template's order."""
    if isinstance(schema, list):
        return [_with_sorted_keys(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    parts = {key: _with_sorted_keys(part) for key, part in schema.items()}
    if isinstance(parts.get("properties"), Mapping):
        parts["properties"] = dict(sorted(parts["properties"].items()))
    return parts
