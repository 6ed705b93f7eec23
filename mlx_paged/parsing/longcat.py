"""LongCat Flash: a JSON object, or a name, keys and values between tags.

<longcat_tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</longcat_tool_call>

<longcat_tool_call>get_weather
<longcat_arg_key>city</longcat_arg_key>
<longcat_arg_value>Oslo</longcat_arg_value>
</longcat_tool_call>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.json_blocks import json_call
from mlx_paged.parsing.lark import Lark
from mlx_paged.parsing.tagged import TaggedFormat
from mlx_paged.parsing.tags import paired_tags


class LongcatFormat(TaggedFormat):
    """Reads both; the chat template determines the forced one."""

    names = ("longcat",)
    models = "LongCat Flash"
    tags = paired_tags("longcat_")
    markers = tags.markers
    begins_call = ("<longcat_tool_call>",)
    takes_json = True

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return "<longcat_tool_call>" in chat_template

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        if self.tags.key in self.chat_template:
            return super().grammar(tools, required=required, parallel=parallel)
        lark = Lark(self.vocabulary)
        closing = lark.literal("\n" + self.tags.call_end)
        return lark.answer(
            self.tags.call,
            f'"\\n" {json_call(lark, tools)} {closing}',
            required=required,
            parallel=parallel,
        )
