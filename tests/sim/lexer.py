"""Tokens of preprocessed Metal source, each with the file and line it came from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<marker>^\#\ \d+\ "[^"\n]*"[^\n]*$)
    |(?P<pragma>^[ \t]*\#[^\n]*$)
    |(?P<space>\s+)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<punctuation>::|->|<<=|>>=|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|\.\.\.|.)""",
    re.MULTILINE | re.VERBOSE,
)
_MARKER = re.compile(r'# (\d+) "([^"]*)"')
_CODE = frozenset({"name", "number", "string", "punctuation"})
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


class MetalError(Exception):
    """The source is not Metal, or not the part of Metal that the simulator knows."""


@dataclass
class Attribute:
    name: str
    arguments: str


@dataclass(slots=True)
class Token:
    kind: str  # marker, pragma, space, name, number, string, punctuation or attribute
    text: str
    file: str
    line: int
    attributes: Sequence[Attribute] = ()

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def is_code(self) -> bool:
        return self.kind in _CODE

    def drop(self) -> None:
        """Takes the token out of the text; lines stay where they are."""
        self.kind, self.text = "space", "\n" * self.text.count("\n") or " "


def tokens(text: str) -> list[Token]:
    """All tokens; [[...]] becomes one token of kind `attribute` and leaves the text."""
    found, file, line = [], "<source>", 1
    for match in _TOKEN.finditer(text):
        kind, piece = match.lastgroup or "", match[0]
        if kind == "marker":
            parts = _MARKER.match(piece)
            assert parts
            file, line = unescape(parts[2]), int(parts[1]) - 1  # the newline that follows counts
        found.append(Token(kind, piece, file, line))
        if kind == "space":  # no other token has newlines
            line += piece.count("\n")
    _fold_attributes(found)
    return found


def _fold_attributes(found: list[Token]) -> None:
    for i in range(len(found) - 1):
        if found[i].text == "[" and found[i + 1].text == "[":
            end = closing(found, i)
            inside = found[i + 2 : end - 1]
            found[i].attributes = [_attribute(part) for part in split(inside)]
            for token in found[i : end + 1]:
                token.drop()
            found[i].kind = "attribute"


def _attribute(part: list[Token]) -> Attribute:
    names = [t for t in part if t.is_code]
    if len(names) > 1 and names[1].text == "::":  # metal::kernel
        names = names[2:]
    return Attribute(names[0].text, "".join(t.text for t in names[2:-1]))


def unescape(string: str) -> str:
    """Decodes a file name of the preprocessor, which writes bytes beyond ASCII as ``\\303``."""
    escape = re.compile(rb"\\([0-7]{3}|.)")
    raw = escape.sub(lambda e: bytes([int(e[1], 8)]) if len(e[1]) == 3 else e[1], string.encode())
    return raw.decode()


def text_of(found: Iterable[Token]) -> str:
    return "".join(t.text for t in found)


def spelled(found: Iterable[Token]) -> str:
    """On one line, for messages and for use in other places."""
    return " ".join(t.text for t in found if t.is_code)


def closing(found: list[Token], start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    opening, depth = found[start].text, 0
    for i in range(start, len(found)):
        if found[i].text == opening:
            depth += 1
        elif found[i].text == _BRACKETS[opening]:
            depth -= 1
            if depth == 0:
                return i
    raise MetalError(f"{found[start].place}: no {_BRACKETS[opening]} closes this {opening}")


def split(found: list[Token], separator: str = ",") -> list[list[Token]]:
    """Parts between separators outside every kind of bracket, template arguments included."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in found:
        if token.text in ("(", "[", "{", "<"):
            depth += 1
        elif token.text in (")", "]", "}", ">"):
            depth -= 1
        if token.text == separator and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return [p for p in parts if any(t.is_code for t in p)]


def outside_templates(head: list[Token]) -> list[Token]:
    """Without what is between brackets, angle ones of templates included; ( and [ are kept.
    alignas(..) and __attribute__((..)) are left out whole."""
    kept: list[Token] = []
    open_brackets: list[str] = []
    for i, token in enumerate(head):
        text, before = token.text, head[i - 1] if i else token
        if not open_brackets and text not in (")", "]", "}"):
            kept.append(token)
        opens_template = text == "<" and before.kind == "name" and before.text != "operator"
        if text in ("(", "[", "{") or opens_template:
            if text == "(" and before.text in ("alignas", "__attribute__") and not open_brackets:
                del kept[-2:]
            elif opens_template and not open_brackets:
                kept.pop()
            open_brackets.append(text)
        elif open_brackets and text == {"(": ")", "[": "]", "{": "}", "<": ">"}[open_brackets[-1]]:
            open_brackets.pop()
    return kept
