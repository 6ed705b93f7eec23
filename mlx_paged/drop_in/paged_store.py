"""PagedStore: the keys and values of everything that a model of mlx-lm's has cached."""

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
# Approximate host memory of a block of the prefix cache; where no layer has attention, it is
# all that a block takes.
_NODE_BYTES = 1024


@dataclass(frozen=True)
class StoreStats:
    """Numbers of a model's store.

    Attributes:
        num_blocks: Blocks it has memory for; it grows as needed.
        num_used_blocks: Held by prompt caches that live and by sequences being generated.
        num_cached_blocks: Kept only because their prefix may come again.
        num_prompt_tokens: Tokens of prompts so far.
        num_cached_tokens: Part of them that was found in the store and not computed.
        num_evictions: Blocks dropped to make room.
        num_window_blocks: Blocks of layers with a sliding window, which are counted here alone
            (several windows: their sum); the numbers above are of all other layers.
        num_used_window_blocks: Held, likewise. Of a long text those only that its window reaches.
        num_cached_window_blocks: Kept, likewise.
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
        """Empty ones, or on their way to be."""
        return self.num_blocks - self.num_used_blocks - self.num_cached_blocks

    @classmethod
    def sum(cls, stats: Sequence[StoreStats]) -> StoreStats:
        """Options of all stores of a model."""
        return cls(**{f.name: sum(getattr(s, f.name) for s in stats) for f in fields(cls)})


class SequenceHandle:
    """One sequence's hold on its blocks; it ends with the object.

    mlx-lm's prompt caches are objects: a copy is a fork, and one that nobody refers to any more is
    simply gone.
    """

    __slots__ = ("__weakref__", "_ended", "is_torn", "num_drafts", "state", "tables")

    def __init__(
        self, tables: BlockTables, ended: deque[BlockTables], state: State | None = None
    ) -> None:
        self.tables = tables
        self.num_drafts = 0  # so many tokens at the end may be taken back
        self.is_torn = False  # what it was to be a copy of may not have been copied
        # State of the recurrent layers; None: before the first token, or there are none.
        self.state = state
        self._ended = ended

    def __del__(self) -> None:
        # In any thread, at any moment: the store's next call frees the blocks.
        self._ended.append(self.tables)


class PagedStore:
    """Pools for every layer of a model, and the KV manager of their blocks.

    *When a block is used again.* The store does not know when the device has done what was built.
    Whatever is released may still be read by what was built since the store last settled, so all of
    that counts as one step of the KV manager: no block is handed out again before the next
    `settle`, which waits for everything.

    *Lazy calls.* A program that is alone (one thread) and calls the model itself may never ask for
    the result, or not yet: such a step is only built, and begun by whoever needs the pools next.
    It is built on a stream that any thread can run. If its input was not, and another thread comes
    before anybody has asked for the result, that cache is lost, and says so.

    *Threads.* MLX's streams belong to threads: nobody else can run what a thread has built on its
    own. So whoever builds reads or writes of the pools sets the device to work on them before it
    gives the store away (`_schedule`); they depend on all that was built before, whatever its
    stream. The arrays of the pools are touched by the thread that has the store only.

    Args:
        model: see `DropInRunner`; the store does not keep it alive.
        cache_bytes: memory up to which prefixes that nobody uses at the moment are kept: the store
            grows to that size before it evicts any, and past it only for sequences that live.
        lock: see `exclusive`. Stores of one model have one.
        kv_format: see `DropInRunner`.

    Raises:
        UnsupportedModelError: the model cannot have one.
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
        self.is_interrupted = False  # by an exception, in the middle of something
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
            windows=[_window_group(reach, num_blocks) for reach in self.flat.windows],
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
        self.num_compactions = 0  # after each of them blocks have other ids
        self._is_retired = False
        # As they were when the device was last set to work, and the states of that time.
        self._scheduled = self.flat.pools()
        self._newest_states: list[mx.array] = []
        self._stream: mx.Stream | None = None  # of lazy calls
        # The graph they have built, if the device is not at work on it yet.
        self._lazy_leases: WeakSet[SequenceHandle] = WeakSet()
        self._lazy_thread: int | None = None
        self._begun = self._scheduled

    @property
    def _share_of_limit(self) -> int:
        """Memory of blocks, and of snapshots where there are any."""
        return self.limit // 2 if self.has_states else self.limit

    @property
    def _max_cached_blocks(self) -> int:
        """Up to here the store grows for prefixes that nobody uses, in every group."""
        return max(2, self._share_of_limit // max(_NODE_BYTES, self.block_bytes))

    def _least_blocks(self, number: int) -> int:
        """As many blocks of a group would do for what lives, and for unused prefixes within the
        limit."""
        pool = self.kv.attention[number].pool
        within = max(0, self._max_cached_blocks - 1 - pool.num_used)
        return max(_INITIAL_BLOCKS, 1 + pool.num_used + min(pool.num_cached, within))

    @property
    def store(self) -> PagedStore:
        """For `exclusive`."""
        return self

    # Leases.

    @exclusive
    def lease(self) -> SequenceHandle:
        """For a sequence without blocks."""
        self._collect()
        return SequenceHandle(self.kv.open(array(TOKEN_TYPE)), self._ended)

    @exclusive
    def fork(self, lease: SequenceHandle, num_tokens: int) -> SequenceHandle:
        """The same blocks, for a sequence that has the first `num_tokens` tokens.

        Nothing happens on the device until one of the two is written.
        """
        self._collect()
        tables = lease.tables
        state = None if lease.state is None else self.flat.alone(lease.state)
        return SequenceHandle(self.kv.fork(tables, tables.tokens[:num_tokens]), self._ended, state)

    def _collect(self) -> None:
        """Takes back what ended leases held, and gives memory back where there is much of it."""
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

        The device is at work on the keys and values then; logits are computed when asked for.

        Args:
            tokens: ``[num_rows]``: those of the first sequence, then those of the next.
            logit_rows: rows whose logits are wanted.
            input_embeddings: ``[num_rows, hidden_size]`` in the place of the tokens'.
            is_lazy: builds the step only, if no other thread is there.

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
        """Makes ready to write ``[start, start + length)`` of sequences, layer by layer.

        Args:
            number: of the layers' group.
            num_everywhere: tokens that every layer has.
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
        """Makes ``[start, end)`` of each sequence its own to write; returns a group's tables."""
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
            if copies is None:  # all that is there is in use
                missing = kv.num_to_write(tables, start, end, number) - pool.num_available
                self._grow(pool.num_blocks + max(missing, pool.num_blocks // 4), number)
                copies = kv.make_writable(tables, start, end, number)
                assert copies is not None
            if copies:
                # Here and now: the next sequence may have a block evicted that was copied from.
                # Whatever is written later comes after this copy, as it takes the pools from it.
                self.flat.copy_blocks(copies, number)
                self._schedule()
            lease.is_torn = False
        return [lease.tables.attention[number].blocks for lease in leases]

    def can_trim(self, leases: Sequence[SequenceHandle], layer: int, num_tokens: int) -> bool:
        """True if sequences still hold what a layer reads after their first `num_tokens` tokens."""
        reach = self.flat.spec(layer).reach
        number = self.flat.group_of(reach)
        needed = reach.first_visible(num_tokens) if num_tokens else self.block_size << 32
        firsts = (lease.tables.attention[number].first for lease in leases)
        return all(first * self.block_size <= needed for first in firsts)

    def _make_room(self, num_blocks: int, number: int) -> None:
        """Grows as far as unused prefixes may take the store; `make_writable` evicts the rest."""
        pool = self.kv.attention[number].pool
        if pool.num_free < num_blocks and pool.num_quarantined:
            self.settle()
        if pool.num_free < num_blocks and pool.num_blocks < self._max_cached_blocks:
            enough = pool.num_blocks + num_blocks - pool.num_free
            self._grow(min(max(2 * pool.num_blocks, enough), self._max_cached_blocks), number)
        if pool.num_free < num_blocks:
            self.settle()  # so that what is evicted is free at once

    def _grow(self, num_blocks: int, number: int) -> None:
        self.flat.grow(num_blocks, number)
        self.kv.attention[number].pool.grow(num_blocks)
        self._schedule()

    def _cut(self, num_blocks: int, number: int) -> None:
        """Gives memory back; blocks that are used move to what remains."""
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
        """Waits until all that was read or written has been; what was released is free then."""
        self._begin()
        mx.eval(self.flat.pools(), self.flat.unfinished())
        mx.synchronize()
        if not self._is_between_steps:
            self.kv.on_step_evaluated(self.kv.pool.launched_step)
        self.kv.launch_step(self.kv.pool.launched_step + 1)

    @property
    def _is_between_steps(self) -> bool:
        """True if `settle` was cut off: what is built is always part of a step."""
        return self.kv.pool.evaluated_step == self.kv.pool.launched_step

    def pools(self) -> list[mx.array]:
        """Every pool as it is now."""
        return self.flat.pools()

    def _schedule(self, *others: mx.array) -> None:
        """Sets the device to work on all that was built, and on other arrays."""
        states = self.flat.unfinished()
        mx.async_eval(*others, states, self.flat.pools())  # type: ignore[no-untyped-call]
        self._newest_states = states or self._newest_states
        self._scheduled = self._begun = self.flat.pools()
        self._lazy_thread = None
        self._lazy_leases.clear()

    def _begin(self) -> None:
        """Sets the device to work on what lazy calls have built."""
        if self._lazy_thread is None:
            return
        try:
            self._schedule()
        except RuntimeError:
            if self._lazy_thread == threading.get_ident():
                raise
            # Only that thread could run it. Older handles are the same memory, unwritten there.
            for lease in list(self._lazy_leases):
                lease.is_torn = True
            self.flat.restore(self._begun)
            self._schedule()

    def leave(self) -> None:
        """For `exclusive`: the thread gives the store away."""
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
        number = self.flat.group_of(self.flat.spec(layer).reach)
        tables = [lease.tables.attention[number].blocks for lease in leases]
        keys, values = self.flat.read(layer, tables, start, end)
        self._schedule(keys, values)
        return keys, values

    @exclusive
    def written(self) -> mx.array:
        """An array that is there once all that was built so far is done.

        To wait for it holds nobody up; to wait for the pools is for those who have the store.
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
        """Counts tokens of prompts, and those of them that were found."""
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens

    # Prefixes.

    def match(self, query: PrefixQuery) -> PrefixMatch:
        """The longest stored prefix that a sequence can continue from."""
        match = self.kv.match(query)
        while self.has_states:
            limited = self.snapshots.limit(match)
            match = self.kv.limit(limited)  # (windows may not reach back from there)
            if match.num_full_blocks == limited.num_full_blocks:
                break
        return match

    # The whole store.

    def retire(self) -> None:
        """The weights have changed: what is stored stays with those who hold it, for nobody new.

        From the next call on: a model may be collected at any moment, in any thread.
        """
        self._is_retired = True

    @exclusive
    def set_limit(self, limit: int) -> None:
        """Another `cache_bytes`; what is over it goes at once."""
        self.limit = limit
        self.snapshots.set_limit(self._share_of_limit)
        self._collect()
        for group in self.kv.attention:
            if group.pool.num_blocks > self._max_cached_blocks:
                self._cut(self._least_blocks(group.number), group.number)

    @exclusive
    def clear(self) -> None:
        """Forgets every prefix that no live cache holds, and gives their memory back."""
        self._collect()
        self.kv.reset_prefix_cache()
        self.snapshots.clear()
        for number in range(self.flat.num_groups):
            self._cut(self._least_blocks(number), number)

    def recover(self) -> None:
        """Makes the store whole again after an exception in the middle of something.

        What was built and not begun is dropped, which only those lose who got the exception.
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
        """Its numbers now."""
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
        """Recounts blocks, prefix tree and tables; raises `IntegrityError`."""
        self._collect()
        self.kv.check_integrity()


def _window_group(reach: KVCacheGroupSpec, num_blocks: int) -> WindowGroupSpec:
    assert reach.window is not None
    return WindowGroupSpec(
        num_blocks,
        span=reach.window + WINDOW_SLACK,
        first_visible=lambda position: max(0, reach.first_visible(position) - WINDOW_SLACK),
    )
