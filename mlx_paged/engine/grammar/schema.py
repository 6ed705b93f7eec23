"""Prepares JSON schemas for llguidance: drops no-ops, and finds what it cannot enforce."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from llguidance import LLMatcher

from mlx_paged.engine.grammar.dead_ends import DeadEnds
from mlx_paged.engine.grammar.limits import LIMITS
from mlx_paged.engine.grammar.patterns import none_of, quotable
from mlx_paged.engine.grammar.references import (
    without_endless_references,
    without_impossible_reference,
)
from mlx_paged.engine.grammar.schema_errors import (
    Diagnosis,
    diagnose,
    drop_counts,
    drop_look_around,
    drop_unsupported,
    one_line,
    paths,
)
from mlx_paged.engine.grammar.subschemas import (
    SCHEMA,
    SCHEMAS,
    SCHEMAS_BY_NAME,
    Schema,
    mapped,
    names_of,
    subschemas,
)
from mlx_paged.errors import InvalidParameterError

#: The whitespace of JSON unless a request says otherwise: a line break with its indentation, or a
#: few spaces. It is bounded, or an answer could consist of whitespace until max_tokens.
WHITESPACE = r"( {1,4}|\n[ \t]{0,40})"

# Keywords that constrain nothing in any schema.
_EMPTY: Mapping[str, Callable[[Any], bool]] = {
    "additionalItems": lambda v: v is True or v == {},
    "dependencies": lambda v: v == {},
    "dependentRequired": lambda v: isinstance(v, dict) and not any(v.values()),
    "dependentSchemas": lambda v: isinstance(v, dict) and all(s in (True, {}) for s in v.values()),
    "minContains": lambda v: v == 0,
    "minItems": lambda v: v == 0,
    "minLength": lambda v: v == 0,
    "minProperties": lambda v: v == 0,
    "not": lambda v: v is False,
    "patternProperties": lambda v: v == {},
    "propertyNames": lambda v: v in (True, {}, {"type": "string"}),
    "required": lambda v: v == [],
    "unevaluatedItems": lambda v: v is True or v == {},
    "unevaluatedProperties": lambda v: v is True or v == {},
    "uniqueItems": lambda v: v is False,
}
# Distance from an excluded bound to the nearest number that an answer may contain.
_EPSILON = 1e-9
_SATISFIABLE = "a JSON schema for which there is a value"
# Next to these, the meaning of "unevaluated" depends on the value.
_APPLICATORS = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
# With these, properties of several schemas may be joined.
_JOINS = (
    *("allOf", "oneOf", "if", "not", "patternProperties", "dependentSchemas", "$dynamicRef"),
    *("dependentRequired", "dependencies", "unevaluatedProperties", "propertyNames"),
)
# Classes that a pattern for all other names may use.
_PLAIN_NAMES = re.compile(r"[ !#-\[\]-~]*")
# Maximum letters of declared names for which such a pattern compiles in a few milliseconds.
_MAX_IN_NAMES = 400


class Prepared(NamedTuple):
    """A schema in the form for llguidance.

    Attributes:
        schema: Includes the options of its grammar (``x-guidance``).
        relaxed: Paths of keywords that are not enforced, such as
            ``structured_outputs.json.properties.a.not``.
    """

    schema: Schema
    relaxed: tuple[str, ...]


def prepare_schema(
    schema: Schema,
    *,
    strict: bool,
    field: str,
    whitespace_pattern: str | None = None,
    disable_any_whitespace: bool = False,
    disable_additional_properties: bool = False,
) -> Prepared:
    """Prepares a schema for compilation, alone or after ``%json`` in a Lark grammar.

    Args:
        schema: Plain Python data. It is not changed.
        strict: Refuse keywords that cannot be enforced; otherwise they are relaxed.
        field: Name of the schema in errors.
        whitespace_pattern, disable_any_whitespace, disable_additional_properties: See
            `StructuredOutputs`.

    Raises:
        InvalidParameterError: An invalid schema, or with `strict` one that cannot be enforced. Its
            field is the path of the keyword.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidParameterError(field, _SATISFIABLE, schema)
    try:
        clean = _Cleaner(disable_additional_properties)(schema)
        assert isinstance(clean, dict)
        _check_integers(clean, field)
    except RecursionError:
        raise InvalidParameterError(field, "a schema of fewer levels", schema) from None
    for path, each in subschemas(clean):
        for key in ("const", "enum"):
            if key in each and not _is_exact(each[key], is_integer=_is_integer(each)):
                expected = "integers of at most 2**53, which 64-bit floating point holds"
                raise InvalidParameterError(f"{field}{path}.{key}", expected, each[key])
    options: dict[str, Any] = {"lenient": False}
    own = schema.get("x-guidance")
    if disable_any_whitespace:
        options["whitespace_flexible"] = False
    elif whitespace_pattern or not isinstance(own, dict) or own.get("whitespace_flexible", True):
        options["whitespace_pattern"] = whitespace_pattern or WHITESPACE
    finite = without_endless_references(clean)
    error, clean = _error_of(finite, options, field)
    repeats = [(f"{field}{path}.minProperties", each) for path, each in _may_repeat_names(clean)]
    if strict and error is None and repeats:
        path, each = repeats[0]
        expected = "a keyword that can be enforced (names of other properties may repeat)"
        raise InvalidParameterError(path, expected, each["minProperties"])
    relaxed: list[str] = []
    if error is not None:
        cause = diagnose(clean, error)
        if strict or not cause.is_unsupported:
            raise _refusal(field, cause)
        options |= {"lenient": True, "coerce_one_of": True}
        clean, relaxed = _relax(clean, options, field)
    relaxed = [f"{field}{path}" for path in _as_written(schema, relaxed)]
    relaxed += [path for path, _ in repeats]
    return Prepared(_final(clean, options, field), tuple(dict.fromkeys(relaxed)))


def _error_of(
    schema: Schema, options: dict[str, Any], field: str
) -> tuple[str | None, dict[str, Any]]:
    """Returns llguidance's error for a schema, and the schema without references to schemas that no
    value satisfies.

    Raises:
        InvalidParameterError: No value satisfies the schema.
    """
    while isinstance(schema, dict):
        error = _problems(schema, options)[0]
        without = None if error is None else without_impossible_reference(schema, error)
        if without is None:
            return error, schema
        schema = without
    raise InvalidParameterError(field, _SATISFIABLE, schema)


def _relax(
    schema: dict[str, Any], options: dict[str, Any], field: str
) -> tuple[dict[str, Any], list[str]]:
    """Returns a schema without keywords that cannot be enforced, and their paths."""
    # These are errors even if unknown keywords are allowed.
    relaxed = [*drop_look_around(schema), *drop_counts(schema)]
    while True:
        error, schema = _error_of(schema, options, field)
        if error is None:
            break
        cause = diagnose(schema, error)
        dropped = drop_unsupported(schema, error) if cause.is_unsupported else []
        if not dropped:
            raise _refusal(field, cause)
        relaxed += dropped
    # A warning about none of the schema's own keywords is reported with the path of the schema.
    warnings = _problems(schema, options)[1]
    return schema, relaxed + [path for text in warnings for path in paths(schema, text) or [""]]


def _as_written(schema: dict[str, Any], relaxed: list[str]) -> list[str]:
    """Returns paths in the original schema, where `additionalProperties` may have been
    `unevaluatedProperties`."""
    given = dict(subschemas(schema))
    found = []
    for path in relaxed:
        where = path.removesuffix(".additionalProperties")
        beside = given.get(where, {}) if where != path else {}
        if "additionalProperties" in beside or "unevaluatedProperties" not in beside:
            found.append(path)
        if "unevaluatedProperties" in beside:
            found.append(f"{where}.unevaluatedProperties")
    return found


def _check_integers(value: object, path: str) -> None:
    """Refuses numbers that overflow llguidance 1.9.1's stack, which would end the process.

    These are integers equal to -2**63 as floating point, because their negative does not fit into
    64 bits, and integer ranges without an upper neighbor.
    """
    highest = -(1 << 63) + 512
    if isinstance(value, dict):
        for key, inner in value.items():
            at = f"{path}.{key}"
            is_bound = key in ("maximum", "exclusiveMaximum") and isinstance(inner, (int, float))
            if is_bound and inner <= highest + 1:
                raise InvalidParameterError(at, f"a number above {highest + 1}", inner)
            _check_integers(inner, at)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            _check_integers(inner, f"{path}[{i}]")
    elif isinstance(value, int) and -(1 << 63) <= value <= highest:
        raise InvalidParameterError(path, f"an integer above {highest}", value)


def _with(schema: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    given = schema.get("x-guidance")
    return {**schema, "x-guidance": {**given, **options} if isinstance(given, dict) else options}


def _problems(schema: dict[str, Any], options: dict[str, Any]) -> tuple[str | None, list[str]]:
    """Returns llguidance's error for a schema (None if it is valid), and its warnings."""
    text = json.dumps(_with(schema, options), ensure_ascii=False)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(
        LLMatcher.grammar_from_json_schema(text), limits=LIMITS
    )
    return (messages[0], []) if is_error else (None, messages)


def _refusal(field: str, cause: Diagnosis) -> InvalidParameterError:
    return InvalidParameterError(field + cause.path, cause.expected, cause.value)


# The schema for llguidance.


def _final(schema: dict[str, Any], options: dict[str, Any], field: str) -> dict[str, Any]:
    """Returns the schema with correctly quoted patterns, names with one spelling, and no parts that
    could begin without an end."""
    quoted = mapped(schema, _quote_patterns)
    if quoted != schema:
        error = _problems(quoted, options)[0]
        if error is not None:
            expected = f"a schema whose patterns can be enforced ({one_line(error)})"
            raise InvalidParameterError(field, expected, schema)
    final = _without_dead_ends(mapped(quoted, _mend_bounds), options)
    if isinstance(final, dict):
        final = _with_one_spelling(final, options)
        spelled = _without_dead_ends(final, final["x-guidance"])
        if isinstance(spelled, dict) and spelled != final:
            error, spelled = _error_of(spelled, {}, field)
            if error is not None:
                raise _refusal(field, diagnose(spelled, error))
        final = spelled
    if not isinstance(final, dict):
        raise InvalidParameterError(field, _SATISFIABLE, schema)
    return final


def _without_dead_ends(schema: dict[str, Any], options: dict[str, Any]) -> Schema:
    names = {name: None for _, each in subschemas(schema) for name in names_of(each)}
    found: Schema = mapped(schema, DeadEnds(options, list(names)).rewrite)
    return found


def _mend_bounds(schema: dict[str, Any]) -> None:
    """Moves whole numbers out of ranges that exclude them: llguidance 1.9.1 lets ``1`` pass for a
    number above 1 and below 1.5."""
    bounds = [schema.get(key) for key in ("minimum", "maximum")]
    open_bounds = [schema.get(key) for key in ("exclusiveMinimum", "exclusiveMaximum")]
    if not all(v is None or isinstance(v, (int, float)) for v in (*bounds, *open_bounds)):
        return
    lowest, highest = ([v for v in pair if v is not None] for pair in zip(bounds, open_bounds))
    if not lowest or not highest or not 0 < min(highest) - max(lowest) < 1:
        return
    for key, value, other, sign in (
        ("exclusiveMinimum", open_bounds[0], "minimum", 1),
        ("exclusiveMaximum", open_bounds[1], "maximum", -1),
    ):
        if value is not None and value == int(value):
            moved, given = value + sign * _EPSILON, schema.get(other, value)
            schema[other] = max(moved, given) if sign > 0 else min(moved, given)
            del schema[key]


def _quote_patterns(schema: dict[str, Any]) -> None:
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = quotable(schema["pattern"])
    by_pattern = schema.get("patternProperties")
    if isinstance(by_pattern, dict):
        schema["patternProperties"] = {quotable(key): value for key, value in by_pattern.items()}


def _with_one_spelling(schema: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Prevents that a declared name appears under another spelling.

    llguidance excludes declared names from other properties' names in one spelling only:
    ``"f\\u006fo"`` would pass as a name other than ``"foo"``, and its value would be free. If
    there are few declared names and no composition, a pattern describes the other names, and names
    from patterns get one spelling. Otherwise ``\\u`` escapes are forbidden; only control characters
    need them.
    """
    is_open = [
        each
        for _, each in subschemas(schema)
        if each.get("additionalProperties", True) is not False
        and any(key in each for key in ("properties", "required", "patternProperties"))
    ]
    if not is_open:
        return _with(schema, options)
    names = "".join(name for each in is_open for name in names_of(each))
    composes = any(not _stands_alone(each) for _, each in subschemas(schema))
    if not composes and len(names) <= _MAX_IN_NAMES and _PLAIN_NAMES.fullmatch(names):
        closed = mapped(schema, _close)
        if _problems(closed, options)[0] is None:
            return _with(closed, options)
    return _with(schema, {**options, "json_allowed_escapes": 'nrbtf\\"'})


def _stands_alone(schema: dict[str, Any]) -> bool:
    """True if llguidance never joins the properties of an object's schema with another's."""
    if any(key in schema for key in _JOINS):
        return False
    refers = "$ref" in schema or "anyOf" in schema
    return not (refers and any(key in schema for key in ("properties", "required", "type")))


def _close(schema: dict[str, Any]) -> None:
    """Replaces `additionalProperties` by a pattern for all names that are not declared."""
    names = names_of(schema)
    if names and schema.get("additionalProperties", True) is not False:
        others = schema.pop("additionalProperties", {})
        schema["patternProperties"] = {none_of(names): others}
        schema["additionalProperties"] = False


# Cleaning.


class _Cleaner:
    """Copies a schema without keywords that have no effect."""

    def __init__(self, disable_additional_properties: bool) -> None:
        self._closes = disable_additional_properties

    def __call__(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        clean: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _EMPTY and _EMPTY[key](value):
                continue
            if key in SCHEMAS and isinstance(value, list):
                clean[key] = [self(each) for each in value]
            elif key in SCHEMA:
                clean[key] = self(value)
            elif key in SCHEMAS_BY_NAME and isinstance(value, dict):
                clean[key] = {name: self(each) for name, each in value.items()}
            else:
                clean[key] = value
        _drop_unused(clean)
        if self._closes and "properties" in clean:
            clean.setdefault("additionalProperties", False)
        return clean


def _drop_unused(schema: dict[str, Any]) -> None:
    """Removes keywords without effect: they need others, or are for another type. Spells
    `unevaluated` keywords as `additional` ones where both mean the same."""
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    elif "then" not in schema and "else" not in schema:
        del schema["if"]
    if "contains" not in schema or schema.get("minContains") == 0:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
    kind = schema.get("type")
    if "format" in schema and isinstance(kind, str) and kind != "string":
        del schema["format"]  # such as OpenAPI's int32
    for keyword, plain in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "items"),
    ):
        if keyword in schema and not any(name in schema for name in _APPLICATORS):
            value = schema.pop(keyword)
            schema.setdefault(plain, value)
    if "propertyNames" in schema and _allows_all_names(schema["propertyNames"]):
        del schema["propertyNames"]


def _allows_all_names(names: Any) -> bool:
    annotations = ("type", "title", "description", "$comment", "default", "examples")
    return (
        isinstance(names, dict)
        and all(key in annotations for key in names)
        and names.get("type", "string") in ("string", ["string"])
    )


# Checks.


def _is_integer(schema: dict[str, Any]) -> bool:
    """True if the numbers of a schema must be integers."""
    kinds = schema.get("type")
    return kinds == "integer" or (
        isinstance(kinds, list) and "integer" in kinds and "number" not in kinds
    )


def _is_exact(value: Any, *, is_integer: bool = False) -> bool:
    """True if llguidance writes a value unchanged. It reads integers as 64-bit floats.

    Args:
        is_integer: True if the schema requires an integer, so that a float is converted, too.
    """
    if isinstance(value, dict):
        return all(map(_is_exact, value.values()))
    if isinstance(value, list):
        return all(_is_exact(each, is_integer=is_integer) for each in value)
    if isinstance(value, float) and not is_integer:
        return True
    return not isinstance(value, (int, float)) or abs(value) <= 1 << 53


def _may_repeat_names(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Finds objects that need more than one property besides their required ones. Two of these may
    get the same name, and a parser keeps only one."""
    for path, each in subschemas(schema):
        min_properties, required = each.get("minProperties"), each.get("required", [])
        if isinstance(min_properties, (int, float)) and isinstance(required, list):
            has_others = each.get("additionalProperties", True) is not False
            if min_properties > len(required) + 1 and (has_others or "patternProperties" in each):
                yield path, each
