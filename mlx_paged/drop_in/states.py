"""Recurrent state in the drop-in: immutable arrays.

The engine keeps states in numbered slots (`mlx_paged.model.recurrent`), because its steps are
evaluated in order. mlx-lm's callers build lazy graphs, and copy, keep and drop prompt caches at any
time. A step here therefore creates new arrays: a fork or a snapshot is one more reference, and
nothing has to wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from mlx_paged.core import KVManager
from mlx_paged.core.kv.tree import PrefixMatch, PrefixNode
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


class StepStates:
    """The states that a step reads and writes.

    Args:
        specs: Specs of the model's recurrent caches.
    """

    def __init__(self, specs: Sequence[StateSpec]) -> None:
        self.specs = specs
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
            batch = StateBatch(arrays, group.num_seqs)
            for row, member in enumerate(group.members):
                states[member] = State(batch, row)
        assert all(state is not None for state in states), "a sequence had no rows"
        return states  # type: ignore[return-value]


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

    def __init__(self, spec: StateSpec, number: int, states: StepStates) -> None:
        ArraysCache.__init__(self, len(spec.shapes))
        self.spec = spec
        self.pools = []
        self._number = number
        self._source = states
        self._group: SequenceGroup | None = None
        self._states: dict[int, mx.array] = {}
        self._changed: set[int] = set()

    @contextmanager
    def grouped(self, group: SequenceGroup) -> Iterator[None]:
        """Exposes the states of these sequences, and records the entries that change."""
        self._group = group
        try:
            yield
            for index in sorted(self._changed):
                self._source.write(self._number, index, group, self._states[index])
        finally:
            self._group = None
            self._states = {}
            self._changed = set()

    def __getitem__(self, index: int) -> mx.array | None:
        if self._group is None:
            raise RuntimeError("recurrent state was read outside of a group of a step")
        if index not in self._states:
            state = self._source.read(self._number, index, self._group)
            if state is None:
                return None
            self._states[index] = state
        return self._states[index]

    def __setitem__(self, index: int, state: mx.array) -> None:
        if self._group is None:
            raise RuntimeError("recurrent state was written outside of a group of a step")
        self._states[index] = state
        self._changed.add(index)


class Snapshots:
    """States kept with nodes of the prefix tree, so that other sequences can continue there.

    Args:
        kv: The KV manager that owns the tree.
        max_bytes: Memory limit; the least recently used states are dropped first.
        state_bytes: Size of one state.
    """

    def __init__(self, kv: KVManager, *, max_bytes: int, state_bytes: int) -> None:
        self._kv = kv
        self._state_bytes = max(1, state_bytes)
        self._max = max(1, max_bytes // self._state_bytes)
        self._states: OrderedDict[PrefixNode, State] = OrderedDict()
        self._swept_at = 0

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, node: PrefixNode) -> bool:
        return node in self._states

    def add(self, node: PrefixNode, state: State) -> None:
        """Keeps the state after the tokens of a node. It must not be part of a larger batch."""
        num_evictions = self._kv.attention[0].num_evictions
        if self._swept_at != num_evictions:
            self._swept_at = num_evictions
            for gone in [n for n in self._states if not n.is_indexed]:
                del self._states[gone]
        self._states[node] = state
        if len(self._states) > self._max:
            self._states.popitem(last=False)

    def set_limit(self, max_bytes: int) -> None:
        """Changes `max_bytes`."""
        self._max = max(1, max_bytes // self._state_bytes)
        while len(self._states) > self._max:
            self._states.popitem(last=False)

    def drop(self, node: PrefixNode) -> None:
        """Drops a node's state, if any."""
        self._states.pop(node, None)

    def take(self, node: PrefixNode) -> State:
        """Returns the state of a node that `limit` returned."""
        self._states.move_to_end(node)
        return self._states[node]

    def limit(self, match: PrefixMatch) -> PrefixMatch:
        """Shortens a match to the last node with a state."""
        node = match.node
        while node is not None and node.parent is not None and node not in self._states:
            node = node.parent
        return PrefixMatch(node, None, 0)

    def clear(self) -> None:
        """Drops all states."""
        self._states.clear()


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
