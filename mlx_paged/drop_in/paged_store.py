"""PagedStore: all cached keys, values and states of one mlx-lm model."""

from __future__ import annotations

import threading
import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any
from weakref import WeakSet

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged.core import BlockCopy, BlockTables, ElasticKVManager, StepBatch, WindowGroupSpec
from mlx_paged.core.kv.tree import TOKEN_TYPE
from mlx_paged.drop_in.locking import exclusive
from mlx_paged.drop_in.runner import WINDOW_SLACK, DropInRunner
from mlx_paged.model.kv_formats import KVFormat
from mlx_paged.model.layout import KVCacheGroupSpec, LayerSpec, StateSpec
from mlx_paged.model.plan import build_plan
from mlx_paged.model.state_arrays import State
from mlx_paged.ops import AttentionPlan

BLOCK_SIZE = 32
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

    __slots__ = ("__weakref__", "_ended", "is_torn", "num_drafts", "position", "state", "tables")

    def __init__(
        self, tables: BlockTables, ended: deque[BlockTables], state: State | None = None
    ) -> None:
        self.tables = tables
        self.num_drafts = 0  # tokens at the end that may be trimmed
        self.is_torn = False  # True if block copies or writes may be missing
        # State of the recurrent layers; None before the first token, or without such layers.
        self.state = state
        self.position = 0  # number of tokens that `state` covers; kept by `PagedStore.run`
        self._ended = ended

    def __del__(self) -> None:
        # Runs in any thread at any time, so only queue the blocks; the store's next call frees
        # them.
        self._ended.append(self.tables)


class PagedStore:
    """Pools for every layer of a model, and the KV manager of their blocks.

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
        self.block_size = BLOCK_SIZE
        self.flat = DropInRunner(model, block_size=BLOCK_SIZE, kv_format=kv_format)
        self.has_states = self.flat.layout.has_states
        # States that the prefix tree holds, or is about to, by slot.
        self.snapshots: dict[int, State] = {}
        self.kv = ElasticKVManager(
            weakref.proxy(self),
            BLOCK_SIZE,
            windows=[_window_group(group_spec) for group_spec in self.flat.windows],
            has_states=self.has_states,
        )
        self.flat.allocate(self.kv.pool.num_blocks)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._ended: deque[BlockTables] = deque()
        self._is_retired = False
        # Pools and states as of the last `_schedule`.
        self._scheduled = self.flat.pools()
        self._newest_states: list[mx.array] = []
        self._stream: mx.Stream | None = None  # for lazy calls
        # Lazy work that has not been started on the device.
        self._lazy_handles: WeakSet[SequenceHandle] = WeakSet()
        self._lazy_thread: int | None = None
        self._begun = self._scheduled
        self.set_limit(cache_bytes)

    @property
    def store(self) -> PagedStore:
        """Lets `exclusive` find the store."""
        return self

    # Handles.

    @exclusive
    def open_handle(self) -> SequenceHandle:
        """Returns a handle for a new sequence without blocks."""
        self.collect()
        return SequenceHandle(self.kv.open(array(TOKEN_TYPE)), self._ended)

    @exclusive
    def fork(self, handle: SequenceHandle, num_known: int) -> SequenceHandle:
        """Returns a handle with the same blocks, for a sequence whose first `num_known` tokens are
        known.

        Nothing is copied on the device until one of the two is written.
        """
        self.collect()
        tables = handle.tables
        state = None if handle.state is None else self.flat.states.alone(handle.state)
        return SequenceHandle(self.kv.fork(tables, tables.tokens[:num_known]), self._ended, state)

    def hold(self, tables: BlockTables, state: State | None, position: int) -> SequenceHandle:
        """Returns a handle for the sequence of a scheduler.

        Args:
            state: Its recurrent state after `position` tokens. If its next step begins elsewhere,
                that step reads a snapshot.
        """
        handle = SequenceHandle(tables, self._ended, state)
        handle.position = position
        return handle

    def nbytes(self, handles: Sequence[SequenceHandle], layer: int) -> int:
        """Memory of a layer's blocks or states, including shared ones."""
        spec = self.flat.specs[layer]
        if isinstance(spec, StateSpec):
            return sum(handle.state is not None for handle in handles) * spec.bytes_per_slot
        if not isinstance(spec, LayerSpec):
            return 0
        number = self.flat.group_of(spec.group_spec)
        num_blocks = sum(len(handle.tables.attention[number].live) for handle in handles)
        return num_blocks * self.block_size * spec.bytes_per_token

    def collect(self) -> None:
        """Frees the blocks of ended handles, and gives back unused memory."""
        if self._ended:
            while self._ended:
                if self.kv.is_open(self._ended[0]):
                    self.kv.free(self._ended[0])
                self._ended.popleft()
            self.kv.give_back()
        if self._is_retired and self.kv.enable_prefix_caching:
            self.kv.reset_prefix_cache()
            self.kv.enable_prefix_caching = False

    # Steps.

    @exclusive
    def forward(
        self,
        handles: Sequence[SequenceHandle],
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
                logits = self._build(handles, starts, lengths, tokens, logit_rows, input_embeddings)
            self._scheduled = self.flat.pools()
            self._lazy_thread = threading.get_ident()
            self._lazy_handles.update(handles)
            return logits
        self._begin()
        logits = self._build(handles, starts, lengths, tokens, logit_rows, input_embeddings)
        self._schedule()
        return logits

    def _build(
        self,
        handles: Sequence[SequenceHandle],
        starts: Sequence[int],
        lengths: Sequence[int],
        tokens: mx.array,
        logit_rows: np.ndarray,
        input_embeddings: mx.array | None,
    ) -> mx.array:
        ends = [start + length for start, length in zip(starts, lengths)]
        if self.flat.windows:
            for handle, start in zip(handles, starts):
                self.kv.slide(handle.tables, max(0, start - handle.num_drafts))
        tables = [
            self._make_writable(handles, starts, ends, i) for i in range(self.flat.num_groups)
        ]
        logits, states = self.flat.forward(
            tokens.astype(mx.int32),
            tables,
            ends,
            lengths,
            logit_rows,
            input_embeddings,
            [handle.state for handle in handles],
        )
        for handle, state, end in zip(handles, states, ends):
            move = self.kv.move_state(handle.tables, end)
            assert move is not None
            self._advance(handle, state, end, move.write)
        return logits

    def _advance(self, handle: SequenceHandle, state: State, position: int, slot: int) -> None:
        """Sets the state of a sequence, and keeps it if a snapshot is due there."""
        handle.state, handle.position = state, position
        pending = handle.tables.state.pending  # type: ignore[union-attr]
        if pending and pending[-1][1] == slot:
            self.snapshots[slot] = self.flat.states.alone(state)

    @exclusive
    def run(
        self,
        batch: StepBatch,
        handles: Sequence[SequenceHandle],
        tokens: mx.array,
        logit_rows: np.ndarray,
    ) -> mx.array:
        """Starts a step that a scheduler planned.

        Args:
            tokens: ``[num_rows]`` int32, all sequences concatenated.
            logit_rows: Rows that need logits.

        Returns:
            ``[len(logit_rows), vocab_size]``, lazily.
        """
        self._begin()
        for number, copies in enumerate(batch.block_copies):
            if copies:
                self.flat.copy_blocks(copies, number)
        for handle, start, slots in zip(handles, batch.starts, batch.slots):
            if handle.position != start:  # it takes cached tokens
                handle.state = self.snapshots.get(slots.read)
        ends = [start + length for start, length in zip(batch.starts, batch.query_lens)]
        logits, states = self.flat.forward(
            tokens,
            [
                [each[number].blocks for each in batch.tables]
                for number in range(self.flat.num_groups)
            ],
            ends,
            batch.query_lens,
            logit_rows,
            states=[handle.state for handle in handles],
        )
        for handle, state, end, slots in zip(handles, states, ends, batch.slots):
            self._advance(handle, state, end, slots.write)
        self._schedule()
        return logits

    @exclusive
    def plan_write(
        self,
        handles: Sequence[SequenceHandle],
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
        for handle in handles:
            self.kv.slide(handle.tables, num_everywhere)
        ends = [start + length] * len(handles)
        tables = self._make_writable(handles, [start] * len(handles), ends, number)
        return build_plan(tables, ends, [length] * len(handles), block_size=self.block_size)

    def _make_writable(
        self,
        handles: Sequence[SequenceHandle],
        starts: Sequence[int],
        ends: Sequence[int],
        number: int,
    ) -> list[list[int]]:
        """Makes ``[start, end)`` of each sequence writable; returns its tables in a group."""
        self.collect()
        for handle, start, end in zip(handles, starts, ends):
            tables = handle.tables
            if handle.is_torn:
                raise RuntimeError(
                    "[paged prompt cache] what was to be in it was never computed (an exception "
                    "came between, or another thread before the result was asked for): make a "
                    "new one"
                )
            handle.is_torn = True
            copies = self.kv.make_writable(tables, start, end, number)
            if copies:
                # Copy now: the next sequence may evict a source block. Later writes take the pools
                # from this copy, so they run after it.
                self.flat.copy_blocks(copies, number)
                self._schedule()
            handle.is_torn = False
        return [handle.tables.attention[number].blocks for handle in handles]

    def fill(self, handle: SequenceHandle, num_tokens: int) -> None:
        """Gives a sequence blocks for `num_tokens` tokens in groups that nothing has written to."""
        for number, table in enumerate(handle.tables.attention):
            if len(table.blocks) < self.kv.blocks_for(num_tokens):
                self._make_writable([handle], [num_tokens], [num_tokens], number)

    def can_trim(self, handles: Sequence[SequenceHandle], layer: int, num_tokens: int) -> bool:
        """True if sequences still hold all that a layer reads after the first `num_tokens`
        tokens."""
        group_spec = self.flat.spec(layer).group_spec
        number = self.flat.group_of(group_spec)
        needed = group_spec.first_visible(num_tokens) if num_tokens else self.block_size << 32
        firsts = (handle.tables.attention[number].first for handle in handles)
        return all(first * self.block_size <= needed for first in firsts)

    # The device's side of the KV manager's pools.

    def wait(self) -> None:
        """Waits for all reads and writes."""
        self._begin()
        mx.eval(self.flat.pools(), self.flat.states.unfinished())
        mx.synchronize()

    def resize(self, number: int, num_blocks: int, copies: Sequence[BlockCopy]) -> None:
        """See `DevicePools`."""
        if copies:
            self.flat.copy_blocks(copies, number)
        self.flat.resize(num_blocks, number)
        self._schedule()

    def drop_state(self, slot: int) -> None:
        """Drops a snapshot, if the slot is one."""
        self.snapshots.pop(slot, None)

    @exclusive
    def synchronize(self) -> None:
        """Waits for all reads and writes; released blocks are then free."""
        self.kv.synchronize()

    def pools(self) -> list[mx.array]:
        """Returns the current pool arrays."""
        return self.flat.pools()

    def _schedule(self, *others: mx.array) -> None:
        """Starts all built work on the device, along with `others`."""
        states = self.flat.states.unfinished()
        mx.async_eval(*others, states, self.flat.pools())  # type: ignore[no-untyped-call]
        self._newest_states = states or self._newest_states
        self._scheduled = self._begun = self.flat.pools()
        self._lazy_thread = None
        self._lazy_handles.clear()

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
            for handle in list(self._lazy_handles):
                handle.is_torn = True
            self.flat.restore(self._begun)
            self._schedule()

    def leave(self) -> None:
        """Called by `exclusive` before the thread releases the store."""
        if self.flat.states.has_unfinished and self._lazy_thread is None:
            self._schedule()

    @exclusive
    def write(self, layer: int, plan: AttentionPlan, keys: mx.array, values: mx.array) -> None:
        """Writes ``[batch, num_kv_heads, length, head_dim]`` keys and values of one layer."""
        self._begin()
        self.flat.write(layer, plan, keys, values)
        self._schedule()

    @exclusive
    def read(
        self, layer: int, handles: Sequence[SequenceHandle], start: int, end: int
    ) -> tuple[mx.array, mx.array]:
        """Dense ``[batch, num_kv_heads, end - start, head_dim]`` keys and values of one layer."""
        self._begin()
        number = self.flat.group_of(self.flat.spec(layer).group_spec)
        tables = [handle.tables.attention[number].blocks for handle in handles]
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
    def count(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Adds to the counts of prompt tokens and of cached prompt tokens."""
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens

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
        self.collect()
        share = limit // 2 if self.has_states else limit  # half of it is for states
        block_bytes = max(_NODE_BYTES, BLOCK_SIZE * self.flat.bytes_per_token)
        state_bytes = max(1, self.flat.layout.bytes_per_slot)
        self.kv.set_limits(max(2, share // block_bytes), max(1, share // state_bytes))

    @exclusive
    def clear(self) -> None:
        """Drops every prefix that no live cache holds, and frees its memory."""
        self.collect()
        self.kv.clear()

    def recover(self) -> None:
        """Repairs the store after an interrupted operation.

        Drops work that was built but not started; only the interrupted caller loses it.
        """
        self.flat.restore(self._scheduled)
        self.flat.states.unfinished()
        lost = [tables for tables in self.kv.open_tables if _is_lost(tables)]
        try:
            self.kv.check_recovery(lost)
        except Exception:
            self.synchronize()
            self.kv.recount(lost)
            if self.kv.states is not None:
                ref_count = self.kv.states.pool.ref_count
                for slot in [slot for slot in self.snapshots if not ref_count(slot)]:
                    del self.snapshots[slot]
        self.kv.open_step()

    @exclusive
    def stats(self) -> StoreStats:
        """Current statistics."""
        self.collect()
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
            nbytes=nbytes + self.flat.states.nbytes,
        )

    @exclusive
    def check_integrity(self) -> None:
        """Recounts blocks, prefix tree and tables; raises `IntegrityError` on a mismatch."""
        self.collect()
        self.kv.check_integrity()


def _is_lost(tables: BlockTables) -> bool:
    """True if a scheduler's sequence has these tables, and nothing will free them."""
    owner = tables.owner
    return owner is not None and (owner.answer is None or owner.answer.handle is None)


def _window_group(group_spec: KVCacheGroupSpec) -> WindowGroupSpec:
    assert group_spec.window is not None
    return WindowGroupSpec(
        0,
        span=group_spec.window + WINDOW_SLACK,
        first_visible=lambda position: max(0, group_spec.first_visible(position) - WINDOW_SLACK),
    )
