"""Muse Spark and Muse Glimmer: messages to the model itself, to the user, or to a tool.

 to=self<|message|>I look it up.<|eom|><|start|>assistant to=user<|message|>Let me see.<|eom|>
<|start|>assistant to=get_weather<|message|><atem:function_calls>
<atem:invoke name="get_weather">
<atem:parameter name="city">Oslo</atem:parameter>
</atem:invoke>
</atem:function_calls>
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mlx_paged.parsing.channels import Body, ChannelParser, channel_answer, message_rules
from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.format import Parser
from mlx_paged.parsing.lark import MORE_CALLS, Lark
from mlx_paged.parsing.tagged import TaggedFormat
from mlx_paged.parsing.tagged_parser import TaggedParser
from mlx_paged.parsing.tags import attribute_tags

_MESSAGE, _START, _END, _END_OF_TURN = "<|message|>", "<|start|>", "<|eom|>", "<|eot|>"
# Any beginning of "assistant to=...".
_HEADER = re.compile(
    r"\s*(?:a(?:s(?:s(?:i(?:s(?:t(?:a(?:nt?)?)?)?)?)?)?)?)?\s*(?:t(?:o(?:=[\w.-]{0,256})?)?)?\s*"
)
_RECIPIENT = re.compile(r"to=([\w.-]+)")


class MuseFormat(TaggedFormat):
    """A call in each message."""

    names = ("muse_spark", "muse_glimmer")
    models = "Muse Spark, Muse Glimmer"
    tags = attribute_tags(
        "atem:invoke",
        "atem:parameter",
        blocks=(("<atem:function_calls>", "</atem:function_calls>"),),
    )
    markers = (*tags.markers, _MESSAGE, _START, _END, _END_OF_TURN)
    begins_call = ("<atem:function_calls>", tags.call)
    reads_everything = True

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return "<atem:function_calls>" in chat_template

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return ChannelParser(
            opens=(_MESSAGE,),
            ends=(_START, _END, _END_OF_TURN),
            header=_HEADER,
            body_of=lambda header, marker: _body_of(header),
            calls=TaggedParser(self.tags, tools),
            begins_call=self.begins_call,
        )

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        """See the base. It begins at the answer's first token: the reasoning is a part of it."""
        lark = Lark(self.vocabulary)
        message = message_rules(lark, self.markers, _END, f"{_START}assistant")
        begin, end = self.tags.blocks[0]
        calls = []
        for tool in tools:
            opening = lark.literal(f" to={tool.name}{_MESSAGE}{begin}\n{self.tags.call}")
            calls.append(f"{opening} {self._call(lark, tool)}")
        closing = lark.literal("\n" + end)
        call = lark.rule(f"({' | '.join(calls)}) {closing}")
        again = lark.literal(f"{_END}{_START}assistant")
        more = f"({again} {call}){MORE_CALLS}" if parallel else ""
        return channel_answer(
            lark,
            self.markers,
            thoughts=message(f" to=self{_MESSAGE}"),
            texts="" if required else message(f" to=user{_MESSAGE}"),
            last="" if required else f" to=user{_MESSAGE}",
            calls=f"{call} {more}",
        )


def _body_of(header: str) -> Body:
    found = _RECIPIENT.search(header)
    if found is None or found[1] in ("user", "commentary"):
        return Body.TEXT
    return Body.REASONING if found[1] == "self" else Body.CALLS
