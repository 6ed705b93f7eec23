"""Options that take lists: repeated, or by commas."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from mlx_paged.errors import InvalidParameterError


def parse_list(field: str, given: Sequence[str] | None, expected: str, read: Any) -> list[Any]:
    """Values of an option that may be repeated and takes commas, each once.

    Args:
        read: makes a value of a word, or raises ValueError.
    """
    words = [word.strip() for part in given or () for word in part.split(",")]
    values = []
    for word in words:
        try:
            values.append(read(word))
        except ValueError:
            raise InvalidParameterError(field, expected, word) from None
    return list(dict.fromkeys(values))


def at_least(least: int) -> Any:
    """Reads an integer of at least this."""

    def read(word: str) -> int:
        value = int(word)
        if value < least:
            raise ValueError
        return value

    return read


def read_window(word: str) -> int | None:
    """``0`` and ``none`` are no window."""
    return at_least(0)("0" if word.lower() == "none" else word) or None


def read_head_dim(word: str) -> int:
    """What a pool may have."""
    value = int(word)
    if value % 8 or not 8 <= value <= 576:
        raise ValueError
    return value


def one_of(values: Collection[Any], kind: type = str) -> Any:
    """Reads one of these."""

    def read(word: str) -> Any:
        value = kind(word)
        if value not in values:
            raise ValueError
        return value

    return read
