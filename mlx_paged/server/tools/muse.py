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

from mlx_paged.server.tools.channels import Body, ChannelParser
from mlx_paged.server.tools.definitions import Tool
from mlx_paged.server.tools.format import Parser
from mlx_paged.server.tools.lark import MORE_CALLS, Lark
from mlx_paged.server.tools.tagged import TaggedFormat, TaggedParser, Tags

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
    tags = Tags(
        call='<atem:invoke name="',
        name_end='">',
        call_end="</atem:invoke>",
        key='<atem:parameter name="',
        key_ends=(('">', None),),
        value="",
        value_end="</atem:parameter>",
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

    def forced(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        """See the base. It begins at the answer's first token: the reasoning is a part of it."""
        lark = Lark(self.vocabulary)
        again = lark.literal(f"{_START}assistant")
        others = [marker for marker in self.markers if marker != _END]

        def message(recipient: str) -> str:
            opening = lark.literal(f" to={recipient}{_MESSAGE}")
            return lark.rule(f"{opening} {lark.until(_END, others=others)} {again}")

        begin, end = self.tags.blocks[0]
        calls = []
        for tool in tools:
            opening = lark.literal(f" to={tool.name}{_MESSAGE}{begin}\n{self.tags.call}")
            calls.append(f"{opening} {self._call(lark, tool)}")
        closing = lark.literal("\n" + end)
        call = lark.rule(f"({' | '.join(calls)}) {closing}")
        more = f"({lark.literal(_END)} {again} {call}){MORE_CALLS}" if parallel else ""
        if required:
            lark.rule(f"{message('self')}* {call} {more}", "start")
        else:
            text = lark.terminal(lark.without(self.markers))
            final = f"{lark.literal(f' to=user{_MESSAGE}')} {text}"
            lark.rule(
                f"({message('self')} | {message('user')})* ({call} {more} | {final})", "start"
            )
        return lark.text()


def _body_of(header: str) -> Body:
    found = _RECIPIENT.search(header)
    if found is None or found[1] in ("user", "commentary"):
        return Body.TEXT
    return Body.REASONING if found[1] == "self" else Body.CALLS
