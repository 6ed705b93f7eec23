"""Matches: earlier occurrences of a sequence's latest tokens, and their lengths."""

from __future__ import annotations

from array import array
from typing import NamedTuple


class Match(NamedTuple):
    """An earlier occurrence of the latest tokens.

    Attributes:
        length: Number of equal tokens.
        drafts: The tokens that followed it.
    """

    length: int
    drafts: tuple[int, ...]


def common_length(one: array[int], end: int, other: array[int], last: int, limit: int) -> int:
    """Returns the number of equal tokens before and at two positions, at most `limit`."""
    length = 0
    limit = min(limit, end + 1, last + 1)
    while length < limit and one[end - length] == other[last - length]:
        length += 1
    return length
