"""GLM 4.5 to 4.7: a name, keys and values between tags.

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Oslo</arg_value>
</tool_call>

From GLM 4.7 on there are no newlines between the tags.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlx_paged.parsing.tagged import TaggedFormat
from mlx_paged.parsing.tags import paired_tags


class Glm45Format(TaggedFormat):
    """``<tool_call>``, the name, and ``<arg_key>`` and ``<arg_value>`` for each argument."""

    names = ("glm45",)
    models = "GLM 4.5, 4.6"
    tags = paired_tags()
    markers = tags.markers
    begins_call = ("<tool_call>",)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return any(f"</arg_key>{newline}<arg_value>" in chat_template for newline in ("\n", "\\n"))


class Glm47Format(TaggedFormat):
    """The same without newlines."""

    names = ("glm47", "poolside_v1", "laguna")
    models = "GLM 4.7 and later, Poolside Laguna"
    tags = paired_tags(newline="")
    markers = tags.markers
    begins_call = ("<tool_call>",)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return "<arg_key>" in chat_template
