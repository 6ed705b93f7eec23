"""Recurrent state as immutable arrays, for steps that are evaluated lazily.

The engine keeps states in numbered slots (`mlx_paged.model.recurrent`), because its steps are
evaluated in order. Callers of the drop-in build lazy graphs, and copy, keep and drop states at any
time. A step here therefore creates new arrays: a fork or a snapshot is one more reference, and
nothing has to wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakSet

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from mlx_paged.model.layout import StateSpec
from mlx_paged.model.plan import SequenceGroup, int32
from mlx_paged.model.recurrent import RecurrentCache

#: The arrays of a recurrent cache; None for an entry that is unused or not set yet.
Entries = list[mx.array | None]
#: The entries of all recurrent caches of a model, in order.
Arrays = list[Entries]


class StateBatch:
    """The states of sequences that were computed in one batch.

    Attributes:
        arrays: Each ``[size, ...]``.
        size: Number of sequences.
    """

    __slots__ = ("__weakref__", "arrays", "size")

    def __init__(self, arrays: Arrays, size: int) -> None:
        self.arrays = arrays
        self.size = size

    @property
    def present(self) -> list[mx.array]:
        """All arrays that are set."""
        return [array for entries in self.arrays for array in entries if array is not None]

    @property
    def nbytes(self) -> int:
        """Memory of the whole batch, which any one of its states keeps alive."""
        return sum(array.nbytes for array in self.present)


class State(NamedTuple):
    """The state of one sequence: a row of a batch."""

    batch: StateBatch
    row: int

    @property
    def arrays(self) -> Arrays:
        """Each ``[1, ...]``."""
        if self.batch.size == 1:
            return self.batch.arrays
        at = slice(self.row, self.row + 1)
        return [[a if a is None else a[at] for a in entries] for entries in self.batch.arrays]

    def alone(self) -> State:
        """Returns a copy that does not keep the batch alive."""
        if self.batch.size == 1:
            return self
        arrays = [
            [a if a is None else mx.contiguous(a) for a in entries] for entries in self.arrays
        ]
        return State(StateBatch(arrays, 1), 0)


class StateArrays:
    """All states of a model, and those that the step being built reads and writes.

    Args:
        specs: Specs of the model's recurrent caches.
    """

    def __init__(self, specs: Sequence[StateSpec]) -> None:
        self.specs = specs
        self._batches: WeakSet[StateBatch] = WeakSet()
        self._unfinished: WeakSet[StateBatch] = WeakSet()  # not yet returned by `unfinished`
        self._reads: Sequence[State | None] = ()
        self._gathers: dict[int, _Gather] = {}
        self._made: dict[int, tuple[SequenceGroup, dict[tuple[int, int], mx.array | None]]] = {}

    @contextmanager
    def read_by(self, reads: Sequence[State | None]) -> Iterator[None]:
        """Begins a step of sequences with these states; None before the first token."""
        self._reads = reads
        try:
            yield
        finally:
            self._reads, self._gathers, self._made = (), {}, {}

    def read(self, cache: int, entry: int, group: SequenceGroup) -> mx.array | None:
        """Returns ``[num_seqs, ...]`` of a group; None if it begins, or if the entry is unused."""
        spec = self.specs[cache]
        shape = spec.shapes[entry]  # must raise IndexError past the end: some models unpack states
        if shape is None or group.begins:
            return None
        gather = self._gathers.get(id(group))
        if gather is None:
            reads = [self._reads[i] for i in group.members]
            gather = self._gathers[id(group)] = _Gather(reads)
        return gather(cache, entry, shape, spec.dtypes[entry])

    def write(self, cache: int, entry: int, group: SequenceGroup, state: mx.array) -> None:
        """Records an entry's value after the group's rows."""
        _, made = self._made.setdefault(id(group), (group, {}))
        spec = self.specs[cache]
        made[cache, entry] = fitted(state, spec.shapes[entry], spec.dtypes[entry])

    def made(self) -> list[State]:
        """Returns the state of every sequence after the step."""
        states: list[State | None] = list(self._reads)
        for group, made in self._made.values():
            arrays = [
                [
                    made[cache, entry] if (cache, entry) in made else self.read(cache, entry, group)
                    for entry in range(len(spec.shapes))
                ]
                for cache, spec in enumerate(self.specs)
            ]
            batch = self._remember(StateBatch(arrays, group.num_seqs))
            for row, member in enumerate(group.members):
                states[member] = State(batch, row)
        assert all(state is not None for state in states), "a sequence had no rows"
        return states  # type: ignore[return-value]

    # States from outside, and all states.

    def checked(self, cache: int, entries: Sequence[mx.array | None]) -> Entries:
        """Converts ``[num_seqs, ...]`` arrays from outside to the form of a recurrent cache.

        Raises:
            ValueError: The shapes do not match the layer, or the batch sizes differ.
        """
        spec = self.specs[cache]
        if len(entries) != len(spec.shapes):
            raise ValueError(
                f"[paged prompt cache] recurrent state must be {len(spec.shapes)} arrays but got "
                f"{len(entries)}: this cache belongs to another model"
            )
        found = [fitted(a, s, d) for a, s, d in zip(entries, spec.shapes, spec.dtypes)]
        sizes = {len(array) for array in found if array is not None}
        if len(sizes) > 1:
            raise ValueError(
                f"[paged prompt cache] recurrent state must be of one batch but got {sorted(sizes)}"
            )
        return found

    def of(self, arrays: Arrays, num_seqs: int) -> list[State]:
        """Returns the states of a batch, from the ``[num_seqs, ...]`` arrays of each cache."""
        batch = self._remember(StateBatch(arrays, num_seqs))
        return [State(batch, row) for row in range(num_seqs)]

    def joined(self, states: Sequence[State]) -> Arrays:
        """Returns the ``[len(states), ...]`` arrays of each cache, all None without states."""
        if not states:
            return [[None] * len(spec.shapes) for spec in self.specs]
        if len(states) == states[0].batch.size and [s.row for s in states] == [*range(len(states))]:
            return states[0].batch.arrays
        return [
            [None if rows[0] is None else mx.concatenate(list(rows)) for rows in zip(*caches)]
            for caches in zip(*(state.arrays for state in states))
        ]

    def alone(self, state: State) -> State:
        """See `State.alone`."""
        alone = state.alone()
        self._remember(alone.batch)
        return alone

    def _remember(self, batch: StateBatch) -> StateBatch:
        self._batches.add(batch)
        self._unfinished.add(batch)
        return batch

    @property
    def nbytes(self) -> int:
        """Memory of all live states."""
        return sum(batch.nbytes for batch in list(self._batches))

    def unfinished(self) -> list[mx.array]:
        """Returns the arrays created since the last call, for evaluation."""
        states = [array for batch in self._unfinished for array in batch.present]
        self._unfinished.clear()
        return states

    @property
    def has_unfinished(self) -> bool:
        """True if states were created since the last `unfinished`."""
        return bool(self._unfinished)


class _Gather:
    """Assembles the states of a group from one or more batches.

    While the same sequences run together, this launches no operation.
    """

    def __init__(self, reads: Sequence[State | None]) -> None:
        self._num_seqs = len(reads)
        self._batches = list({id(s.batch): s.batch for s in reads if s is not None}.values())
        starts, end = {}, 0
        for batch in self._batches:
            starts[id(batch)] = end
            end += batch.size
        # Sequences without a state share a row of zeros after all batches.
        at = [end if s is None else starts[id(s.batch)] + s.row for s in reads]
        self._num_zeros = int(end in at)
        whole = at == list(range(end + self._num_zeros))
        self._at = None if whole or not self._batches else int32(np.array(at))

    def __call__(self, cache: int, entry: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        if not self._batches:
            return mx.zeros((self._num_seqs, *shape), dtype)
        parts = []
        for batch in self._batches:
            array = batch.arrays[cache][entry]
            parts.append(mx.zeros((batch.size, *shape), dtype) if array is None else array)
        if self._num_zeros:
            parts.append(mx.zeros((1, *shape), dtype))
        whole = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return unshared(whole) if self._at is None else whole[self._at]


def unshared(array: mx.array) -> mx.array:
    """Returns the array as a new object, because ``a += b`` changes the object for all holders."""
    return array.astype(array.dtype)


class ArrayStateCache(RecurrentCache):
    """The states of one recurrent layer while a step is built. Holds nothing between steps.

    Several modules of a layer may use it; each has its own entry.
    """

    def __init__(self, spec: StateSpec, cache_index: int, states: StateArrays) -> None:
        ArraysCache.__init__(self, len(spec.shapes))
        self.spec = spec
        self.pools = []
        self._cache_index = cache_index
        self._source = states
        self._group: SequenceGroup | None = None
        self._states: dict[int, mx.array] = {}
        self._changed: set[int] = set()

    def _read(self, index: int, group: SequenceGroup) -> mx.array | None:
        return self._source.read(self._cache_index, index, group)

    def _keep(self, index: int, state: mx.array, group: SequenceGroup) -> None:
        self._source.write(self._cache_index, index, group, state)


def fitted(
    state: mx.array | None, shape: tuple[int, ...] | None, dtype: mx.Dtype
) -> mx.array | None:
    """Converts a state from outside to the layer's shape and dtype.

    Some states, such as n-gram contexts, grow to their full size over the first tokens. They are
    padded with leading zeros, which is equivalent.

    Raises:
        ValueError: The shape does not match the layer.
    """
    if state is None:
        return None
    present = state.shape[1:]
    if shape is None or present[1:] != shape[1:] or present[:1] > shape[:1]:
        raise ValueError(
            f"[paged prompt cache] recurrent state must be of shape {shape} but got {present}: "
            "this cache belongs to another model"
        )
    if present != shape:
        missing = [(0, 0), (shape[0] - present[0], 0)]
        state = mx.pad(state, missing + [(0, 0)] * (len(shape) - 1))
    return state.astype(dtype)
