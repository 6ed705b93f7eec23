"""ElasticKVManager: a KV store in pools that grow and shrink, for work that is evaluated lazily.

Its callers build work for the device without knowing when it is evaluated. All work since the last
`synchronize` therefore counts as one step that is always in flight: a released block is reused only
after the next `synchronize`, which waits for everything. The steps of schedulers are parts of it.

A group of blocks grows up to `max_cached_blocks` before it evicts, and past that only for live
sequences. It shrinks again once these are gone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from mlx_paged.core.kv.forking import ForkingKVManager
from mlx_paged.core.kv.specs import BlockCopy, StateGroupSpec, WindowGroupSpec
from mlx_paged.core.kv.tables import BlockTables

# Tokens that every group has room for.
_MIN_TOKENS = 1024


class DevicePools(Protocol):
    """The device's side of a store."""

    def wait(self) -> None:
        """Waits for all work that was built so far."""

    def resize(self, number: int, num_blocks: int, copies: Sequence[BlockCopy]) -> None:
        """Resizes the pools of an attention group, after it has copied some blocks."""

    def drop_state(self, slot: int) -> None:
        """Drops the state in a slot."""


class ElasticKVManager(ForkingKVManager):
    """A `ForkingKVManager` whose pools change their size. States are immutable; slots name them.

    Args:
        pools: A weak reference is enough, such as `weakref.proxy`.
        windows: Windowed groups; their number of blocks is not used.
        has_states: True if the model has recurrent layers.

    Attributes:
        max_cached_blocks: Number of blocks, per group, up to which the pools grow for unused
            prefixes.
        max_snapshots: Maximum number of unused states.
        num_compactions: Number of times that block ids have changed.
    """

    def __init__(
        self,
        pools: DevicePools,
        block_size: int,
        *,
        windows: Sequence[WindowGroupSpec] = (),
        has_states: bool = False,
    ) -> None:
        self._pools = pools
        self._min_blocks = 1 + _MIN_TOKENS // block_size
        self.max_cached_blocks = self.max_snapshots = sys.maxsize
        self.num_compactions = 0
        states = StateGroupSpec(self._min_blocks, keeps_newest=True, on_free=self._drop_state)
        super().__init__(
            self._min_blocks,
            block_size,
            windows=[WindowGroupSpec(self._min_blocks, w.span, w.first_visible) for w in windows],
            states=states if has_states else None,
            supply=self._supply,
        )
        self.open_step()

    # Steps.

    def launch_step(self, step: int) -> tuple[tuple[BlockCopy, ...], ...]:
        return tuple(group.take_copies() for group in self.attention)

    def on_step_evaluated(self, step: int) -> None:
        """Does nothing; see `synchronize`."""

    def synchronize(self) -> None:
        """Waits for all work; released blocks are then free."""
        self._pools.wait()
        for group in self.attention:
            pool = group.pool
            if pool.evaluated_step < pool.launched_step:
                pool.on_step_evaluated(pool.launched_step)
        self.open_step()

    def open_step(self) -> None:
        """Begins the next step, unless one is open: `synchronize` may have been interrupted."""
        for group in self.attention:
            pool = group.pool
            if pool.evaluated_step == pool.launched_step:
                pool.on_step_launched(pool.launched_step + 1)

    # Sizes.

    def commit(self, tables: BlockTables, num_computed_tokens: int) -> None:
        super().commit(tables, num_computed_tokens)
        self._limit_snapshots()

    def _limit_snapshots(self) -> None:
        if self.states is not None:
            self.states.limit_cached(self.max_snapshots)

    def _supply(self, number: int, num_blocks: int) -> None:
        pool = self.attention[number].pool
        if pool.num_free < num_blocks and pool.num_quarantined:
            self.synchronize()
        if pool.num_free < num_blocks and pool.num_blocks < self.max_cached_blocks:
            enough = pool.num_blocks + num_blocks - pool.num_free
            self._grow(number, min(max(2 * pool.num_blocks, enough), self.max_cached_blocks))
        if pool.num_free < num_blocks:
            self.synchronize()  # so that evicted blocks are free at once
        missing = num_blocks - pool.num_available
        if missing > 0:
            self._grow(number, pool.num_blocks + max(missing, pool.num_blocks // 4))

    def _drop_state(self, slot: int) -> None:
        self._pools.drop_state(slot)  # not bound to it: it may hold this manager

    def _grow(self, number: int, num_blocks: int) -> None:
        self._pools.resize(number, num_blocks, ())
        self.attention[number].pool.grow(num_blocks)

    def _shrink(self, number: int, num_blocks: int) -> None:
        """Shrinks a group; moves used blocks into the remaining part."""
        if num_blocks >= self.attention[number].pool.num_blocks:
            return
        self.synchronize()
        copies = self.compact(num_blocks, number)
        self.num_compactions += 1
        self._pools.resize(number, num_blocks, copies)

    def _needed(self, number: int) -> int:
        """Blocks that a group needs for live sequences, and for unused prefixes within the
        limit."""
        pool = self.attention[number].pool
        within = max(0, self.max_cached_blocks - 1 - pool.num_used)
        return max(self._min_blocks, 1 + pool.num_used + min(pool.num_cached, within))

    def give_back(self) -> None:
        """Shrinks groups that have much unused memory."""
        limit = self.max_cached_blocks
        for group in self.attention:
            num_blocks, needed = group.pool.num_blocks, self._needed(group.number)
            if num_blocks >= 4 * needed or num_blocks > max(limit, 2 * needed):
                self._shrink(group.number, max(needed, min(2 * needed, limit)))
        self._limit_snapshots()

    def set_limits(self, max_cached_blocks: int, max_snapshots: int) -> None:
        """Changes the limits; gives back the excess at once."""
        self.max_cached_blocks, self.max_snapshots = max_cached_blocks, max_snapshots
        self._limit_snapshots()
        for group in self.attention:
            if group.pool.num_blocks > max_cached_blocks:
                self._shrink(group.number, self._needed(group.number))

    def clear(self) -> None:
        """Drops every prefix that no sequence uses, and its memory."""
        self.reset_prefix_cache()
        for group in self.attention:
            self._shrink(group.number, self._needed(group.number))
