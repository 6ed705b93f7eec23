"""The grammar of arguments that are JSON within a JSON string: ``"{\\"city\\": \\"Oslo\\"}"``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.format import arguments_schema
from mlx_paged.parsing.lark import Lark
from mlx_paged.parsing.schemas import Schema, resolved, types_of

_MAX_DEPTH = 24
_INTEGER = r"/-?(0|[1-9][0-9]{0,30})/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?/"
# A backslash of the inner JSON is two, and a quote that it escapes is escaped once more.
_STRING = r'/\\"([^"\\\x00-\x1f\x7f]|\\\\(\\"|\\\\|[bfnrt]|u[0-9a-fA-F]{4}))*\\"/'

#: Keywords that are enforced, or that do not constrain values.
_KNOWN = frozenset(
    {
        *("$anchor", "$comment", "$defs", "$id", "$ref", "$schema", "additionalProperties"),
        *("anyOf", "const", "default", "definitions", "deprecated", "description", "enum"),
        *("examples", "items", "nullable", "oneOf", "properties", "readOnly", "required"),
        *("strict", "title", "type", "writeOnly", "x-guidance"),
    }
)


def escaped_arguments(lark: Lark, tool: Tool, separators: tuple[str, str] | None) -> str:
    """A rule of Lark: the arguments of a tool, as they stand between the string's quotes."""
    return _Escaped(lark, tool.parameters, separators or (", ", ": ")).arguments()


def left_out(schema: Any, path: str, depth: int = 0) -> Iterator[tuple[str, object]]:
    """The keywords of a schema that `escaped_arguments` does not enforce: paths and values."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    for key, value in schema.items():
        here = f"{path}.{key}"
        if key not in _KNOWN:
            yield here, value
        elif key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
            for name, inner in value.items():
                yield from left_out(inner, f"{here}.{name}", depth + 1)
        elif key in ("anyOf", "oneOf") and isinstance(value, Sequence):
            for i, inner in enumerate(value):
                yield from left_out(inner, f"{here}[{i}]", depth + 1)
        elif key == "items":
            yield from left_out(value, here, depth + 1)


class _Escaped:
    """Makes the rules of one tool.

    Args:
        lark: Destination of the rules.
        root: The document that references (``$ref``) point into.
        separators: Item and key separators.
    """

    def __init__(self, lark: Lark, root: Mapping[str, Any], separators: tuple[str, str]) -> None:
        self._lark = lark
        self._root = root
        self._item, self._key = (self._literal(text) for text in separators)
        self._rules: dict[str, str] = {}  # by schema, which may contain itself

    def arguments(self) -> str:
        return self._object(arguments_schema(self._root))

    def _literal(self, text: str) -> str:
        """A text of the inner JSON."""
        return self._lark.literal(json.dumps(text, ensure_ascii=False)[1:-1])

    def _value(self, schema: Schema) -> str:
        schema = resolved(schema, self._root)
        key = json.dumps(schema, sort_keys=True)
        if key not in self._rules:
            self._rules[key] = name = self._lark.reserve()
            self._lark.define(name, " | ".join(self._alternatives(schema)))
        return self._rules[key]

    def _alternatives(self, schema: Schema) -> list[str]:
        if not isinstance(schema, Mapping):
            schema = {}
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return [self._literal(json.dumps(value, ensure_ascii=False)) for value in values]
        for keyword in ("anyOf", "oneOf"):
            if schema.get(keyword):
                beside = {k: v for k, v in schema.items() if k != keyword}
                parts = [resolved(part, self._root) for part in schema[keyword]]
                return [self._value({**beside, **p}) for p in parts if isinstance(p, Mapping)]
        types = types_of(schema, self._root)
        found = []
        for type_name in sorted(types):
            if type_name == "object":
                found.append(self._object(schema))
            elif type_name == "array":
                found.append(self._array(schema))
            elif type_name == "integer" and "number" not in types:
                found.append(self._lark.terminal(_INTEGER))
            elif type_name == "number":
                found.append(self._lark.terminal(_NUMBER))
            elif type_name == "string":
                found.append(self._lark.terminal(_STRING))
            elif type_name == "boolean":
                found.append('("true" | "false")')
            elif type_name == "null":
                found.append('"null"')
        return found

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._value(schema.get("items", True))
        return self._lark.rule(f'"[" ({item} ({self._item} {item})*)? "]"')

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        more = schema.get("additionalProperties", not properties)
        members = [
            (f"{self._literal(json.dumps(name, ensure_ascii=False))} {self._key} {value}", needed)
            for name, needed in ((n, n in required) for n in properties)
            for value in [self._value(properties[name])]
        ]
        tail = ""
        if more is not False:
            other = f"{self._lark.terminal(_STRING)} {self._key} {self._value(more)}"
            tail = self._lark.rule(other)
        first = []
        for i, (member, needed) in enumerate(members):
            rest = [f"({self._item} {m}){'' if n else '?'}" for m, n in members[i + 1 :]]
            rest += [f"({self._item} {tail})*"] if tail else []
            first.append(" ".join([member, *rest]))
            if needed:
                break
        else:
            first += [f"{tail} ({self._item} {tail})*"] if tail else []
            first.append('""')
        return self._lark.rule(f'"{{" ({" | ".join(first)}) "}}"')
