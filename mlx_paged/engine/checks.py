"""Checks of values that callers give."""

from __future__ import annotations


def is_text(value: object) -> bool:
    """True if it is a string that UTF-8 can spell: a lone surrogate is not a character."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
