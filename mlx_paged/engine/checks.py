"""Validates values from callers."""

from __future__ import annotations


def is_text(value: object) -> bool:
    """True for a string that UTF-8 can encode: a lone surrogate is not a character."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
