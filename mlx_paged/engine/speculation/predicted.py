"""PredictedAnswer: drafts from the caller's own guess of the answer, such as a file before an edit.

Drafts follow the guess token by token. Where the answer departs from it, they resume as soon as its
latest tokens occur in the guess again, preferably shortly after the last position.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from mlx_paged.engine.speculation.matches import Match, common_length

# Compared occurrences of the latest pair of tokens, on each side of the last position.
_MAX_CANDIDATES = 8
_MAX_MATCH = 24


class PredictedAnswer:
    """A guess of one answer.

    Args:
        tokens: The tokens of the guess, at least one.
        num_prompt_tokens: Tokens of the sequence before its answer.
    """

    def __init__(self, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        self._guess = array("I", tokens)
        self._begin = num_prompt_tokens
        self._next = 0  # index of the next token in the guess
        self._ends: dict[int, list[int]] = {}  # pair -> where it ends in the guess, ascending
        for end in range(1, len(tokens)):
            self._ends.setdefault(tokens[end - 1] << 32 | tokens[end], []).append(end)

    def find(self, tokens: array[int], max_drafts: int) -> Match | None:
        """Returns the continuation of the latest tokens in the guess, or None.

        Args:
            tokens: Prompt and answer; the answer has at least one token.
        """
        last = len(tokens) - 1
        length, end = 0, -1
        for candidate in self._candidates(tokens, last):
            limit = min(_MAX_MATCH, last - self._begin + 1)
            found = common_length(self._guess, candidate, tokens, last, limit)
            if found > length:
                length, end = found, candidate
        # A single token occurs everywhere, but an answer and its guess often begin the same way.
        if not length or (length == 1 and last > self._begin):
            return None
        self._next = end + 1
        drafts = tuple(self._guess[self._next : self._next + max_drafts])
        return Match(length, drafts) if drafts else None

    def _candidates(self, tokens: array[int], last: int) -> list[int]:
        """Positions in the guess where the latest tokens may end, the most likely first."""
        if last == self._begin:
            return [0]
        ends = self._ends.get(tokens[last - 1] << 32 | tokens[last], [])
        middle = bisect_left(ends, self._next)
        before = ends[max(0, middle - _MAX_CANDIDATES) : middle]
        return ends[middle : middle + _MAX_CANDIDATES] + before[::-1]
