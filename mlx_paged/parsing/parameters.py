"""The parameters of a tool, one by one, for syntaxes that do not write them as a JSON object."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import Any, NamedTuple

from mlx_paged.errors import InvalidParameterError
from mlx_paged.parsing.lark import as_text_pattern
from mlx_paged.parsing.schemas import Schema, resolved

#: Name, schema, and True if it is required.
Parameter = tuple[str, Schema, bool]

# Lists of a tool: each is a rule with all its parameters.
_MAX_LISTS = 64
_MAX_LEVELS = 16
# Maximum subschemas to visit: with references, a small schema can have any number of them.
_MAX_PARTS = 1 << 14
_RUST_LETTER = re.compile(r"\\u\{([0-9a-fA-F]+)\}")


class _Part(NamedTuple):
    """One of the schemas that an object must satisfy together."""

    path: str
    schema: Mapping[str, Any]

    def of(self, name: str) -> list[Schema]:
        """Returns the schemas that a property must satisfy."""
        found: list[Schema] = []
        properties = self.schema.get("properties") or {}
        if name in properties:
            found.append(properties[name])
        for pattern, of_matching in (self.schema.get("patternProperties") or {}).items():
            if (matches := _matcher(pattern)) is not None and matches(name):
                found.append(of_matching)
        if not found and name not in (self.schema.get("required") or ()):
            found.append(self.schema.get("additionalProperties", True))
        return found


class _Object(NamedTuple):
    """One way for an object to be valid: it satisfies all parts."""

    parts: list[_Part]

    def parameters(self) -> list[Parameter] | None:
        """Returns its properties, in order; None if no object satisfies all parts."""
        names: dict[str, bool] = {}
        for _, of_part in self.parts:
            required = list(of_part.get("required") or ())
            for name in [*(of_part.get("properties") or {}), *required]:
                names[name] = names.get(name, False) or name in required
        found: list[Parameter] = []
        for name, is_required in names.items():
            schemas: list[Schema] = []
            for part in self.parts:
                schemas += [
                    s for s in part.of(name) if s is not True and s != {} and s not in schemas
                ]
            if any(schema is False for schema in schemas):
                if is_required:
                    return None
                continue
            schema: Schema = True
            if schemas:
                schema = schemas[0] if len(schemas) == 1 else {"allOf": schemas}
            found.append((name, schema, is_required))
        return found

    def lists(self) -> list[list[Parameter]] | None:
        """Returns lists of properties that together enforce `minProperties` and `maxProperties`.

        The result is empty if no object is valid, and None if lists cannot enforce the limits.
        """
        parameters = self.parameters()
        if parameters is None:
            return []
        min_count = max((_number(s.get("minProperties"), 0) for _, s in self.parts), default=0)
        max_count = min(
            (_number(s.get("maxProperties"), len(parameters)) for _, s in self.parts),
            default=len(parameters),
        )
        optional = [i for i, (_, _, needed) in enumerate(parameters) if not needed]
        num_required = len(parameters) - len(optional)
        max_count = min(max_count - num_required, len(optional))
        min_count = max(0, min_count - num_required)
        if max_count < 0:
            return []
        if min_count > max_count:
            return [] if min_count <= len(optional) else None
        if comb(len(optional), max_count) * comb(max_count, min_count) > _MAX_LISTS:
            return None
        found = []
        for kept in combinations(optional, max_count):
            # The first ones are present; any of the later ones may be.
            for first in combinations(kept, min_count):
                last = first[-1] if first else -1
                found.append(
                    [
                        (name, schema, needed or i in first)
                        for i, (name, schema, needed) in enumerate(parameters)
                        if needed or i in first or (i in kept and i > last)
                    ]
                )
        return found


def parameter_lists(parameters: Schema) -> list[tuple[list[Parameter], Schema]]:
    """Returns the possible parameter lists of an object, in order; the object has one of them.

    Keywords from `unenforced` are dropped.

    Returns:
        Each list, and the document that its references point into.

    Raises:
        InvalidParameterError: No object is valid, or there are too many lists.
    """
    lists: list[list[Parameter]] = []
    for each in _objects(parameters, "tools"):
        found = each.lists()
        lists += [each.parameters() or []] if found is None else found
    if not lists:
        raise InvalidParameterError("tools", "a schema for which there is a value", parameters)
    return [(of_list, parameters) for of_list in lists]


def counts(parameters: Mapping[str, Any]) -> dict[str, int]:
    """Returns the allowed numbers of properties, by keyword, as `parameter_lists` counts them."""
    return {
        keyword: parameters[keyword]
        for keyword in ("minProperties", "maxProperties")
        if type(parameters.get(keyword)) is int and parameters[keyword] >= 0
    }


def unenforced(
    parameters: Schema, field: str, *, nested: bool = False
) -> Iterator[tuple[str, object]]:
    """Returns paths and values of keywords that `parameter_lists` and `lark.strings` drop.

    Args:
        field: Name of the schema in errors.
        nested: True if the syntax also writes objects and arrays within values. Otherwise, values
            other than strings are JSON, which is enforced.

    Raises:
        InvalidParameterError: See `parameter_lists`.
    """
    budget = _Budget(field, parameters)
    seen: set[str] = set()

    def of_object(schema: Schema, path: str) -> Iterator[tuple[str, object]]:
        root = parameters if isinstance(parameters, Mapping) else {}
        for each in _objects(schema, field, path=path, root=root, budget=budget):
            is_possible = each.lists() is not None
            own = each.parameters() or []
            has_names = bool(own)
            for name, of_all, _ in own if nested else ():
                if isinstance(of_all, Mapping) and "allOf" in of_all:
                    yield f"{each.parts[0].path}.properties.{name}", of_all
            for part in each.parts:
                for keyword in ("minProperties", "maxProperties"):
                    if keyword in part.schema and not (is_possible and (has_names or not nested)):
                        yield f"{part.path}.{keyword}", part.schema[keyword]
                for keyword in ("const", "enum"):
                    if keyword in part.schema and isinstance(part.schema[keyword], (dict, list)):
                        yield f"{part.path}.{keyword}", part.schema[keyword]
                for pattern in part.schema.get("patternProperties") or {}:
                    if _matcher(pattern) is None or (nested and not has_names):
                        yield f"{part.path}.patternProperties.{pattern}", pattern
                for name, of_name in (part.schema.get("properties") or {}).items():
                    yield from of_value(of_name, f"{part.path}.properties.{name}", 0)
                yield from of_value(
                    part.schema.get("additionalProperties", True),
                    f"{part.path}.additionalProperties",
                    0,
                )

    def of_value(schema: Schema, path: str, depth: int) -> Iterator[tuple[str, object]]:
        root = parameters if isinstance(parameters, Mapping) else {}
        schema, path = _followed(schema, path, root)
        if not isinstance(schema, Mapping) or path in seen or depth > _MAX_LEVELS:
            return
        seen.add(path)
        budget.spend()
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and as_text_pattern(pattern) is None:
            yield f"{path}.pattern", pattern
        for keyword in ("allOf", "anyOf", "oneOf"):
            for i, part in enumerate(schema.get(keyword) or ()):
                yield from of_value(part, f"{path}.{keyword}[{i}]", depth + 1)
        if not nested:
            return
        if "prefixItems" in schema:
            yield f"{path}.prefixItems", schema["prefixItems"]
        yield from of_value(schema.get("items", True), f"{path}.items", depth + 1)
        if schema.keys() & _OF_OBJECTS:
            yield from of_object(schema, path)

    yield from dict(of_object(parameters, "")).items()


_OF_OBJECTS = {
    "properties",
    "required",
    "patternProperties",
    "additionalProperties",
    "minProperties",
    "maxProperties",
}


class _Budget:
    """Limits the number of subschemas that are visited."""

    def __init__(self, field: str, schema: Schema) -> None:
        self._field, self._schema = field, schema
        self._left = _MAX_PARTS

    def spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise self.too_large()

    def too_large(self) -> InvalidParameterError:
        expected = "a schema of fewer alternatives, as this model's calls are not JSON"
        return InvalidParameterError(self._field, expected, self._schema)


def _objects(
    schema: Schema,
    field: str,
    *,
    path: str = "",
    root: Mapping[str, Any] | None = None,
    budget: _Budget | None = None,
) -> list[_Object]:
    """Returns the ways to be valid, one for each branch of ``anyOf`` and ``oneOf``."""
    budget = budget or _Budget(field, schema)
    if root is None:
        root = schema if isinstance(schema, Mapping) else {}

    def product(some: list[list[_Part]], others: list[list[_Part]]) -> list[list[_Part]]:
        if len(some) * len(others) > _MAX_LISTS:
            raise budget.too_large()
        return [a + b for a in some for b in others]

    def alternatives(schema: Schema, path: str, depth: int) -> list[list[_Part]]:
        budget.spend()
        schema, path = _followed(schema, path, root)
        if depth > _MAX_LEVELS:
            raise budget.too_large()
        if not isinstance(schema, Mapping):
            return [[]] if schema else []
        found = [[_Part(path, schema)]]
        for i, part in enumerate(schema.get("allOf") or ()):
            found = product(found, alternatives(part, f"{path}.allOf[{i}]", depth + 1))
        for keyword in ("anyOf", "oneOf"):
            if schema.get(keyword):
                options: list[list[_Part]] = []
                for i, part in enumerate(schema[keyword]):
                    options += alternatives(part, f"{path}.{keyword}[{i}]", depth + 1)
                found = product(found, options)
        return found

    return [_Object(parts) for parts in alternatives(schema, path, 0)]


def _followed(schema: Schema, path: str, root: Mapping[str, Any]) -> tuple[Schema, str]:
    """Resolves a schema's references; returns it with its path."""
    if isinstance(schema, Mapping) and "$ref" in schema:
        path = "".join(f".{part}" for part in str(schema["$ref"]).strip("#/").split("/") if part)
    return resolved(schema, root), path


def _matcher(pattern: str) -> Callable[[str], object] | None:
    """Returns a function that tests names for a pattern; None if Python's `re` lacks its syntax."""
    try:
        letters = _RUST_LETTER.sub(lambda found: re.escape(chr(int(found[1], 16))), pattern)
        return re.compile(letters).search
    except (re.error, ValueError, OverflowError):
        return None


def _number(value: object, default: int) -> int:
    return int(value) if isinstance(value, (int, float)) else default


def unenforced_paths(
    found: Sequence[tuple[str, object]], field: str, *, strict: bool
) -> tuple[str, ...]:
    """Returns the paths of keywords that are dropped.

    Args:
        found: Result of `unenforced`.
        field: Name of the schema in errors.
        strict: Raise instead if there is one.

    Raises:
        InvalidParameterError: There is one, and `strict` is set.
    """
    if strict and found:
        path, value = found[0]
        expected = "a keyword that can be enforced (this model's calls are not JSON)"
        raise InvalidParameterError(field + path, expected, value)
    return tuple(field + path for path, _ in found)
