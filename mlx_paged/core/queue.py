"""SequenceQueue: sequences in service order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from mlx_paged.core.request import Sequence


class SequenceQueue:
    """Sorted by `Sequence.order`, which is unique: first served first, last preempted first."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        """Goes over the members of now: the queue may change meanwhile."""
        return iter(self._items.copy())

    def __contains__(self, seq: Sequence) -> bool:
        place = bisect_left(self._items, seq.order, key=_order)
        return place < len(self._items) and self._items[place] is seq

    @property
    def first(self) -> Sequence:
        return self._items[0]

    @property
    def last(self) -> Sequence:
        return self._items[-1]

    def add(self, seq: Sequence) -> None:
        insort(self._items, seq, key=_order)

    def remove(self, seq: Sequence) -> None:
        place = bisect_left(self._items, seq.order, key=_order)
        assert self._items[place] is seq
        del self._items[place]


def _order(seq: Sequence) -> tuple[int, int, int]:
    return seq.order
