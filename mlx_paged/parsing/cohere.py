"""Cohere's Command R7B and Command A: an array of actions between tokens.

<|START_THINKING|>I look it up.<|END_THINKING|><|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}}
]<|END_ACTION|>

Text is between <|START_RESPONSE|> and <|END_RESPONSE|>, or <|START_TEXT|> and <|END_TEXT|>.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import CallBegin, Event
from mlx_paged.parsing.format import Parser, ToolFormat, lark_arguments
from mlx_paged.parsing.json_blocks import CallBlockParser
from mlx_paged.parsing.json_calls import JsonCalls
from mlx_paged.parsing.lark import MORE_CALLS, Lark
from mlx_paged.parsing.lexer import Lexeme

_BEGIN, _END = "<|START_ACTION|>", "<|END_ACTION|>"
_AROUND_TEXT = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")


class CohereFormat(ToolFormat):
    """Actions. Their ids count within a conversation, as its template does."""

    names = ("cohere_command3", "cohere_command4")
    models = "Command R7B, Command A"
    markers = (_BEGIN, _END, *_AROUND_TEXT)
    begins_call = (_BEGIN,)
    begins_text = (_AROUND_TEXT[0], _AROUND_TEXT[2])

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _BEGIN in chat_template or _BEGIN in vocabulary

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return CohereParser(tools)

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark = Lark(self.vocabulary)
        index = lark.terminal("/[0-9]{1,3}/")
        calls = []
        for tool in tools:
            name = json.dumps(tool.name, ensure_ascii=False)
            head = json.dumps(f'", "tool_name": {name}, "parameters": ', ensure_ascii=False)
            calls.append(f"{head} {lark.rule(lark_arguments(tool))}")
        opening = json.dumps('\n    {"tool_call_id": "')
        call = lark.rule(f'{opening} {index} ({" | ".join(calls)}) "}}"')
        more = f'("," {call}){MORE_CALLS}' if parallel else ""
        rest = f'"[" {call} {more} "\\n]" {lark.literal(_END)}'
        if required or not lark.has_token(_BEGIN):
            others = _AROUND_TEXT
            return lark.answer(_BEGIN, rest, required=required, parallel=False, others=others)
        # Text is between tokens, which a rule must name because text cannot contain them.
        marks = [lark.literal(marker) for marker in _AROUND_TEXT]
        text = lark.terminal(lark.without(self.markers))
        texts = lark.rule(" | ".join([text, *marks]))
        lark.rule(f"{texts}* ({lark.literal(_BEGIN)} {rest})?", "start")
        return lark.text()


class CohereParser(CallBlockParser):
    """Reads actions; the markers around text are left out."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        known = {tool.name for tool in tools}
        super().__init__((_BEGIN,), (_END,), lambda: JsonCalls(known))

    def feed(self, lexeme: Lexeme) -> Iterable[Event]:
        if lexeme.is_marker and lexeme.text in _AROUND_TEXT and not self.in_string:
            return
        for event in super().feed(lexeme):
            yield CallBegin(event.name) if isinstance(event, CallBegin) else event
