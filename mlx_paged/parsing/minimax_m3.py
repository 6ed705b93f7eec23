"""MiniMax M3: tags of XML's kind, each after one token; keys are names of tags, and values nest.

]<]minimax[>[<tool_call>
]<]minimax[>[<invoke name="find">]<]minimax[>[<city>Oslo]<]minimax[>[</city>]<]minimax[>[<tags>
]<]minimax[>[<item>a]<]minimax[>[</item>]<]minimax[>[</tags>]<]minimax[>[</invoke>
]<]minimax[>[</tool_call>  (without the second newline)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_paged.parsing import schemas
from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import CallArguments, CallBegin, CallEnd, ContentText, Event
from mlx_paged.parsing.format import Parser, arguments_schema
from mlx_paged.parsing.lark import ONE_TO_MAX_CALLS, Lark
from mlx_paged.parsing.lexer import Lexeme
from mlx_paged.parsing.nested_values import NestedFormat, SchemaRules
from mlx_paged.parsing.parameters import parameter_lists

_TOKEN = "]<]minimax[>["
_BEGIN, _END = "<tool_call>", "</tool_call>"
_INVOKE, _INVOKE_END = re.compile(r'<invoke name="([^"\s]{1,256})">'), "</invoke>"
_TAG = re.compile(r"<(/?)([^<>/\s][^<>\s]*)>")
_ITEM = "item"
_MAX_TAG_LENGTH = 512  # characters


class MinimaxM3Format(NestedFormat):
    """One block of invocations."""

    names = ("minimax_m3",)
    models = "MiniMax M3"
    markers = (_TOKEN,)
    begins_call = (_TOKEN,)

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return _TOKEN in chat_template or _TOKEN in vocabulary

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return MinimaxM3Parser(tools)

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        lark = Lark(self.vocabulary)
        calls = []
        for tool in tools:
            opening = lark.literal(f'\n{_TOKEN}<invoke name="{tool.name}">')
            calls.append(f"{opening} {_Values(lark, tool).arguments()}")
        call = lark.rule(" | ".join(calls))
        end = lark.literal(f"\n{_TOKEN}{_END}")
        rest = lark.rule(f"{call}{ONE_TO_MAX_CALLS if parallel else ''} {end}")
        return lark.answer(
            _TOKEN + _BEGIN, rest, required=required, parallel=False, others=[_TOKEN]
        )


@dataclass
class _Value:
    """An open value.

    Attributes:
        key: Its tag; "" for all arguments of a call.
        schema: Its part of the tool's schema.
        closes: The bracket that closes it, if it is a container; "" until that is known.
        text: Its text so far, unless it is a container or is streamed.
        streams: True for a string, which is returned as it arrives.
        is_first: True while a container is empty.
        children: Values of an object whose keys no schema lists, by key. A repeated key makes an
            array, so they are returned together at the end. None for other values.
        out: JSON so far, for a child of such an object.
    """

    key: str
    schema: schemas.Schema
    closes: str = ""
    text: list[str] = field(default_factory=list)
    streams: bool = False
    is_first: bool = True
    children: dict[str, list[str]] | None = None
    out: list[str] = field(default_factory=list)


class MinimaxM3Parser:
    """Reads tags, and writes their values as JSON, piece by piece.

    A tag counts only at a valid position; elsewhere it is text. A tag that closes an outer value
    also closes those within it. Text outside of values is returned after the call.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._root: Mapping[str, Any] = {}  # the schema of the open call
        self._open: list[_Value] = []  # values, the innermost last; the first one is the call
        self._tag: str | None = None  # text after a token
        self._in_block = False
        self._raw: list[str] = []  # of a block without a call
        self._follows_block = False
        self._keys: set[str] = set()  # parameters of the open call
        self._stray: list[str] = []  # text in it at a position without text

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        text, is_marker = lexeme
        if is_marker:
            if self._tag is not None:
                yield from self._no_tag()
            self._tag = text.removeprefix(_TOKEN)
        elif self._tag is not None:
            self._tag += text
        else:
            yield from self._add(text)
            return
        tag = self._tag.lstrip()
        end = tag.find(">")
        if (tag and tag[0] != "<") or (end < 0 and len(tag) > _MAX_TAG_LENGTH):
            yield from self._no_tag()
        elif end >= 0:
            self._tag = None
            yield from self._at(tag[: end + 1])
            if tag[end + 1 :]:
                yield from self._add(tag[end + 1 :])

    def passes(self, text: str) -> bool:
        return self._tag is None and not self._open and not self._in_block

    def finish(self) -> Iterator[Event]:
        tag, self._tag = self._tag, None
        if self._open:
            is_complete = len(self._open) == 1 and self._has_required()
            if is_complete:
                yield from self._close()
            yield CallEnd(is_complete, lacks_end=True)
            yield from self._beside_call()
            self._open = []
        else:
            yield from self._leave_block()
            if tag:
                yield ContentText(_TOKEN + tag)
        self._in_block = False

    def _beside_call(self) -> Iterator[Event]:
        stray, self._stray = "".join(self._stray).replace(_TOKEN, " ").strip(), []
        if stray:
            yield ContentText(stray + "\n")

    def _has_required(self) -> bool:
        return self._keys >= set(self._root.get("required") or ())

    def _no_tag(self) -> Iterator[Event]:
        """The token begins no tag: it is text."""
        tag, self._tag = self._tag, None
        yield from self._add(_TOKEN + (tag or ""))

    def _leave_block(self) -> Iterator[Event]:
        raw, self._raw = "".join(self._raw), []
        self._in_block = False
        if raw:
            yield ContentText(raw)

    def _add(self, text: str) -> Iterator[Event]:
        """Text that is not a tag."""
        if not self._open:
            if self._in_block and not text.strip():
                if self._raw:
                    self._raw.append(text)
                return
            if self._in_block:
                yield from self._leave_block()
            self._follows_block = self._follows_block and not text.strip()
            yield ContentText(text)
        elif len(self._open) > 1 and not self._open[-1].closes:
            value = self._open[-1]
            if value.streams:
                yield from self._give(json.dumps(text, ensure_ascii=False)[1:-1])
            else:
                value.text.append(text)
        else:
            self._stray.append(text)

    def _at(self, tag: str) -> Iterator[Event]:
        """A tag after a token."""
        invoked = _INVOKE.fullmatch(tag)
        if self._open:
            yield from self._in_call(tag, invoked)
        elif invoked is not None and invoked[1] in self._tools:
            self._raw = []
            yield from self._begin_call(invoked[1])
        elif tag == _BEGIN:
            yield from self._leave_block()
            self._in_block, self._raw = True, [_TOKEN + tag]
        elif tag == _END and (self._in_block or self._follows_block):
            if self._raw:
                self._raw.append(_TOKEN + tag)
            self._follows_block = not self._raw
            yield from self._leave_block()
        else:
            if self._in_block:
                yield from self._leave_block()
            yield ContentText(_TOKEN + tag)

    def _begin_call(self, name: str) -> Iterator[Event]:
        self._root = self._tools[name].parameters
        self._open, self._keys = [_Value("", {**self._root, "type": "object"}, "}")], set()
        yield CallBegin(name)
        yield CallArguments("{")

    def _in_call(self, tag: str, invoked: re.Match[str] | None) -> Iterator[Event]:
        found = _TAG.fullmatch(tag)
        innermost = self._open[-1]
        ends_call = tag in (_INVOKE_END, _END) or (invoked is not None and not innermost.streams)
        names = [value.key for value in self._open]
        if found is not None and found[1] and found[2] in names[1:]:
            while self._open[-1].key != found[2]:
                yield from self._close()
            yield from self._close()
            return
        if ends_call:
            while self._open:
                yield from self._close()
            yield CallEnd()
            yield from self._beside_call()
            self._follows_block = self._in_block = self._in_block or tag == _INVOKE_END
            if tag != _INVOKE_END:
                yield from self._at(tag)
            return
        if found is None or found[1] or not self._takes_key(innermost):
            yield from self._add(_TOKEN + tag)
            return
        yield from self._begin_value(found[2])

    def _takes_key(self, value: _Value) -> bool:
        """Returns True if another value may begin within this one."""
        return bool(value.closes) or not (value.streams or "".join(value.text).strip())

    def _begin_value(self, key: str) -> Iterator[Event]:
        parent = self._open[-1]
        if not parent.closes:
            types = schemas.types_of(parent.schema, self._root)
            is_array = "array" in types and (key == _ITEM or "object" not in types)
            parent.closes, parent.text = ("]" if is_array else "}"), []
            if not is_array and not self._lists_keys(parent):
                parent.children = {}
            else:
                yield from self._give("[" if is_array else "{")
        if parent.children is None:
            separator = "" if parent.is_first else ", "
            name = json.dumps(key, ensure_ascii=False) + ": " if parent.closes == "}" else ""
            yield from self._give(separator + name)
        parent.is_first = False
        if len(self._open) == 1:
            self._keys.add(key)
        value = _Value(key, self._schema_within(parent, key))
        # An unknown parameter is a string.
        is_known = value.schema is not True or parent.closes == "]"
        value.streams = not is_known or schemas.types_of(value.schema, self._root) == {"string"}
        self._open.append(value)
        if value.streams:
            yield from self._give('"')

    def _give(self, text: str) -> Iterator[Event]:
        """Returns more of the JSON, or holds it."""
        for parent, child in reversed(list(zip(self._open, self._open[1:], strict=False))):
            if parent.children is not None:
                child.out.append(text)
                return
        if text:
            yield CallArguments(text)

    def _close(self) -> Iterator[Event]:
        """The innermost value ends."""
        value = self._open[-1]
        parent = self._open[-2] if len(self._open) > 1 else None
        yield from self._give(self._end(value))
        self._open.pop()
        if parent is not None and parent.children is not None:
            parent.children.setdefault(value.key, []).append("".join(value.out))

    def _lists_keys(self, value: _Value) -> bool:
        """True if the schema lists the keys of an object."""
        schema = schemas.resolved(value.schema, self._root)
        return isinstance(schema, Mapping) and "properties" in schema

    def _schema_within(self, parent: _Value, key: str) -> schemas.Schema:
        """Returns the schema of a child; {} allows any value, True is for an unknown parameter."""
        schema = schemas.resolved(parent.schema, self._root)
        if not isinstance(schema, Mapping):
            return {}
        if parent.closes == "]":
            return schema.get("items", {})  # type: ignore[no-any-return]
        known = schemas.properties_of({**self._root, **schema})
        if key in known:
            return known[key]
        others = schema.get("additionalProperties")
        if isinstance(others, Mapping):
            return others
        is_free = "properties" not in schema and parent.key != ""
        return {} if is_free else True

    def _end(self, value: _Value) -> str:
        """The rest of a value's JSON."""
        if value.children is not None:
            items = [
                f"{json.dumps(key, ensure_ascii=False)}: "
                + (texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]")
                for key, texts in value.children.items()
            ]
            return "{" + ", ".join(items) + "}"
        if value.closes:
            return value.closes
        if value.streams:
            return '"'
        text = "".join(value.text)
        types = schemas.types_of(value.schema, self._root)
        if not text.strip() and types and types <= {"array", "object"}:
            return "[]" if "array" in types else "{}"
        is_free = not isinstance(value.schema, Mapping) or not value.schema
        if is_free:
            return schemas.Parameter(schemas.ALL_TYPES).to_json(text)
        return schemas.Parameter.of(value.schema, self._root).to_json(text)


class _Values(SchemaRules):
    """Rules of a tool's arguments in this notation."""

    def arguments(self) -> str:
        """Returns the rule of all arguments, up to the end of the call."""
        lark = self._lark
        schema = arguments_schema(self._root)
        end = lark.literal(f"{_TOKEN}{_INVOKE_END}")
        return lark.rule(" | ".join(f"{keys} {end}" for keys in self._keys(schema)))

    def _keys(self, schema: schemas.Schema) -> list[str]:
        """Rules of an object's keys and values, one for each list of parameters."""
        lists = []
        for parameters, _ in parameter_lists(schema):
            parts = ['""']
            for name, of_name, is_required in parameters:
                opening = self._lark.literal(f"{_TOKEN}<{name}>")
                parts.append(f"({opening} {self._rule(of_name, name)}){'' if is_required else '?'}")
            lists.append(" ".join(parts))
        return lists

    def _value(self, schema: schemas.Schema, tag: str) -> str:
        lark = self._lark
        types = schemas.types_of(schema, self._root)
        end = f"{_TOKEN}</{tag}>"
        if not isinstance(schema, Mapping) or schema.keys() & {"const", "enum"}:
            return lark.value(schema, self._root, end, strict=self._is_strict)
        is_object = "object" in types and "properties" in schema
        is_array = "array" in types and "items" in schema
        alternatives = []
        if is_object:
            rooted = {**schema, "$defs": self._root.get("$defs", {})}
            alternatives += [f"{keys} {lark.literal(end)}" for keys in self._keys(rooted)]
        if is_array:
            alternatives.append(f"{self._items(schema)} {lark.literal(end)}")
        tagged = {name for name, has in (("object", is_object), ("array", is_array)) if has}
        if rest := sorted(types - tagged):
            narrowed: schemas.Schema = {"allOf": [schema, {"type": rest}]} if tagged else schema
            alternatives.append(lark.value(narrowed, self._root, end, strict=self._is_strict))
        return " | ".join(alternatives)

    def _items(self, schema: Mapping[str, Any]) -> str:
        opening = self._lark.literal(f"{_TOKEN}<{_ITEM}>")
        item = f"({opening} {self._rule(schema['items'], _ITEM)})"
        min_items, max_items = int(schema.get("minItems", 0)), schema.get("maxItems")
        if max_items is not None and int(max_items) <= 0:
            return '""'
        return f"{item}{{{min_items},{'' if max_items is None else int(max_items)}}}"
