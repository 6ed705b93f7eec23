"""BlockBytes: the host's access to the bytes of blocks and state slots, between and during steps.

It reads and writes the pools' memory directly, in no stream. So a caller may only touch blocks that
no step in flight reads or writes; a step launched afterwards sees what was written. This takes
memory that host and device share: the CPU's, or Metal's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged.model.layout import KVCacheGroupSpec
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.pages import host_bytes

Bytes = npt.NDArray[np.uint8]


class _Rows(NamedTuple):
    """The part of a block that one pool holds."""

    rows: Bytes  # [num_blocks, num_bytes]
    begin: int  # within the bytes of a block
    end: int


class BlockBytes:
    """The bytes of the blocks of each KV cache group, as the KV manager numbers the groups.

    The bytes of a block are those of the key pool and the value pool of each layer, in order.

    Args:
        groups: Specs of the layers of each group with blocks. Recurrent layers come after these.
        companion: Another model whose layers have the blocks of the first group, too.
    """

    def __init__(
        self,
        model: PagedModel,
        groups: Sequence[Sequence[KVCacheGroupSpec]],
        companion: PagedModel | None = None,
    ) -> None:
        self._model = model
        self._companion = companion
        self._specs = [tuple(specs) for specs in groups]
        self._pools: list[mx.array] = []
        self._rows: list[list[_Rows]] = []

    @property
    def num_bytes(self) -> list[int]:
        """Bytes of one block of each group, and of a state slot if the model has any."""
        return [rows[-1].end if rows else 0 for rows in self._current()]

    def read(self, group: int, block: int, out: Bytes) -> None:
        """Copies a block to ``[num_bytes]`` uint8."""
        for rows, begin, end in self._current()[group]:
            out[begin:end] = rows[block]

    def write(self, group: int, block: int, data: Bytes) -> None:
        """Overwrites a block with ``[num_bytes]`` uint8."""
        for rows, begin, end in self._current()[group]:
            rows[block] = data[begin:end]

    def _current(self) -> list[list[_Rows]]:
        """The parts of each group's blocks. Pools are replaced when their sizes change."""
        pools = [*self._model.allocated_pools, *self._further]
        if len(pools) != len(self._pools) or any(a is not b for a, b in zip(pools, self._pools)):
            self._pools = pools
            self._rows = self._all_rows()
        return self._rows

    @property
    def _further(self) -> Sequence[mx.array]:
        return () if self._companion is None else self._companion.allocated_pools

    def _all_rows(self) -> list[list[_Rows]]:
        caches = self._model.attention_caches
        pools, further = self._model.allocated_pools, list(self._further)
        attention, states = pools[: 2 * len(caches)], pools[2 * len(caches) :]
        found: list[list[_Rows]] = []
        for specs in self._specs:
            own = [
                attention[2 * i + part]
                for i, cache in enumerate(caches)
                if cache.spec.group_spec in specs
                for part in (0, 1)
            ]
            if not found:
                own += further
            found.append(_parts([(pool, pool.shape[0]) for pool in own]))
        if self._model.layout.has_states:
            found.append(_parts([(pool, pool.shape[0] * pool.shape[1]) for pool in states]))
        return found


def _parts(pools: Sequence[tuple[mx.array, int]]) -> list[_Rows]:
    """Lays the parts of a block end to end.

    Args:
        pools: Each with its number of rows.
    """
    parts, begin = [], 0
    for pool, num_rows in pools:
        rows = host_bytes(pool).reshape(num_rows, -1)
        parts.append(_Rows(rows, begin, begin + rows.shape[1]))
        begin += rows.shape[1]
    return parts
