"""Removes parts of a schema that llguidance would begin and could not end.

llguidance detects most schemas without a value and leaves them out if alternatives remain. It does
not detect that no name is left for a property, or that a text has no spelling in JSON: it allows
the comma or the colon before, and then no token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from mlx_paged.engine.grammar.subschemas import Schema, mapped, names_of

_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
# JSON spells other control characters as \u escapes only.
_WITHOUT_SHORT_ESCAPE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")
# Maximum names to compare with patterns; more would take longer than a step.
_MAX_NAMES = 2000


class DeadEnds:
    """Rewrites the schemas within a schema, innermost first, so that each of them has a value.

    Args:
        options: Options of llguidance's grammar (``x-guidance``).
        names: Names of all properties anywhere in the schema, because schemas may be joined.
    """

    def __init__(self, options: Mapping[str, Any], names: Collection[str]) -> None:
        self._tester = _Tester(options)
        self._names = names

    def rewrite(self, schema: dict[str, Any]) -> dict[str, Any] | bool:
        """Returns a schema with the same values; False for none. May modify its argument."""
        patterns = schema.get("patternProperties")
        if isinstance(patterns, dict) and len(patterns) * len(self._names) <= _MAX_NAMES:
            _resolve_names(schema, self._names, self._tester)
        return _without_unspellable_texts(schema, self._tester)


def without_impossible_parts(schema: dict[str, Any]) -> Schema:
    """Returns a schema with the same values, whose parts without a value are False if detected.

    llguidance does this itself within a schema, but not in a grammar made of its parts.
    """
    options = {"lenient": True, "coerce_one_of": True}
    around: dict[str, Any] = {k: v for k, v in schema.items() if k in ("$defs", "definitions")}

    def change(each: dict[str, Any]) -> Schema | None:
        if "$ref" in each and not around:
            return None
        alone = {**around, **each, "x-guidance": options}
        return None if _has_value(json.dumps(alone, ensure_ascii=False), "") else False

    found: Schema = mapped(schema, change)
    return found


# Names.


def _resolve_names(schema: dict[str, Any], names: Collection[str], tester: _Tester) -> None:
    """Declares properties by name where a pattern matches only some of `names`, and forbids other
    properties where the patterns leave no name for them."""
    by_pattern = dict(schema["patternProperties"])
    own = names_of(schema)
    for pattern, value in schema["patternProperties"].items():
        if value is False or tester.has_name(names, {pattern: True}):
            continue
        del by_pattern[pattern]
        known_ones = schema.get("properties")
        properties = dict(known_ones) if isinstance(known_ones, dict) else {}
        schema["properties"] = properties
        for name in names:
            if tester.matches(name, pattern):
                known = properties.get(name)
                properties[name] = value if known in (None, True, {}) else {"allOf": [known, value]}
    schema["patternProperties"] = by_pattern
    if not by_pattern:
        del schema["patternProperties"]
    elif schema.get("additionalProperties", True) is not False:
        others = dict.fromkeys(by_pattern, False)
        if not tester.has_name(own, others, additional=True):
            schema["additionalProperties"] = False


# Texts.


def _without_unspellable_texts(schema: dict[str, Any], tester: _Tester) -> dict[str, Any] | bool:
    """Returns the schema without texts that have no spelling in this JSON; False if no value is
    left."""
    if not tester.spells_controls:
        if "const" in schema and _has_controls(schema["const"]):
            return False
        if isinstance(schema.get("enum"), list):
            left = [value for value in schema["enum"] if not _has_controls(value)]
            if not left:
                return False
            schema["enum"] = left
    if isinstance(schema.get("pattern"), str) and not tester.has_text(schema):
        kinds = schema.get("type", list(_TYPES))
        if not isinstance(kinds, (str, list)):
            return schema
        kinds = [
            kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "string"
        ]
        if not kinds:
            return False
        return {**{k: v for k, v in schema.items() if k != "pattern"}, "type": kinds}
    return schema


def _has_controls(value: Any) -> bool:
    if isinstance(value, str):
        return _WITHOUT_SHORT_ESCAPE.search(value) is not None
    if isinstance(value, dict):
        return any(map(_has_controls, value)) or any(map(_has_controls, value.values()))
    return isinstance(value, list) and any(map(_has_controls, value))


class _Tester:
    """Tests with llguidance if small schemas have a value."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        kept = ("json_allowed_escapes", "lenient", "coerce_one_of")
        self._options = {key: options[key] for key in kept if key in options}
        self._options["whitespace_flexible"] = False
        self._known: dict[str, bool] = {}
        self.spells_controls = "u" in options.get("json_allowed_escapes", "u")

    def has_name(
        self, taken: Collection[str], patterns: Mapping[str, bool], *, additional: bool = False
    ) -> bool:
        """Returns True if a property can have a name other than those taken."""
        return self._has_value(
            {
                "type": "object",
                "properties": dict.fromkeys(taken, False),
                "patternProperties": patterns,
                "additionalProperties": additional,
                "minProperties": 1,
            },
            "{",
        )

    def matches(self, name: str, pattern: str) -> bool:
        """True if a pattern matches a possible name."""
        schema = {"type": "string", "allOf": [{"const": name}, {"pattern": pattern}]}
        return self._has_value(schema, "")

    def has_text(self, schema: Mapping[str, Any]) -> bool:
        """True if some text matches a schema's pattern."""
        kept = ("pattern", "minLength", "maxLength")
        return self._has_value(
            {"type": "string", **{key: schema[key] for key in kept if key in schema}}, ""
        )

    def _has_value(self, schema: Mapping[str, Any], begun: str) -> bool:
        text = json.dumps({**schema, "x-guidance": self._options}, ensure_ascii=False)
        if text not in self._known:
            self._known[text] = _has_value(text, begun)
        return self._known[text]


def _has_value(schema: str, begun: str) -> bool:
    grammar = LLMatcher.grammar_from_json_schema(schema)
    tokenizer = _byte_tokenizer()
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        # Other errors are reported when the schema is compiled.
        return not matcher.get_error().startswith("Unsatisfiable schema")
    if begun and not matcher.consume_tokens(list(begun.encode())):
        return False
    matcher.compute_bitmask()
    return not matcher.is_error()


@cache
def _byte_tokenizer() -> LLTokenizer:
    """Returns a tokenizer whose tokens are single bytes; it costs nothing to build."""
    return LLTokenizer("byte")
