"""Dense keys and values for model code that does not leave attention to MLX.

Sparse indexers, handwritten scores and host arithmetic on positions need K and V as arrays, and
positions as numbers. For such models, a step runs once for each group of sequences, with tokens
``[num_seqs, length]``, and these caches gather the group's blocks.

In a *uniform* group, all sequences are also at the same position. Then `offset` is a plain integer,
and model code sees exactly mlx-lm's own cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.model.caches import KVPools, StepContext
from mlx_paged.model.layout import KVCacheGroupSpec, LayerSpec
from mlx_paged.model.plan import PaddedTables, StepInputs, int32


@dataclass(frozen=True)
class GatheredGroup:
    """Sequences with the same number of rows, and the same position if they are `uniform`."""

    length: int
    starts: mx.array  # [num_seqs] int32: position of each sequence's first row
    start: int | None  # that position if the group is uniform
    context_lens: mx.array  # [num_seqs] int32
    max_context_len: int
    block_tables: Mapping[KVCacheGroupSpec, mx.array]  # [num_seqs, max_blocks] int32
    slots: Mapping[KVCacheGroupSpec, mx.array]  # [num_seqs * length] int32

    @classmethod
    def of(
        cls,
        inputs: StepInputs,
        members: np.ndarray,
        group_specs: Sequence[KVCacheGroupSpec],
        *,
        block_size: int,
        uniform: bool,
    ) -> GatheredGroup:
        """Returns the group of the sequences `members` (by number) of a step."""
        length = int(inputs.query_lens[members[0]])
        lens = inputs.context_lens[members]
        positions = (lens - length)[:, None] + np.arange(length)
        tables: dict[KVCacheGroupSpec, mx.array] = {}
        slots: dict[KVCacheGroupSpec, mx.array] = {}
        for group_spec in group_specs:
            padded = inputs.tables_of(group_spec)
            if not isinstance(padded, PaddedTables):
                padded = PaddedTables.of(padded)
            blocks = padded.blocks[members]
            at = np.take_along_axis(blocks, positions // block_size, axis=1)
            tables[group_spec] = int32(blocks)
            slots[group_spec] = int32((at * block_size + positions % block_size).reshape(-1))
        return cls(
            length=length,
            starts=int32(lens - length),
            start=int(lens[0]) - length if uniform else None,
            context_lens=int32(lens),
            max_context_len=int(lens.max()),
            block_tables=tables,
            slots=slots,
        )


def groups_of(inputs: StepInputs, *, uniform: bool) -> list[np.ndarray]:
    """Groups the sequences of a step, by index; sequences without rows are in no group.

    With recurrent state, either all sequences of a group have one, or all begin in this step.
    """
    columns = [inputs.query_lens]
    if uniform:
        columns.append(inputs.context_lens)
    if inputs.state_slots is not None:
        columns.append(np.asarray(inputs.state_slots.reads) == 0)
    keys = np.stack(columns, axis=1)
    kinds, which = np.unique(keys, axis=0, return_inverse=True)
    groups = [np.flatnonzero(which.reshape(-1) == i) for i in range(len(kinds))]
    return [group for group in groups if inputs.query_lens[group[0]] > 0]


class GatheredLayerCache(KVPools):
    """The cache of one attention layer that is read as dense arrays."""

    def __init__(
        self, context: StepContext, spec: LayerSpec, *, num_blocks: int, block_size: int
    ) -> None:
        super().__init__(context, spec, num_blocks=num_blocks, block_size=block_size)
        self._group: GatheredGroup | None = None
        # Gathered arrays of the group, under the names of mlx-lm's caches. Model code may order
        # them after others with `mx.depends`.
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @contextmanager
    def grouped(self, group: GatheredGroup) -> Iterator[None]:
        """Reads and writes the blocks of these sequences."""
        self._group = group
        try:
            yield
        finally:
            self._group = self.keys = self.values = None

    @property
    def group(self) -> GatheredGroup:
        """The current group; an error outside of one."""
        if self._group is None:
            raise RuntimeError("a paged cache was used outside of a step of the model runner")
        return self._group

    @property
    def offset(self) -> Any:
        """``[num_seqs]`` int32 positions of the first rows; an ``int`` in a uniform group."""
        # mlx-lm's own caches advance with a write; model code reads this once, before it.
        return self.group.starts if self.group.start is None else self.group.start

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes ``[num_seqs, num_kv_heads, length, head_dim]``; returns all that can be seen."""
        group, group_spec = self.group, self._group_spec

        def rows(x: mx.array) -> mx.array:
            num_seqs, heads, length, dim = x.shape
            return x.transpose(0, 2, 1, 3).reshape(num_seqs * length, heads, dim)

        self._write(rows(keys), rows(values), group.slots[group_spec])
        dense_keys, dense_values = ops.gather_kv(
            self.key_pool,
            self.value_pool,
            group.block_tables[group_spec],
            group.context_lens,
            group.max_context_len,
            dtype=self.spec.dtype,
        )
        first = self._first_key()
        self.keys = dense_keys[:, :, first:, : self.spec.key_dim]
        self.values = dense_values[:, :, first:, : self.spec.value_dim]
        return self.keys, self.values

    def _first_key(self) -> int:
        """Returns the tokens that a rotating or chunked cache has dropped so far; masks count from
        there."""
        group, spec = self.group, self.spec
        if group.start is None:
            return 0
        if spec.window is not None:
            return max(0, group.start + 1 - spec.window)
        return self.start_position

    @property
    def start_position(self) -> int:  # type: ignore[override]
        """Position of the first key of a chunked cache."""
        group = self.group
        if group.start is None or self.spec.chunk is None:
            return 0
        return max(0, group.start - self.spec.chunk)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Returns the last result of `update_and_fetch`, for layers that share it."""
        if self.keys is None or self.values is None:
            raise RuntimeError("a layer's keys were read before it wrote any")
        return self.keys, self.values

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Returns the keys that each row sees, ``[num_seqs, 1, length, num_keys]`` bool."""
        group, own = self.group, self.spec.window
        window, first = window_size or own, self._first_key()
        if group.start is not None:
            # Like mlx-lm's rotating cache, this drops everything before its window.
            dropped = own is not None and (window is None or window >= own)
            if length == 1 and (window is None or dropped):
                return None
            fits = own is not None and group.max_context_len - first <= (window or 0)
            if not return_array and (window is None or fits):
                return "causal"
        keys = mx.arange(first, group.max_context_len)
        queries = group.starts[:, None, None, None] + mx.arange(length)[:, None]
        seen = keys <= queries
        if window is not None:
            seen = seen & (keys > queries - window)
        return seen if group.start is None else seen[0, 0]

    def empty(self) -> bool:
        """True if nothing has been written yet."""
        return self.group.start == 0
