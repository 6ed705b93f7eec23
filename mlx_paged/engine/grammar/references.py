"""Resolves references of a schema (``$ref``) that no value satisfies. llguidance reports them as
errors, or follows them forever."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mlx_paged.engine.grammar.subschemas import Schema, mapped, subschemas
from mlx_paged.parsing.schemas import pointer_index

_PROCESSING = re.compile(r"Unsatisfiable schema.*?while processing json-schema:///(\S*)", re.S)
_STRUCTURES = {"array", "object"}


def without_endless_references(schema: dict[str, Any]) -> Schema:
    """Returns a schema with the same values, without references to endless values only."""
    targets: dict[str, Any] = {}
    for _, each in subschemas(schema):
        pointer = each.get("$ref")
        if isinstance(pointer, str) and pointer.startswith("#"):
            found = _target(schema, pointer)
            if found is not None:
                targets[pointer] = found
    ends = dict.fromkeys(targets, False)
    has_changed = True
    while has_changed:
        has_changed = False
        for pointer, target in targets.items():
            if not ends[pointer] and _has_end(target, ends):
                ends[pointer] = has_changed = True
    endless = {pointer for pointer, has_end in ends.items() if not has_end}
    return _without(schema, endless) if endless else schema


def without_impossible_reference(schema: dict[str, Any], error: str) -> Schema | None:
    """Returns a schema with the same values, without references that an error reports as having no
    value; None if the error is about something else."""
    found = _PROCESSING.match(error)
    if found is None:
        return None
    pointer = found.group(1) or "#"
    if not any(each.get("$ref") == pointer for _, each in subschemas(schema)):
        return None
    return _without(schema, {pointer})


def _without(schema: dict[str, Any], pointers: set[str]) -> Schema:
    def change(each: dict[str, Any]) -> Schema | None:
        return False if each.get("$ref") in pointers else None

    changed: Schema = mapped(schema, change)
    return changed


def _target(schema: Any, pointer: str) -> Any:
    for part in pointer.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict) and part in schema:
            schema = schema[part]
        else:
            index = pointer_index(part, schema)
            if index is None:
                return None
            schema = schema[index]
    return None if pointer not in ("#", "") and not pointer.startswith("#/") else schema


def _has_end(schema: Any, ends: Mapping[str, bool]) -> bool:
    """Returns True if a schema has a finite value, given what is known of its references."""
    if not isinstance(schema, dict):
        return schema is not False
    if not ends.get(str(schema.get("$ref")), True):
        return False
    if not all(_has_end(each, ends) for each in _listed(schema, "allOf")):
        return False
    for key in ("anyOf", "oneOf"):
        options = _listed(schema, key)
        if options and not any(_has_end(each, ends) for each in options):
            return False
    if "const" in schema or "enum" in schema:
        return True
    kinds = schema.get("type")
    kinds = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, list) else None
    if kinds is None or kinds - _STRUCTURES:
        return True
    return ("array" in kinds and _array_has_end(schema, ends)) or (
        "object" in kinds and _object_has_end(schema, ends)
    )


def _array_has_end(schema: dict[str, Any], ends: Mapping[str, bool]) -> bool:
    min_items = schema.get("minItems", 0)
    if not isinstance(min_items, (int, float)):
        return True
    first = _listed(schema, "prefixItems")
    needed = first[: int(min_items)]
    if min_items > len(first):
        needed = [*needed, schema.get("items", True)]
    return all(_has_end(each, ends) for each in needed)


def _object_has_end(schema: dict[str, Any], ends: Mapping[str, bool]) -> bool:
    declared = schema.get("properties")
    properties: dict[str, Any] = declared if isinstance(declared, dict) else {}
    others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
    return all(
        _has_end(properties.get(name, others), ends)
        for name in _listed(schema, "required")
        if isinstance(name, str)
    )


def _listed(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []
