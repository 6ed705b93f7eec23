"""Lone surrogates: models may escape them (``\\ud83d``), but UTF-8 cannot encode them."""

from __future__ import annotations


def without_lone_surrogates(text: str) -> str:
    """Returns a text with surrogate pairs joined, and U+FFFD in place of lone surrogates."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
