"""ERNIE 4.5: a JSON object between tags; text stands between tags of its own.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_call>

<response>
It is sunny.
</response>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.format import Parser
from mlx_paged.parsing.frames import FramedParser
from mlx_paged.parsing.hermes import HermesFormat

_BEGIN, _END = "<response>", "</response>"


class Ernie45Format(HermesFormat):
    """As Hermes writes calls. The tags around text are left out."""

    names = ("ernie45",)
    models = "ERNIE 4.5 Thinking"
    markers = (*HermesFormat.markers, _BEGIN, _END)
    frames = (_BEGIN, _END)
    frames_text = True

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return super().matches(chat_template, vocabulary) and (
            _BEGIN in chat_template or _BEGIN in vocabulary
        )

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return FramedParser(super().parser(tools), begin=(_BEGIN,), end=(_END,))
