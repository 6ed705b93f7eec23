"""Schemas with every kind of keyword, for grammar walks and generations."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}


def closed(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    """An object with only these properties, all required unless some are named."""
    return opened(properties, required, additionalProperties=False, **more)


def opened(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    """An object that may have additional properties."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, **more}


def listed(items: Any, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def text(**more: Any) -> Schema:
    return {"type": "string", **more}


ADDRESS = closed({"street": TEXT, "city": TEXT, "zip": text(pattern="^[0-9]{5}$")})
LINE = closed({"sku": TEXT, "qty": {"type": "integer", "minimum": 1}, "price": NUMBER})
STEP = closed({"explanation": TEXT, "output": TEXT})
ONE_TO_THREE = {"enum": [1, 2, 3]}

SCHEMAS: dict[str, Schema] = {
    # Objects
    "an object": closed({"name": TEXT, "age": INTEGER, "email": TEXT}),
    "an open object": opened({"name": TEXT, "age": INTEGER}, ["name"]),
    "nested objects": closed({
        "id": INTEGER,
        "customer": closed({"name": TEXT, "address": ADDRESS}),
        "lines": listed(LINE, minItems=1, maxItems=5),
    }),
    "optional properties": closed(dict.fromkeys("abcdefghij", TEXT), ["c"]),
    "names with escapes": closed({'a"b': INTEGER, "ü\n": TEXT, "": BOOLEAN}),
    "a map": {"type": "object", "additionalProperties": INTEGER},
    "a map of one to three": {
        "type": "object", "additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 3,
    },
    "names by a pattern": {
        "type": "object", "patternProperties": {"^x_[a-z]+$": INTEGER},
        "additionalProperties": False,
    },
    "any object": {"type": "object"},
    "anything": {},
    # Choices
    "an enum": closed({
        "color": {"enum": ["red", "green", "blue"]}, "size": {"enum": ["S", "M", "L", None, 3]},
    }),
    "a large enum": closed({"c": {"enum": [f"COUNTRY_{i:03d}" for i in range(250)]}}),
    "a const": closed({"type": {"const": "circle"}, "r": NUMBER}),
    "several types": closed({"v": text(maxLength=4) | {"type": ["string", "null"]},
                             "w": {"type": ["integer", "boolean"]}}),
    "any of types": closed({"v": {"anyOf": [TEXT, INTEGER, {"type": "null"}]}}),
    "one of, told apart": {"oneOf": [
        closed({"kind": {"const": "a"}, "x": INTEGER}), closed({"kind": {"const": "b"}, "y": TEXT}),
    ]},
    "all of, joined": {"allOf": [opened({"a": INTEGER}), opened({"b": TEXT})]},
    "all of, bounds": closed({"v": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 9}]}}),
    # References
    "definitions": closed(
        {"home": {"$ref": "#/$defs/place"}, "work": {"$ref": "#/$defs/place"}},
        **{"$defs": {"place": closed({"city": TEXT})}},
    ),
    "a tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": closed({
            "value": INTEGER, "children": listed({"$ref": "#/$defs/node"}, maxItems=3),
        })},
    },
    "a chain": closed({"v": INTEGER, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
    # Strings
    "a pattern": closed({"p": text(pattern=r"^\+?[0-9]{3}-[0-9]{4}$")}),
    "a pattern without anchors": closed({"p": text(pattern="ab+c")}),
    "a pattern and lengths": closed({"p": text(pattern="^[a-z]+$", minLength=3, maxLength=6)}),
    "lengths": closed({"s": text(minLength=2, maxLength=8)}),
    "long lengths": closed({"s": text(minLength=10, maxLength=2000)}),
    "formats": closed({
        "d": text(format="date"), "t": text(format="date-time"), "e": text(format="email"),
        "u": text(format="uuid"),
    }),
    "formats of addresses": closed({
        "a": text(format="ipv4"), "b": text(format="ipv6"), "h": text(format="hostname"),
        "u": text(format="uri"),
    }),
    # Numbers
    "bounds of integers": closed({"x": {"type": "integer", "minimum": -5, "maximum": 120}}),
    "bounds of numbers": closed({"x": {"type": "number", "minimum": 0, "exclusiveMaximum": 1}}),
    "multiples": closed({"x": {"type": "integer", "multipleOf": 5}}),
    # Arrays
    "lengths of arrays": closed({"a": listed(INTEGER, minItems=2, maxItems=4)}),
    "a tuple": closed({"t": {
        "type": "array", "prefixItems": [INTEGER, TEXT, BOOLEAN], "items": False, "minItems": 3,
    }}),
    # Real-world forms
    "steps of mathematics": closed({"steps": listed(STEP), "final_answer": TEXT}),
    "a tool": opened(
        {
            "location": text(description="City"), "unit": text(enum=["celsius", "fahrenheit"]),
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        ["location"],
    ),
}  # fmt: skip

#: Schemas that cannot be enforced, by the keyword that a strict request is rejected for.
REFUSED: dict[str, tuple[Schema, str]] = {
    "one of, overlapping": (
        closed({"v": {"oneOf": [
            {"type": "integer", "minimum": 0, "maximum": 20},
            {"type": "integer", "minimum": 10, "maximum": 30},
        ]}}),
        "properties.v.oneOf",
    ),
    "a pattern that looks ahead": (
        closed({"p": text(pattern="^(?!foo)[a-z]{3,6}$")}), "properties.p.pattern",
    ),
    "unique items": (
        closed({"a": listed(ONE_TO_THREE, uniqueItems=True, minItems=2, maxItems=3)}),
        "properties.a.uniqueItems",
    ),
    "contains": (
        closed({"a": listed(ONE_TO_THREE, contains={"const": 2}, minItems=2, maxItems=3)}),
        "properties.a.contains",
    ),
    "names by a schema": (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,5}$"},
         "additionalProperties": BOOLEAN},
        "propertyNames",
    ),
    "a condition": (
        {**closed({"k": {"enum": ["a", "b"]}, "v": INTEGER}, ["k"]),
         "if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["v"]}},
        "if",
    ),
    "a negation": (
        closed({"v": text(maxLength=2) | {"not": {"enum": ["x", "y"]}}}), "properties.v.not",
    ),
    "a map of two or three": (
        {"type": "object", "additionalProperties": INTEGER, "minProperties": 2, "maxProperties": 3},
        "minProperties",
    ),
    "required by another": (
        closed({"a": INTEGER, "b": INTEGER}, []) | {"dependentRequired": {"a": ["b"]}},
        "dependentRequired",
    ),
    "unevaluated properties": (
        {"allOf": [opened({"a": INTEGER})], "unevaluatedProperties": False},
        "unevaluatedProperties",
    ),
}  # fmt: skip
assert len(SCHEMAS) + len(REFUSED) == 45
