"""OLMo 3: calls in Python's notation, one on each line, between tags.

<function_calls>
get_weather(city="Oslo", days=3)
</function_calls>
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlx_paged.server.tools.definitions import Tool
from mlx_paged.server.tools.format import Parser, ToolFormat
from mlx_paged.server.tools.json_blocks import CallBlockParser
from mlx_paged.server.tools.lark import Lark
from mlx_paged.server.tools.parameters import counts, unenforced
from mlx_paged.server.tools.python_calls import PythonCalls
from mlx_paged.server.tools.pythonic import python_call

_BEGIN, _END = "<function_calls>", "</function_calls>"


class Olmo3Format(ToolFormat):
    """One block of calls."""

    names = ("olmo3",)
    models = "OLMo 3"
    markers = (_BEGIN, _END)
    begins_call = (_BEGIN,)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _BEGIN in chat_template and _END in chat_template

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return CallBlockParser((_BEGIN,), (_END,), reader=lambda: PythonCalls(tools, in_list=False))

    def counts(self, parameters: Mapping[str, Any]) -> Mapping[str, int]:
        return counts(parameters)

    def unenforced(self, tool: Tool) -> Iterable[tuple[str, object]]:
        return unenforced(tool.parameters, tool.field)

    def forced(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark = Lark(self.vocabulary)
        line = f'"\\n" {lark.rule(" | ".join(python_call(lark, tool) for tool in tools))}'
        closing = lark.literal(f"\n{_END}")
        rest = lark.rule(f"({line}){'+' if parallel else ''} {closing}")
        return lark.answer(_BEGIN, rest, required=required, parallel=False)
