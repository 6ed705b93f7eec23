"""Phi-4-mini: a JSON array after ``functools``, or between the vocabulary's own markers.

functools[{"name": "get_weather", "arguments": {"city": "Oslo"}}]
<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>
"""

from __future__ import annotations

from collections.abc import Mapping

from mlx_paged.parsing.json_blocks import JsonBlockFormat


class Phi4MiniFormat(JsonBlockFormat):
    """An array of calls. ``functools`` without one after it is a word."""

    names = ("phi4_mini_json",)
    models = "Phi-4-mini"
    markers = ("functools", "<|tool_call|>", "<|/tool_call|>")
    begins_call = ("functools", "<|tool_call|>")
    is_array = True

    def __init__(self, vocabulary: Mapping[str, int], chat_template: str = "") -> None:
        super().__init__(vocabulary, chat_template)
        if "<|tool_call|>" in vocabulary and "functools" not in chat_template:
            self.begin, self.end = "<|tool_call|>", "<|/tool_call|>"
        else:
            self.begin, self.end = "functools", ""

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return "functools[" in chat_template or "<|/tool_call|>" in vocabulary
