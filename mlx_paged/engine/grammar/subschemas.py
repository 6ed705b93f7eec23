"""The schemas within a JSON schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any] | bool

# Keywords by their content.
SCHEMA = (
    *("additionalProperties", "additionalItems", "contains", "else", "if", "items", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SCHEMAS_BY_NAME = (
    *("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"),
    "dependencies",
)


def subschemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each schema within a schema with its path, itself included."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for key, value in schema.items():
        if key in SCHEMAS and isinstance(value, list):
            for i, each in enumerate(value):
                yield from subschemas(each, f"{path}.{key}[{i}]")
        elif key in SCHEMA:
            yield from subschemas(value, f"{path}.{key}")
        elif key in SCHEMAS_BY_NAME and isinstance(value, dict):
            for name, each in value.items():
                yield from subschemas(each, f"{path}.{key}.{name}")


def mapped(schema: Any, change: Callable[[dict[str, Any]], Schema | None]) -> Any:
    """Returns a copy in which each schema is changed, innermost first.

    Args:
        change: Returns the replacement of a schema; None keeps it, maybe modified in place.
    """
    if isinstance(schema, list):
        return [mapped(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {}
    for key, value in schema.items():
        if key in SCHEMAS or key in SCHEMA:
            copy[key] = mapped(value, change)
        elif key in SCHEMAS_BY_NAME and isinstance(value, dict):
            copy[key] = {name: mapped(each, change) for name, each in value.items()}
        else:
            copy[key] = value
    changed = change(copy)
    return copy if changed is None else changed


def names_of(schema: dict[str, Any]) -> list[str]:
    """Returns the names of properties that an object's schema declares or requires.

    Older schemas have ``required: true`` inside a property, which has no effect.
    """
    properties, required = schema.get("properties"), schema.get("required")
    declared = list(properties) if isinstance(properties, dict) else []
    needed = [n for n in required if isinstance(n, str)] if isinstance(required, list) else []
    return [*dict.fromkeys([*declared, *needed])]
