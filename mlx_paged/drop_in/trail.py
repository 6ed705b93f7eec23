"""Trail: the known tokens at the head of a sequence, forked without copying them."""

from __future__ import annotations

from collections.abc import Sequence


class Trail:
    """An append-only token list, of which forks share the storage.

    ::

        storage   [ a b c d e f ]
        fork 1      -------        length 4
        fork 2      -----------    length 6, and the only one that may append in place
    """

    __slots__ = ("_length", "_storage")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._storage = list(tokens)
        self._length = len(self._storage)

    def __len__(self) -> int:
        return self._length

    def tokens(self) -> list[int]:
        """The tokens, as a list of their own."""
        return self._storage[: self._length]

    def last(self) -> int:
        """The newest token."""
        return self._storage[self._length - 1]

    def fork(self) -> Trail:
        """The same tokens; what is appended to either is not seen by the other."""
        other = Trail.__new__(Trail)
        other._storage, other._length = self._storage, self._length
        return other

    def truncate(self, length: int) -> None:
        """Forgets the tokens from `length` on."""
        self._length = min(self._length, length)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends."""
        if len(self._storage) != self._length:  # a fork went on, or tokens were forgotten
            self._storage = self._storage[: self._length]
        self._storage.extend(tokens)
        self._length += len(tokens)

    def slice(self, start: int, end: int) -> list[int]:
        """Tokens ``[start, end)``, all of them known."""
        assert end <= self._length
        return self._storage[start:end]
