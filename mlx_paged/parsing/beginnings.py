"""Beginnings: recognizes prefixes of texts that match one of several expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class _Step(NamedTuple):
    """A part of an expression: characters, their minimum number, and whether the maximum is 1."""

    characters: re.Pattern[str]
    is_optional: bool
    is_repeated: bool


class Beginnings:
    """Beginnings of texts that are given as sequences of regular expressions.

    An expression is a character, a class, an optional one, ``\\s*``, or a group with a repeated
    class. All possible matches are tracked together, so long texts need no deep recursion, unlike
    one expression for all beginnings.
    """

    def __init__(self, texts: Iterable[Sequence[str]]) -> None:
        self._texts = [[_step(unit) for unit in text] for text in texts]

    def has(self, text: str) -> bool:
        """True if a text is a prefix of a match, or a match."""
        return any(_begins(steps, text) for steps in self._texts)


def _step(unit: str) -> _Step:
    if unit == r"\s*":
        return _Step(re.compile(r"\s"), True, True)
    repeated = re.search(r"(\[[^\]]*\]|\\d)\{1,\d+\}", unit)
    if repeated is not None:
        return _Step(re.compile(repeated[1]), False, True)
    if len(unit) > 1 and unit.endswith("?") and unit != r"\?":
        return _Step(re.compile(unit[:-1]), True, False)
    return _Step(re.compile(unit), False, False)


def _begins(steps: Sequence[_Step], text: str) -> bool:
    # Indices into `steps` that may come next; True: a repeated one has begun.
    places = _with_skipped(steps, {(0, False)})
    for c in text:
        following: set[tuple[int, bool]] = set()
        for at, _ in places:
            if at < len(steps) and steps[at].characters.fullmatch(c):
                following.add((at, True) if steps[at].is_repeated else (at + 1, False))
        if not following:
            return False
        places = _with_skipped(steps, following)
    return True


def _with_skipped(steps: Sequence[_Step], places: set[tuple[int, bool]]) -> set[tuple[int, bool]]:
    found, left = set(places), list(places)
    while left:
        at, has_begun = left.pop()
        if at < len(steps) and (has_begun or steps[at].is_optional):
            place = (at + 1, False)
            if place not in found:
                found.add(place)
                left.append(place)
    return found
