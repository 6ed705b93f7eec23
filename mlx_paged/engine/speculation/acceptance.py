"""Acceptance: estimates the acceptance rate of drafts from past ones.

Drafts differ by source and by the length of the match. Each such kind has its own estimate for the
first draft, and for a draft after an accepted one. The more drafts a sequence has had, the more its
own acceptance rate counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

#: Maximum tokens of a match of each kind; longer matches are of the next kind.
_LENGTHS = (1, 2, 3, 5, 9, 17)
_DECAY = 0.98  # for all sequences together
_OWN_DECAY = 0.9  # for one
_OWN_WEIGHT = 4.0  # number of its own drafts that count as much as all others
_START = 4.0  # number of drafts that the values below count for


class Source(IntEnum):
    """The source of a draft."""

    SEQUENCE = 0
    SHARED = 1  # another answer
    GRAMMAR = 2  # the only continuation
    MODEL = 3  # a model; its kinds differ by how the sequence samples instead of by a match
    PREDICTION = 4  # the caller's guess of the answer


# The first draft, by length of the match. Measured on chats and edits with SmolLM2-135M.
_FIRST = (0.15, 0.25, 0.45, 0.6, 0.7, 0.8, 0.9)
_NEXT = 0.85
_MODEL = (0.6, 0.7)
_MIN_PREDICTED = 0.5
_NUM_KINDS = len(Source) * len(_FIRST)


class Chances(NamedTuple):
    """Estimated probabilities of acceptance: of the first draft, and of one after an accepted."""

    first: float
    next: float


class Draft(NamedTuple):
    """Proposed tokens.

    Attributes:
        begin: Position of the first one.
        tokens: At least one.
        kind: See `kind_of`.
    """

    begin: int
    tokens: tuple[int, ...]
    kind: int


def kind_of(source: Source, match_length: int) -> int:
    """Returns the kind of a draft."""
    bucket = sum(match_length > length for length in _LENGTHS)
    return source * len(_FIRST) + bucket


def source_of(kind: int) -> Source:
    """Returns the source of drafts of a kind."""
    return Source(kind // len(_FIRST))


class Counts:
    """Decayed counts of drafts and of accepted drafts, by kind.

    Args:
        decay: Weight of everything before a new draft.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.tried = [[0.0, 0.0] for _ in range(_NUM_KINDS)]
        self.accepted = [[0.0, 0.0] for _ in range(_NUM_KINDS)]

    def copy(self) -> Counts:
        """Returns equal counts."""
        counts = Counts(self._decay)
        counts.tried = [[*each] for each in self.tried]
        counts.accepted = [[*each] for each in self.accepted]
        return counts

    def approach(self, other: Counts, source: Source) -> None:
        """Moves the counts of a source halfway to others."""
        kinds = slice(source * len(_FIRST), (source + 1) * len(_FIRST))
        for own, theirs in ((self.tried, other.tried), (self.accepted, other.accepted)):
            pairs = zip(own[kinds], theirs[kinds])
            own[kinds] = [[(a + b) / 2 for a, b in zip(*pair)] for pair in pairs]

    def add(self, kind: int, is_later: bool, is_accepted: bool) -> None:
        """Counts one draft."""
        tried, accepted = self.tried[kind], self.accepted[kind]
        tried[is_later] = self._decay * tried[is_later] + 1
        accepted[is_later] = self._decay * accepted[is_later] + is_accepted


class Acceptance:
    """The estimates of an engine."""

    def __init__(self) -> None:
        self._all = Counts(_DECAY)
        for kind in range(_NUM_KINDS):
            source, bucket = divmod(kind, len(_FIRST))
            first, later = _FIRST[bucket], _NEXT
            if source == Source.GRAMMAR:
                first, later = 0.9, 0.95
            elif source == Source.MODEL:
                first, later = _MODEL
            elif source == Source.PREDICTION:  # The caller expects it to be right.
                first = max(first, _MIN_PREDICTED)
            self._all.tried[kind] = [_START, _START]
            self._all.accepted[kind] = [_START * first, _START * later]
        self._prior = self._all.copy()

    def fade(self) -> None:
        """Moves the estimates for a model's drafts halfway back to their initial values, because
        they have aged."""
        self._all.approach(self._prior, Source.MODEL)

    def settle(self, draft: Draft, tokens: Sequence[int], own: Counts) -> None:
        """Compares a draft with the tokens that came, as far as these are known.

        Args:
            tokens: Prompt and answer.
            own: The counts of the sequence.
        """
        known = tokens[draft.begin : draft.begin + len(draft.tokens)]
        for index, (drafted, token) in enumerate(zip(draft.tokens, known)):
            is_same = drafted == token
            self._all.add(draft.kind, index > 0, is_same)
            own.add(draft.kind, index > 0, is_same)
            if not is_same:
                return

    def chances(self, kind: int, own: Counts) -> Chances:
        """Returns the estimates for a sequence's draft."""
        found = []
        for is_later in (0, 1):
            prior = self._all.accepted[kind][is_later] / self._all.tried[kind][is_later]
            tried, accepted = own.tried[kind][is_later], own.accepted[kind][is_later]
            found.append((accepted + _OWN_WEIGHT * prior) / (tried + _OWN_WEIGHT))
        return Chances(*found)


def new_counts() -> Counts:
    """Returns the counts of a new sequence."""
    return Counts(_OWN_DECAY)
