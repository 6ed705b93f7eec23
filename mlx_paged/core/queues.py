"""Queues: the scheduler's running and waiting sequences, and the deadlines of requests.

A step must not touch every waiting sequence, so each is in one of four places::

      ready, short    a step takes them in service order until it is full
      ready, long     the same; skipped once long prompts have had their share of the step
      parked          filed under the running sequence that computes its next tokens, by the token
                      count at which to wake up; not touched before then

          running sequence A, 640 of 3000 tokens computed
            1024: [B, C]      share the first 1024 tokens with A
            2976: [D]         shares 2976

      held            waits for a slot of its adapter; not touched before one is free
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, merge

from mlx_paged.core.kv.tables import BlockTables
from mlx_paged.core.request import Request, Sequence
from mlx_paged.errors import IntegrityError


class SequenceQueue:
    """Sequences sorted by the unique `Sequence.order`: served from the front, preempted from the
    back.

    Attributes:
        items: The members, in order; read-only.
    """

    def __init__(self) -> None:
        self.items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterates over a copy: the queue may change during the loop."""
        return iter(self.items.copy())

    def __contains__(self, seq: Sequence) -> bool:
        index = bisect_left(self.items, seq.order, key=_order)
        return index < len(self.items) and self.items[index] is seq

    @property
    def first(self) -> Sequence:
        return self.items[0]

    @property
    def last(self) -> Sequence:
        return self.items[-1]

    def add(self, seq: Sequence) -> None:
        insort(self.items, seq, key=_order)

    def add_all(self, sequences: list[Sequence]) -> None:
        """Adds many at once. The sort merges sorted runs, so it is cheap."""
        if len(sequences) == 1:
            self.add(sequences[0])
        elif sequences:
            self.items += sequences
            self.items.sort(key=_order)

    def remove(self, seq: Sequence) -> None:
        index = bisect_left(self.items, seq.order, key=_order)
        assert self.items[index] is seq
        del self.items[index]


def _order(seq: Sequence) -> tuple[tuple[bool, int], int, int]:
    return seq.order


class WaitingQueue:
    """The waiting sequences: ready ones in service order, parked ones by what they wait for.

    Args:
        is_long: Returns True if a prompt of this many tokens is long.

    Attributes:
        size: Number of waiting sequences.
        num_background: Number of these that belong to background requests.
    """

    def __init__(self, is_long: Callable[[int], bool]) -> None:
        self.size = self.num_background = 0
        self._is_long = is_long
        self._short = SequenceQueue()
        self._long = SequenceQueue()
        self._held = SequenceQueue()
        self._parked: dict[BlockTables, _Parked] = {}  # by the running sequence's tables

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Sequence]:
        """Iterates over all in service order, parked or not. O(size): too slow for every step."""
        parked = [seq for each in self._parked.values() for seq in each.sequences()]
        ready = self._short, self._long
        return merge(*ready, self._held, sorted(parked, key=_order), key=_order)

    def __contains__(self, seq: Sequence) -> bool:
        if seq.waits_for is None:
            return seq in (self._held if seq.is_held else self._ready(seq))
        tables, num_tokens = seq.waits_for
        return tables in self._parked and seq in self._parked[tables].by_target.get(num_tokens, ())

    def _ready(self, seq: Sequence) -> SequenceQueue:
        return self._long if self._is_long(len(seq.tokens)) else self._short

    def first(self, *, with_long: bool = True) -> Sequence | None:
        """Returns the first ready sequence; only short ones unless `with_long`."""
        if not (with_long and self._long):
            return self._short.first if self._short else None
        if not self._short or self._long.first.order < self._short.first.order:
            return self._long.first
        return self._short.first

    def ready_short(self) -> Iterator[Sequence]:
        """The short ready sequences in service order; the queue must not change during the loop."""
        return iter(self._short.items)

    def add(self, seq: Sequence) -> None:
        self._ready(seq).add(seq)
        self.size += 1
        self.num_background += seq.request.background

    def add_token(self, seq: Sequence, token: int) -> None:
        """Appends the token that was in flight when the sequence was preempted."""
        self.remove(seq)
        seq.tokens.append(token)
        self.add(seq)

    def remove(self, seq: Sequence) -> None:
        self.size -= 1
        self.num_background -= seq.request.background
        if seq.waits_for is None:
            (self._held if seq.is_held else self._ready(seq)).remove(seq)
            seq.is_held = False
            return
        tables, num_tokens = seq.waits_for
        del self._parked[tables].by_target[num_tokens][seq]
        seq.waits_for = None

    # Waiting for a slot.

    @property
    def first_held(self) -> Sequence | None:
        """The first sequence that waits for a slot of its adapter."""
        return self._held.first if self._held else None

    def hold(self, seq: Sequence) -> None:
        """Sets a ready sequence aside until `release_held`."""
        self._ready(seq).remove(seq)
        self._held.add(seq)
        seq.is_held = True

    def release_held(self) -> None:
        """Makes all sequences ready that were set aside."""
        held, self._held = self._held.items, SequenceQueue()
        for seq in held:
            seq.is_held = False
        self._make_ready(held)

    # Parking.

    def park(self, seq: Sequence, tables: BlockTables, num_tokens: int) -> None:
        """Parks a ready sequence until `tables` have `num_tokens` computed tokens or are freed."""
        self._ready(seq).remove(seq)
        if tables not in self._parked:
            self._parked[tables] = _Parked()
        self._parked[tables].add(seq, num_tokens)
        seq.waits_for = (tables, num_tokens)

    def wake(self) -> None:
        """Makes sequences ready whose wait is over. Does not touch the others."""
        if not self._parked:
            return
        woken: list[Sequence] = []
        for tables, parked in list(self._parked.items()):
            woken += parked.take(tables.num_computed_tokens)
            if not parked.targets:
                del self._parked[tables]
        self._make_ready(woken)

    def wake_from(self, tables: BlockTables) -> None:
        """Makes all sequences ready that wait for `tables`, which are being freed."""
        parked = self._parked.pop(tables, None)
        if parked is not None:
            self._make_ready(list(parked.sequences()))

    def wake_all(self) -> None:
        for tables in list(self._parked):
            self.wake_from(tables)

    def _make_ready(self, woken: list[Sequence]) -> None:
        short: list[Sequence] = []
        long: list[Sequence] = []
        is_long = self._is_long
        for seq in woken:
            seq.waits_for = None
            (long if is_long(len(seq.tokens)) else short).append(seq)
        self._short.add_all(short)
        self._long.add_all(long)

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if a sequence is in the wrong place."""
        for queue, long in ((self._short, False), (self._long, True)):
            for seq in queue:
                is_ready = seq.waits_for is None and not seq.is_held
                if not is_ready or self._is_long(len(seq.tokens)) != long:
                    raise IntegrityError(f"{seq!r} is not in its part of the waiting queue")
        if any(seq.waits_for is not None or not seq.is_held for seq in self._held):
            raise IntegrityError("a held sequence is parked too, or not marked as held")
        num_waiting = len(self._short) + len(self._long) + len(self._held)
        for tables, parked in self._parked.items():
            owner = tables.owner
            if owner.tables is not tables:
                raise IntegrityError(f"sequences wait for tables that {owner!r} has given up")
            if sorted(parked.targets) != sorted(parked.by_target):
                raise IntegrityError(f"sequences that wait for {owner!r} would never wake up")
            for num_tokens, sequences in parked.by_target.items():
                num_waiting += len(sequences)
                for seq in sequences:
                    if seq.waits_for != (tables, num_tokens):
                        raise IntegrityError(f"{seq!r} is parked, but waits for something else")
        if num_waiting != self.size:
            raise IntegrityError(f"{self.size} are counted as waiting, but {num_waiting} are")
        num_background = sum(seq.request.background for seq in self)
        if num_background != self.num_background:
            raise IntegrityError(
                f"{self.num_background} background sequences are counted, but {num_background} wait"
            )


class _Parked:
    """The sequences that wait for one running sequence, by the number of computed tokens."""

    def __init__(self) -> None:
        self.targets: list[int] = []  # a heap
        self.by_target: dict[int, dict[Sequence, None]] = {}

    def add(self, seq: Sequence, num_tokens: int) -> None:
        if num_tokens not in self.by_target:
            self.by_target[num_tokens] = {}
            heappush(self.targets, num_tokens)
        self.by_target[num_tokens][seq] = None

    def take(self, num_computed_tokens: int) -> Iterator[Sequence]:
        """Removes and yields the sequences that wait for at most this many tokens."""
        while self.targets and self.targets[0] <= num_computed_tokens:
            yield from self.by_target.pop(heappop(self.targets))

    def sequences(self) -> Iterable[Sequence]:
        return (seq for sequences in self.by_target.values() for seq in sequences)


class Deadlines:
    """The unfinished requests with a deadline. A check touches only requests that are due.

    Attributes:
        heap: (deadline, arrival, request), earliest first; may include requests that have ended.
    """

    def __init__(self) -> None:
        self._requests: set[Request] = set()
        self.heap: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        assert request.deadline is not None
        self._requests.add(request)
        heappush(self.heap, (request.deadline, request.arrival, request))

    def discard(self, request: Request) -> None:
        self._requests.discard(request)
        if len(self.heap) > 2 * len(self._requests) + 64:
            self.heap = [entry for entry in self.heap if entry[2] in self._requests]
            heapify(self.heap)

    def pop_due(self, now: float) -> list[Request]:
        """Removes and returns the requests that are due, in order of arrival."""
        due = []
        while self.heap and self.heap[0][0] <= now:
            request = heappop(self.heap)[2]
            if request in self._requests:
                self._requests.remove(request)
                due.append(request)
        due.sort(key=lambda request: request.arrival)
        return due
