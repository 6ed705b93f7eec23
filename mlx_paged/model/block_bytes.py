"""BlockBytes: the host's access to the bytes of blocks and state slots, between and during steps.

A caller may read blocks that no step in flight writes, and write blocks that no step in flight
reads or writes. Steps launched afterwards see the new bytes.

- `SharedBlockBytes` reads and writes the pools' memory directly, in no stream, where host and
  device share it: the CPU's, and Metal's.
- `StagedBlockBytes` (`staged_blocks.py`) moves bytes through the stream of a device with memory of
  its own: NVIDIA's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged import kernels
from mlx_paged.model.layout import KVCacheGroupSpec
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.pages import host_bytes

Bytes = npt.NDArray[np.uint8]

#: Called on the thread of the engine once a block has been read.
OnRead = Callable[[], object]


class NoAccessError(ValueError):
    """The blocks cannot be read or written on this device; the message says why."""


class Rows(NamedTuple):
    """A pool, and the part of each block that it holds.

    Attributes:
        num_rows: Number of blocks, or of state slots, which the pool's memory consists of.
        begin, end: Range of a row's bytes within the bytes of a block.
    """

    pool: mx.array
    num_rows: int
    begin: int
    end: int


class BlockBytes(ABC):
    """The bytes of the blocks of each KV cache group, as the KV manager numbers the groups.

    The bytes of a block are those of the key pool and the value pool of each layer, in order.

    Args:
        groups: Specs of the layers of each group with blocks. Recurrent layers come after these.
        companion: Another model whose layers have the blocks of the first group, too.

    Raises:
        NoAccessError: The blocks cannot be read or written on this device.
    """

    def __init__(
        self,
        model: PagedModel,
        groups: Sequence[Sequence[KVCacheGroupSpec]],
        companion: PagedModel | None = None,
    ) -> None:
        # Without these kernels, MLX operations replace the pools instead of writing in place.
        for kernel in {"write_kv", "copy_blocks"} & kernels.rejected:
            raise NoAccessError(f"calibration rejected the kernel {kernel}")
        self._model = model
        self._companion = companion
        self._specs = [tuple(specs) for specs in groups]
        self._pools: list[mx.array] = []
        self._rows: list[list[Rows]] = []

    @property
    def num_bytes(self) -> list[int]:
        """Bytes of one block of each group, and of a state slot if the model has any."""
        return [rows[-1].end if rows else 0 for rows in self._current()]

    @abstractmethod
    def read(self, group: int, block: int, out: Bytes, on_read: OnRead | None = None) -> None:
        """Copies a block to ``[num_bytes]`` uint8, now or later.

        Args:
            on_read: Called once `out` has the bytes; `out` must not be used before.
        """

    @abstractmethod
    def write(self, group: int, block: int, data: Bytes) -> None:
        """Overwrites a block with ``[num_bytes]`` uint8, now or in `begin_writes`."""

    @abstractmethod
    def begin_reads(self, step: int) -> None:
        """Begins the reads since the last call. Call it before `step` is launched, which may reuse
        the blocks."""

    @abstractmethod
    def begin_writes(self) -> None:
        """Begins the writes since the last call; their data may change afterwards."""

    @abstractmethod
    def collect(self, evaluated_step: int | None = None) -> None:
        """Finishes the reads begun before a step that has been evaluated; None finishes all reads,
        begun or not."""

    @abstractmethod
    def abandon(self) -> None:
        """Drops all unfinished reads and writes, after an interrupted step."""

    def _current(self) -> list[list[Rows]]:
        """Returns the parts of each group's blocks. Pools are replaced when their sizes change."""
        further = () if self._companion is None else self._companion.allocated_pools
        pools = [*self._model.allocated_pools, *further]
        if len(pools) != len(self._pools) or any(a is not b for a, b in zip(pools, self._pools)):
            self._pools = pools
            self._rows = self._all_rows(further)
            self._on_new_pools()
        return self._rows

    @abstractmethod
    def _on_new_pools(self) -> None:
        """Called when `_rows` has changed."""

    def _all_rows(self, further: Sequence[mx.array]) -> list[list[Rows]]:
        caches = self._model.attention_caches
        pools = self._model.allocated_pools
        attention, states = pools[: 2 * len(caches)], pools[2 * len(caches) :]
        found: list[list[Rows]] = []
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


def _parts(pools: Sequence[tuple[mx.array, int]]) -> list[Rows]:
    """Lays the parts of a block end to end.

    Args:
        pools: Each with its number of rows.
    """
    parts, begin = [], 0
    for pool, num_rows in pools:
        end = begin + pool.nbytes // num_rows
        parts.append(Rows(pool, num_rows, begin, end))
        begin = end
    return parts


class SharedBlockBytes(BlockBytes):
    """Blocks in memory that the host shares. No call waits."""

    def __init__(
        self,
        model: PagedModel,
        groups: Sequence[Sequence[KVCacheGroupSpec]],
        companion: PagedModel | None = None,
    ) -> None:
        super().__init__(model, groups, companion)
        # ``[num_rows, row_bytes]`` of each pool of each group
        self._memory: list[list[Bytes]] = []

    def _on_new_pools(self) -> None:
        self._memory = [
            [host_bytes(rows.pool).reshape(rows.num_rows, -1) for rows in group]
            for group in self._rows
        ]

    def read(self, group: int, block: int, out: Bytes, on_read: OnRead | None = None) -> None:
        for rows, memory in zip(self._current()[group], self._memory[group], strict=True):
            out[rows.begin : rows.end] = memory[block]
        if on_read is not None:
            on_read()

    def write(self, group: int, block: int, data: Bytes) -> None:
        for rows, memory in zip(self._current()[group], self._memory[group], strict=True):
            memory[block] = data[rows.begin : rows.end]

    def begin_reads(self, step: int) -> None:
        pass

    def begin_writes(self) -> None:
        pass

    def collect(self, evaluated_step: int | None = None) -> None:
        pass

    def abandon(self) -> None:
        pass
