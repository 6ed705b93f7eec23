"""PoolMemory: returns the memory of unused blocks to the system, and reclaims it on demand.

There are two ways, by device:

- *Discard* (CPU on Linux): returns the pages of free blocks; the next write brings them back. Pools
  keep their size, so nothing else changes.
- *Resize* (Metal, where the system keeps whole buffers): moves blocks in use to the front, and
  replaces the pools with smaller ones, which grow when the scheduler lacks room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_paged.core import BlockCopy, KVManager
from mlx_paged.engine.kv_cache_config import KVCacheConfig, PoolSizes
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.model import pages
from mlx_paged.model.layout import KVCacheGroupSpec

# A pool shrinks to the blocks in use plus 1/_SPARE, and only if that frees 1/_WORTHWHILE.
_SPARE = 4
_WORTHWHILE = 4


class Companion(Protocol):
    """Pools of another model with the block ids of the full group, such as a draft model's."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all its layers."""

    def allocate(self, num_blocks: int) -> None:
        """Reallocates the pools. Their contents are lost."""

    def copied(self, copies: Sequence[BlockCopy]) -> None:
        """Records that blocks of the full group were copied."""

    def resize(self, num_blocks: int) -> None:
        """Changes the number of blocks; keeps the contents of the first ones."""

    def discard_blocks(self, runs: Sequence[tuple[int, int]]) -> None:
        """Returns the memory of free blocks; each run is (first, end)."""


class PoolMemory:
    """The memory of an engine's pools.

    Args:
        kv_config: Derives all pool sizes from the size of the full group.
        sizes: The configured sizes, which the runner's pools have.
        new_kv: Creates an empty KV store of the configured sizes.
        step_blocks: Blocks of the largest step.
        companion: Further pools that follow those of the full group.

    Attributes:
        num_blocks: Blocks of the full group's pool now.
        resizes: True to resize, False to discard.
    """

    def __init__(
        self,
        runner: ModelRunner,
        kv_config: KVCacheConfig,
        sizes: PoolSizes,
        new_kv: Callable[[], KVManager],
        *,
        step_blocks: int,
        companion: Companion | None = None,
    ) -> None:
        self._companion = companion
        self._runner = runner
        self._kv_config = kv_config
        self._full = sizes
        self._new_kv = new_kv
        self._step_blocks = step_blocks
        self.num_blocks = sizes.num_blocks
        self.resizes = not pages.can_discard(runner.model.platform)
        self._is_torn = False  # True while a resize is incomplete
        self._last_discard = -1  # newest step that was launched before
        others = [s for s in runner.model.layout.group_specs if s not in kv_config.windows]
        self._specs: list[list[KVCacheGroupSpec]] = [others, *([w] for w in kv_config.windows)]

    @property
    def is_shrunk(self) -> bool:
        """True while the pools are smaller than configured."""
        return self.num_blocks < self._full.num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the full group."""
        return self._bytes_per_block(0)

    def _bytes_per_block(self, number: int) -> int:
        model = self._runner.model
        per_token = sum(model.layout.bytes_per_token(spec) for spec in self._specs[number])
        if number == 0 and self._companion is not None:
            per_token += self._companion.bytes_per_token
        return per_token * model.block_size

    def _sizes(self, num_blocks: int) -> list[int]:
        """Returns the blocks of each attention group, by the blocks of the full one."""
        sizes = self._kv_config.sizes(num_blocks)
        return [sizes.num_blocks, *sizes.window_blocks]

    def make_kv(self) -> KVManager:
        """Creates an empty KV store over the pools as they are.

        Reallocates them, without their contents, if a resize was interrupted.
        """
        if self._is_torn:
            sizes = self._kv_config.sizes(self.num_blocks)
            self._runner.allocate(
                self._kv_config.blocks_by_group(sizes), self._full.num_state_slots
            )
            if self._companion is not None:
                self._companion.allocate(self.num_blocks)
            self._is_torn = False
        self._last_discard = -1
        kv = self._new_kv()
        for number, size in enumerate(self._sizes(self.num_blocks)):
            if size < kv.attention[number].pool.num_blocks:
                kv.compact(size, number)
        return kv

    def drop_features(self, keys: Sequence[bytes]) -> int:
        """Drops features of images, video and audio; returns their bytes."""
        media = self._runner.media
        if media is None or not keys:
            return 0
        before = media.store.num_bytes
        media.store.drop(keys)
        return before - media.store.num_bytes

    # Discarding.

    def discard(self, kv: KVManager) -> int:
        """Discards the memory of free blocks and state slots; returns the bytes that were in use.

        A step may be in flight: it touches no free block.
        """
        num_bytes, model = 0, self._runner.model
        for group, specs in zip(kv.attention, self._specs):
            runs, num_fresh = self._runs(group.pool.free_since)
            for spec in specs:
                model.discard_blocks(runs, spec)
            if group.number == 0 and self._companion is not None and runs:
                self._companion.discard_blocks(runs)
            num_bytes += num_fresh * self._bytes_per_block(group.number)
        if kv.states is not None:
            runs, num_fresh = self._runs(kv.states.pool.free_since)
            model.discard_slots(runs)
            num_bytes += num_fresh * model.layout.bytes_per_slot
        self._last_discard = kv.pool.launched_step
        return num_bytes

    def _runs(self, free_since: Callable[[int], list[int]]) -> tuple[list[tuple[int, int]], int]:
        """Returns the runs of free blocks to discard, and how many blocks in them were used."""
        fresh = free_since(self._last_discard)
        if not fresh:
            return [], 0
        return pages.runs_of(free_since(-1), fresh), len(free_since(max(0, self._last_discard)))

    def hold_pages(self, holds: bool) -> None:
        """Turns huge pages off or on: they would refill their discarded parts."""
        if not self.resizes:
            self._runner.model.allow_huge_pages(not holds)

    # Resizing. No step may be in flight.

    def min_blocks(self, kv: KVManager, num_running: int) -> int:
        """Returns the smallest full group that holds what is in use and lets sequences grow."""
        used = [group.pool.num_used + group.pool.num_quarantined for group in kv.attention]
        room = max(used[0] // _SPARE, self._step_blocks, num_running)
        size, full = 1 + used[0] + room, self._full.num_blocks
        while size < full and any(
            blocks < 1 + count + num_running for blocks, count in zip(self._sizes(size), used)
        ):
            size += max(1, size // _SPARE)
        return min(size, full)

    def is_worthwhile(self, num_blocks: int) -> bool:
        """True if shrinking to `num_blocks` frees enough to be worth the copy."""
        return num_blocks <= self.num_blocks - self.num_blocks // _WORTHWHILE

    def is_short(self, kv: KVManager, num_running: int) -> bool:
        """True if the running sequences might not find a block each."""
        return any(group.pool.num_available_later < num_running for group in kv.attention)

    def is_full(self, kv: KVManager, num_running: int) -> bool:
        """True if cached blocks will be evicted soon."""
        return any(group.pool.num_free <= num_running for group in kv.attention)

    def grown(self) -> int:
        """Returns the next larger size."""
        return min(self._full.num_blocks, self.num_blocks + self.num_blocks // 2 + 1)

    @property
    def full(self) -> int:
        """The configured size."""
        return self._full.num_blocks

    def resize(self, kv: KVManager, num_blocks: int) -> int:
        """Changes the size of the full group's pool to `num_blocks`, and the others with it.

        Returns:
            Bytes given back; negative if the pools grew.
        """
        before = self.num_bytes
        self._is_torn = True
        for number, size in enumerate(self._sizes(num_blocks)):
            pool = kv.attention[number].pool
            if size < pool.num_blocks:
                self._copy(kv.compact(size, number), number)
                self._resize(number, size)
            elif size > pool.num_blocks:
                self._resize(number, size)
                pool.grow(size)
        self.num_blocks = num_blocks
        self._is_torn = False
        return before - self.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools. Parts that were never written may take no physical memory."""
        num_bytes = sum(pool.nbytes for pool in self._runner.model.pools())
        if self._companion is not None:
            block_bytes = self._companion.bytes_per_token * self._runner.block_size
            num_bytes += self.num_blocks * block_bytes
        return num_bytes

    def _resize(self, number: int, num_blocks: int) -> None:
        for spec in self._specs[number]:
            self._runner.model.resize(num_blocks, spec)
        if number == 0 and self._companion is not None:
            self._companion.resize(num_blocks)

    def _copy(self, copies: Sequence[BlockCopy], number: int) -> None:
        if copies:
            pairs = mx.array(np.array(copies, dtype=np.int32))
            for spec in self._specs[number]:
                self._runner.model.copy_blocks(pairs, spec)
            if number == 0 and self._companion is not None:
                self._companion.copied(copies)
