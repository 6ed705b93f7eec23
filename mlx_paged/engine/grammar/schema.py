"""JSON schemas for llguidance: what says nothing is left out, what it cannot enforce is found.

llguidance names a keyword that it does not know, and not where it is; its errors are looked up in
the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from llguidance import LLMatcher

from mlx_paged.engine.grammar.patterns import none_of, quotable
from mlx_paged.errors import InvalidParameterError

#: The whitespace of JSON unless a request says otherwise: a line break with its indentation, or a
#: few spaces. It is bounded, or an answer could consist of whitespace until max_tokens.
WHITESPACE = r"( {1,4}|\n[ \t]{0,40})"

Schema = dict[str, Any] | bool

# Keywords by what is in them.
_SCHEMA = (
    *("additionalProperties", "additionalItems", "contains", "else", "if", "items", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS_BY_NAME = (
    *("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"),
    "dependencies",
)
# What says nothing in any schema.
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
# With these beside it, what a keyword calls unevaluated depends on the value.
_APPLICATORS = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
# With these, properties of several schemas may be joined.
_JOINS = (
    *("allOf", "oneOf", "if", "not", "patternProperties", "dependentSchemas", "$dynamicRef"),
    *("dependentRequired", "dependencies", "unevaluatedProperties", "propertyNames"),
)
# The classes of a pattern of all others may have these.
_PLAIN_NAMES = re.compile(r"[ !#-\[\]-~]*")
# Letters of declared names for which a pattern of all others compiles in a few milliseconds.
_MOST_IN_NAMES = 400
_LOOK_AROUND = re.compile(r"\(\?(=|!|<=|<!)|\\[bB]")


class Prepared(NamedTuple):
    """A schema as llguidance gets it.

    Attributes:
        schema: With the options of its grammar in it (``x-guidance``).
        relaxed: Where keywords are that are not enforced, such as
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
    """Makes a schema ready to be compiled, alone or after ``%json`` in a Lark grammar.

    Args:
        schema: plain Python data. It is not changed.
        strict: refuse what cannot be enforced; otherwise it is relaxed.
        field: what errors call the schema.
        whitespace_pattern, disable_any_whitespace, disable_additional_properties: see
            `StructuredOutputs`.

    Raises:
        InvalidParameterError: an invalid schema, or with `strict` one that cannot be enforced. Its
            field is the path to the keyword.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidParameterError(field, "a JSON schema for which there is a value", schema)
    try:
        clean = _Cleaner(disable_additional_properties)(schema)
    except RecursionError:
        raise InvalidParameterError(field, "a schema of fewer levels", schema) from None
    assert isinstance(clean, dict)
    _check_integers(clean, field)
    for path, each in _subschemas(clean):
        for key in ("const", "enum"):
            if key in each and not _is_exact(each[key]):
                expected = "integers that 64-bit floating point holds (at most 2**53)"
                raise InvalidParameterError(f"{field}{path}.{key}", expected, each[key])
    options: dict[str, Any] = {"lenient": False}
    own = schema.get("x-guidance")
    if disable_any_whitespace:
        options["whitespace_flexible"] = False
    elif whitespace_pattern or not isinstance(own, dict) or own.get("whitespace_flexible", True):
        options["whitespace_pattern"] = whitespace_pattern or WHITESPACE
    error = _problems(clean, options)[0]
    repeats = [(f"{field}{path}.minProperties", each) for path, each in _may_repeat_names(clean)]
    if strict and error is None and repeats:
        path, each = repeats[0]
        expected = "a keyword that can be enforced (names of other properties may repeat)"
        raise InvalidParameterError(path, expected, each["minProperties"])
    if error is None:
        return Prepared(_final(clean, options, field), tuple(path for path, _ in repeats))
    path, keyword_value, unsupported = _located(clean, error)
    if strict or not unsupported:
        raise _refusal(field + path, error, keyword_value, unsupported)
    # (These are errors even where unknown keywords are not.)
    dropped = [f"{field}{path}" for path in (*_drop_look_around(clean), *_drop_counts(clean))]
    options |= {"lenient": True, "coerce_one_of": True}
    error, warnings = _problems(clean, options)
    if error is not None:
        path, keyword_value, unsupported = _located(clean, error)
        raise _refusal(field + path, error, keyword_value, unsupported)
    # (What is relaxed in a schema that is not the request's, as a meta-schema, has no place in it.)
    relaxed = [field + path for text in warnings for path in _places(clean, text) or [""]]
    relaxed = [*dropped, *relaxed, *(path for path, _ in repeats)]
    return Prepared(_final(clean, options, field), tuple(dict.fromkeys(relaxed)))


def _check_integers(value: object, path: str) -> None:
    """Refuses numbers upon which llguidance 1.9.1 overflows its stack, and the process ends.

    They are integers that are -2**63 as floating point, since their negative has no 64 bits, and
    ranges of integers that have nothing above.
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
            _check_integers(inner, f"{path}.{i}")
    elif isinstance(value, int) and -(1 << 63) <= value <= highest:
        raise InvalidParameterError(path, f"an integer above {highest}", value)


def _with(schema: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    given = schema.get("x-guidance")
    return {**schema, "x-guidance": {**given, **options} if isinstance(given, dict) else options}


def _problems(schema: dict[str, Any], options: dict[str, Any]) -> tuple[str | None, list[str]]:
    """llguidance's error for a schema, or its warnings."""
    text = json.dumps(_with(schema, options), ensure_ascii=False)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(
        LLMatcher.grammar_from_json_schema(text)
    )
    return (messages[0], []) if is_error else (None, messages)


def _refusal(path: str, error: str, value: object, unsupported: bool) -> InvalidParameterError:
    expected = "a keyword that can be enforced" if unsupported else "a valid JSON schema"
    return InvalidParameterError(path, f"{expected} ({one_line(error)})", value)


def one_line(error: str, limit: int = 240) -> str:
    """An error of llguidance, which may have many lines, as one."""
    text = " ".join(line.strip() for line in error.splitlines() if line.strip(" ^"))
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


# What llguidance gets.


def _final(schema: dict[str, Any], options: dict[str, Any], field: str) -> dict[str, Any]:
    """The schema with patterns that are quoted rightly and names that have one spelling."""
    quoted = _mapped(schema, _quote_patterns)
    if quoted != schema:
        error = _problems(quoted, options)[0]
        if error is not None:
            expected = f"a schema whose patterns can be enforced ({one_line(error)})"
            raise InvalidParameterError(field, expected, schema)
    return _with_one_spelling(quoted, options)


def _quote_patterns(schema: dict[str, Any]) -> None:
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = quotable(schema["pattern"])
    by_pattern = schema.get("patternProperties")
    if isinstance(by_pattern, dict):
        schema["patternProperties"] = {quotable(key): value for key, value in by_pattern.items()}


def _with_one_spelling(schema: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Sees to it that no declared name can be spelled anew as one of another property.

    llguidance rules declared names out of the names of other properties, but only in one spelling:
    ``"f\\u006fo"`` would pass for another name than ``"foo"``, and its value would be free. Where
    the declared names are few and nothing is composed, the other names get a pattern, and those of
    patterns have one spelling. Elsewhere there are no ``\\u`` escapes, which only control
    characters need.
    """
    is_open = [
        each
        for _, each in _subschemas(schema)
        if each.get("additionalProperties", True) is not False
        and any(key in each for key in ("properties", "required", "patternProperties"))
    ]
    if not is_open:
        return _with(schema, options)
    names = "".join(name for each in is_open for name in _names_of(each))
    composes = any(not _stands_alone(each) for _, each in _subschemas(schema))
    if not composes and len(names) <= _MOST_IN_NAMES and _PLAIN_NAMES.fullmatch(names):
        closed = _mapped(schema, _close)
        if _problems(closed, options)[0] is None:
            return _with(closed, options)
    return _with(schema, {**options, "json_allowed_escapes": 'nrbtf\\"'})


def _names_of(schema: dict[str, Any]) -> list[str]:
    return [*dict.fromkeys([*schema.get("properties", ()), *schema.get("required", ())])]


def _stands_alone(schema: dict[str, Any]) -> bool:
    """Whether llguidance never joins the properties of an object's schema with another's."""
    if any(key in schema for key in _JOINS):
        return False
    refers = "$ref" in schema or "anyOf" in schema
    return not (refers and any(key in schema for key in ("properties", "required", "type")))


def _close(schema: dict[str, Any]) -> None:
    """Gives the names of an object's other properties as a pattern."""
    names = _names_of(schema)
    if names and schema.get("additionalProperties", True) is not False:
        others = schema.pop("additionalProperties", {})
        schema["patternProperties"] = {none_of(names): others}
        schema["additionalProperties"] = False


def _mapped(schema: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    """A copy in which each schema is changed."""
    if isinstance(schema, list):
        return [_mapped(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {}
    for key, value in schema.items():
        if key in _SCHEMAS or key in _SCHEMA:
            copy[key] = _mapped(value, change)
        elif key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            copy[key] = {name: _mapped(each, change) for name, each in value.items()}
        else:
            copy[key] = value
    change(copy)
    return copy


# Cleaning.


class _Cleaner:
    """Copies a schema without what says nothing."""

    def __init__(self, disable_additional_properties: bool) -> None:
        self._closes = disable_additional_properties

    def __call__(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        clean: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _EMPTY and _EMPTY[key](value):
                continue
            if key in _SCHEMAS and isinstance(value, list):
                clean[key] = [self(each) for each in value]
            elif key in _SCHEMA:
                clean[key] = self(value)
            elif key in _SCHEMAS_BY_NAME and isinstance(value, dict):
                clean[key] = {name: self(each) for name, each in value.items()}
            else:
                clean[key] = value
        _drop_unused(clean)
        if self._closes and "properties" in clean:
            clean.setdefault("additionalProperties", False)
        return clean


def _drop_unused(schema: dict[str, Any]) -> None:
    """Keywords that say nothing without others, or where the type is another."""
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
        del schema["format"]  # (OpenAPI's int32 and the like)
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


# Places.


def _subschemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each schema within a schema with its path, itself included."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for key, value in schema.items():
        if key in _SCHEMAS and isinstance(value, list):
            for i, each in enumerate(value):
                yield from _subschemas(each, f"{path}.{key}[{i}]")
        elif key in _SCHEMA:
            yield from _subschemas(value, f"{path}.{key}")
        elif key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            for name, each in value.items():
                yield from _subschemas(each, f"{path}.{key}.{name}")


def _is_exact(value: Any) -> bool:
    """Whether llguidance, which reads larger integers as floats, writes a value as it is."""
    if isinstance(value, dict):
        return all(map(_is_exact, value.values()))
    if isinstance(value, list):
        return all(map(_is_exact, value))
    return not isinstance(value, int) or abs(value) <= 1 << 53


def _may_repeat_names(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects that need more than one property besides those that they require. Each of the others
    may have the name of another, and a parser keeps one of them."""
    for path, each in _subschemas(schema):
        least, required = each.get("minProperties"), each.get("required", [])
        if isinstance(least, (int, float)) and isinstance(required, list):
            has_others = each.get("additionalProperties", True) is not False
            if least > len(required) + 1 and (has_others or "patternProperties" in each):
                yield path, each


def _drop_look_around(schema: dict[str, Any]) -> list[str]:
    """Takes patterns that look around out of a schema; returns where they were."""
    found = []
    for path, each in list(_subschemas(schema)):
        pattern = each.get("pattern")
        if isinstance(pattern, str) and _LOOK_AROUND.search(pattern):
            del each["pattern"]
            found.append(f"{path}.pattern")
        by_pattern = each.get("patternProperties")
        for name in list(by_pattern) if isinstance(by_pattern, dict) else ():
            assert isinstance(by_pattern, dict)
            if _LOOK_AROUND.search(name):
                del by_pattern[name]
                found.append(f"{path}.patternProperties.{name}")
                # (The properties that it allowed would be refused.)
                if each.get("additionalProperties") is False:
                    del each["additionalProperties"]
                    found.append(f"{path}.additionalProperties")
    return found


def _drop_counts(schema: dict[str, Any]) -> list[str]:
    """Takes out how many properties there are at least, where llguidance takes those that may be
    missing for missing; returns where that was."""
    found = []
    for path, each in list(_subschemas(schema)):
        properties, required = each.get("properties"), each.get("required", [])
        counts = each.get("minProperties"), each.get("maxProperties")
        if (
            counts[0] is not None
            and counts not in ((1, None), (1, 1))  # (these it counts)
            and each.get("additionalProperties") is False
            and isinstance(properties, dict)
            and any(name not in required for name in properties)
        ):
            del each["minProperties"]
            found.append(f"{path}.minProperties")
    return found


def _places(schema: dict[str, Any], message: str) -> list[str]:
    """The paths of the keywords that an error or a warning of llguidance is about."""
    return [path for path, _ in _found(schema, message)]


def _found(schema: dict[str, Any], message: str) -> list[tuple[str, Any]]:
    matches = _matcher_of(message)
    return [
        (f"{path}.{key}", value)
        for path, each in _subschemas(schema)
        for key, value in each.items()
        if matches(key, value)
    ]


def _matcher_of(message: str) -> Callable[[str, Any], bool]:
    """Recognises the keyword, and its value, that a message is about."""
    if unknown := re.search(r"Unimplemented keys: (\[.*?\])", message):
        try:
            names = json.loads(unknown.group(1))
        except ValueError:
            names = re.findall(r'"([^"]+)"', unknown.group(1))
        return lambda key, value: key in names
    if "min/maxProperties" in message:
        return lambda key, value: key in ("minProperties", "maxProperties")
    if "oneOf" in message:
        return lambda key, value: key == "oneOf"
    if unknown := re.search(r"Unknown format: (.*)", message):
        name = unknown.group(1).strip()
        return lambda key, value: key == "format" and str(value) == name
    if unknown := re.search(r"Invalid type: (.*)", message):
        kind = unknown.group(1).strip()
        return lambda key, value: key == "type" and (value == kind or kind in _listed(value))
    if unknown := re.search(r"Pointer '(.*)' does not exist", message):
        pointer = unknown.group(1)
        return lambda key, value: key == "$ref" and str(value).endswith(pointer)
    if unknown := re.search(r"Resource '(.*?)' is not present", message):
        resource = unknown.group(1)
        return lambda key, value: key == "$ref" and str(value).startswith(resource)
    if "regex parse error" in message or "lookarounds" in message or "regex" in message:
        return lambda key, value: any(
            one_line(pattern, 1 << 20) in one_line(message, 1 << 20)
            for pattern in ([value] if key == "pattern" else value if _is_map(key, value) else ())
            if isinstance(pattern, str)
        )
    # Any other message has the keyword in it as a word, and perhaps words that mean nothing.
    words = {*re.findall(r"[$\w]+", message)} - {"type", "not", "if", "then", "else", "items"}
    return lambda key, value: key in words


def _is_map(key: str, value: object) -> bool:
    return key == "patternProperties" and isinstance(value, dict)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _located(schema: dict[str, Any], error: str) -> tuple[str, object, bool]:
    """(the path of what an error is about, its value, whether it only cannot be enforced)."""
    found = _found(schema, error)
    path, value = found[0] if found else ("", schema)
    unsupported = (
        error.startswith(("Unimplemented keys", "Unknown format", "oneOf", "min/maxProperties"))
        or "look-around" in error
        or "lookarounds" in error
        or "Unable to determine if regex is empty" in error
    )
    return path, value, unsupported
