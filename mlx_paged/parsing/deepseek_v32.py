"""DeepSeek V3.2 and V4: invocations with named parameters, in tags with their own token.

<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>

V4 calls the block ``tool_calls``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mlx_paged.parsing.tagged import TaggedFormat
from mlx_paged.parsing.tags import attribute_tags

_D = "｜DSML｜"


class DeepseekV32Format(TaggedFormat):
    """DSML. Each parameter says if it is a string; others are JSON."""

    names = ("deepseek_v32",)
    models = "DeepSeek V3.2"
    tags = attribute_tags(
        f"{_D}invoke",
        f"{_D}parameter",
        key_ends=(('" string="true">', True), ('" string="false">', False), ('">', None)),
        blocks=(
            (f"<{_D}function_calls>", f"</{_D}function_calls>"),
            (f"<{_D}tool_calls>", f"</{_D}tool_calls>"),
        ),
    )
    markers = tags.markers
    begins_call = tuple(begin for begin, _ in tags.blocks)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _D in chat_template


class DeepseekV4Format(DeepseekV32Format):
    """The same with another name of the block."""

    names = ("deepseek_v4",)
    models = "DeepSeek V4"
    tags = replace(DeepseekV32Format.tags, blocks=DeepseekV32Format.tags.blocks[::-1])
    begins_call = DeepseekV32Format.begins_call[::-1]

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _D in chat_template and "tool_calls>" in chat_template
