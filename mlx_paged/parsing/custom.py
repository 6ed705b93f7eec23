"""Custom tools: their input is a text, not arguments. The model calls a function of one string."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Literal

from mlx_paged.errors import InvalidParameterError
from mlx_paged.parsing.definitions import InputGrammar, Tool
from mlx_paged.parsing.regular import NotRegular, regular_expression

#: The parameter that has the input.
INPUT = "input"

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HEAD_WITHOUT_SPACE = '{"input":"'
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def custom_tool(
    name: str, description: str | None, field: str, grammar: InputGrammar | None = None
) -> Tool:
    """Returns a custom tool as a function with the parameter `INPUT`.

    Args:
        field: The request's path of the grammar's definition, or of the tool.
    """
    about = "The whole input, as plain text."
    if grammar is not None:
        about = f"The whole input, by this grammar ({grammar.syntax}):\n{grammar.definition}"
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": about}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return Tool(
        name, description, parameters, strict=grammar is not None, field=field, is_custom=True,
        grammar=grammar,
    )  # fmt: skip


def with_pattern(tool: Tool) -> Tool:
    """Returns a custom tool whose schema contains the grammar of its input. It may take a while.

    Raises:
        InvalidParameterError: An invalid grammar, or one that cannot be enforced in calls.
    """
    if tool.grammar is None:
        return tool
    pattern = f"^(?:{_expression(tool.grammar, tool.field)})$"
    parameters = {
        **tool.parameters, "properties": {INPUT: {"type": "string", "pattern": pattern}},
    }  # fmt: skip
    return replace(tool, parameters=parameters)


def _expression(grammar: InputGrammar, field: str) -> str:
    if grammar.syntax == "lark":
        try:
            return regular_expression(grammar.definition)
        except (NotRegular, RecursionError) as error:
            expected = (
                f"a Lark grammar that is a regular expression, as calls can hold no other: {error}"
            )
            raise InvalidParameterError(field, expected, grammar.definition) from error
    body = grammar.definition.removeprefix("^")
    if body.endswith("$") and not re.search(r"(?<!\\)(\\\\)*\\\$$", body):
        body = body[:-1]
    return body


def arguments_of(text: str) -> str:
    """An input as the arguments of the function."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class InputReader:
    """Extracts the input from arguments while they are written.

    Arguments that do not match the function are read when they are complete: the only string in
    them, or all their text.
    """

    def __init__(self) -> None:
        self._state: Literal["head", "string", "end", "unknown"] = "head"
        self._held = ""
        self._high = ""  # the first half of a surrogate pair

    def feed(self, piece: str) -> str:
        """Takes more of the arguments; returns more of the input."""
        if self._state == "end":
            return ""
        self._held += piece
        if self._state == "head":
            if found := _HEAD.match(self._held):
                self._state, self._held = "string", self._held[found.end() :]
            elif not _HEAD_WITHOUT_SPACE.startswith("".join(self._held.split())):
                self._state = "unknown"
        return self._string() if self._state == "string" else ""

    def finish(self) -> str:
        """The arguments have ended; returns the rest of the input."""
        if self._state not in ("head", "unknown"):
            return ""
        text = self._held.strip()
        try:
            value = json.loads(text) if text else ""
        except (ValueError, RecursionError):
            return text
        if isinstance(value, dict):
            if not value:
                return ""
            texts = [v for v in value.values() if isinstance(v, str)]
            found = value.get(INPUT, texts[0] if len(texts) == 1 == len(value) else None)
            return found if isinstance(found, str) else text
        return value if isinstance(value, str) else text

    def _string(self) -> str:
        """Returns the part of the string in `_held` that no later text can change."""
        out: list[str] = []
        held, at = self._held, 0
        while at < len(held):
            if plain := _PLAIN.match(held, at):
                out.append(self._high + plain.group())
                self._high, at = "", plain.end()
            elif held[at] == '"':
                self._state, at = "end", len(held)
            else:
                size = 6 if held[at + 1 : at + 2] == "u" else 2
                if at + size > len(held):
                    break
                out.append(self._unescaped(held[at + 1 : at + size]))
                at += size
        self._held = held[at:]
        return "".join(out)

    def _unescaped(self, escape: str) -> str:
        high, self._high = self._high, ""
        if escape[0] != "u":
            return high + _ESCAPES.get(escape[0], escape[0])
        try:
            code = chr(int(escape[1:], 16))
        except ValueError:
            return f"{high}\\{escape}"
        if "\ud800" <= code <= "\udbff":
            self._high = code
            return high
        if high and "\udc00" <= code <= "\udfff":
            return (high + code).encode("utf-16", "surrogatepass").decode("utf-16")
        return high + code
