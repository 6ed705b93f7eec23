"""MiniMax M2: invocations with named parameters, in one block.

<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Oslo</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from collections.abc import Mapping

from mlx_paged.parsing.tagged import TaggedFormat
from mlx_paged.parsing.tags import attribute_tags


class MinimaxM2Format(TaggedFormat):
    """``<invoke name="...">`` and ``<parameter name="...">`` within ``<minimax:tool_call>``."""

    names = ("minimax_m2",)
    models = "MiniMax M2"
    tags = attribute_tags(
        "invoke", "parameter", blocks=(("<minimax:tool_call>", "</minimax:tool_call>"),)
    )
    markers = tags.markers
    begins_call = ("<minimax:tool_call>",)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return "<minimax:tool_call>" in chat_template
