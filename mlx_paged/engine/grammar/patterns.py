"""Rewrites regular expressions for JSON names and texts so that llguidance quotes them correctly.

If a character class contains control characters but not ``"``, llguidance accepts ``\\"`` anyway,
and likewise the backslash: ``[^"]*`` would accept ``"a\\"b"``. So classes are rewritten without the
control characters that have no short escape in JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SHORT = "\b\t\n\f\r"  # JSON has an escape of one letter for each
_CONTROLS = r"[\x00-\x1f]"
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))


def quotable(pattern: str) -> str:
    """Returns a pattern for the same texts, except that its classes exclude control characters
    other than BS, HT, LF, FF and CR."""
    out, i = [], 0
    while i < len(pattern):
        if pattern[i] == "\\":
            out.append(pattern[i : i + 2])
            i += 2
        elif pattern[i] == "[":
            end, is_nested = _end_of_class(pattern, i)
            found = pattern[i:end]
            out.append(found if is_nested else _class(found))
            i = end
        else:
            out.append(pattern[i])
            i += 1
    return "".join(out)


def none_of(words: Iterable[str]) -> str:
    """Returns a pattern for all texts except some."""
    return f"^{_none_of(set(words))}$"


def _none_of(words: set[str]) -> str:
    ends: dict[str, set[str]] = {}
    for word in words - {""}:
        ends.setdefault(word[0], set()).add(word[1:])
    letters = {letter: rf"\u{{{ord(letter):x}}}" for letter in sorted(ends)}
    others = f"[^{''.join(letters.values())}](?s:.)*" if ends else "(?s:.)+"
    branches = [spelled + _none_of(ends[letter]) for letter, spelled in letters.items()]
    return f"({'|'.join([others, *branches])}){'' if '' in words else '?'}"


def _end_of_class(pattern: str, start: int) -> tuple[int, bool]:
    """Returns (end of the class that begins at `start`, True if it contains classes)."""
    i = start + 1
    i += pattern[i : i + 1] == "^"
    i += pattern[i : i + 1] == "]"  # A "]" at this place is a character of the class.
    depth, is_nested = 1, False
    while i < len(pattern) and depth:
        if pattern[i] == "\\":
            i += 1
        elif pattern[i] == "[":
            depth, is_nested = depth + 1, True
        elif pattern[i] == "]":
            depth -= 1
        i += 1
    return min(i, len(pattern)), is_nested


def _class(found: str) -> str:
    try:
        matches = re.compile(found, re.ASCII).fullmatch
    except re.error:  # it uses syntax that only Rust has
        return f"[{found}--{_CONTROLS}]" if found.startswith("[^") else found
    controls = [chr(c) for c in range(0x20) if matches(chr(c))]
    if all(c in _SHORT for c in controls) or (matches('"') and matches("\\")):
        return found
    short = "".join(f"\\x{ord(c):02x}" for c in _SHORT if c in controls)
    if not any(map(matches, _PRINTABLE)) and not found.startswith("[^"):
        return f"[{short}]" if short else found
    return f"(?:[{found}--{_CONTROLS}]{f'|[{short}]' if short else ''})"
