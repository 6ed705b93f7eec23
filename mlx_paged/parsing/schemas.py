"""Parameter types from a tool's JSON Schema, for syntaxes that are not JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from mlx_paged.parsing.json_value import JsonValue

Schema: TypeAlias = Mapping[str, Any] | bool

ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)(\.0+)?")
_LENIENT_INTEGER = re.compile(r"([+-]?)0*([0-9]+)")
_LENIENT_DECIMAL = re.compile(r"([+-]?)(?=\.?[0-9])0*([0-9]*)\.([0-9]*)")
# Digits of other scripts are none, and Python refuses to read thousands of them.
_INDEX = re.compile("0|[1-9][0-9]{0,8}")
_MAX_REFERENCES = 64
# Maximum subschemas to visit: with references, a small schema can have any number of them.
_MAX_PARTS = 1 << 12
#: Names under which models put all arguments.
WRAPPERS = ("arguments", "input")
_MAX_NULL_LENGTH = 16  # characters, with space around it


def pointer_index(part: str, target: Any) -> int | None:
    """Returns the index that a part of a JSON pointer has in a list; None if it has none."""
    if not isinstance(target, list) or _INDEX.fullmatch(part) is None:
        return None
    index = int(part)
    return index if index < len(target) else None


def resolved(schema: Schema, root: Mapping[str, Any]) -> Schema:
    """Resolves references (`$ref`) of a schema into the tool's own; returns True if one dangles."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        target: Any = root
        pointer = str(schema["$ref"])
        for part in pointer.removeprefix("#").strip("/").split("/") if pointer != "#" else []:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping):
                target = target.get(part, True)
            else:
                index = pointer_index(part, target)
                target = True if index is None else target[index]
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**target, **beside} if isinstance(target, Mapping) else beside or bool(target)
    return True


class Budget:
    """Limits the number of subschemas that are visited."""

    def __init__(self) -> None:
        self._left = _MAX_PARTS

    def spend(self) -> bool:
        """Counts one subschema; returns True if it may be visited."""
        self._left -= 1
        return self._left >= 0


def properties_of(parameters: Mapping[str, Any]) -> dict[str, Schema]:
    """Returns the schema of each parameter, including those named only in parts of the schema."""
    found: dict[str, list[Schema]] = {}
    budget = Budget()

    def look(schema: Schema, depth: int) -> None:
        schema = resolved(schema, parameters)
        if not isinstance(schema, Mapping) or depth > 8 or not budget.spend():
            return
        for name, of_name in dict(schema.get("properties") or {}).items():
            if of_name not in found.setdefault(name, []):
                found[name].append(of_name)
        for keyword in ("allOf", "anyOf", "oneOf"):
            for part in schema.get(keyword) or ():
                look(part, depth + 1)
        for keyword in ("then", "else"):
            look(schema.get(keyword, True), depth + 1)

    look(parameters, 0)
    return {n: of[0] if len(of) == 1 else {"anyOf": list(of)} for n, of in found.items()}


def types_of(
    schema: Schema, root: Mapping[str, Any], depth: int = 0, budget: Budget | None = None
) -> frozenset[str]:
    """Returns the JSON types that a value may have; all of them if that takes too long."""
    budget = budget or Budget()
    schema = resolved(schema, root)
    if schema is False:
        return frozenset()
    if not isinstance(schema, Mapping) or depth > 16 or not budget.spend():
        return ALL_TYPES
    types = ALL_TYPES
    if "const" in schema:
        types &= {_type(schema["const"])}
    if "enum" in schema:
        types &= {_type(value) for value in schema["enum"]}
    declared = schema.get("type")
    if declared is not None:
        named = {declared} if isinstance(declared, str) else set(declared)
        # Unknown type names come from some templates, and are ignored.
        named = named | {"integer"} if "number" in named else named
        if named & ALL_TYPES:
            types &= named
    elif not schema.keys() & {"const", "enum", "anyOf", "oneOf", "allOf"}:
        if "properties" in schema:
            types = frozenset({"object"})
        elif "items" in schema or "prefixItems" in schema:
            types = frozenset({"array"})
    for keyword in ("anyOf", "oneOf"):
        if schema.get(keyword):
            parts = [types_of(part, root, depth + 1, budget) for part in schema[keyword]]
            types &= frozenset().union(*parts)
    for part in schema.get("allOf") or ():
        types &= types_of(part, root, depth + 1, budget)
    if schema.get("nullable") is True:
        types |= {"null"}
    return types


def _type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


@dataclass(frozen=True)
class Parameter:
    """A parameter whose value is written as plain text.

    Attributes:
        types: JSON types that it may have.
        values: All allowed values, if the schema lists them.
    """

    types: frozenset[str] = frozenset({"string"})
    values: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, schema: Schema, root: Mapping[str, Any]) -> Parameter:
        """Returns the parameter that a schema describes."""
        types = types_of(schema, root)
        schema = resolved(schema, root)
        values = None
        if isinstance(schema, Mapping) and ("enum" in schema or "const" in schema):
            values = tuple(schema["enum"]) if "enum" in schema else (schema["const"],)
        return cls(types or frozenset({"string"}), values)

    @property
    def is_string(self) -> bool:
        """True if its value is a string whatever it looks like."""
        return self.types == {"string"}

    def to_json(self, text: str) -> str:
        """Returns a value as JSON; a string unless it has another type of the parameter."""
        if not self.is_string and (converted := self._converted(text)) is not None:
            return converted
        return json.dumps(text, ensure_ascii=False)

    def _converted(self, text: str) -> str | None:
        types = self.types
        bare = text.strip()
        if self.values is not None:
            if text in self.values:
                return None
            for value in self.values:
                if not isinstance(value, str) and bare in (json.dumps(value), str(value)):
                    return json.dumps(value, ensure_ascii=False)
        if bare in ("null", "None") and "null" in types:
            return "null"
        if bare in ("true", "false", "True", "False") and "boolean" in types:
            return bare.lower()
        if "integer" in types and _INTEGER.fullmatch(bare):
            return bare
        if "number" in types and _NUMBER.fullmatch(bare):
            return bare
        if types & {"integer", "number"} and "string" not in types:
            if whole := _LENIENT_INTEGER.fullmatch(bare):
                return whole[1].replace("+", "") + whole[2]
            if "number" in types and (decimal := _LENIENT_DECIMAL.fullmatch(bare)):
                sign, digits, fraction = decimal.groups()
                return f"{sign.replace('+', '')}{digits or '0'}.{fraction or '0'}"
        if bare[:1] in ("{", "[", "(") and types & {"array", "object"}:
            return _container(bare, types)
        return None


def _container(text: str, types: frozenset[str]) -> str | None:
    """Converts an array or an object to JSON, from Python's notation or from JSON with errors.

    Returns None if it is neither, or not one of `types`.
    """
    value = JsonValue()
    end, mended = value.take(text)
    is_json = end == len(text) and value.has_ended
    if is_json and mended == text and (found := _json_container(text, types)) is not None:
        return found
    try:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, (ast.Set, ast.Tuple)):
            node = ast.List(elts=node.elts)
        read = ast.literal_eval(node)
        if _type(read) in types:
            return json.dumps(read, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    return _json_container(mended, types) if is_json else None


def _json_container(text: str, types: frozenset[str]) -> str | None:
    try:
        # Numbers are not converted, because they may have any number of digits.
        read = json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return text if _type(read) in types else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class ArgumentsWriter:
    """Writes the text of a JSON object from parameters whose values arrive as plain text.

    A string is written as its text arrives. Any other value is written when it is complete, by the
    parameter's type; a value that does not fit becomes a string. An unknown parameter is a string.

    Args:
        parameters: JSON Schema of the tool's arguments; None for an unknown tool.
        trims_newlines: Drop a newline at either end of a value, which belongs to the syntax.
    """

    def __init__(
        self, parameters: Mapping[str, Any] | None, *, trims_newlines: bool = False
    ) -> None:
        self._parameters = parameters or {}
        self._properties = properties_of(self._parameters)
        self._trims_newlines = trims_newlines
        self._num_parameters = 0
        self._parameter = Parameter()
        self._text: list[str] = []  # of a value that is not written yet
        self._streams = False
        self._wrapper: str | None = None  # a parameter that may contain all arguments
        self._at_start = False
        self._newline = ""

    def types(self, name: str) -> frozenset[str] | None:
        """Returns the JSON types of a parameter; None if the tool has none of that name."""
        schema = self._schema(name)
        return None if schema is None else types_of(schema, self._parameters)

    def begin(self, name: str, *, is_string: bool | None = None) -> str:
        """Begins a parameter. This and the other methods return the piece of JSON to write next.

        Args:
            name: Its name.
            is_string: Its type according to the syntax; None if the syntax has no types.
        """
        self._parameter = self._parameter_of(name, is_string)
        self._text = []
        self._streams = False
        self._at_start = self._trims_newlines
        self._newline = ""
        self._wrapper = None
        if not self._num_parameters and self._may_wrap(name):
            self._wrapper = name
            return ""
        opening = self._opening(name)
        if self._parameter.is_string and is_string is not False:
            self._streams = True
            return opening + '"'
        return opening

    def _opening(self, name: str) -> str:
        self._num_parameters += 1
        opening = "{" if self._num_parameters == 1 else ", "
        return opening + json.dumps(name, ensure_ascii=False) + ": "

    def _may_wrap(self, name: str) -> bool:
        """True for a name under which models put all arguments, and no parameter of the tool."""
        return name in WRAPPERS and bool(self._properties) and self._schema(name) is None

    @property
    def is_string(self) -> bool:
        """True if the value is known to be a string."""
        return self._streams

    @property
    def held(self) -> str:
        """The text of an incomplete value that is not written yet."""
        return "".join(self._text) if not self._streams else ""

    def restart(self) -> None:
        """Forgets the text of a value that is not written yet."""
        self._text = []

    def _schema(self, name: str) -> Schema | None:
        """Returns the schema of a parameter; None if the tool's schema says nothing about it."""
        if name in self._properties:
            return self._properties[name]
        others = self._parameters.get("additionalProperties")
        return others if isinstance(others, Mapping) else None

    def _parameter_of(self, name: str, is_string: bool | None) -> Parameter:
        schema = self._schema(name)
        if schema is None:
            # A value declared as no string may have any other type.
            return Parameter() if is_string is not False else Parameter(ALL_TYPES - {"string"})
        parameter = Parameter.of(schema, self._parameters)
        # If schema and model differ about the type of the value, the schema is right.
        return Parameter() if is_string and "string" in parameter.types else parameter

    def add(self, text: str) -> str:
        """Adds text to the value of the open parameter."""
        if self._trims_newlines:
            if self._at_start and text:
                self._at_start = False
                text = text.removeprefix("\n")
            text = self._newline + text
            self._newline = text[len(text.removesuffix("\n")) :]
            text = text.removesuffix("\n")
        if self._streams:
            return json.dumps(text, ensure_ascii=False)[1:-1]
        self._text.append(text)
        if (
            self._wrapper is None
            and self._parameter.types == {"string", "null"}
            and self._parameter.values is None
        ):
            so_far = "".join(self._text)
            if not _may_be_null(so_far):
                self._streams = True
                self._text.clear()
                return json.dumps(so_far, ensure_ascii=False)[:-1]
        return ""

    def end(self) -> str:
        """Ends the value of the open parameter."""
        if self._streams:
            return '"'
        text = "".join(self._text)
        self._text = []
        if self._wrapper is not None:
            return self._unwrapped(self._wrapper, text)
        if self._parameter.is_string:  # The model says it is none: JSON, if it is valid.
            text = unquoted(text)
        return self._parameter.to_json(text)

    def _unwrapped(self, name: str, text: str) -> str:
        """Writes the parameters in a wrapper; the wrapper itself if it holds no such object."""
        inner = unquoted(text)
        value = JsonValue()
        end, mended = value.take(inner)
        if value.has_ended and not value.is_broken and not inner[end:].strip():
            try:
                read = json.loads(mended)
            except (ValueError, RecursionError):  # thousands of digits, or of brackets
                read = None
            if isinstance(read, dict) and read.keys() <= self._properties.keys():
                self._num_parameters += len(read)
                return "{" + mended[1:-1].strip() if read else ""
        self._parameter = self._parameter_of(name, None)
        return self._opening(name) + self._parameter.to_json(text)

    def close(self) -> str:
        """Ends the object."""
        return "}" if self._num_parameters else "{}"


def unquoted(text: str) -> str:
    """Returns the value of a JSON string; any other text unchanged."""
    if text.lstrip()[:1] != '"':
        return text
    try:
        return str(json.loads(text))
    except ValueError:
        return text


def _may_be_null(text: str) -> bool:
    """True if a text, of a string or null, may still become null."""
    begun = text.lstrip()
    bare = begun.rstrip()
    if len(text) > _MAX_NULL_LENGTH:
        return False
    is_begun = bare == begun and ("null".startswith(bare) or "None".startswith(bare))
    return is_begun or bare in ("", "null", "None")
