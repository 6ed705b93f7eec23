"""Recurrent state, kept in numbered slots.

A recurrent layer (Mamba, gated delta, short convolutions, RWKV) has a state for each sequence, of
the same size at every length. Every recurrent cache of a model has ``num_slots`` slots; slot *i*
of all of them together is the state of one sequence after some number of tokens.

The contract with whoever hands out slots:

- In a step every sequence names the slot that it **reads** (its state before the step's tokens)
  and the slot that it **writes** (its state after them): `StateSlots`.
- **Slot 0 is the initial state**, all zeros. It is never handed out and never written; a sequence
  whose first token is in the step reads slot 0. Writing to -1 writes nothing.
- A slot that is read keeps what it holds unless it is also the one written. So
  - a *snapshot* costs no copy: leave the slot that was written where it is, and let the next step
    read it and write another;
  - a *fork* or a *prefix hit* reads the snapshot's slot, as often as wanted, and writes its own;
  - a step that *failed* can be run again as it was, because its states before are untouched, as
    long as every sequence reads one slot and writes another. With one step in flight while the next
    is launched, that takes slots that are not written by the next step either: three for a
    sequence, used in turn, or a new one for every step.
  `reads[i] == writes[i]` is allowed and saves the slots, for whoever never runs a step twice.
- In one step no slot is written twice, and none that one sequence writes is read by another.
- As with blocks, a slot is handed out again only after the last step that reads it has been
  evaluated.
- A state is known at the end of a sequence's rows in a step, and nowhere between: who wants the
  state after token *n* (a block boundary) lets a step end there.
- `copy_states` copies slots for whoever needs a copy after all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from mlx_paged import ops
from mlx_paged.model.specs import StateSpec
from mlx_paged.model.state_pool import StatePool


@dataclass(frozen=True)
class StateSlots:
    """Slots of a step's sequences, in the order of their rows."""

    reads: Sequence[int]  # [num_seqs]; 0: the initial state
    writes: Sequence[int]  # [num_seqs]; -1: nowhere


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences of a step that have the same number of rows."""

    rows: mx.array | None  # [num_seqs * length] int32; None: all rows of the step, as they are
    num_seqs: int
    length: int
    reads: mx.array  # [num_seqs] int32
    writes: mx.array  # [num_seqs] int32


@dataclass(frozen=True)
class StatePlan:
    """How the rows of a step are cut into equal-length groups, as recurrent layers need them."""

    groups: tuple[SequenceGroup, ...]
    order: mx.array | None  # [num_rows] int32: where each row is among the groups'; None: in order


def build_state_plan(query_lens: Sequence[int] | np.ndarray, slots: StateSlots) -> StatePlan:
    """Groups the sequences of a step by their number of rows.

    Args:
        query_lens: rows of each sequence.
        slots: their slots.

    Raises:
        ValueError: for lists of different lengths, a slot that is written twice or that is written
            by one sequence and read by another, or a write to slot 0.
    """
    lens = np.asarray(query_lens, dtype=np.int64)
    reads = np.asarray(slots.reads, dtype=np.int64)
    writes = np.asarray(slots.writes, dtype=np.int64)
    _validate(lens, reads, writes)
    starts = np.cumsum(lens) - lens
    rows, groups = [], []
    lengths = [int(n) for n in np.unique(lens) if n > 0]
    for length in lengths:
        members = np.flatnonzero(lens == length)
        rows.append((starts[members][:, None] + np.arange(length)).reshape(-1))
        groups.append(
            SequenceGroup(
                None if len(lengths) == 1 else _int32(rows[-1]),
                len(members),
                length,
                _int32(reads[members]),
                _int32(writes[members]),
            )
        )
    if len(groups) <= 1:
        return StatePlan(tuple(groups), None)
    return StatePlan(tuple(groups), _int32(np.argsort(np.concatenate(rows))))


def _validate(lens: np.ndarray, reads: np.ndarray, writes: np.ndarray) -> None:
    for name, values in (("reads", reads), ("writes", writes)):
        if values.shape != lens.shape:
            raise ValueError(
                f"[state slots] {name} must be of shape {lens.shape} like query_lens but got "
                f"{values.shape}"
            )
    if (reads < 0).any():
        raise ValueError(f"[state slots] reads must be at least 0 but got {reads.min()}")
    if (writes == 0).any():
        raise ValueError("[state slots] writes must not be 0: that slot is the initial state")
    written = writes[writes > 0]
    if len(np.unique(written)) != len(written):
        raise ValueError(f"[state slots] writes must be distinct but got {writes.tolist()}")
    crossed = np.isin(reads, written) & (reads != writes)
    if crossed.any():
        slot = reads[crossed][0]
        raise ValueError(
            f"[state slots] slot {slot} is written by one sequence and read by another"
        )


def _int32(values: np.ndarray) -> mx.array:
    return ops.upload(values.astype(np.int32))[0]


class RecurrentCache(ArraysCache):  # type: ignore[misc]
    """The states of one recurrent layer, in slots; an ``ArraysCache``, as model code asks for one.

    Model code sees one group of sequences at a time (`grouped`): then this is a list of
    ``[num_seqs, ...]`` arrays, which it reads and replaces.
    """

    def __init__(self, spec: StateSpec, *, num_slots: int) -> None:
        super().__init__(len(spec.shapes))
        self.spec = spec
        self.pools = [
            None if shape is None else StatePool(shape, dtype, num_slots)
            for shape, dtype in zip(spec.shapes, spec.dtypes)
        ]
        self._group: SequenceGroup | None = None
        self._states: dict[int, mx.array] = {}
        self._changed: set[int] = set()

    @contextmanager
    def grouped(self, group: SequenceGroup) -> Iterator[None]:
        """Shows the states of these sequences, and writes what was replaced to their slots."""
        self._group = group
        try:
            yield
            for i in sorted(self._changed):
                pool = self.pools[i]
                assert pool is not None, f"state {i} was not there when the layer was looked at"
                pool.write(self._states[i], group.writes)
        finally:
            self._group = None
            self._states = {}
            self._changed = set()

    def __getitem__(self, index: int) -> mx.array | None:
        if self._group is None:
            raise RuntimeError("recurrent state was read outside of a group of a step")
        pool = self.pools[index]
        if index not in self._states and pool is not None:
            self._states[index] = pool.read(self._group.reads)
        return self._states.get(index)

    def __setitem__(self, index: int, state: mx.array) -> None:
        if self._group is None:
            raise RuntimeError("recurrent state was written outside of a group of a step")
        self._states[index] = state
        self._changed.add(index)

    def make_mask(self, *args: Any, **kwargs: Any) -> None:
        """No mask: nothing is padded."""
        return None

    def advance(self, num_tokens: int) -> None:
        """mlx-lm counts padding down here."""

    def empty(self) -> bool:
        """False: there always is a state, if only the initial one."""
        return False


def copy_states(caches: Iterable[RecurrentCache], slot_pairs: mx.array) -> None:
    """Copies slots in every recurrent layer.

    Args:
        slot_pairs: ``[num_pairs, 2]`` int32 of (src, dst); all sources are read before anything is
            written.
    """
    for cache in caches:
        for pool in cache.pools:
            if pool is not None:
                pool.write(pool.read(slot_pairs[:, 0]), slot_pairs[:, 1])
