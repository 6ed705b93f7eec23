"""Recurrent state, kept in numbered slots.

A recurrent layer (Mamba, gated delta, short convolutions, RWKV) has a state for each sequence, with
the same size at every length. Every recurrent cache of a model has ``num_slots`` slots; slot *i* of
all of them together is the state of one sequence after some number of tokens.

The contract with the code that hands out slots:

- In a step, every sequence names the slot that it **reads** (its state before the step's tokens)
  and the slot that it **writes** (its state after them): `StateSlots`.
- **Slot 0 is the initial state.** It is never handed out and never written; a sequence whose first
  token is in the step reads it. Model code then finds no state (``None``), as in mlx-lm's own
  cache, because some layers treat a first token differently from one after a state of zeros.
  Writing to -1 writes nothing.
- A slot that is read keeps its contents unless it is also written. So
  - a *snapshot* costs no copy: leave the written slot alone, and let the next step read it and
    write another;
  - a *fork* or a *prefix hit* reads the snapshot's slot any number of times, and writes its own;
  - a *failed* step can run again unchanged, because its input states are untouched, as long as
    every sequence reads one slot and writes another. With one step in flight while the next is
    launched, the next step must not write these slots either: that takes three slots for a
    sequence, used in turn, or a new one for every step.
  `reads[i] == writes[i]` is allowed and saves slots, if a step never runs twice.
- In one step, no slot is written twice, and none is written by one sequence and read by another.
- As with blocks, a slot is handed out again only after the last step that reads it has been
  evaluated.
- A state is known only at the end of a sequence's rows in a step. For the state after token *n* (a
  block boundary), a step must end there.

A recurrence runs along a sequence, but a step has one row for each token. So for modules with
state, the rows are cut into ``[num_seqs, length]`` groups (`plan.StatePlan`) of sequences that
either all begin or all continue. The module runs on each group with the states of its sequences,
and the results return to the order of the rows. The rest of the model (norms, projections outside
of the module, experts) sees all rows together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache

from mlx_paged import ops
from mlx_paged.model.caches import StepContext
from mlx_paged.model.layout import StateSpec
from mlx_paged.model.plan import SequenceGroup

# Slots in a block of a pool; only its shape needs them.
_BLOCK = 8
# Maximum words of a head; the native ops support up to 576.
_HEAD = 512
# The values next to the "keys": the ops write both, and this is the minimum.
_NO_VALUES = 8


class StatePool:
    """One state array of a recurrent layer: ``[num_slots, *shape]``; slot 0 is all zeros.

    The native ops treat it as a KV pool and write in place even if the buffer has other owners: a
    slot is a token, and its "keys" are the state's bytes cut into heads. So states cost no copy of
    their pool, and need no kernels of their own.

    Args:
        shape: Shape of one sequence's state.
        dtype: Any; dtypes that the native ops do not support are stored as words of the same bits.
        num_slots: Includes slot 0.
    """

    def __init__(self, shape: tuple[int, ...], dtype: mx.Dtype, num_slots: int) -> None:
        self._shape, self._dtype = shape, dtype
        self._word = dtype if dtype.size == 2 else mx.float32
        self._num_words = math.prod(shape) * dtype.size // self._word.size
        if self._word.size > dtype.size:
            raise ValueError(f"[state pool] dtype must have at least 2 bytes but got {dtype}")
        self._num_heads = max(1, -(-self._num_words // _HEAD))
        self._head_dim = max(8, -(-self._num_words // self._num_heads // 8) * 8)
        blocks = -(-num_slots // _BLOCK)
        self.pool = self._allocate(blocks, self._head_dim)
        self._beside = self._allocate(blocks, _NO_VALUES)
        self.write(mx.zeros((1, *shape), dtype), mx.zeros((1,), dtype=mx.int32))
        self._allocated = self.pool, self._beside

    def reset(self) -> None:
        """Puts back the handles it was allocated with; see `PagedModel.reset`."""
        self.pool, self._beside = self._allocated

    def _allocate(self, num_blocks: int, dim: int) -> mx.array:
        return ops.allocate_pool(num_blocks, _BLOCK, self._num_heads, dim, self._word)

    def read(self, slots: mx.array) -> mx.array:
        """``[num_seqs, *shape]`` of ``[num_seqs]`` int32 slots."""
        width = self._num_heads * self._head_dim
        words = self.pool.reshape(-1, width)[slots][:, : self._num_words]
        return words.view(self._dtype).reshape(slots.shape[0], *self._shape)

    def grown(self, states: mx.array) -> mx.array:
        """``[num_seqs, *shape]`` of states of few tokens, with zeros before them.

        N-gram contexts grow with the first tokens; their code ignores zeros.
        """
        missing = [whole - size for whole, size in zip(self._shape, states.shape[1:])]
        if states.ndim != 1 + len(self._shape) or not any(missing) or min(missing) < 0:
            return states  # `write` reports states that do not fit.
        return mx.pad(states, [(0, 0), *((n, 0) for n in missing)])

    def write(self, states: mx.array, slots: mx.array) -> None:
        """Writes ``[num_seqs, *shape]`` to ``[num_seqs]`` int32 slots in place; -1: nowhere."""
        num = slots.shape[0]
        if states.shape != (num, *self._shape):
            raise ValueError(
                f"[state pool] states must be of shape {(num, *self._shape)} but got {states.shape}"
            )
        words = states.astype(self._dtype).reshape(num, -1).view(self._word)
        missing = self._num_heads * self._head_dim - self._num_words
        if missing:
            words = mx.pad(words, [(0, 0), (0, missing)])
        self.pool, self._beside = ops.write_kv(
            self.pool,
            self._beside,
            words.reshape(num, self._num_heads, self._head_dim),
            mx.zeros((num, self._num_heads, _NO_VALUES), self._word),
            slots,
        )


class WindowedStates:
    """Methods of mlx-vlm's cache of recurrent state that mlx-lm's lacks."""

    def update_window(
        self: Any, index: int, source: mx.array, width: int, *, lengths: None = None
    ) -> mx.array:
        """Keeps the last `width` inputs of ``[num_seqs, length, dim]``, without padding."""
        self[index] = state = mx.contiguous(source[:, source.shape[1] - width :])
        return state

    def update_recurrent(self: Any, index: int, length: int, update: Callable[..., Any]) -> Any:
        """Replaces a state with the result of `update(state, None)`: ``(output, state, ...)``."""
        output, state = update(self[index], None)[:2]
        self[index] = state
        return output, state


class StateArrays(WindowedStates, ArraysCache):  # type: ignore[misc]
    """mlx-lm's cache of recurrent state, with the methods of mlx-vlm's."""


class RecurrentCache(WindowedStates, ArraysCache):  # type: ignore[misc]
    """The states of one recurrent layer in slots, as the ``ArraysCache`` that model code expects.

    Model code sees one group of sequences at a time (`grouped`): a list of ``[num_seqs, ...]``
    arrays, which it reads and replaces.
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
        """Shows the states of these sequences, and keeps those that were replaced."""
        self._group, self._states, self._changed = group, {}, set()
        try:
            yield
            for i in sorted(self._changed):
                self._keep(i, self._states[i], group)
        finally:
            self._group = None
            self._states = {}
            self._changed = set()

    def _read(self, index: int, group: SequenceGroup) -> mx.array | None:
        """Returns ``[num_seqs, ...]`` of a group; None if it begins, or if the entry is unused."""
        pool = self.pools[index]  # An IndexError past the last, as some code unpacks its states.
        return None if pool is None or group.begins else pool.read(group.reads)

    def _keep(self, index: int, state: mx.array, group: SequenceGroup) -> None:
        """Writes a replaced state to the slots of a group."""
        pool = self.pools[index]
        assert pool is not None, f"state {index} was not there in the observed forward"
        pool.write(pool.grown(state) if group.begins else state, group.writes)

    def __getitem__(self, index: int) -> mx.array | None:
        if self._group is None:
            raise RuntimeError("recurrent state was read outside of a group of a step")
        if index not in self._states:
            state = self._read(index, self._group)
            if state is None:
                return None
            self._states[index] = state
        return self._states[index]

    def __setitem__(self, index: int, state: mx.array) -> None:
        if self._group is None:
            raise RuntimeError("recurrent state was written outside of a group of a step")
        self._states[index] = state
        self._changed.add(index)

    def make_mask(self, *args: Any, **kwargs: Any) -> None:
        """Returns no mask, because nothing is padded."""
        return None

    def advance(self, num_tokens: int) -> None:
        """mlx-lm counts padding down here."""

    def empty(self) -> bool:
        """True if the group's sequences have no state yet, as in mlx-lm's own cache."""
        return self[0] is None


def regrouped(module: nn.Module, context: StepContext) -> Callable[..., Any]:
    """Returns a `__call__` for a module that holds recurrent state, for rows of a flat step."""
    base = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        caches = [a for a in (*args, *kwargs.values()) if isinstance(a, RecurrentCache)]
        if not context.active or not caches:
            return base.__call__(self, *args, **kwargs)
        step = context.step
        if step.states is None:
            raise RuntimeError("a step of a model with recurrent state came without state slots")
        [cache] = caches
        num_rows = step.plan.positions.shape[0]
        results = []
        for group in step.states.groups:
            with cache.grouped(group), context.rows(group.rows):
                result = base.__call__(
                    self,
                    *(_cut(a, group, num_rows) for a in args),
                    **{name: _cut(a, group, num_rows) for name, a in kwargs.items()},
                )
            results.append(tree_map(_as_rows, result))
        if len(results) == 1:
            return results[0]
        return tree_map(lambda *parts: mx.concatenate(parts)[step.states.order], *results)

    return call


def _as_rows(grouped: mx.array) -> mx.array:
    return grouped.reshape(grouped.shape[0] * grouped.shape[1], 1, *grouped.shape[2:])


def _cut(value: Any, group: SequenceGroup, num_rows: int) -> Any:
    """Returns the rows of a group as ``[num_seqs, length, ...]``; keeps values without rows."""
    if not isinstance(value, mx.array) or value.shape[:1] != (num_rows,):
        return value
    if group.rows is not None:
        value = value[group.rows]
    if value.ndim == 1:  # Positions: a sequence begins at that of its first row.
        return value[:: group.length]
    return value.reshape(group.num_seqs, group.length, *value.shape[2:])
