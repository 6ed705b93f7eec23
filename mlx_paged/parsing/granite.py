"""Granite 3: a JSON array after a marker. Granite 20B FC and Granite 4 have other markers.

<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]
"""

from __future__ import annotations

from collections.abc import Mapping

from mlx_paged.parsing.hermes import HermesFormat
from mlx_paged.parsing.json_blocks import JsonBlockFormat


class GraniteFormat(JsonBlockFormat):
    """An array of calls after ``<|tool_call|>`` (3.0, 3.2, 3.3) or ``<tool_call>`` (3.1)."""

    names = ("granite",)
    models = "Granite 3"
    markers = ("<|tool_call|>", "<tool_call>", "</tool_call>", "<|end_of_text|>")
    begins_call = ("<|tool_call|>", "<tool_call>")
    is_array = True

    def __init__(self, vocabulary: Mapping[str, int], chat_template: str = "") -> None:
        super().__init__(vocabulary, chat_template)
        is_new = "<|tool_call|>" in vocabulary or "<|tool_call|>" in chat_template
        self.begin = "<|tool_call|>" if is_new or "<tool_call>" not in vocabulary else "<tool_call>"

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        has_roles = "<|start_of_role|>" in chat_template
        return has_roles and ("<|tool_call|>" in chat_template or "<|tool_call|>" in vocabulary)


class Granite20bFormat(JsonBlockFormat):
    """An object after each ``<function_call>``."""

    names = ("granite-20b-fc",)
    models = "Granite 20B function calling"
    markers = ("<function_call>",)
    begins_call = ("<function_call>",)
    begin = "<function_call> "
    between = ""

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return "<function_call>" in chat_template and "<start_function_call>" not in chat_template


class Granite4Format(HermesFormat):
    """As Hermes writes them."""

    names = ("granite4",)
    models = "Granite 4"

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return "<|start_of_role|>" in chat_template and super().matches(chat_template, vocabulary)
