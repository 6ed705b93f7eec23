"""PagedStore: all cached keys, values and states of one mlx-lm model."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any
from weakref import WeakSet

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged.core import BlockTables, KVManager, PrefixQuery, WindowGroupSpec
from mlx_paged.core.kv.tree import TOKEN_TYPE, PrefixMatch
from mlx_paged.drop_in.locking import exclusive
from mlx_paged.drop_in.runner import WINDOW_SLACK, DropInRunner
from mlx_paged.drop_in.states import Snapshots, State
from mlx_paged.model.kv_formats import KVFormat
from mlx_paged.model.layout import KVCacheGroupSpec
from mlx_paged.model.plan import build_plan
from mlx_paged.ops import AttentionPlan

BLOCK_SIZE = 32
_INITIAL_BLOCKS = 1 + 1024 // BLOCK_SIZE
# Approximate host memory of a prefix cache block; the whole cost of a block if no layer has
# attention.
_NODE_BYTES = 1024


@dataclass(frozen=True)
class StoreStats:
    """Statistics of a model's store.

    Attributes:
        num_blocks: Allocated blocks; grows as needed.
        num_used_blocks: Blocks held by live prompt caches and by generating sequences.
        num_cached_blocks: Blocks kept only for prefix reuse.
        num_prompt_tokens: Prompt tokens so far.
        num_cached_tokens: Prompt tokens found in the store.
        num_evictions: Blocks evicted to make room. Like the block counts above, this excludes
            sliding-window layers.
        num_window_blocks: Allocated blocks of sliding-window layers, summed over all windows.
        num_used_window_blocks: Window blocks in use. A long text uses only those in its window.
        num_cached_window_blocks: Window blocks kept only for prefix reuse.
        nbytes: Memory of the whole store.
    """

    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_evictions: int
    num_window_blocks: int
    num_used_window_blocks: int
    num_cached_window_blocks: int
    nbytes: int

    @property
    def num_free_blocks(self) -> int:
        """Blocks that are free or in quarantine."""
        return self.num_blocks - self.num_used_blocks - self.num_cached_blocks

    @classmethod
    def sum(cls, stats: Sequence[StoreStats]) -> StoreStats:
        """Sums the statistics of several stores."""
        return cls(**{f.name: sum(getattr(s, f.name) for s in stats) for f in fields(cls)})


class SequenceHandle:
    """A sequence's hold on its blocks; ends when the object is collected.

    mlx-lm's prompt caches are plain objects: a copy is a fork, and there is no explicit close.
    """

    __slots__ = ("__weakref__", "_ended", "is_torn", "num_drafts", "state", "tables")

    def __init__(
        self, tables: BlockTables, ended: deque[BlockTables], state: State | None = None
    ) -> None:
        self.tables = tables
        self.num_drafts = 0  # tokens at the end that may be trimmed
        self.is_torn = False  # True if block copies or writes may be missing
        # State of the recurrent layers; None before the first token, or without such layers.
        self.state = state
        self._ended = ended

    def __del__(self) -> None:
        # Runs in any thread at any time, so only queue the blocks; the store's next call frees
        # them.
        self._ended.append(self.tables)


class PagedStore:
    """Pools for every layer of a model, and the KV manager of their blocks.

    *Block reuse.* The store does not know when the device finishes the graphs it has built. Graphs
    built since the last `settle` may still read a released block, so all of them count as one step
    of the KV manager. No block is reused before the next `settle`, which waits for everything.

    *Lazy calls.* A single-threaded program that calls the model itself may evaluate the result
    later, or never. Such a step is only built; the next operation that needs the pools starts it.
    It is built on a stream that any thread can run. If its input was built on another stream, and a
    second thread needs the pools first, the cache is lost and raises an error when used.

    *Threads.* MLX streams belong to threads: a thread cannot run a graph built on another thread's
    stream. A thread that builds reads or writes of the pools therefore starts them on the device
    before it releases the store (`_schedule`). They depend on all earlier work, on any stream. Only
    the thread that holds the store touches the pool arrays.

    Args:
        model: See `DropInRunner`. The store does not keep it alive.
        cache_bytes: Size up to which the store keeps unused prefixes. It grows to this size before
            it evicts, and grows past it only for live sequences.
        lock: See `exclusive`. All stores of a model share one lock.
        kv_format: See `DropInRunner`.

    Raises:
        UnsupportedModelError: The model cannot have a store.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        cache_bytes: int,
        lock: threading.RLock | None = None,
        kv_format: KVFormat | None = None,
    ) -> None:
        self.lock: Any = threading.RLock() if lock is None else lock
        self.is_interrupted = False  # an exception cut off an operation
        num_blocks = _INITIAL_BLOCKS
        self.block_size = BLOCK_SIZE
        self.flat = DropInRunner(
            model, num_blocks=num_blocks, block_size=BLOCK_SIZE, kv_format=kv_format
        )
        self.block_bytes = BLOCK_SIZE * self.flat.bytes_per_token  # in all layers
        self.has_states = self.flat.layout.has_states
        self.kv = KVManager(
            num_blocks,
            BLOCK_SIZE,
            windows=[_window_group(group_spec, num_blocks) for group_spec in self.flat.windows],
        )
        self.kv.launch_step(1)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.limit = cache_bytes
        self.snapshots = Snapshots(
            self.kv,
            max_bytes=self._share_of_limit,
            state_bytes=self.flat.layout.bytes_per_slot,
        )
        self._ended: deque[BlockTables] = deque()
        self.num_compactions = 0  # each one changes block ids
        self._is_retired = False
        # Pools and states as of the last `_schedule`.
        self._scheduled = self.flat.pools()
        self._newest_states: list[mx.array] = []
        self._stream: mx.Stream | None = None  # for lazy calls
        # Lazy work that has not been started on the device.
        self._lazy_leases: WeakSet[SequenceHandle] = WeakSet()
        self._lazy_thread: int | None = None
        self._begun = self._scheduled

    @property
    def _share_of_limit(self) -> int:
        """Memory limit for blocks. Snapshots get an equal share if the model has states."""
        return self.limit // 2 if self.has_states else self.limit

    @property
    def _max_cached_blocks(self) -> int:
        """Number of blocks, per group, up to which the store grows for unused prefixes."""
        return max(2, self._share_of_limit // max(_NODE_BYTES, self.block_bytes))

    def _least_blocks(self, number: int) -> int:
        """Number of blocks that a group needs for live sequences, and for unused prefixes within
        the limit."""
        pool = self.kv.attention[number].pool
        within = max(0, self._max_cached_blocks - 1 - pool.num_used)
        return max(_INITIAL_BLOCKS, 1 + pool.num_used + min(pool.num_cached, within))

    @property
    def store(self) -> PagedStore:
        """Lets `exclusive` find the store."""
        return self

    # Leases.

    @exclusive
    def lease(self) -> SequenceHandle:
        """Returns a handle for a new sequence without blocks."""
        self._collect()
        return SequenceHandle(self.kv.open(array(TOKEN_TYPE)), self._ended)

    @exclusive
    def fork(self, lease: SequenceHandle, num_tokens: int) -> SequenceHandle:
        """Returns a handle with the same blocks, for a sequence with the first `num_tokens` tokens.

        Nothing is copied on the device until one of the two is written.
        """
        self._collect()
        tables = lease.tables
        state = None if lease.state is None else self.flat.alone(lease.state)
        return SequenceHandle(self.kv.fork(tables, tables.tokens[:num_tokens]), self._ended, state)

    def _collect(self) -> None:
        """Frees the blocks of ended leases, and shrinks groups that have much unused memory."""
        if self._ended:
            while self._ended:
                if self.kv.is_open(self._ended[0]):
                    self.kv.free(self._ended[0])
                self._ended.popleft()
            for group in self.kv.attention:
                num_blocks, least = group.pool.num_blocks, self._least_blocks(group.number)
                most = self._max_cached_blocks
                if num_blocks >= 4 * least or num_blocks > max(most, 2 * least):
                    self._cut(max(least, min(2 * least, most)), group.number)
        if self._is_retired and self.kv.enable_prefix_caching:
            self.kv.reset_prefix_cache()
            self.snapshots.clear()
            self.kv.enable_prefix_caching = False

    # Steps.

    @exclusive
    def forward(
        self,
        leases: Sequence[SequenceHandle],
        starts: Sequence[int],
        lengths: Sequence[int],
        tokens: mx.array,
        logit_rows: np.ndarray,
        input_embeddings: mx.array | None = None,
        *,
        is_lazy: bool = False,
    ) -> mx.array:
        """Starts a step that computes ``[start, start + length)`` of each sequence.

        Keys and values are started on the device. Logits stay lazy.

        Args:
            tokens: ``[num_rows]``, all sequences concatenated.
            logit_rows: Rows that need logits.
            input_embeddings: ``[num_rows, hidden_size]``, replaces the token embeddings.
            is_lazy: Only build the step, provided that the program has no other threads.

        Returns:
            ``[len(logit_rows), vocab_size]``.
        """
        if is_lazy and threading.active_count() == 1:
            if self._stream is None:
                self._begin()
                self._stream = mx.new_thread_unsafe_stream(mx.default_device())
            with mx.stream(self._stream):
                logits = self._build(leases, starts, lengths, tokens, logit_rows, input_embeddings)
            self._scheduled = self.flat.pools()
            self._lazy_thread = threading.get_ident()
            self._lazy_leases.update(leases)
            return logits
        self._begin()
        logits = self._build(leases, starts, lengths, tokens, logit_rows, input_embeddings)
        self._schedule()
        return logits

    def _build(
        self,
        leases: Sequence[SequenceHandle],
        starts: Sequence[int],
        lengths: Sequence[int],
        tokens: mx.array,
        logit_rows: np.ndarray,
        input_embeddings: mx.array | None,
    ) -> mx.array:
        ends = [start + length for start, length in zip(starts, lengths)]
        if self.flat.windows:
            for lease, start in zip(leases, starts):
                self.kv.slide(lease.tables, max(0, start - lease.num_drafts))
        tables = [self._own(leases, starts, ends, i) for i in range(self.flat.num_groups)]
        logits, states = self.flat.forward(
            tokens.astype(mx.int32),
            tables,
            ends,
            lengths,
            logit_rows,
            input_embeddings,
            [lease.state for lease in leases],
        )
        for lease, state in zip(leases, states):
            lease.state = state
        return logits

    @exclusive
    def plan_write(
        self,
        leases: Sequence[SequenceHandle],
        start: int,
        length: int,
        number: int,
        num_everywhere: int,
    ) -> AttentionPlan:
        """Prepares to write ``[start, start + length)`` of sequences, layer by layer.

        Args:
            number: Group number of the layers.
            num_everywhere: Number of tokens that every layer has.
        """
        self._begin()
        for lease in leases:
            self.kv.slide(lease.tables, num_everywhere)
        ends = [start + length] * len(leases)
        tables = self._own(leases, [start] * len(leases), ends, number)
        return build_plan(tables, ends, [length] * len(leases), block_size=self.block_size)

    def _own(
        self,
        leases: Sequence[SequenceHandle],
        starts: Sequence[int],
        ends: Sequence[int],
        number: int,
    ) -> list[list[int]]:
        """Makes ``[start, end)`` of each sequence writable; returns its tables in a group."""
        self._collect()
        kv, pool = self.kv, self.kv.attention[number].pool
        for lease, start, end in zip(leases, starts, ends):
            tables = lease.tables
            if lease.is_torn:
                raise RuntimeError(
                    "[paged prompt cache] what was to be in it was never computed (an exception "
                    "came between, or another thread before the result was asked for): make a "
                    "new one"
                )
            lease.is_torn = True
            self._make_room(kv.num_to_write(tables, start, end, number), number)
            copies = kv.make_writable(tables, start, end, number)
            if copies is None:  # all blocks are in use
                missing = kv.num_to_write(tables, start, end, number) - pool.num_available
                self._grow(pool.num_blocks + max(missing, pool.num_blocks // 4), number)
                copies = kv.make_writable(tables, start, end, number)
                assert copies is not None
            if copies:
                # Copy now: the next sequence may evict a source block. Later writes take the pools
                # from this copy, so they run after it.
                self.flat.copy_blocks(copies, number)
                self._schedule()
            lease.is_torn = False
        return [lease.tables.attention[number].blocks for lease in leases]

    def can_trim(self, leases: Sequence[SequenceHandle], layer: int, num_tokens: int) -> bool:
        """True if sequences still hold all that a layer reads after the first `num_tokens`
        tokens."""
        group_spec = self.flat.spec(layer).group_spec
        number = self.flat.group_of(group_spec)
        needed = group_spec.first_visible(num_tokens) if num_tokens else self.block_size << 32
        firsts = (lease.tables.attention[number].first for lease in leases)
        return all(first * self.block_size <= needed for first in firsts)

    def _make_room(self, num_blocks: int, number: int) -> None:
        """Grows the store up to its limit for unused prefixes; then `make_writable` evicts."""
        pool = self.kv.attention[number].pool
        if pool.num_free < num_blocks and pool.num_quarantined:
            self.settle()
        if pool.num_free < num_blocks and pool.num_blocks < self._max_cached_blocks:
            enough = pool.num_blocks + num_blocks - pool.num_free
            self._grow(min(max(2 * pool.num_blocks, enough), self._max_cached_blocks), number)
        if pool.num_free < num_blocks:
            self.settle()  # so that evicted blocks are free at once

    def _grow(self, num_blocks: int, number: int) -> None:
        self.flat.grow(num_blocks, number)
        self.kv.attention[number].pool.grow(num_blocks)
        self._schedule()

    def _cut(self, num_blocks: int, number: int) -> None:
        """Shrinks a group to `num_blocks`; moves used blocks into the remaining part."""
        if num_blocks >= self.kv.attention[number].pool.num_blocks:
            return
        self.settle()
        copies = self.kv.compact(num_blocks, number)
        self.num_compactions += 1
        if copies:
            self.flat.copy_blocks(copies, number)
        self.flat.cut(num_blocks, number)
        self._schedule()

    @exclusive
    def settle(self) -> None:
        """Waits for all reads and writes; released blocks are then free."""
        self._begin()
        mx.eval(self.flat.pools(), self.flat.unfinished())
        mx.synchronize()
        if not self._is_between_steps:
            self.kv.on_step_evaluated(self.kv.pool.launched_step)
        self.kv.launch_step(self.kv.pool.launched_step + 1)

    @property
    def _is_between_steps(self) -> bool:
        """True if `settle` was interrupted; otherwise a step is always open."""
        return self.kv.pool.evaluated_step == self.kv.pool.launched_step

    def pools(self) -> list[mx.array]:
        """Returns the current pool arrays."""
        return self.flat.pools()

    def _schedule(self, *others: mx.array) -> None:
        """Starts all built work on the device, along with `others`."""
        states = self.flat.unfinished()
        mx.async_eval(*others, states, self.flat.pools())  # type: ignore[no-untyped-call]
        self._newest_states = states or self._newest_states
        self._scheduled = self._begun = self.flat.pools()
        self._lazy_thread = None
        self._lazy_leases.clear()

    def _begin(self) -> None:
        """Starts the work of lazy calls on the device."""
        if self._lazy_thread is None:
            return
        try:
            self._schedule()
        except RuntimeError:
            if self._lazy_thread == threading.get_ident():
                raise
            # Only the lazy thread could run it. The older pool arrays are the same memory, and the
            # lost writes never happened.
            for lease in list(self._lazy_leases):
                lease.is_torn = True
            self.flat.restore(self._begun)
            self._schedule()

    def leave(self) -> None:
        """Called by `exclusive` before the thread releases the store."""
        if self.flat.has_unfinished and self._lazy_thread is None:
            self._schedule()

    @exclusive
    def write(self, layer: int, plan: AttentionPlan, keys: mx.array, values: mx.array) -> None:
        """Writes ``[batch, num_kv_heads, length, head_dim]`` keys and values of one layer."""
        self._begin()
        self.flat.write(layer, plan, keys, values)
        self._schedule()

    @exclusive
    def read(
        self, layer: int, leases: Sequence[SequenceHandle], start: int, end: int
    ) -> tuple[mx.array, mx.array]:
        """Dense ``[batch, num_kv_heads, end - start, head_dim]`` keys and values of one layer."""
        self._begin()
        number = self.flat.group_of(self.flat.spec(layer).group_spec)
        tables = [lease.tables.attention[number].blocks for lease in leases]
        keys, values = self.flat.read(layer, tables, start, end)
        self._schedule(keys, values)
        return keys, values

    @exclusive
    def written(self) -> mx.array:
        """Returns an array that is evaluated once all work so far is done.

        A thread can wait for it without holding the store, unlike for the pools.
        """
        self._begin()
        [done] = mx.depends([mx.zeros(1)], self.flat.pools() + self._newest_states)
        self._schedule(done)
        return done

    # Prefixes.

    @exclusive
    def computing_next_block(self, tokens: Sequence[int], query: PrefixQuery) -> Any:
        """See `KVManager.computing_next_block`."""
        return self.kv.computing_next_block(tokens, query)

    @exclusive
    def count(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Adds to the counts of prompt tokens and of cached prompt tokens."""
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens

    # Prefixes.

    def match(self, query: PrefixQuery) -> PrefixMatch:
        """Returns the longest stored prefix that a sequence can continue from."""
        match = self.kv.match(query)
        while self.has_states:
            limited = self.snapshots.limit(match)
            match = self.kv.limit(limited)  # windows may not reach back from there
            if match.num_full_blocks == limited.num_full_blocks:
                break
        return match

    # The whole store.

    def retire(self) -> None:
        """Stops sharing after a change of weights; live holders keep their content.

        Takes effect at the next call, because a finalizer may run this at any time in any thread.
        """
        self._is_retired = True

    @exclusive
    def set_limit(self, limit: int) -> None:
        """Changes `cache_bytes`; frees the excess at once."""
        self.limit = limit
        self.snapshots.set_limit(self._share_of_limit)
        self._collect()
        for group in self.kv.attention:
            if group.pool.num_blocks > self._max_cached_blocks:
                self._cut(self._least_blocks(group.number), group.number)

    @exclusive
    def clear(self) -> None:
        """Drops every prefix that no live cache holds, and frees its memory."""
        self._collect()
        self.kv.reset_prefix_cache()
        self.snapshots.clear()
        for number in range(self.flat.num_groups):
            self._cut(self._least_blocks(number), number)

    def recover(self) -> None:
        """Repairs the store after an interrupted operation.

        Drops work that was built but not started; only the interrupted caller loses it.
        """
        self.flat.restore(self._scheduled)
        self.flat.unfinished()
        try:
            self.kv.check_integrity()
        except Exception:
            self.settle()
            self.kv.recount()
            self.snapshots.clear()
        if self._is_between_steps:
            self.kv.launch_step(self.kv.pool.launched_step + 1)

    @exclusive
    def stats(self) -> StoreStats:
        """Current statistics."""
        self._collect()
        pool, *windows = [group.pool for group in self.kv.attention]
        nbytes = sum(
            group.pool.num_blocks * self.flat.block_bytes(group.number)
            for group in self.kv.attention
        )
        return StoreStats(
            num_blocks=pool.num_usable,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_evictions=self.kv.counters.num_evictions,
            num_window_blocks=sum(window.num_usable for window in windows),
            num_used_window_blocks=sum(window.num_used for window in windows),
            num_cached_window_blocks=sum(window.num_cached for window in windows),
            nbytes=nbytes + self.flat.state_bytes,
        )

    @exclusive
    def check_integrity(self) -> None:
        """Recounts blocks, prefix tree and tables; raises `IntegrityError` on a mismatch."""
        self._collect()
        self.kv.check_integrity()


def _window_group(group_spec: KVCacheGroupSpec, num_blocks: int) -> WindowGroupSpec:
    assert group_spec.window is not None
    return WindowGroupSpec(
        num_blocks,
        span=group_spec.window + WINDOW_SLACK,
        first_visible=lambda position: max(0, group_spec.first_visible(position) - WINDOW_SLACK),
    )
