"""Random JSON schemas with the full vocabulary of draft 2020-12."""

from __future__ import annotations

from random import Random
from typing import Any

NAMES = ("a", "b", "foo", "bar", "a b", 'q"x', "é", "", "back\\slash", "new\nline", "$ref", "not")
PATTERNS = (
    "^a$", "^foo$", "^(a|b)$", "^[a-c]{1,2}$", "^x_", "o", "^", ".*", "^$", "^.$", "^[^a]*$",
    r"^\d{2,4}$", r"^\w+$", r"\s", r"^\S*$", "^[A-Z][a-z]*$", r"^\p{L}+$", "[\"\\\\]",
    "^(?!a)", "^(?=a)",
    r"\bword\b", "^[\\x01-\\x05]$", "^a|b$", "(ab)*c?", "^[0-9a-f]{8}(-[0-9a-f]{4})$", "^é+$", "a^",
    r"^\u0061$", r"^[^\n]{0,5}$", r"^(a{1,3}){1,3}$", r"^\/x\.y$", "^[€-☃]$",
)  # fmt: skip
FORMATS = ("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid",
           "uri", "phone", "regex", "json-pointer", "int32", "iri")  # fmt: skip
NUMBERS = (0, 1, -1, 2, 3, 5, 7, 10, 100, -20, 0.5, 1.5, -2.25, 0.01, 1e3, 2.0, -0.0, 1e-3)
CONSTANTS = (None, True, False, 0, 1, -5, 1.5, 1e20, "", "a", "foo", 'q"\\', "é\n", "😀", "\x01",
             [], [1, "a"], {}, {"a": 1}, {"b": [None], "a": "x"})  # fmt: skip
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")


class RandomSchemas:
    """Generates schemas.

    Args:
        seed: The same seed gives the same schemas.
    """

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._defs: list[str] = []

    def schema(self) -> Any:
        """Returns a whole schema, possibly with (recursive) definitions."""
        rng = self._rng
        self._defs = [f"d{i}" for i in range(rng.choice((0, 0, 1, 2, 3)))]
        root = self._schema(rng.choice((1, 2, 2, 3, 3, 4)))
        if not isinstance(root, dict):
            return root
        if self._defs:
            where = rng.choice(("$defs", "$defs", "definitions"))
            root = self._with_references(root, where)
            root[where] = {
                name: self._with_references(self._schema(rng.choice((1, 2, 2))), where)
                for name in self._defs
            }
        if rng.random() < 0.1:
            root["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        return root

    def _with_references(self, schema: Any, where: str) -> Any:
        if isinstance(schema, list):
            return [self._with_references(each, where) for each in schema]
        if not isinstance(schema, dict):
            return schema
        return {
            key: value.replace("$defs", where)
            if key == "$ref" and isinstance(value, str)
            else self._with_references(value, where)
            for key, value in schema.items()
        }

    def _schema(self, depth: int) -> Any:
        rng = self._rng
        chance = rng.random()
        if chance < 0.04:
            return True
        if chance < 0.05:
            return False
        if chance < 0.08:
            return {}
        schema: dict[str, Any] = {}
        if self._defs and rng.random() < 0.15:
            schema["$ref"] = rng.choice([f"#/$defs/{name}" for name in self._defs] + ["#"])
            if rng.random() < 0.7:
                return schema
        if depth <= 0:
            kinds = [self._of_value, self._of_string, self._of_number, self._of_type]
        else:
            kinds = [
                self._of_value, self._of_string, self._of_number, self._of_type, self._of_object,
                self._of_object, self._of_object, self._of_array, self._of_array, self._composed,
            ]  # fmt: skip
        for kind in rng.sample(kinds, 1 if rng.random() < 0.85 else 2):
            schema |= kind(depth - 1)
        if rng.random() < 0.1:
            schema |= rng.choice(
                (
                    {"title": "x"}, {"description": "about\n"}, {"default": 1}, {"examples": [1]},
                    {"deprecated": True}, {"readOnly": True}, {"$comment": "x"}, {"nullable": True},
                    {"contentEncoding": "base64"}, {"$anchor": "here"}, {"x-more": {"type": 3}},
                )
            )  # fmt: skip
        return schema

    def _maybe(self, schema: dict[str, Any], chance: float, key: str, value: Any) -> None:
        if self._rng.random() < chance:
            schema[key] = value

    def _of_type(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        return {
            "type": rng.choice(TYPES)
            if rng.random() < 0.7
            else rng.sample(TYPES, rng.choice((1, 2, 3)))
        }

    def _of_value(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        if rng.random() < 0.4:
            return {"const": rng.choice(CONSTANTS)}
        found: dict[str, Any] = {"enum": rng.sample(CONSTANTS, rng.choice((1, 2, 4)))}
        self._maybe(found, 0.2, "type", rng.choice(TYPES))
        return found

    def _of_string(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        found: dict[str, Any] = {"type": "string"} if rng.random() < 0.85 else {}
        self._maybe(found, 0.3, "minLength", rng.choice((0, 1, 2, 5)))
        self._maybe(found, 0.4, "maxLength", rng.choice((0, 1, 3, 8, 20)))
        self._maybe(found, 0.4, "pattern", rng.choice(PATTERNS))
        self._maybe(found, 0.2, "format", rng.choice(FORMATS))
        return found

    def _of_number(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        found: dict[str, Any] = (
            {"type": rng.choice(("integer", "number"))} if rng.random() < 0.9 else {}
        )
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            self._maybe(found, 0.3, key, rng.choice(NUMBERS))
        self._maybe(found, 0.25, "multipleOf", rng.choice((1, 2, 3, 7, 0.5, 0.25, 1.5, 0.125, 100)))
        self._maybe(found, 0.1, "format", "int32")
        return found

    def _of_object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        found: dict[str, Any] = {"type": "object"} if rng.random() < 0.8 else {}
        names = rng.sample(NAMES, rng.choice((0, 1, 2, 2, 3)))
        if names:
            found["properties"] = {name: self._schema(depth) for name in names}
        required = [name for name in names if rng.random() < 0.6]
        if rng.random() < 0.1:
            required.append(rng.choice(NAMES))
        self._maybe(found, 0.5, "required", list(dict.fromkeys(required)))
        closes = rng.random()
        if closes < 0.45:
            found["additionalProperties"] = False
        elif closes < 0.65:
            found["additionalProperties"] = self._schema(depth)
        if rng.random() < 0.25:
            found["patternProperties"] = {
                p: self._schema(depth) for p in rng.sample(PATTERNS, rng.choice((1, 1, 2)))
            }
        self._maybe(found, 0.1, "minProperties", rng.choice((0, 1, 2, 3)))
        self._maybe(found, 0.1, "maxProperties", rng.choice((0, 1, 2, 3)))
        self._maybe(found, 0.05, "propertyNames", self._of_string(0))
        self._maybe(found, 0.05, "dependentRequired", {rng.choice(NAMES): [rng.choice(NAMES)]})
        self._maybe(found, 0.04, "dependentSchemas", {rng.choice(NAMES): self._schema(depth)})
        self._maybe(found, 0.02, "dependencies", {rng.choice(NAMES): [rng.choice(NAMES)]})
        self._maybe(
            found, 0.06, "unevaluatedProperties", rng.choice((False, True, {"type": "null"}))
        )
        return found

    def _of_array(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        found: dict[str, Any] = {"type": "array"} if rng.random() < 0.85 else {}
        if rng.random() < 0.7:
            found["items"] = self._schema(depth)
        if rng.random() < 0.3:
            found["prefixItems"] = [self._schema(depth) for _ in range(rng.choice((1, 2, 3)))]
        self._maybe(found, 0.3, "minItems", rng.choice((0, 1, 2, 3)))
        self._maybe(found, 0.4, "maxItems", rng.choice((0, 1, 2, 4)))
        self._maybe(found, 0.08, "uniqueItems", rng.choice((True, False)))
        self._maybe(found, 0.06, "contains", self._schema(0))
        self._maybe(found, 0.05, "minContains", rng.choice((0, 1, 2)))
        self._maybe(found, 0.04, "maxContains", rng.choice((0, 1, 2)))
        self._maybe(found, 0.04, "unevaluatedItems", rng.choice((False, True)))
        return found

    def _composed(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        several = [self._schema(depth) for _ in range(rng.choice((1, 2, 2, 3)))]
        kind = rng.choice(("allOf", "anyOf", "anyOf", "oneOf", "not", "if"))
        if kind == "not":
            return {"not": several[0]}
        if kind == "if":
            found = {"if": several[0]}
            self._maybe(found, 0.7, "then", self._schema(depth))
            self._maybe(found, 0.5, "else", self._schema(depth))
            return found
        return {kind: several}
