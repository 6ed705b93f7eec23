"""Llama 3.1, 3.2 and 3.3: a bare JSON object, at times after ``<|python_tag|>``.

{"name": "get_weather", "parameters": {"city": "Oslo"}}
"""

from __future__ import annotations

from collections.abc import Mapping

from mlx_paged.parsing.bare_json import BareJsonFormat


class Llama3JsonFormat(BareJsonFormat):
    """A call object, which may follow text on its line; semicolons separate several."""

    names = ("llama3_json", "llama4_json")
    models = "Llama 3.1, 3.2 and 3.3; Llama 4 with its own template"
    markers = ("<|python_tag|>", "<|eom_id|>")
    begins_call = ("<|python_tag|>",)
    is_array = False
    within = "{"
    arguments_key = "parameters"

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        is_llama = "<|start_header_id|>" in chat_template or "<|header_start|>" in chat_template
        return is_llama and '"parameters": ' in chat_template
