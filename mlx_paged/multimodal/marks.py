"""Keeps users' texts apart from placeholders: a user's text stays text, whatever it spells.

A chat template writes a placeholder for each item, and a user may write the same characters. So the
users' are marked before the template sees them (`marked`). The mark is checked where placeholders
are searched, and `marked_text.MarkedText` tokenizes a marked text as if the model had no
placeholders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

#: Follows the first character of each marked placeholder. It is a private character; if a user
#: writes it, it is doubled.
MARK = "\U000f5eed"
#: A mark, and the character that follows it.
MARKED = re.compile(f"{MARK}(.)", re.DOTALL)


def marked(value: Any, placeholders: Iterable[str]) -> Any:
    """Marks placeholders in a text, and in all texts of lists, tuples and mappings."""
    literals = "|".join(re.escape(each) for each in placeholders if each)
    starts = re.compile(rf"{MARK}|(?={literals})." if literals else MARK, re.DOTALL)

    def mark(text: str) -> str:
        return starts.sub(lambda found: found.group() + MARK, text)

    return _each(value, mark)


def unmarked(text: str) -> str:
    """The text as the user wrote it."""
    return MARKED.sub(r"\1", text) if MARK in text else text


def _each(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_each(key, change): _each(part, change) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each(part, change) for part in value]
    return value
