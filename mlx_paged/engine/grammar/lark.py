"""Grammars in llguidance's Lark, from callers' grammars, choices and structural tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from mlx_paged.engine.grammar.schema import prepare_schema
from mlx_paged.errors import InvalidParameterError
from mlx_paged.parsing.format import lark_literal

# Keywords, and the tokens that contain none: strings, comments and regular expressions.
_LEXEMES = re.compile(
    r"""(?P<json>%json\b)|(?P<options>%llguidance\b)|//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[imslux]*"""
)
_SPACE = re.compile(r"\s*")
_GBNF_RULE = re.compile(r"(?m)^\s*[A-Za-z][\w-]*\s*::=")
_ANY_TEXT = "TEXT: /(.|\\n)*/\n"


def lark_of(text: str, field: str) -> str:
    """Returns a grammar in Lark, from Lark or GBNF.

    Raises:
        InvalidParameterError: GBNF that is not well-formed.
    """
    if not _GBNF_RULE.search(text):
        return text
    try:
        return gbnf_to_lark(text)
    except (GbnfToLarkError, RecursionError, KeyError, ValueError) as error:
        raise InvalidParameterError(field, f"Lark or GBNF ({error})", text) from error


def with_forcing(lark: str) -> str:
    """Returns a Lark grammar whose forced texts are written in the tokenizer's usual tokens.

    Only for grammars made by this package, see `without_forcing`.
    """
    return f'%llguidance {{"no_forcing": false}}\n{lark}'


def without_forcing(lark: str) -> str:
    """Returns a Lark grammar with llguidance's option `no_forcing`, unless the grammar sets it.

    llguidance 1.9.1 follows bytes that only one byte can follow to their end. `/a+/ /a+/` has no
    such end: it would never return.
    """
    end = 0
    while found := _LEXEMES.search(lark, end):
        end = found.end()
        if not found["options"]:
            continue
        start = _SPACE.match(lark, end).end()  # type: ignore[union-attr]
        try:
            options, after = json.JSONDecoder().raw_decode(lark, start)
        except (ValueError, RecursionError):
            return lark  # llguidance reports the error.
        if not isinstance(options, dict):
            return lark
        options = json.dumps({"no_forcing": True, **options}, ensure_ascii=False)
        return f"{lark[:end]} {options}{lark[after:]}"
    return f'%llguidance {{"no_forcing": true}}\n{lark}'


def with_prepared_schemas(
    lark: str, *, strict: bool, field: str, prepares: Mapping[str, Any] | None = None
) -> tuple[str, tuple[str, ...], list[Any]]:
    """Prepares the schemas of a Lark grammar, after ``%json``.

    Args:
        strict: Refuse keywords that cannot be enforced.
        field: Name of the grammar in errors; the i-th schema is ``%json[i]`` in it.
        prepares: Options of `prepare_schema`.

    Returns:
        The grammar, the relaxed paths, and the prepared schemas.

    Raises:
        InvalidParameterError: See `prepare_schema`.
    """
    parts: list[str] = []
    relaxed: list[str] = []
    schemas: list[Any] = []
    end, index = 0, 0
    decoder = json.JSONDecoder()
    while found := _LEXEMES.search(lark, end):
        parts.append(lark[end : found.start()])
        end = found.end()
        if found["json"] is None:
            parts.append(found.group())
            continue
        name = f"{field}.%json[{index}]"
        start = _SPACE.match(lark, end).end()  # type: ignore[union-attr]
        try:
            schema, end = decoder.raw_decode(lark, start)
        except (ValueError, RecursionError) as error:
            expected = f"a JSON schema ({error})"
            raise InvalidParameterError(name, expected, lark[start : start + 100]) from error
        if isinstance(schema, (dict, bool)):
            schema, also = prepare_schema(schema, strict=strict, field=name, **(prepares or {}))
            relaxed += also
        schemas.append(schema)
        parts.append(f"%json {json.dumps(schema, ensure_ascii=False)}")
        index += 1
    return "".join([*parts, lark[end:]]), tuple(relaxed), schemas


def string(text: str) -> str:
    """Returns a text as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def choice(texts: Sequence[str]) -> str:
    """Returns a grammar of one of several texts."""
    return "start: " + " | ".join(map(string, texts))


def structural_tag(tag: Mapping[str, Any], added: Mapping[str, int], field: str) -> str:
    """Returns a grammar of a structural tag, in either of vLLM's forms.

    Returns:
        llguidance's JSON of one or several grammars.

    Raises:
        InvalidParameterError: A part that is missing, of another kind, or not supported.
    """
    return _TagWriter(added).write(tag, field)


class _TagWriter:
    """Writes the rules of a structural tag."""

    def __init__(self, added: Mapping[str, int]) -> None:
        self._added = added
        self._rules: list[str] = []
        self._grammars: list[dict[str, str]] = []

    def write(self, tag: Mapping[str, Any], field: str) -> str:
        if "structures" in tag:
            start = self._structures(tag, field)
        elif tag.get("type") == "structural_tag":
            _only(tag, field, "type", "format")
            start = self._format(_part(tag, field, "format", dict), f"{field}.format", is_last=True)
        else:
            expected = '{"structures": ..., "triggers": ...} or {"type": "structural_tag", ...}'
            raise InvalidParameterError(field, expected, tag)
        lark = f"start: {start}\n{''.join(self._rules)}{_ANY_TEXT}"
        main = {"name": "structural_tag", "lark_grammar": lark}
        return json.dumps({"grammars": [main, *self._grammars]}, ensure_ascii=False)

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}\n")
        return name

    def _structures(self, tag: Mapping[str, Any], field: str) -> str:
        _only(tag, field, "structures", "triggers", "type")
        tags = []
        for i, each in enumerate(_part(tag, field, "structures", list)):
            name = f"{field}.structures[{i}]"
            _require(name, each, dict)
            _only(each, name, "begin", "schema", "end")
            content = {"type": "json_schema", "json_schema": each.get("schema", {})}
            tags.append({"begin": each.get("begin"), "content": content, "end": each.get("end")})
        triggers = _part(tag, field, "triggers", list)
        return self._triggered(tags, triggers, field, f"{field}.structures")

    # Formats.

    def _format(self, format: Any, field: str, *, is_last: bool = False) -> str:
        """Returns the body of a rule for a format.

        Args:
            is_last: True if nothing follows it.
        """
        _require(field, format, dict)
        kind = format.get("type")
        write = getattr(self, f"_{kind}", None) if kind in _FORMATS else None
        if write is None:
            expected = f"one of {', '.join(_FORMATS)}"
            raise InvalidParameterError(f"{field}.type", expected, kind)
        _only(format, field, "type", *_FORMATS[kind])
        body: str = write(format, field, is_last)
        return body

    def _const_string(self, format: Mapping[str, Any], field: str, is_last: bool) -> str:
        return lark_literal(_part(format, field, "value", str), self._added)

    def _json_schema(self, format: Mapping[str, Any], field: str, is_last: bool) -> str:
        schema = _part(format, field, "json_schema", (dict, bool))
        return f"%json {json.dumps(schema, ensure_ascii=False)}"

    def _regex(self, format: Mapping[str, Any], field: str, is_last: bool) -> str:
        return f"/{llguidance.regex_to_lark(_part(format, field, 'pattern', str), '')}/"

    def _grammar(self, format: Mapping[str, Any], field: str, is_last: bool) -> str:
        text = lark_of(_part(format, field, "grammar", str), f"{field}.grammar")
        name = f"grammar_{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": text})
        return f"@{name}"

    def _any_text(self, format: Mapping[str, Any], field: str, is_last: bool) -> str:
        if not is_last:
            expected = "last, or the content of a tag: it has no end of its own"
            raise InvalidParameterError(field, expected, format)
        return "TEXT"

    def _sequence(self, format: Mapping[str, Any], field: str, is_last: bool) -> str:
        elements = _part(format, field, "elements", list)
        last = len(elements) - 1
        return " ".join(
            self._rule(self._format(e, f"{field}.elements[{i}]", is_last=is_last and i == last))
            for i, e in enumerate(elements)
        )

    def _or(self, format: Mapping[str, Any], field: str, is_last: bool) -> str:
        elements = _part(format, field, "elements", list)
        return " | ".join(
            self._rule(self._format(e, f"{field}.elements[{i}]", is_last=is_last))
            for i, e in enumerate(elements)
        )

    def _tag(self, format: Mapping[str, Any], field: str, is_last: bool) -> str:
        begin = _part(format, field, "begin", str)
        start = lark_literal(begin, self._added) if begin else ""
        return f"{start} {self._body(format, field)}"

    def _body(self, tag: Mapping[str, Any], field: str, begun: str = "") -> str:
        """Returns the rest of a tag after its beginning."""
        _only(tag, field, "type", "begin", "content", "end")
        begin = _part(tag, field, "begin", str)[len(begun) :] if begun else ""
        ends = tag.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        is_texts = isinstance(ends, list) and all(isinstance(end, str) for end in ends)
        if not is_texts or not ends:
            raise InvalidParameterError(f"{field}.end", "a text, or several", tag.get("end"))
        content = _part(tag, field, "content", dict)
        parts = [lark_literal(begin, self._added)] if begin else []
        if content.get("type") == "any_text":
            parts.append(self._text_until(ends))
        else:
            parts.append(self._rule(self._format(content, f"{field}.content")))
            if any(ends):
                parts.append(f"({' | '.join(lark_literal(end, self._added) for end in ends)})")
        return " ".join(parts)

    def _text_until(self, ends: Sequence[str]) -> str:
        if not any(ends):
            return "TEXT"
        bodies = []
        for end in ends:
            written = lark_literal(end, self._added)
            if written.startswith("<["):
                bodies.append(f"TEXT {written}")
            else:
                bodies.append(self._rule(f"TEXT {written}", lazy=True))
        return f"({' | '.join(bodies)})"

    def _triggered_tags(self, format: Mapping[str, Any], field: str, is_last: bool) -> str:
        tags = _part(format, field, "tags", list)
        for i, tag in enumerate(tags):
            _require(f"{field}.tags[{i}]", tag, dict)
        return self._triggered(
            tags,
            _part(format, field, "triggers", list),
            field,
            f"{field}.tags",
            at_least_one=_flag(format, field, "at_least_one"),
            stop_after_first=_flag(format, field, "stop_after_first"),
        )

    def _triggered(
        self,
        tags: Sequence[Mapping[str, Any]],
        triggers: Sequence[Any],
        field: str,
        tags_field: str,
        *,
        at_least_one: bool = False,
        stop_after_first: bool = False,
    ) -> str:
        """Returns text in which a trigger begins a tag."""
        for i, trigger in enumerate(triggers):
            _require(f"{field}.triggers[{i}]", trigger, str)
            if not trigger:
                raise InvalidParameterError(f"{field}.triggers[{i}]", "a text, not empty", trigger)
        if not tags or not triggers:
            raise InvalidParameterError(field, "at least one tag, and one trigger", tags)
        bodies: dict[str, list[str]] = {}
        for i, tag in enumerate(tags):
            name = f"{tags_field}[{i}]"
            begin = _part(tag, name, "begin", str)
            trigger = next((t for t in triggers if begin.startswith(t)), None)
            if trigger is None:
                expected = f"a text that begins with a trigger ({', '.join(map(repr, triggers))})"
                raise InvalidParameterError(f"{name}.begin", expected, begin)
            bodies.setdefault(trigger, []).append(self._rule(self._body(tag, name, trigger)))
        parts, only = [], []
        for trigger, options in bodies.items():
            written = lark_literal(trigger, self._added)
            rest = f"({' | '.join(options)})"
            only.append(f"{written} {rest}")
            if written.startswith("<["):
                parts.append(self._rule(f"TEXT {written} {rest}"))
            elif "<[" in written:
                raise InvalidParameterError(
                    f"{field}.triggers", "text, or to begin with an added token", trigger
                )
            else:
                parts.append(self._rule(f"{self._rule(f'TEXT {written}', lazy=True)} {rest}"))
        first, part = self._rule(" | ".join(only)), self._rule(" | ".join(parts))
        if stop_after_first:
            return first if at_least_one else f"{part} | TEXT"
        return f"{first} {part}* TEXT" if at_least_one else f"{part}* TEXT"

    def _tags_with_separator(self, format: Mapping[str, Any], field: str, is_last: bool) -> str:
        tags = []
        for i, tag in enumerate(_part(format, field, "tags", list)):
            name = f"{field}.tags[{i}]"
            _require(name, tag, dict)
            tags.append(self._rule(self._format({"type": "tag", **tag}, name)))
        if not tags:
            raise InvalidParameterError(f"{field}.tags", "at least one tag", tags)
        separator = lark_literal(_part(format, field, "separator", str), self._added)
        tag = self._rule(" | ".join(tags))
        several = tag if _flag(format, field, "stop_after_first") else f"{tag} ({separator} {tag})*"
        return several if _flag(format, field, "at_least_one") else f"({several})?"


# The formats, with their fields besides the type.
_FORMATS: Mapping[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "any_text": (),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}
_KINDS = {dict: "a mapping", list: "a list", str: "a text", (dict, bool): "a JSON schema"}


def _require(field: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind):
        raise InvalidParameterError(field, _KINDS[kind], value)


def _part(mapping: Mapping[str, Any], field: str, name: str, kind: Any) -> Any:
    value = mapping.get(name)
    _require(f"{field}.{name}", value, kind)
    return value


def _flag(mapping: Mapping[str, Any], field: str, name: str) -> bool:
    value = mapping.get(name, False)
    if not isinstance(value, bool):
        raise InvalidParameterError(f"{field}.{name}", "a boolean", value)
    return value


def _only(mapping: Mapping[str, Any], field: str, *names: str) -> None:
    for name in mapping:
        if name not in names:
            expected = f"left out: only {', '.join(names)} can be given there"
            raise InvalidParameterError(f"{field}.{name}", expected, mapping[name])
