"""GigaChat 3: a JSON object in its own turn, which has its own role.

<|message_sep|>

function call<|role_sep|>
{"name": "get_weather", "arguments": {"city": "Oslo"}}

Newer ones write the token ``<|function_call|>`` instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import Event
from mlx_paged.parsing.json_blocks import CallBlockParser, JsonBlockFormat, json_call
from mlx_paged.parsing.json_calls import JsonCalls
from mlx_paged.parsing.lark import Lark
from mlx_paged.parsing.lexer import Lexeme

_ROLE, _TOKEN, _SEPARATOR = "function call<|role_sep|>", "<|function_call|>", "<|message_sep|>"


class GigaChat3Format(JsonBlockFormat):
    """One call, at the end of the answer."""

    names = ("gigachat3",)
    models = "GigaChat 3"
    markers = (_ROLE, _TOKEN, _SEPARATOR)
    begins_call = (_ROLE, _TOKEN)

    def __init__(self, vocabulary: Mapping[str, int], chat_template: str = "") -> None:
        super().__init__(vocabulary, chat_template)
        has_token = _TOKEN in vocabulary or _TOKEN in chat_template
        self.begin = _TOKEN if has_token else f"{_ROLE}\n"

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        has_role = "function call" in chat_template and "<|role_sep|>" in chat_template
        return has_role or _TOKEN in chat_template

    def parser(self, tools: Sequence[Tool]) -> GigaChatParser:
        known = {tool.name for tool in tools}
        return GigaChatParser(self.begins_call, (), lambda: JsonCalls(known, one=True))

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        """See the base. There is never more than one call."""
        lark = Lark(self.vocabulary)
        marker = next(marker for marker in self.begins_call if self.begin.startswith(marker))
        body = json_call(lark, tools)
        newline = self.begin.removeprefix(marker)
        rest = lark.rule(f"{self.literal(newline)} {body}" if newline else body)
        separator = lark.literal(f"{_SEPARATOR}\n\n")
        if required:
            lark.rule(f"({separator})? {lark.literal(marker)} {rest}", "start")
        elif self.begin == _TOKEN:
            return lark.answer(
                marker, rest, required=False, parallel=False, others=[_ROLE, _SEPARATOR]
            )
        else:
            others = [m for m in self.markers if m != _SEPARATOR]
            before = lark.until(f"{_SEPARATOR}\n\n", others=others)
            text = lark.terminal(lark.without(self.markers))
            lark.rule(f"{text} | {before} {lark.literal(marker)} {rest}", "start")
        return lark.text()


class GigaChatParser(CallBlockParser):
    """Reads text and a call. The separator of turns is left out."""

    def feed(self, lexeme: Lexeme) -> Iterable[Event]:
        if lexeme == (_SEPARATOR, True) and not self.in_string:
            return list(self.finish())
        return super().feed(lexeme)
