"""Gemma 4 and FunctionGemma: calls in their own notation, with tokens around strings.

<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>

FunctionGemma: <start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from mlx_paged.errors import InvalidParameterError
from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import CallArguments, CallBegin, CallEnd, ContentText, Event
from mlx_paged.parsing.format import Parser
from mlx_paged.parsing.lark import Lark, strings
from mlx_paged.parsing.lexer import Lexeme
from mlx_paged.parsing.nested_values import NestedFormat, SchemaRules
from mlx_paged.parsing.parameters import parameter_lists
from mlx_paged.parsing.schemas import (
    ALL_TYPES,
    Parameter,
    Schema,
    properties_of,
    resolved,
    types_of,
    unquoted,
)

# Models forget "call", or write a colon too many.
_HEAD = re.compile(r"\s*:?\s*(?:call\s*:+)?\s*([^\s{}<>:]{1,256})\s*")
_BARE = "call:"  # beginning of a call without its marker
_MAX_HEAD_LENGTH = 512  # characters
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.$-]+")
_LITERAL = re.compile(r"|null|true|false|[-+.0-9eE]+")  # no string continues after it
_ANY = Parameter(ALL_TYPES)


class Gemma4Format(NestedFormat):
    """Keys without quotes, strings between two equal tokens, other values as in JSON."""

    names: ClassVar[tuple[str, ...]] = ("gemma4",)
    models = "Gemma 4"
    begin: ClassVar[str] = "<|tool_call>"
    end: ClassVar[str] = "<tool_call|>"
    quote: ClassVar[str] = '<|"|>'
    markers = (begin, end, quote)
    begins_call = (begin,)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return cls.begin in chat_template and cls.end in chat_template

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return GemmaParser(self.begin, self.end, self.quote, tools)

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        """See the base. Keys have the chat template's sorting order."""
        lark = Lark(self.vocabulary)
        calls = []
        for tool in tools:
            values = _Values(lark, self.quote, tool)
            calls.append(f"{lark.literal(f'call:{tool.name}')} {values.arguments()}")
        call = f"({' | '.join(calls)}) {lark.literal(self.end)}"
        bare = [f"{_BARE}{tool.name}{{" for tool in tools]  # also read as a call
        return lark.answer(
            self.begin,
            call,
            required=required,
            parallel=parallel,
            between="",
            others=[self.quote, *bare],
        )


class FunctionGemmaFormat(Gemma4Format):
    """The same with other tokens."""

    names = ("functiongemma", "function_gemma")
    models = "FunctionGemma"
    begin = "<start_function_call>"
    end = "<end_function_call>"
    quote = "<escape>"
    markers = (begin, end, quote)
    begins_call = (begin,)


class GemmaParser:
    """Reads calls in this notation and writes their arguments as JSON, piece by piece.

    A string without quotes ends at a comma only if a key follows. Text in a position where the
    notation has none is returned after the call.

    Args:
        begin, end: Markers around a call. A line may begin with a call without its marker.
        quote: Marker on both sides of a string.
        tools: Tools that may be called; values follow the types of their parameters.
    """

    def __init__(self, begin: str, end: str, quote: str, tools: Sequence[Tool]) -> None:
        self._begin, self._end, self._quote = begin, end, quote
        self._tools = {tool.name: tool for tool in tools}
        self._state: Callable[[Lexeme, list[Event]], None] = self._outside
        self._marker = ""  # of the open call; "" if it is missing
        self._head = ""
        self._at_line_start = True
        self._follows_call = False
        self._parameters: Mapping[str, Any] = {}
        self._open: list[str] = []  # brackets
        self._is_first: list[bool] = []  # True if the open container is still empty
        self._text: list[str] = []  # of a key or a value without quotes
        self._is_blank = True  # True if that is whitespace
        self._key = ""
        self._quoted_key: str | None = None
        self._properties: Mapping[str, Schema] = {}
        self._in_key = False
        self._is_quoted = False
        self._has_value = False  # after a value: a comma or a bracket follows
        self._is_empty = False  # the open string
        self._space: str | None = None  # after an empty string, whose quotes may be one, doubled
        self._stray: list[str] = []  # text in the call at a position without text
        self._pending: str | None = None  # an unquoted value that may continue

    def feed(self, lexeme: Lexeme) -> Iterable[Event]:
        out: list[Event] = []
        self._state(lexeme, out)
        return out

    def passes(self, text: str) -> bool:
        is_outside = self._state == self._outside and not self._follows_call
        return is_outside and not self._at_line_start and "\n" not in text

    def finish(self) -> Iterable[Event]:
        out: list[Event] = []
        if self._state == self._in_head:
            if not (self._follows_call and not self._head.strip()):
                out.append(ContentText(self._marker + self._head))
        elif self._state == self._in_arguments:
            pieces: list[str] = []
            self._resolve_quote(Lexeme("", True), pieces)
            if self._pending is not None or (self._text and not self._in_key):
                self._end_value(pieces)
            _give(pieces, out)
            self._end_call(out, is_complete=False)
        elif self._state == self._after_arguments:
            self._end_call(out)
        self._state = self._outside
        return out

    # States.

    def _outside(self, lexeme: Lexeme, out: list[Event]) -> None:
        text, is_marker = lexeme
        if lexeme == (self._begin, True):
            self._marker, self._head = text, ""
            self._state = self._in_head
        elif is_marker:
            if text != self._quote and not (text == self._end and self._follows_call):
                self._add_text(text, out)
        else:
            for line in text.splitlines(keepends=True) if "\n" in text else [text]:
                if self._state != self._outside:
                    self._state(Lexeme(line), out)
                elif self._at_line_start and self._may_be_bare(line):
                    self._marker, self._head = "", ""
                    self._state = self._in_head
                    self._in_head(Lexeme(line), out)
                else:
                    self._add_text(line, out)
                    is_blank = not line.strip()
                    self._at_line_start = line.endswith("\n") or (self._at_line_start and is_blank)

    def _add_text(self, text: str, out: list[Event]) -> None:
        if text:
            self._follows_call = self._follows_call and not text.strip()
            out.append(ContentText(text))

    @staticmethod
    def _may_be_bare(text: str) -> bool:
        """Returns True if a line may begin with a call without its marker."""
        begun = text.lstrip()
        return begun.startswith(_BARE) or (begun != "" and _BARE.startswith(begun))

    def _in_head(self, lexeme: Lexeme, out: list[Event]) -> None:
        before, bracket, rest = lexeme.text.partition("{")
        if lexeme.is_marker:
            if lexeme.text == self._begin and not self._head.strip():  # once more
                self._marker += self._head + lexeme.text
                self._head = ""
                return
            before, bracket, rest = "", "", lexeme.text
        self._head += before
        found = _HEAD.fullmatch(self._head) if bracket else None
        if found is not None and found[1] in self._tools:
            self._parameters = self._tools[found[1]].parameters
            self._properties = properties_of(self._parameters)
            out += [CallBegin(found[1]), CallArguments("{")]
            self._open, self._is_first = ["{"], [True]
            self._begin_key()
            self._state = self._in_arguments
            if rest:
                self._in_arguments(Lexeme(rest), out)
        elif (
            bracket
            or lexeme.is_marker
            or len(self._head) > _MAX_HEAD_LENGTH
            or not (self._marker or (self._may_be_bare(self._head) and "\n" not in self._head))
        ):
            self._follows_call = False
            self._state = self._outside
            self._at_line_start = False
            if self._marker:
                self._add_text(self._marker, out)
                self._outside(Lexeme(self._head + bracket), out)
            else:
                head, self._head = self._head + bracket, ""
                self._outside(Lexeme(head), out)
            if rest:
                self._outside(Lexeme(rest, lexeme.is_marker), out)

    def _begin_key(self) -> None:
        self._in_key, self._has_value, self._is_quoted, self._text = True, False, False, []
        self._quoted_key, self._is_blank = None, True

    def _begin_value(self) -> None:
        self._in_key, self._has_value, self._is_quoted, self._text = False, False, False, []
        self._is_blank = True

    def _in_arguments(self, lexeme: Lexeme, out: list[Event]) -> None:
        pieces: list[str] = []
        rest = ""
        if self._space is not None:
            if not lexeme.is_marker and not lexeme.text.strip():
                self._space += lexeme.text
                return
            self._resolve_quote(lexeme, pieces)
        if lexeme.is_marker and lexeme.text == self._quote:
            self._at_quote(pieces)
        elif self._is_quoted:
            self._add_quoted(lexeme.text, pieces)
        elif lexeme == (self._end, True):
            # Brackets are missing; return everything there is.
            self._state = self._outside
            self._follows_call = True
            self._end_value(pieces)
            _give(pieces, out)
            self._end_call(out, is_complete=False)
            return
        else:
            rest = self._read(lexeme.text, pieces)
        _give(pieces, out)
        if not self._open:
            self._state = self._after_arguments
            if rest:
                self._after_arguments(Lexeme(rest), out)

    def _after_arguments(self, lexeme: Lexeme, out: list[Event]) -> None:
        if lexeme.is_marker or lexeme.text.strip():
            self._state = self._outside
            self._follows_call = True
            self._end_call(out)
            if lexeme != (self._end, True):
                self._outside(lexeme, out)

    def _end_call(self, out: list[Event], *, is_complete: bool = True) -> None:
        out.append(CallEnd(is_complete))
        stray, self._stray = " ".join("".join(self._stray).split()), []
        if stray:
            out.append(ContentText(stray + "\n"))

    def _resolve_quote(self, lexeme: Lexeme, pieces: list[str]) -> None:
        """Decides by the next text if a string is empty or its quote was doubled."""
        space, self._space = self._space, None
        if space is None:
            return
        if lexeme.is_marker or lexeme.text.lstrip()[0] in ",}]":
            pieces.append('"')
        else:
            self._is_quoted, self._has_value = True, False
            self._add_quoted(space, pieces)

    def _take_stray(self) -> None:
        """Moves unquoted text out of the arguments: it is at a position where none is allowed."""
        self._stray += [*self._text, " "] if not self._is_blank else []
        self._text, self._is_blank = [], True

    def _at_quote(self, pieces: list[str]) -> None:
        if self._in_key:
            if not self._is_quoted:
                self._take_stray()
            self._is_quoted = not self._is_quoted
            self._quoted_key = None if self._is_quoted else "".join(self._text)
            self._text = []
        elif not self._is_quoted and not self._has_value:
            self._take_stray()
            self._separate(pieces)
            pieces.append('"')
            self._is_quoted = self._is_empty = True
        elif self._is_quoted:
            if self._is_empty:
                self._space = ""
            else:
                pieces.append('"')
            self._is_quoted, self._has_value = False, True

    def _add_quoted(self, text: str, pieces: list[str]) -> None:
        if self._in_key:
            self._text.append(text)
        else:
            self._is_empty = self._is_empty and not text
            pieces.append(json.dumps(text, ensure_ascii=False)[1:-1])

    def _read(self, text: str, pieces: list[str]) -> str:
        """Reads unquoted text; returns the text after the last bracket."""
        at = 0
        while at < len(text) and self._open:
            found = _SYNTAX.search(text, at)
            end = len(text) if found is None else found.start()
            if self._has_value:
                self._stray.append(text[at:end])
            else:
                self._add_plain(text[at:end])
            at = end + 1
            if found is None:
                break
            c = found[0]
            if self._in_key:
                self._in_key_at(c, pieces)
            elif c in "{[" and not self._has_value and self._is_blank:
                self._separate(pieces)
                pieces.append(c)
                self._open.append(c)
                self._is_first.append(True)
                self._begin_key() if c == "{" else self._begin_value()
            elif c == "," or c in "}]":
                if c == "," and self._open[-1] == "{" and not self._has_value:
                    self._pending = "".join(self._text)
                    self._begin_key()
                    continue
                self._end_value(pieces)
                if c == ",":
                    self._begin_key() if self._open[-1] == "{" else self._begin_value()
                else:
                    self._close(pieces)
            elif self._has_value:
                self._stray.append(c)
            else:  # a colon, or a bracket within a word
                self._add_plain(c)
        return text[at:]

    def _add_plain(self, text: str) -> None:
        """Adds text to an unquoted key or value."""
        self._text.append(text)
        self._is_blank = self._is_blank and not text.strip()

    def _in_key_at(self, c: str, pieces: list[str]) -> None:
        """Reads a character of `_SYNTAX` within a key: it ends the key, or is a part of it."""
        text, quoted, pending = "".join(self._text), self._quoted_key, self._pending
        if c == ":":
            key = text.strip() if quoted is None else quoted
            if pending is not None and quoted is None and not self._is_key(key, pending):
                self._begin_value()
                self._pending = None
                self._add_plain(f"{pending},{text}:")
                return
            self._end_pending(pieces)
            if quoted is not None:
                self._take_stray()
            self._key = key
            self._begin_value()
        elif quoted is not None and c in ",}":  # a key without a value
            self._stray += [quoted, " "]
            self._quoted_key = None
            self._take_stray()
            self._in_key_at(c, pieces)
        elif c == "}" and (self._is_blank or pending is not None):
            if not self._is_blank:
                self._pending = f"{pending},{text}"
            self._end_pending(pieces)
            self._close(pieces)
        elif c == "," and pending is not None:
            self._pending = f"{pending},{text}"
            self._begin_key()
        elif c != ",":
            self._add_plain(c)

    def _is_key(self, text: str, before: str) -> bool:
        """True if a text after a comma is a key, not more of the value without quotes before it."""
        if _LITERAL.fullmatch(before.strip()):
            return True
        if len(self._open) == 1 and self._properties:
            return text in self._properties
        return re.search(r"\s", text) is None

    def _end_pending(self, pieces: list[str]) -> None:
        """Ends the unquoted value before a key."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._write_plain(pending, pieces)

    def _separate(self, pieces: list[str]) -> None:
        """Writes the text before a value: a comma, and its key."""
        if not self._is_first[-1]:
            pieces.append(", ")
        self._is_first[-1] = False
        if self._open[-1] == "{":
            pieces.append(json.dumps(self._key, ensure_ascii=False) + ": ")

    def _end_value(self, pieces: list[str]) -> None:
        """Ends an unquoted value."""
        if self._pending is not None:
            text = "".join(self._text)
            self._pending += f",{text}" if text.strip() else ""
            self._text = []
            self._end_pending(pieces)
            return
        text = "".join(self._text)
        self._text = []
        if not (self._has_value or self._in_key):
            self._write_plain(text, pieces)

    def _write_plain(self, text: str, pieces: list[str]) -> None:
        text = text.strip()
        if text or self._open[-1] == "{":
            self._separate(pieces)
            text = unquoted(text)
            parameter = _ANY
            if len(self._open) == 1 and self._key in self._properties:
                parameter = Parameter.of(self._properties[self._key], self._parameters)
            pieces.append(parameter.to_json(text))

    def _close(self, pieces: list[str]) -> None:
        pieces.append("}" if self._open.pop() == "{" else "]")
        self._is_first.pop()
        self._in_key, self._has_value, self._text = False, True, []


_SYNTAX = re.compile(r"[,:{}\[\]]")


def _give(pieces: list[str], out: list[Event]) -> None:
    if text := "".join(pieces):
        out.append(CallArguments(text))


class _Values(SchemaRules):
    """Rules of a tool's arguments in this notation."""

    def __init__(self, lark: Lark, quote: str, tool: Tool) -> None:
        super().__init__(lark, tool)
        self._quote = quote

    def arguments(self) -> str:
        """Returns the rule of all arguments."""
        return self._rule({"type": "object", **self._root})

    def _value(self, schema: Schema, tag: str = "") -> str:
        lark = self._lark
        if not isinstance(schema, Mapping):
            schema = {}
        if self._is_strict and (unknown := schema.keys() & _NOT_ENFORCED):
            expected = f"without {', '.join(sorted(unknown))}: this model's calls are not JSON"
            raise InvalidParameterError("tools", expected, schema)
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return " | ".join(lark.literal(self._written(value)) for value in values)
        types = types_of(schema, self._root)
        for keyword in ("anyOf", "oneOf"):
            if schema.get(keyword) and types != {"object"}:
                beside = {k: v for k, v in schema.items() if k != keyword}
                parts = [resolved(part, self._root) for part in schema[keyword]]
                merged = [{**beside, **p} if isinstance(p, Mapping) else beside for p in parts]
                return " | ".join(self._rule(part) for part in merged)
        alternatives = []
        for name in sorted(types):
            if name == "object":
                alternatives += self._objects(schema)
            elif name == "array":
                alternatives.append(self._array(schema))
            elif name == "string":
                text = lark.until(self._quote, allowed=strings(schema, self._root))
                alternatives.append(f"{lark.literal(self._quote)} {text}")
            elif name != "integer" or "number" not in types:
                plain = {k: v for k, v in schema.items() if k in _NUMBERS}
                alternatives.append(lark.json({**plain, "type": name}, strict=self._is_strict))
        return " | ".join(alternatives)

    def _objects(self, schema: Mapping[str, Any]) -> list[str]:
        lark = self._lark
        others = schema.get("additionalProperties", True)
        alternatives = []
        for parameters, _ in parameter_lists({**schema, "$defs": self._root.get("$defs", {})}):
            if not parameters:
                # Any number, with any name.
                key = lark.terminal(r"/[A-Za-z_][A-Za-z0-9_]{0,30}:/")
                if others is not False and ("properties" not in schema or others is not True):
                    one = f"{key} {self._rule(others)}"
                    alternatives.append(f'"{{" ({one} ("," {one})*)? "}}"')
                else:
                    alternatives.append('"{}"')
                continue
            items = [
                (f"{lark.literal(self._key(name) + ':')} {self._rule(of_name)}", is_required)
                for name, of_name, is_required in sorted(parameters, key=lambda p: p[0].lower())
            ]
            first = []
            for i, (item, is_required) in enumerate(items):
                rest = [f'("," {later}){"" if need else "?"}' for later, need in items[i + 1 :]]
                first.append(" ".join([item, *rest]))
                if is_required:
                    break
            else:
                first.append('""')
            alternatives.append(f'"{{" ({" | ".join(first)}) "}}"')
        return alternatives

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._rule(schema.get("items", True))
        min_items, max_items = int(schema.get("minItems", 0)), schema.get("maxItems")
        if max_items is not None and int(max_items) <= 0:
            return '"[]"'
        limit = "" if max_items is None else int(max_items) - 1
        some = f'{item} ("," {item}){{{max(min_items - 1, 0)},{limit}}}'
        return f'"[" {some} "]"' if min_items else f'"[" ({some})? "]"'

    def _written(self, value: Any) -> str:
        """A value as the chat template writes it."""
        if isinstance(value, str):
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._written, value)) + "]"
        if isinstance(value, dict):
            items = sorted(value.items(), key=lambda item: item[0].lower())
            return "{" + ",".join(f"{self._key(k)}:{self._written(v)}" for k, v in items) + "}"
        return json.dumps(value)

    def _key(self, name: str) -> str:
        return name if _PLAIN_KEY.fullmatch(name) else f"{self._quote}{name}{self._quote}"


# `lark_json` handles numbers.
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_NOT_ENFORCED = {
    *("contains", "dependentRequired", "dependentSchemas", "else", "if", "not", "prefixItems"),
    *("propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
}
