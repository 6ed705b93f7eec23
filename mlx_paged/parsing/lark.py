"""Grammars of answers with calls, in llguidance's Lark, put together rule by rule."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mlx_paged.errors import InvalidParameterError
from mlx_paged.parsing.format import lark_escape, lark_json, lark_literal
from mlx_paged.parsing.schemas import Budget, Schema, resolved, types_of

_ANY_TEXT = "/(?s:.*)/"
# Texts that a parameter of several types would read as something other than a string.
_NULL = r"/\s*(null|None)\s*/"
_NO_STRING = r"/\s*([-+.0-9\[{(\"]|null|None|true|True|false|False)(?s:.*)/"

# Regular expressions of formats: for strings within JSON, llguidance has its own.
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,20}[A-Za-z0-9])?"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": r"([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,8}}",
    "email": rf"[A-Za-z0-9_+-]{{1,64}}@{_LABEL}(\.{_LABEL}){{1,8}}",
    "uri": rf"https?:\/\/{_LABEL}(\.{_LABEL}){{0,8}}(\/[A-Za-z0-9._~-]*)*",
    "duration": r"P([0-9]+D)?(T([0-9]+H)?([0-9]+M)?([0-9]+S))",
}


# A forced answer ends after at most 32 calls, whatever the model prefers.
MORE_CALLS = "{0,31}"  # after the first
ONE_TO_MAX_CALLS = "{1,32}"


class Lark:
    """Builds a grammar rule by rule.

    llguidance takes every added token for special: a string never matches one, so markers that are
    tokens are written as tokens.

    Args:
        vocabulary: The tokenizer's added tokens, by text.
    """

    def __init__(self, vocabulary: Mapping[str, int]) -> None:
        self._vocabulary = vocabulary
        self._rules: dict[str, str] = {}  # names by body
        self._defined: dict[str, str | None] = {}  # bodies of rules that were named before

    def text(self) -> str:
        """Returns the grammar. One rule must have the name ``start``."""
        rules = [f"{name}: {body}\n" for body, name in self._rules.items()]
        return "".join(rules + [f"{name}: {body}\n" for name, body in self._defined.items()])

    def reserve(self) -> str:
        """Reserves the name of a rule defined later, because rules may contain themselves."""
        name = f"d{len(self._defined)}"
        self._defined[name] = None
        return name

    def define(self, name: str, body: str) -> None:
        """Defines a rule whose name was reserved."""
        self._defined[name] = body

    def rule(self, body: str, name: str = "") -> str:
        """Adds a rule; returns its name."""
        return self._rules.setdefault(body, name or f"r{len(self._rules)}")

    def terminal(self, body: str) -> str:
        """Adds a terminal, which is one regular expression; returns its name."""
        return self._rules.setdefault(body, f"T{len(self._rules)}")

    def literal(self, text: str) -> str:
        """Returns a text in Lark, with its added tokens as tokens."""
        return lark_literal(text, self._vocabulary)

    def has_token(self, marker: str) -> bool:
        """True if a marker is, or contains, an added token."""
        return any(token and token in marker for token in self._vocabulary)

    def until(self, marker: str, *, allowed: str = _ANY_TEXT, others: Iterable[str] = ()) -> str:
        """Returns the rule of text up to a marker, and the marker.

        Args:
            allowed: Expression of the text's terminal.
            others: Markers that must not occur in the text.
        """
        if not self.has_token(marker):
            # Both are one terminal, because text ends where the marker begins and the lexer does
            # not go back. Readers accept the marker without the newline before it, too.
            text = self.without([marker.lstrip("\n"), *others], allowed=allowed)
            return self.terminal(f"{text} {_string(marker)}")
        begin = min(at for token in self._vocabulary if token and (at := marker.find(token)) >= 0)
        text = self.without(others, allowed=allowed)
        if begin:
            text += f" {_string(marker[:begin])}"
        return f"{self.terminal(text)} {self.literal(marker[begin:])}"

    def without(self, markers: Iterable[str], *, allowed: str = _ANY_TEXT) -> str:
        """Returns an expression for text that contains no marker."""
        spelled = [lark_escape(m) for m in dict.fromkeys(markers) if not self.has_token(m)]
        # One expression for all, because the lexer gives up on many.
        return f"({allowed} & ~/(?s:.*)({'|'.join(spelled)})(?s:.*)/)" if spelled else allowed

    def json(self, schema: Schema, root: Schema | None = None, *, strict: bool = False) -> str:
        """A JSON value that is valid for a schema.

        Args:
            root: The document that references (``$ref``) point into; None: the schema itself.
            strict: See `lark_json`.
        """
        if isinstance(schema, Mapping) and root is not None and "$ref" in json.dumps(schema):
            whole: dict[str, Any] = _rebased(schema)
            schema = {**whole, "$defs": {**whole.get("$defs", {}), "root": _rebased(root)}}
        return self.rule(lark_json(schema, strict=strict))

    def value(self, schema: Schema, root: Schema, end: str, *, strict: bool = False) -> str:
        """Returns a value as text up to a marker, and the marker: strings as is, others as JSON.

        Args:
            root: The document that references (``$ref``) point into.
            strict: See `lark_json`.
        """
        types = types_of(schema, root if isinstance(root, Mapping) else {})
        others = types - {"string"}
        alternatives = []
        if "string" in types:
            allowed = strings(schema, root)
            if others:
                allowed = f"({allowed} & ~{_NULL if others == {'null'} else _NO_STRING})"
            alternatives.append(self.until(end, allowed=allowed))
        if others:
            narrowed: Schema = schema
            if "string" in types:
                narrowed = {"allOf": [schema, {"type": sorted(others)}]}
                if schema is True or not schema:
                    narrowed = {"type": sorted(others)}
            alternatives.append(f"{self.json(narrowed, root, strict=strict)} {self.literal(end)}")
        return self.rule(" | ".join(alternatives))

    def answer(
        self,
        begin: str,
        call: str,
        *,
        required: bool,
        parallel: bool,
        between: str = "\n",
        others: Iterable[str] = (),
        frames: Iterable[str] = (),
    ) -> str:
        """Returns the whole grammar of an answer: calls only, or text in which calls may occur.

        Args:
            begin: Marker that begins a call, or a block of calls.
            call: The rest, to the end of the call.
            required: Allow no text.
            parallel: Allow several calls.
            between: Text between two calls in sequence.
            others: Other markers that the parser would read as the beginning of a call, and which
                the text must not contain.
            frames: Markers that may surround text.
        """
        # Text cannot contain tokens, so they are named.
        frames = [marker for marker in frames if self.has_token(marker)]
        if required:
            one = f"{self.literal(begin)} {call}"
            space = self.literal(between) if between else ""
            more = f" ({space} {one}){MORE_CALLS}" if parallel else ""
            lead = self.terminal(r"/\n{1,2}/")
            self.rule(f"{lead}? {one}{more}", "start")
        else:
            before = self.until(begin, others=[marker for marker in others if marker != begin])
            after = self.terminal(self.without([begin, *others]))
            times = "*" if parallel else "?"
            if frames:
                framed = self.rule(" | ".join([after, *map(self.literal, frames)]))
                before, after = f"{framed}* {before}", f"{framed}*"
            self.rule(f"({before} {call}){times} {after}", "start")
        return self.text()

    def bare_answer(
        self,
        calls: str,
        first: str,
        *,
        required: bool,
        others: Iterable[str] = (),
        within: str = "",
    ) -> str:
        """Returns the whole grammar of an answer whose calls have their own line, unmarked.

        Args:
            calls: All calls.
            first: First characters of calls, as a class of a regular expression; no line of the
                text begins with one.
            required, others: See `answer`.
            within: First character of calls anywhere in a line; the text never has it before a
                string.
        """
        if required:
            lead = self.terminal(r"/\n{1,2}/")
            self.rule(f"{lead}? {calls}", "start")
        else:
            line = rf"[ \t]*([^{first} \t\n][^\n]*)?"
            lines, text = rf"/({line}\n)+/", rf"/({line}\n)*{line}/"
            if within:
                no_call = rf"~/(?s:.*){lark_escape(within)}[ \t\r\n]*\"(?s:.*)/"
                lines, text = f"({lines} & {no_call})", f"({text} & {no_call})"
            lines = self.terminal(self.without(others, allowed=lines))
            text = self.terminal(self.without(others, allowed=text))
            self.rule(f"{text} | {lines}? {calls}", "start")
        return self.text()


def strings(schema: Schema, root: Schema, depth: int = 0, budget: Budget | None = None) -> str:
    """Returns the strings that a schema allows, as a terminal's expression.

    Patterns without an `as_text_pattern` are dropped.

    Raises:
        InvalidParameterError: References make it too large.
    """
    budget = budget or Budget()
    if not budget.spend():
        expected = "schemas of fewer alternatives, as this model's calls are not JSON"
        raise InvalidParameterError("tools", expected, schema)
    schema = resolved(schema, root if isinstance(root, Mapping) else {})
    if not isinstance(schema, Mapping) or depth > 16:
        return _ANY_TEXT
    parts = []
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        parts.append("(" + " | ".join(_string(v) for v in values if isinstance(v, str)) + ")")
    shortest, longest = schema.get("minLength"), schema.get("maxLength")
    if shortest is not None or longest is not None:
        parts.append(f"/(?s:.){{{int(shortest or 0)},{'' if longest is None else int(longest)}}}/")
    if isinstance(schema.get("pattern"), str):
        pattern = as_text_pattern(schema["pattern"])
        if pattern is not None:
            parts.append(pattern)
    if schema.get("format") in _FORMATS:
        parts.append(f"/{_FORMATS[schema['format']]}/")
    for part in schema.get("allOf") or ():
        parts.append(strings(part, root, depth + 1, budget))
    for keyword in ("anyOf", "oneOf"):
        if schema.get(keyword):
            texts = [
                strings(part, root, depth + 1, budget)
                for part in schema[keyword]
                if "string"
                in types_of(part, root if isinstance(root, Mapping) else {}, depth + 1, budget)
            ]
            parts.append("(" + " | ".join(dict.fromkeys(texts)) + ")")
    parts = [part for part in dict.fromkeys(parts) if part != _ANY_TEXT]
    # A pattern alone could match bytes that are no text.
    return "(" + " & ".join(parts) + ")" if parts else _ANY_TEXT


def as_text_pattern(pattern: str) -> str | None:
    """Converts a JSON Schema's pattern, which may match anywhere, to one of the whole string.

    Returns None if it uses lookaround, backreferences, or anchors inside.
    """
    body, begin, end = pattern, "(?s:.*)", "(?s:.*)"
    if body.startswith("^"):
        body, begin = body[1:], ""
    if body.endswith("$") and not body.endswith("\\$"):
        body, end = body[:-1], ""
    escaped = in_class = False
    depth = 0
    out: list[str] = []
    for at, c in enumerate(body):
        is_split = c == "|" and depth == 0 and not (begin and end)
        if escaped and c.isdigit():
            return None
        if not escaped and not in_class:
            if c in "^$" or body.startswith(("(?=", "(?!", "(?<"), at) or is_split:
                return None
            depth += (c == "(") - (c == ")")
        if not escaped:
            in_class = c == "[" or (in_class and c != "]")
        if escaped and c in "dDwW":  # ASCII only, as in JavaScript
            digits, word = "0-9", "0-9A-Za-z_"
            out.pop()
            if c.isupper() and in_class:
                return None
            inside = digits if c in "dD" else word
            out.append(inside if in_class else f"[{'^' if c.isupper() else ''}{inside}]")
        else:
            out.append("\\/" if c == "/" and not escaped else c)
        escaped = c == "\\" and not escaped
    return f"/{begin}({''.join(out)}){end}/"


def _rebased(schema: Any) -> Any:
    """Returns a schema whose references point into ``$defs/root``."""
    if isinstance(schema, Mapping):
        return {
            key: f"#/$defs/root{value[1:]}"
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _rebased(value)
            for key, value in schema.items()
        }
    return [_rebased(item) for item in schema] if isinstance(schema, (list, tuple)) else schema


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
