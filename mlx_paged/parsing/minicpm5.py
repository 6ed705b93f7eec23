"""MiniCPM 5: a function with named parameters, and no block around it.

<function name="get_weather"><param name="city">Oslo</param></function>

A value with ``<``, ``&`` or newlines is between ``<![CDATA[`` and ``]]>``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import Event
from mlx_paged.parsing.format import Parser
from mlx_paged.parsing.lark import Lark, strings
from mlx_paged.parsing.lexer import Lexeme
from mlx_paged.parsing.schemas import Schema, types_of
from mlx_paged.parsing.tagged import TaggedFormat
from mlx_paged.parsing.tagged_parser import TaggedParser
from mlx_paged.parsing.tags import attribute_tags

_QUOTE, _QUOTE_END = "<![CDATA[", "]]>"
# Tags without their space, or with a tokenizer's own letter for it.
_ALIASES = {
    f"<{tag}{space}name={quote}": f'<{tag} name="'
    for tag in ("function", "param")
    for space in ("", "\u0120", " ")
    for quote in "\"'"
    if space + quote != ' "'
}


class MiniCpm5Format(TaggedFormat):
    """``<function name="...">`` and ``<param name="...">``."""

    names = ("minicpm5", "minicpm5xml")
    models = "MiniCPM 5"
    tags = attribute_tags("function", "param", key_ends=(('">', None), ("'>", None)), newline="")
    markers = (*tags.markers, *_ALIASES, _QUOTE, _QUOTE_END)
    begins_call = ('<function name="',)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return '<function name="' in chat_template and '<param name="' in chat_template

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return MiniCpm5Parser(self.tags, tools)

    def _value(
        self, lark: Lark, schema: Schema, root: Schema, value_end: str, *, strict: bool
    ) -> str:
        types = types_of(schema, root if isinstance(root, Mapping) else {})
        if "string" not in types:
            return super()._value(lark, schema, root, value_end, strict=strict)
        allowed = strings(schema, root)
        plain = super()._value(lark, schema, root, value_end, strict=strict)
        if types == {"string"}:
            text = lark.terminal(f"({allowed} & /[^<&\\n]*/)")
            plain = f"{text} {lark.literal(value_end)}"
        quoted = lark.until(f"{_QUOTE_END}{value_end}", allowed=allowed)
        return lark.rule(f"{plain} | {lark.literal(_QUOTE)} {quoted}")


class MiniCpm5Parser(TaggedParser):
    """Reads values in quotes, too."""

    _quoted = False  # True if the value is in quotes
    _has_text = False  # True if the value has begun
    _closing: list[str] | None = None  # a closing quote, if only the value's end follows

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        if lexeme.is_marker:
            is_tag = self._state != self._in_value
            lexeme = Lexeme(_ALIASES.get(lexeme.text, lexeme.text) if is_tag else lexeme.text, True)
        return super().feed(lexeme)

    def _begin_value(self) -> Iterator[Event]:
        self._quoted, self._has_text, self._closing = False, False, None
        yield from super()._begin_value()

    def _in_value(self, lexeme: Lexeme) -> Iterator[Event]:
        if lexeme == (_QUOTE, True) and not self._has_text:
            self._quoted = self._has_text = True
            return
        self._has_text = self._has_text or bool(lexeme.text.strip())
        if not self._quoted:
            yield from super()._in_value(lexeme)
        elif lexeme == (_QUOTE_END, True):
            if self._closing is not None:
                yield from self._add("".join(self._closing))
            self._closing = [lexeme.text]
        elif self._closing is None:
            yield from self._add(lexeme.text)
        elif lexeme == (self._tags.value_end, True):
            yield from super()._in_value(lexeme)
        else:
            closing, self._closing = self._closing, None
            yield from self._add("".join(closing) + lexeme.text)

    def _not_ended(self, lexeme: Lexeme) -> Iterator[Event]:
        closing, self._closing = self._closing, None
        if closing is not None:
            yield from self._add("".join(closing))
        yield from super()._not_ended(lexeme)
