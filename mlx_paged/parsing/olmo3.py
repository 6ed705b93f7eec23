"""OLMo 3: calls in Python's notation, one on each line, between tags.

<function_calls>
get_weather(city="Oslo", days=3)
</function_calls>
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.format import Parser
from mlx_paged.parsing.json_blocks import CallBlockParser
from mlx_paged.parsing.lark import MORE_CALLS, Lark
from mlx_paged.parsing.python_calls import PythonCalls
from mlx_paged.parsing.pythonic import PythonicFormat, python_call

_BEGIN, _END = "<function_calls>", "</function_calls>"


class Olmo3Format(PythonicFormat):
    """One block of calls. The template decides if the tags have their own lines."""

    names = ("olmo3",)
    models = "OLMo 3"
    markers = (_BEGIN, _END)
    begins_call = (_BEGIN,)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _BEGIN in chat_template and _END in chat_template

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return CallBlockParser((_BEGIN,), (_END,), reader=lambda: PythonCalls(tools, in_list=False))

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark = Lark(self.vocabulary)
        call = lark.rule(" | ".join(python_call(lark, tool) for tool in tools))
        is_tight = re.search(rf"{_BEGIN}[\w.-]+\(", self.chat_template) is not None
        newline = "" if is_tight else '"\\n"'
        more = f'("\\n" {call}){MORE_CALLS}' if parallel else ""
        rest = lark.rule(f"{newline} {call} {more} {newline} {lark.literal(_END)}")
        return lark.answer(_BEGIN, rest, required=required, parallel=False)
