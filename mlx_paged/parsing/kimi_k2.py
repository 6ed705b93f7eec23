"""Kimi K2: an id that has the name in it, and JSON, between tokens.

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>
{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>  (without the newline)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.format import Parser, ToolFormat, lark_arguments
from mlx_paged.parsing.lark import ONE_TO_MAX_CALLS, Lark
from mlx_paged.parsing.named_json import Marks, NamedJsonParser

_ID = re.compile(r"(?:functions\.)?(?P<name>[^\s{}<>]+?)(?P<index>:\d+)?")
# Around a name that is written otherwise: ``functions_get_weather_0``.
_PREFIX = re.compile(r"(?:functions?[._:])?")
_NUMBER = re.compile(r"(?:functions?[._:])?\d+")  # an id without a name
_INDEX = re.compile(r"(?:[._:-]\d+)?$")


class KimiK2Format(ToolFormat):
    """The ids are the model's own: its template renders them, and results are found by them."""

    names = ("kimi_k2",)
    models = "Kimi K2, Kimi K2 Thinking"
    marks = Marks(
        call="<|tool_call_begin|>",
        arguments="<|tool_call_argument_begin|>",
        call_end="<|tool_call_end|>",
        block=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        hides_text=True,
    )
    markers = marks.all
    begins_call = (marks.block[0], marks.call)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return cls.marks.block[0] in chat_template

    def parser(self, tools: Sequence[Tool]) -> Parser:
        known = {tool.name for tool in tools}
        return NamedJsonParser(
            self.marks,
            lambda head, tail: _name_and_id(head, tail, known),
            tools,
            is_nameless=_NUMBER.fullmatch,
        )

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark, marks = Lark(self.vocabulary), self.marks
        index = lark.terminal("/[0-9]{1,4}/")
        calls = []
        for tool in tools:
            name = lark.literal(f"functions.{tool.name}:")
            arguments = lark.rule(lark_arguments(tool))
            calls.append(f"{name} {index} {lark.literal(marks.arguments)} {arguments}")
        call = f"{lark.literal(marks.call)} {lark.rule(' | '.join(calls))}"
        call = lark.rule(f"{call} {lark.literal(marks.call_end)}")
        rest = f"{call}{ONE_TO_MAX_CALLS if parallel else ''} {lark.literal(marks.block[1])}"
        return lark.answer(
            marks.block[0],
            rest,
            required=required,
            parallel=parallel,
            between="",
            others=self.begins_call,
        )


def _name_and_id(head: str, tail: str, known: Collection[str]) -> tuple[str, str | None] | None:
    call_id = head.strip()
    found = _ID.fullmatch(call_id)
    if found is None or tail.strip():
        return None
    if found["name"] not in known:
        # Names may end in digits, too, so only the tools tell where the name begins and ends.
        start = _PREFIX.match(call_id).end()  # type: ignore[union-attr]
        end = _INDEX.search(call_id).start()  # type: ignore[union-attr]
        candidates = (call_id[start:end], call_id[start:], call_id[:end], call_id)
        fitting = [name for name in candidates if name in known]
        if fitting:
            return fitting[0], call_id
    return found["name"], call_id if found["index"] else None
