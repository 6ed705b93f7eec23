"""Families with ``<tool_calls>`` around JSON: Hunyuan A13B, Apriel, Jamba, MiniMax M1.

<tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_calls>

Nemotron Nano v2 calls the tags ``<TOOLCALL>``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.format import Parser
from mlx_paged.parsing.frames import FramedParser
from mlx_paged.parsing.json_blocks import JsonBlockFormat, json_call
from mlx_paged.parsing.lark import MORE_CALLS, ONE_TO_MAX_CALLS, Lark

_BEGIN, _END = "<tool_calls>", "</tool_calls>"
_ANSWER = ("<answer>", "</answer>")
_ASSISTANT = "助手\N{FULLWIDTH COLON}"
_FINAL, _END_OF_FINAL = "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"


class _ToolCallsFormat(JsonBlockFormat):
    """An array of calls between the tags."""

    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _END)
    begins_call = (_BEGIN,)
    begin = _BEGIN
    end = _END
    is_array = True

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return f"{_BEGIN}[" in chat_template


class HunyuanA13bFormat(_ToolCallsFormat):
    """After its reasoning, the answer is also between tags; it may begin with the role's name."""

    names = ("hunyuan_a13b",)
    models = "Hunyuan A13B"
    markers = (_BEGIN, _END, *_ANSWER, _ASSISTANT)
    frames = _ANSWER
    frames_text = True

    def parser(self, tools: Sequence[Tool]) -> Parser:
        inner = super().parser(tools)
        return FramedParser(inner, begin=_ANSWER[:1], end=_ANSWER[1:], leads=(_ASSISTANT,))


class AprielFormat(_ToolCallsFormat):
    """The end of the final response also has a marker."""

    names = ("apriel",)
    models = "Apriel 1.5, 1.6"
    markers = (_BEGIN, _END, _FINAL, _END_OF_FINAL)
    frames = (_FINAL, _END_OF_FINAL)
    frames_text = True

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return super().matches(chat_template, vocabulary) and _FINAL in chat_template

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return FramedParser(super().parser(tools), begin=(_FINAL,), end=(_END_OF_FINAL,))


class JambaFormat(_ToolCallsFormat):
    """Each call is on its own line."""

    names = ("jamba",)
    models = "Jamba 1.5, 1.6, 1.7"

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _BEGIN in chat_template and "<|bom|>" in chat_template

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark = Lark(self.vocabulary)
        call = json_call(lark, tools)
        more = f'(",\\n    " {call}){MORE_CALLS}' if parallel else ""
        rest = f'"[\\n    " {call} {more} "\\n]" {lark.literal(_END)}'
        return lark.answer(_BEGIN, lark.rule(rest), required=required, parallel=False)


class MinimaxM1Format(_ToolCallsFormat):
    """A call on each line between the tags."""

    names = ("minimax", "minimax_m1")
    models = "MiniMax M1"
    is_array = False

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return any(f"{_BEGIN}{newline}{{" in chat_template for newline in ("\n", "\\n"))

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark = Lark(self.vocabulary)
        line = f'{json_call(lark, tools)} "\\n"'
        rest = f'"\\n" ({line}){ONE_TO_MAX_CALLS if parallel else ""} {lark.literal(_END)}'
        return lark.answer(_BEGIN, lark.rule(rest), required=required, parallel=False)


class NemotronNanoV2Format(JsonBlockFormat):
    """An array of calls between tags of another name."""

    names = ("nemotron_json", "nemotron_nano_v2")
    models = "Nemotron Nano v2, Llama Nemotron"
    markers = ("<TOOLCALL>", "</TOOLCALL>")
    begins_call = ("<TOOLCALL>",)
    begin = "<TOOLCALL>"
    end = "</TOOLCALL>"
    is_array = True

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return "<TOOLCALL>" in chat_template
