"""Queues: the scheduler's sequences between steps, running, waiting (and for what) or due.

A step must not touch every sequence that waits. So a waiting sequence is in one of three places::

      ready, short    a step looks at them in service order, until it is full
      ready, long     the same; left out where long prompts have had their share of the step
      parked          under the running sequence that computes what it needs next, by how far that
                      has to come; nobody looks at it before then

          running sequence A, 640 of 3000 tokens computed
            1024: [B, C]      share the first 1024 tokens with A
            2976: [D]         shares 2976
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, merge

from mlx_paged.core.kv.groups import BlockTables
from mlx_paged.core.request import Request, Sequence
from mlx_paged.errors import IntegrityError


class SequenceQueue:
    """Sorted by `Sequence.order`, which is unique: first served first, last preempted first.

    Attributes:
        items: The members, in order; not to be changed.
    """

    def __init__(self) -> None:
        self.items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterates over the present members: the queue may change during the loop."""
        return iter(self.items.copy())

    def __contains__(self, seq: Sequence) -> bool:
        place = bisect_left(self.items, seq.order, key=_order)
        return place < len(self.items) and self.items[place] is seq

    @property
    def first(self) -> Sequence:
        return self.items[0]

    @property
    def last(self) -> Sequence:
        return self.items[-1]

    def add(self, seq: Sequence) -> None:
        insort(self.items, seq, key=_order)

    def add_all(self, sequences: list[Sequence]) -> None:
        """Adds many at once; sorted runs are merged."""
        if len(sequences) == 1:
            self.add(sequences[0])
        elif sequences:
            self.items += sequences
            self.items.sort(key=_order)

    def remove(self, seq: Sequence) -> None:
        place = bisect_left(self.items, seq.order, key=_order)
        assert self.items[place] is seq
        del self.items[place]


def _order(seq: Sequence) -> tuple[tuple[bool, int], int, int]:
    return seq.order


class WaitingQueue:
    """The sequences that wait: ready ones in service order, parked ones by what they wait for.

    Args:
        is_long: whether a prompt of so many tokens is long.

    Attributes:
        size: How many wait.
        num_background: How many of them belong to background requests.
    """

    def __init__(self, is_long: Callable[[int], bool]) -> None:
        self.size = self.num_background = 0
        self._is_long = is_long
        self._short = SequenceQueue()
        self._long = SequenceQueue()
        self._parked: dict[BlockTables, _Parked] = {}  # by the tables of who is waited for

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Sequence]:
        """All of them in service order, parked or not; looks at each, so not for a step."""
        parked = [seq for each in self._parked.values() for seq in each.sequences()]
        return merge(self._short, self._long, sorted(parked, key=_order), key=_order)

    def __contains__(self, seq: Sequence) -> bool:
        if seq.waits_for is None:
            return seq in self._ready(seq)
        tables, num_tokens = seq.waits_for
        return tables in self._parked and seq in self._parked[tables].by_target.get(num_tokens, ())

    def _ready(self, seq: Sequence) -> SequenceQueue:
        return self._long if self._is_long(len(seq.tokens)) else self._short

    def first(self, *, with_long: bool = True) -> Sequence | None:
        """The first ready sequence, or the first short one."""
        if not (with_long and self._long):
            return self._short.first if self._short else None
        if not self._short or self._long.first.order < self._short.first.order:
            return self._long.first
        return self._short.first

    def ready_short(self) -> Iterator[Sequence]:
        """The short ready ones, in service order; the queue must not change during the loop."""
        return iter(self._short.items)

    def add(self, seq: Sequence) -> None:
        self._ready(seq).add(seq)
        self.size += 1
        self.num_background += seq.request.background

    def add_token(self, seq: Sequence, token: int) -> None:
        """A waiting sequence gains the token that was in flight when it was preempted."""
        self.remove(seq)
        seq.tokens.append(token)
        self.add(seq)

    def remove(self, seq: Sequence) -> None:
        self.size -= 1
        self.num_background -= seq.request.background
        if seq.waits_for is None:
            self._ready(seq).remove(seq)
            return
        tables, num_tokens = seq.waits_for
        del self._parked[tables].by_target[num_tokens][seq]
        seq.waits_for = None

    # Parking.

    def park(self, seq: Sequence, tables: BlockTables, num_tokens: int) -> None:
        """Nobody looks at a ready sequence until `tables` have `num_tokens` computed tokens, or
        are given up."""
        self._ready(seq).remove(seq)
        if tables not in self._parked:
            self._parked[tables] = _Parked()
        self._parked[tables].add(seq, num_tokens)
        seq.waits_for = (tables, num_tokens)

    def wake(self) -> None:
        """Makes those ready whose wait is over; looks at no others, only at who they wait for."""
        if not self._parked:
            return
        woken: list[Sequence] = []
        for tables, parked in list(self._parked.items()):
            woken += parked.take(tables.num_computed_tokens)
            if not parked.targets:
                del self._parked[tables]
        self._make_ready(woken)

    def wake_from(self, tables: BlockTables) -> None:
        """`tables` are given up: whoever waits for them is ready."""
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
        """Raises `IntegrityError` where a sequence is not where it should be."""
        for queue, long in ((self._short, False), (self._long, True)):
            for seq in queue:
                if seq.waits_for is not None or self._is_long(len(seq.tokens)) != long:
                    raise IntegrityError(f"{seq!r} is not in its part of the waiting queue")
        num_waiting = len(self._short) + len(self._long)
        for tables, parked in self._parked.items():
            owner = tables.owner
            if owner.tables is not tables:
                raise IntegrityError(f"sequences wait for tables that {owner!r} has given up")
            if sorted(parked.targets) != sorted(parked.by_target):
                raise IntegrityError(f"those that wait for {owner!r} would not be woken")
            for num_tokens, sequences in parked.by_target.items():
                num_waiting += len(sequences)
                for seq in sequences:
                    if seq.waits_for != (tables, num_tokens):
                        raise IntegrityError(f"{seq!r} is parked, but waits for something else")
        if num_waiting != self.size:
            raise IntegrityError(f"{self.size} are counted as waiting, but {num_waiting} are")
        num_background = sum(seq.request.background for seq in self)
        if num_background != self.num_background:
            raise IntegrityError(f"{num_background} background sequences wait, not counted")


class _Parked:
    """Those that wait for one running sequence, by the computed tokens that they wait for."""

    def __init__(self) -> None:
        self.targets: list[int] = []  # a heap
        self.by_target: dict[int, dict[Sequence, None]] = {}

    def add(self, seq: Sequence, num_tokens: int) -> None:
        if num_tokens not in self.by_target:
            self.by_target[num_tokens] = {}
            heappush(self.targets, num_tokens)
        self.by_target[num_tokens][seq] = None

    def take(self, num_computed_tokens: int) -> Iterator[Sequence]:
        """Takes out those whose wait ends with so many tokens."""
        while self.targets and self.targets[0] <= num_computed_tokens:
            yield from self.by_target.pop(heappop(self.targets))

    def sequences(self) -> Iterable[Sequence]:
        return (seq for sequences in self.by_target.values() for seq in sequences)


class Deadlines:
    """The unfinished requests that have a deadline. A check touches only those that are due.

    Attributes:
        heap: (deadline, arrival, request), earliest first; also of requests that have ended since.
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
        """Takes out the requests whose time is up, in order of arrival."""
        due = []
        while self.heap and self.heap[0][0] <= now:
            request = heappop(self.heap)[2]
            if request in self._requests:
                self._requests.remove(request)
                due.append(request)
        due.sort(key=lambda request: request.arrival)
        return due
