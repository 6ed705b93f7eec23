"""Hermes, Qwen 2.5 and Qwen 3: a JSON object between tags.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from mlx_paged.parsing.json_blocks import JsonBlockFormat

# JSON in the tags, or an ellipsis for it. Other families have tags of this name, too.
_CALL = re.compile(r"<tool_call>(?:\s|\\n)*(?:[\[{]|\.\.\.)")


class HermesFormat(JsonBlockFormat):
    """``<tool_call>`` and a JSON object. Some models write several objects in one pair of tags."""

    names = ("hermes",)
    models = "Hermes 2 Pro and 3, Qwen 2.5, Qwen 3"
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    begins_call = ("<tool_call>",)
    begin = "<tool_call>\n"
    end = "\n</tool_call>"

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _CALL.search(chat_template) is not None
