"""Kimi K3: everything is between opening and closing tags that are made of three tokens.

<|open|>think<|sep|>I look it up.<|close|>think<|sep|>
<|open|>response<|sep|>Let me see.<|close|>response<|sep|>
<|open|>tools<|sep|>
<|open|>call tool="get_weather" index="1"<|sep|>
<|open|>argument key="city" type="string"<|sep|>Oslo<|close|>argument<|sep|>
<|close|>call<|sep|>
<|close|>tools<|sep|>  (without the newlines)

The arguments may also be one JSON object, in ``<|open|>json type="object"<|sep|>``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mlx_paged.parsing.channels import Body, ChannelParser
from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.format import Parser
from mlx_paged.parsing.lark import ONE_TO_MAX_CALLS, Lark
from mlx_paged.parsing.schemas import Schema
from mlx_paged.parsing.tagged import TaggedFormat
from mlx_paged.parsing.tagged_parser import TaggedParser
from mlx_paged.parsing.tags import Tags

_TEXT, _TEXT_END = "<|open|>response<|sep|>", "<|close|>response<|sep|>"
_ENDS = (_TEXT_END, "<|close|>message<|sep|>", "<|end_of_msg|>")
_TOOLS, _TOOLS_END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
_TYPES = ("string", "number", "boolean", "null", "object", "array")


def _key_end(name: str) -> str:
    return f'" type="{name}"<|sep|>'


class KimiK3Format(TaggedFormat):
    """Every argument has its type. Text is in a tag as well, which is dropped."""

    names = ("kimi_k3",)
    models = "Kimi K3"
    tags = Tags(
        call='<|open|>call tool="',
        name_end='"',
        call_end="<|close|>call<|sep|>",
        key='<|open|>argument key="',
        key_ends=tuple((_key_end(name), name == "string") for name in _TYPES),
        value="",
        value_end="<|close|>argument<|sep|>",
        blocks=((_TOOLS, _TOOLS_END),),
        newline="",
        attributes=r'\s*(?:index="[^"]*")?\s*<\|sep\|>',
        others=('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"),
    )
    markers = (*tags.markers, _TEXT, *_ENDS)
    begins_call = (_TOOLS, tags.call)
    begins_text = (_TEXT,)
    frames_text = True

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        has_tokens = {"<|open|>", "<|close|>", "<|sep|>"} <= vocabulary.keys()
        return has_tokens or {"<|open|>", "<|close|>", "<|sep|>"} <= set(
            re.findall(r"<\|\w+\|>", chat_template)
        )

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return ChannelParser(
            opens=(_TEXT,),
            ends=_ENDS,
            header=re.compile(r"\s*"),
            body_of=lambda header, marker: Body.TEXT,
            calls=TaggedParser(self.tags, tools),
            begins_call=self.begins_call,
            begins_with=Body.TEXT,
        )

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        """See the base. If the prompt has opened the text, it only ends."""
        lark = Lark(self.vocabulary)
        call = lark.rule(
            " | ".join(f"{lark.literal(self.tags.call)} {self._call(lark, tool)}" for tool in tools)
        )
        begin, end = lark.literal(_TOOLS), lark.literal(_TOOLS_END)
        calls = lark.rule(f"{begin} {call}{ONE_TO_MAX_CALLS if parallel else ''} {end}")
        opening, closing = lark.literal(_TEXT), lark.literal(_TEXT_END)
        frame = f"({opening})? ({closing})?"
        if required:
            lark.rule(f"{frame} {calls}", "start")
        else:
            others = [marker for marker in self.markers if marker != _TEXT_END]
            framed = lark.until(_TEXT_END, others=others)
            text = lark.terminal(lark.without(self.markers))
            lark.rule(
                f"({opening})? {framed} ({calls})? | ({opening})? {text} | {frame} {calls}", "start"
            )
        return lark.text()

    def _name(self, lark: Lark, tool: Tool) -> str:
        index = lark.terminal("/[0-9]{1,3}/")
        before, after = lark.literal(tool.name + '" index="'), lark.literal('"<|sep|>')
        return f"{before} {index} {after}"

    def _key_ends(self, schema: Schema, types: frozenset[str]) -> list[tuple[str, Schema]]:
        ends: list[tuple[str, Schema]] = []
        for name in _TYPES:
            kinds = sorted(types & ({"integer", "number"} if name == "number" else {name}))
            if kinds == ["integer", "number"]:
                kinds = ["number"]
            if kinds:
                ends.append((_key_end(name), {"allOf": [schema, {"type": kinds[0]}]}))
        return ends
