"""PLaMo 3: a name and JSON, each between tags.

<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>
<|plamo:begin_tool_name:plamo|>get_weather<|plamo:end_tool_name:plamo|>
<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{"city": "Oslo"}
<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>
<|plamo:end_tool_requests:plamo|>  (without the newlines)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.format import Parser, ToolFormat, lark_arguments
from mlx_paged.parsing.lark import ONE_TO_MAX_CALLS, Lark
from mlx_paged.parsing.named_json import Marks, NamedJsonParser


def _tag(name: str) -> str:
    return f"<|plamo:{name}:plamo|>"


_REQUEST, _REQUEST_END = _tag("begin_tool_request"), _tag("end_tool_request")
_ARGUMENTS = f"{_tag('begin_tool_arguments')}<|plamo:constrain|>json<|plamo:msg|>"
_MARKS = Marks(
    call=_tag("begin_tool_name"),
    arguments=_tag("end_tool_name"),
    call_end=_tag("end_tool_arguments"),
    block=(_tag("begin_tool_requests"), _tag("end_tool_requests")),
    others=(_REQUEST, _REQUEST_END, _ARGUMENTS),
)
_NAME = re.compile(r"[^\s{}<>|]+")
_TAIL = re.compile(r"(?:<\|plamo:[\w:]*\|>|json|\s)*")


class Plamo3Format(ToolFormat):
    """One block of requests. Its tags consist of several tokens each."""

    names = ("plamo3",)
    models = "PLaMo 3"
    markers = _MARKS.all
    begins_call = (_MARKS.block[0], _MARKS.call)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return "begin_tool_request" in chat_template and "<|plamo:" in chat_template

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return NamedJsonParser(_MARKS, _name_of, tools)

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark = Lark(self.vocabulary)
        calls = []
        for tool in tools:
            head = lark.literal(f"{_REQUEST}{_MARKS.call}{tool.name}{_MARKS.arguments}{_ARGUMENTS}")
            calls.append(f"{head} {lark.rule(lark_arguments(tool))}")
        end = lark.literal(_MARKS.call_end + _REQUEST_END)
        call = lark.rule(f"({' | '.join(calls)}) {end}")
        rest = lark.rule(
            f"{call}{ONE_TO_MAX_CALLS if parallel else ''} {lark.literal(_MARKS.block[1])}"
        )
        return lark.answer(
            _MARKS.block[0],
            rest,
            required=required,
            parallel=False,
            others=[*self.begins_call, *_MARKS.others],
        )


def _name_of(head: str, tail: str) -> tuple[str, None] | None:
    name = head.strip()
    if _NAME.fullmatch(name) is None or _TAIL.fullmatch(tail) is None:
        return None
    return name, None
