"""DeepSeek V3, R1 and V3.1: a name and JSON between tokens.

V3 and R1: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Oslo"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}
<｜tool▁call▁end｜><｜tool▁calls▁end｜>  (without the newline)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.format import Parser, ToolFormat, lark_arguments
from mlx_paged.parsing.lark import MORE_CALLS, Lark
from mlx_paged.parsing.named_json import Marks, NamedJsonParser

_MARKS = Marks(
    call="<｜tool▁call▁begin｜>",
    arguments="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
    block=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
_NAME = re.compile(r"[^\s{}<>`]+")


class DeepseekV31Format(ToolFormat):
    """The name, and the arguments."""

    names = ("deepseek_v31",)
    models = "DeepSeek V3.1"
    markers = _MARKS.all
    begins_call = (_MARKS.block[0], _MARKS.call)
    #: Text around the name and the arguments, and between two calls.
    written: ClassVar[tuple[str, str, str, str]] = ("", _MARKS.arguments, "", "")

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _MARKS.block[0] in chat_template

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return NamedJsonParser(_MARKS, _name_of, tools)

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark = Lark(self.vocabulary)
        before, between, after, separator = self.written
        calls = []
        for tool in tools:
            head = lark.literal(before + tool.name + between)
            calls.append(f"{head} {lark.rule(lark_arguments(tool))}")
        opening, closing = lark.literal(_MARKS.call), lark.literal(after + _MARKS.call_end)
        call = lark.rule(f"{opening} {lark.rule(' | '.join(calls))} {closing}")
        next_call = f"({lark.literal(separator)} {call})" if separator else call
        more = f"{next_call}{MORE_CALLS}"
        rest = f"{call} {more if parallel else ''} {lark.literal(_MARKS.block[1])}"
        return lark.answer(
            _MARKS.block[0],
            rest,
            required=required,
            parallel=parallel,
            between="",
            others=self.begins_call,
        )


class DeepseekV3Format(DeepseekV31Format):
    """The word "function", the name, and the arguments as a block of code."""

    names = ("deepseek_v3",)
    models = "DeepSeek V3, R1"
    written = (f"function{_MARKS.arguments}", "\n```json\n", "\n```", "\n")

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _MARKS.block[0] in chat_template and "```json" in chat_template


def _name_of(head: str, tail: str) -> tuple[str, None] | None:
    """The name is in front of the separator, or in the line after it."""
    line, _, code = tail.strip().partition("\n")
    name = line.strip().removesuffix("```json").strip() or head.strip()
    if (
        len(head.split()) > 1
        or _NAME.fullmatch(name) is None
        or code.strip() not in ("", "```json", "```")
    ):
        return None
    return name, None
