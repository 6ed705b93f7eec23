"""Maps llguidance's errors about a schema to keywords, and removes these keywords.

llguidance names an unsupported keyword without its path, so the error is looked up in the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from llguidance import regex_to_lark

from mlx_paged.engine.grammar.subschemas import subschemas

_LOOK_AROUND = re.compile(r"\(\?(=|!|<=|<!)|\\[bB]")
_NOT_DISJOINT = re.compile(r"patternProperty regexes /(.*)/ and /(.*)/ are (not )?disjoint", re.S)
_CIRCULAR = re.compile(r"circular references with sibling keys are not supported: (\S+)")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Next to a reference, these have no effect.
_ANNOTATIONS = (
    *("$ref", "$defs", "definitions", "$schema", "$id", "id", "$comment", "$anchor", "title"),
    *("description", "default", "examples", "readOnly", "writeOnly", "x-guidance"),
)
# Errors about invalid schemas. All others are about features that llguidance lacks.
_INVALID = re.compile(
    r"Expected |Invalid type|Pointer |Resource |schema must be|Definition not found|Infinite "
    r"|.*(must be (an? (array|object|string)|non-negative)|regex parse error|invalid regex)",
    re.S,
)
_WITHOUT_VALUE = "Unsatisfiable schema"


class Keyword(NamedTuple):
    """A keyword of a schema that a message is about.

    Attributes:
        path: Path of the keyword within the whole schema.
        schema: The subschema that has it.
        key: Its name.
    """

    path: str
    schema: dict[str, Any]
    key: str

    @property
    def value(self) -> object:
        """The keyword's value."""
        return self.schema.get(self.key)


class Diagnosis(NamedTuple):
    """The cause of an error of llguidance.

    Attributes:
        path: Path of the keyword; empty if unknown.
        value: Value of the keyword.
        expected: Description of the expected value.
        is_unsupported: True if the schema is valid and has a value, but cannot be enforced.
    """

    path: str
    value: object
    expected: str
    is_unsupported: bool


def one_line(error: str, limit: int = 240) -> str:
    """Returns llguidance's error message on one line."""
    text = " ".join(line.strip() for line in error.splitlines() if line.strip(" ^"))
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def diagnose(schema: dict[str, Any], error: str) -> Diagnosis:
    """Returns the cause of an error of llguidance."""
    keywords = _keywords_of(schema, error)
    path, value = (keywords[0].path, keywords[0].value) if keywords else ("", schema)
    if error.startswith(_WITHOUT_VALUE):
        kind, is_unsupported = "a schema for which there is a value", False
    elif error.startswith("recursion limit"):
        kind, is_unsupported = "a schema of fewer levels", False
    elif _INVALID.match(error) and not _is_other_regex(keywords, error):
        kind, is_unsupported = "a valid JSON schema", False
    else:
        kind, is_unsupported = "a keyword that can be enforced", True
    return Diagnosis(path, value, f"{kind} ({one_line(error)})", is_unsupported)


def _is_other_regex(keywords: list[Keyword], error: str) -> bool:
    """True if an error is about patterns that Python's `re` accepts and Rust's `regex` does not."""
    if "regex parse error" not in error:
        return False
    matches = _pattern_matcher(error)
    for keyword in keywords:
        value = keyword.value
        patterns = [value] if isinstance(value, str) else value
        for pattern in patterns if isinstance(patterns, (list, dict)) else ():
            try:
                if matches(pattern):
                    re.compile(pattern)
            except (re.error, RecursionError, OverflowError):
                return False
    return bool(keywords)


def paths(schema: dict[str, Any], message: str) -> list[str]:
    """Returns the paths of the keywords that an error or a warning of llguidance is about."""
    return [keyword.path for keyword in _keywords_of(schema, message)]


def drop_unsupported(schema: dict[str, Any], error: str) -> list[str]:
    """Removes the unsupported keyword of an error from a schema; returns its paths."""
    if circular := _CIRCULAR.match(error):
        return _drop_circular(schema, circular.group(1))
    dropped = []
    for path, subschema, key in _keywords_of(schema, error):
        if key == "patternProperties":
            dropped += _drop_patterns(path, subschema, _pattern_matcher(error))
        else:
            del subschema[key]
            dropped.append(path)
    return dropped


def drop_look_around(schema: dict[str, Any]) -> list[str]:
    """Removes patterns with lookaround from a schema; returns their paths."""

    def looks_around(pattern: str) -> bool:
        return _LOOK_AROUND.search(pattern) is not None

    dropped = []
    for path, subschema in list(subschemas(schema)):
        pattern = subschema.get("pattern")
        if isinstance(pattern, str) and looks_around(pattern):
            del subschema["pattern"]
            dropped.append(f"{path}.pattern")
        if isinstance(subschema.get("patternProperties"), dict):
            dropped += _drop_patterns(f"{path}.patternProperties", subschema, looks_around)
    return dropped


def drop_counts(schema: dict[str, Any]) -> list[str]:
    """Removes each `minProperties` that llguidance would enforce without counting optional
    properties; returns their paths."""
    dropped = []
    for path, subschema in list(subschemas(schema)):
        properties, required = subschema.get("properties"), subschema.get("required", [])
        counts = subschema.get("minProperties"), subschema.get("maxProperties")
        if (
            counts[0] is not None
            and counts not in ((1, None), (1, 1))  # llguidance counts these correctly.
            and subschema.get("additionalProperties") is False
            and isinstance(properties, dict)
            and isinstance(required, list)
            and any(name not in required for name in properties)
        ):
            del subschema["minProperties"]
            dropped.append(f"{path}.minProperties")
    return dropped


def _drop_patterns(
    path: str, schema: dict[str, Any], is_dropped: Callable[[str], bool]
) -> list[str]:
    by_pattern = schema["patternProperties"]
    dropped = [pattern for pattern in by_pattern if is_dropped(pattern)]
    for pattern in dropped:
        del by_pattern[pattern]
    paths = [f"{path}.{pattern}" for pattern in dropped]
    # Otherwise it would apply to the properties that these patterns matched.
    if dropped and schema.get("additionalProperties", True) is not True:
        del schema["additionalProperties"]
        paths.append(f"{path.removesuffix('.patternProperties')}.additionalProperties")
    return paths


def _drop_circular(schema: dict[str, Any], uri: str) -> list[str]:
    """Removes the keywords next to references to a path, or else these references."""
    refers = [
        (path, each)
        for path, each in list(subschemas(schema))
        if isinstance(each.get("$ref"), str) and f"json-schema:///{each['$ref']}" == uri
    ]
    dropped = []
    for path, each in refers:
        for key in [key for key in each if key not in _ANNOTATIONS]:
            del each[key]
            dropped.append(f"{path}.{key}")
    if not dropped:
        for path, each in refers:
            del each["$ref"]
            dropped.append(f"{path}.$ref")
    return dropped


def _keywords_of(schema: dict[str, Any], message: str) -> list[Keyword]:
    """Returns the keywords of a schema that a message may be about."""
    matches = _matcher_of(message)
    keywords = [
        Keyword(f"{path}.{key}", subschema, key)
        for path, subschema in subschemas(schema)
        for key, value in subschema.items()
        if matches(key, value)
    ]
    if _is_about_patterns(message):
        # A short pattern occurs in any message.
        longest = max((_longest_pattern(keyword, message) for keyword in keywords), default=0)
        keywords = [k for k in keywords if _longest_pattern(k, message) == longest]
    return keywords


def _is_about_patterns(message: str) -> bool:
    words = ("regex", "look-around", "lookarounds")
    return any(word in message for word in words) and "generate regex" not in message


def _pattern_matcher(message: str) -> Callable[[str], bool]:
    """Recognizes the pattern that a message is about."""
    if disjoint := _NOT_DISJOINT.search(message):
        return lambda pattern: regex_to_lark(pattern, "") == disjoint.group(2)
    text = one_line(message, 1 << 20)
    return lambda pattern: any(
        one_line(spelling, 1 << 20) in text for spelling in (pattern, regex_to_lark(pattern, ""))
    )


def _longest_pattern(keyword: Keyword, message: str) -> int:
    """Returns the length of a keyword's longest pattern that a message is about; 0 if none is."""
    matches, value = _pattern_matcher(message), keyword.value
    patterns = [value] if isinstance(value, str) else value if isinstance(value, dict) else ()
    return max((len(p) for p in patterns if isinstance(p, str) and matches(p)), default=0)


def _matcher_of(message: str) -> Callable[[str, Any], bool]:
    """Recognizes the keyword, and its value, that a message is about."""
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
    if "Failed to generate regex" in message:
        return lambda key, value: key in _BOUNDS and _is_large(value)
    if _is_about_patterns(message):
        matches = _pattern_matcher(message)
        return lambda key, value: any(
            isinstance(pattern, str) and matches(pattern)
            for pattern in ([value] if key == "pattern" else value if _is_map(key, value) else ())
        )
    # Any other message contains the keyword as a word, maybe among unrelated words.
    words = {*re.findall(r"[$\w]+", message)} - {"type", "not", "if", "then", "else", "items"}
    return lambda key, value: key in words


def _is_large(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) >= 1e15


def _is_map(key: str, value: object) -> bool:
    return key == "patternProperties" and isinstance(value, dict)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
