"""InternLM 2 and 2.5: a JSON object between tokens.

<|action_start|><|plugin|>
{"name": "get_weather", "parameters": {"city": "Oslo"}}<|action_end|>
"""

from __future__ import annotations

from collections.abc import Mapping

from mlx_paged.parsing.json_blocks import JsonBlockFormat

_BEGIN, _END = "<|action_start|><|plugin|>", "<|action_end|>"


class Internlm2Format(JsonBlockFormat):
    """A call in each block. The key of the arguments comes from the template."""

    names = ("internlm", "internlm2")
    models = "InternLM 2, 2.5"
    markers = (_BEGIN, _END)
    begins_call = (_BEGIN,)
    begin = f"{_BEGIN}\n"
    end = _END
    between = ""

    def __init__(self, vocabulary: Mapping[str, int], chat_template: str = "") -> None:
        super().__init__(vocabulary, chat_template)
        self.arguments_key = "arguments" if '"arguments": ' in chat_template else "parameters"

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _BEGIN in chat_template or {"<|action_start|>", "<|plugin|>"} <= vocabulary.keys()
