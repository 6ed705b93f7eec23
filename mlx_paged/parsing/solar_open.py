"""Solar Open: messages that begin with a token for reasoning, text, or calls.

<|think|>I look it up.<|end|><|begin|>assistant<|content|>Let me see.<|end|>
<|begin|>assistant<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather
<|tool_call:args|>{"city": "Oslo"}<|tool_call:end|><|calls|>  (without the newlines)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mlx_paged.parsing.channels import Body, ChannelParser, channel_answer, message_rules
from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.format import Parser, ToolFormat, lark_arguments
from mlx_paged.parsing.lark import ONE_TO_MAX_CALLS, Lark
from mlx_paged.parsing.named_json import Marks, NamedJsonParser

_THINK, _CONTENT, _CALLS = "<|think|>", "<|content|>", "<|tool_calls|>"
_BEGIN, _END, _FLUSH = "<|begin|>", "<|end|>", "<|flush|>"
_NAME = "<|tool_call:name|>"
_MARKS = Marks(
    call="<|tool_call:begin|>",
    arguments="<|tool_call:args|>",
    call_end="<|tool_call:end|>",
    block=(_CALLS, "<|calls|>"),
    others=(_NAME,),
)
_HEAD = re.compile(rf"\s*(?:(?P<id>[\w.-]*)\s*{re.escape(_NAME)})?\s*(?P<name>[^\s<>{{}}|]+)\s*")
# "assistant", or any beginning of it.
_HEADER = re.compile(r"\s*(?:a(?:s(?:s(?:i(?:s(?:t(?:a(?:nt?)?)?)?)?)?)?)?)?\s*")


class SolarOpenFormat(ToolFormat):
    """The ids are the model's own: its template renders them, and results are found by them."""

    names = ("solar_open",)
    models = "Solar Open"
    markers = (*_MARKS.all, _THINK, _CONTENT, _BEGIN, _END, _FLUSH)
    begins_call = (_CALLS, _MARKS.call)
    reads_everything = True

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _MARKS.call in chat_template or {_MARKS.call, _NAME} <= vocabulary.keys()

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return ChannelParser(
            opens=(_THINK, _CONTENT),
            ends=(_BEGIN, _END, _FLUSH),
            header=_HEADER,
            body_of=lambda header, marker: Body.REASONING if marker == _THINK else Body.TEXT,
            calls=NamedJsonParser(_MARKS, _name_and_id, tools),
            begins_call=self.begins_call,
        )

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        """See the base. It begins at the answer's first token and includes the reasoning.

        The grammar excludes the end of the calls, a token that ends the answer.
        """
        lark = Lark(self.vocabulary)
        message = message_rules(lark, self.markers, _END, f"{_BEGIN}assistant")
        identity = lark.terminal("/[a-z0-9]{10}/")
        calls = []
        for tool in tools:
            head = lark.literal(f"{_NAME}{tool.name}{_MARKS.arguments}")
            calls.append(f"{head} {lark.rule(lark_arguments(tool))}")
        opening, closing = lark.literal(_MARKS.call), lark.literal(_MARKS.call_end)
        call = lark.rule(f"{opening} {identity} ({' | '.join(calls)}) {closing}")
        block = lark.rule(f"{lark.literal(_CALLS)} {call}{ONE_TO_MAX_CALLS if parallel else ''}")
        return channel_answer(
            lark,
            self.markers,
            thoughts=message(_THINK),
            texts="" if required else message(_CONTENT),
            last="" if required else _CONTENT,
            calls=block,
        )


def _name_and_id(head: str, tail: str) -> tuple[str, str | None] | None:
    found = _HEAD.fullmatch(head)
    if found is None or tail.strip():
        return None
    return found["name"], found["id"] or None
