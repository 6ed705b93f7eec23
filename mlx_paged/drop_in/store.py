"""PagedStore: the keys and values of everything that a model of mlx-lm's has cached."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged.core import BlockTables, KVManager, PrefixQuery
from mlx_paged.core.prefix_tree import TOKEN_TYPE, PrefixMatch
from mlx_paged.drop_in.flat_model import FlatModel
from mlx_paged.drop_in.states import Snapshots, State
from mlx_paged.model.plan import build_plan
from mlx_paged.ops import AttentionPlan

BLOCK_SIZE = 32
_INITIAL_TOKENS = 1024
# What a block of the prefix cache takes on the host, in about; where no layer has attention, it is
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
        nbytes: Memory of the whole store.
    """

    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_evictions: int
    nbytes: int


class Lease:
    """One sequence's hold on its blocks; it ends with the object.

    mlx-lm's prompt caches are objects: a copy is a fork, and one that nobody refers to any more is
    simply gone.
    """

    __slots__ = ("_ended", "state", "tables")

    def __init__(
        self, tables: BlockTables, ended: deque[BlockTables], state: State | None = None
    ) -> None:
        self.tables = tables
        self.state = (
            state  # of the recurrent layers; None: before the first token, or there are none
        )
        self._ended = ended

    def __del__(self) -> None:
        # In any thread, at any moment: the store's next call frees the blocks.
        self._ended.append(self.tables)


class PagedStore:
    """Pools for every layer of a model, and the KV manager of their blocks.

    *When a block is used again.* Steps are built lazily, in an order that only mlx-lm's caller
    knows. Whatever is released may still be read by what was built since the store last settled, so
    all of that counts as one step of the KV manager: no block is handed out again before the next
    `settle`, which waits for everything.

    Args:
        model: see `FlatModel`; the store does not keep it alive.
        cache_bytes: memory up to which prefixes that nobody uses at the moment are kept: the store
            grows to that size before it evicts any, and past it only for sequences that live.

    Raises:
        UnsupportedModelError: the model cannot have one.
    """

    def __init__(self, model: nn.Module, *, cache_bytes: int) -> None:
        num_blocks = 1 + _INITIAL_TOKENS // BLOCK_SIZE
        self.block_size = BLOCK_SIZE
        self.flat = FlatModel(model, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self.block_bytes = BLOCK_SIZE * self.flat.bytes_per_token
        self.has_states = self.flat.layout.has_states
        self.kv = KVManager(num_blocks, BLOCK_SIZE)
        self.kv.launch_step(1)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        if self.has_states:
            cache_bytes //= 2  # the other half is for their snapshots
        self._max_cached_blocks = max(2, cache_bytes // max(_NODE_BYTES, self.block_bytes))
        self.snapshots = Snapshots(
            self.kv, max_bytes=cache_bytes, state_bytes=self.flat.layout.bytes_per_slot
        )
        self._ended: deque[BlockTables] = deque()
        self._stream: Any = None
        # Handles of the pools that are known to have been evaluated.
        self._evaluated = self.flat.pools()

    # Leases.

    def lease(self) -> Lease:
        """For a sequence without blocks."""
        self._collect()
        return Lease(self.kv.open(array(TOKEN_TYPE)), self._ended)

    def fork(self, lease: Lease, num_tokens: int) -> Lease:
        """The same blocks, for a sequence that has the first `num_tokens` tokens.

        Nothing happens on the device until one of the two is written.
        """
        self._collect()
        tables = lease.tables
        state = None if lease.state is None else self.flat.alone(lease.state)
        return Lease(self.kv.fork(tables, tables.tokens[:num_tokens]), self._ended, state)

    def _collect(self) -> None:
        """Takes back what ended leases held."""
        while self._ended:
            self.kv.free(self._ended.popleft())

    # Steps.

    def forward(
        self,
        leases: Sequence[Lease],
        starts: Sequence[int],
        lengths: Sequence[int],
        tokens: mx.array,
        logit_rows: np.ndarray,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """Builds a step that computes ``[start, start + length)`` of each sequence.

        Args:
            tokens: ``[num_rows]``: those of the first sequence, then those of the next.
            logit_rows: rows whose logits are wanted.
            input_embeddings: ``[num_rows, hidden_size]`` in the place of the tokens'.

        Returns:
            ``[len(logit_rows), vocab_size]``.
        """
        ends = [start + length for start, length in zip(starts, lengths)]
        tables = self._own(leases, starts, ends)
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

    def plan_write(self, leases: Sequence[Lease], start: int, length: int) -> AttentionPlan:
        """Makes ready to write ``[start, start + length)`` of sequences, layer by layer."""
        ends = [start + length] * len(leases)
        tables = self._own(leases, [start] * len(leases), ends)
        return build_plan(tables, ends, [length] * len(leases), block_size=self.block_size)

    def _own(
        self, leases: Sequence[Lease], starts: Sequence[int], ends: Sequence[int]
    ) -> list[list[int]]:
        """Makes ``[start, end)`` of each sequence its own to write; returns the block tables."""
        self.follow_stream()
        self._collect()
        for lease, start, end in zip(leases, starts, ends):
            tables, kv = lease.tables, self.kv
            self._make_room(kv.num_to_own(tables, start, end))
            copies = kv.own(tables, start, end)
            if copies is None:  # all that is there is in use
                missing = kv.num_to_own(tables, start, end) - kv.pool.num_available
                self._grow(kv.pool.num_blocks + max(missing, kv.pool.num_blocks // 4))
                copies = kv.own(tables, start, end)
                assert copies is not None
            if copies:
                # Here and now: the next sequence may have a block evicted that was copied from.
                # Whatever is written later comes after this copy, as it takes the pools from it.
                self.flat.copy_blocks(copies)
        return [lease.tables.blocks for lease in leases]

    def _make_room(self, num_blocks: int) -> None:
        """Grows as far as unused prefixes may take the store; `KVManager.own` evicts the rest."""
        pool = self.kv.pool
        if pool.num_free < num_blocks and pool.num_quarantined:
            self.settle()
        if pool.num_free < num_blocks and pool.num_blocks < self._max_cached_blocks:
            enough = pool.num_blocks + num_blocks - pool.num_free
            self._grow(min(max(2 * pool.num_blocks, enough), self._max_cached_blocks))
        if pool.num_free < num_blocks:
            self.settle()  # so that what is evicted is free at once

    def _grow(self, num_blocks: int) -> None:
        self.flat.grow(num_blocks)
        self.kv.pool.grow(num_blocks)
        self._evaluated = self.flat.pools()

    def settle(self) -> None:
        """Waits until all that was read or written has been; what was released is free then."""
        mx.eval(self.pools())
        mx.synchronize()
        self._evaluated = self.flat.pools()
        step = self.kv.pool.launched_step
        self.kv.on_step_evaluated(step)
        self.kv.launch_step(step + 1)

    def pools(self) -> list[mx.array]:
        """Every pool as it is now, and new states: waiting for them is waiting for all steps."""
        return self.flat.unfinished()

    def rest(self) -> None:
        """Starts on all that was built, so that another thread may go on."""
        mx.async_eval(self.pools())  # type: ignore[no-untyped-call]

    def follow_stream(self) -> None:
        """All reads and writes of a pool go through one stream, or wait for each other."""
        stream = mx.default_stream(mx.default_device())
        if self._stream is not None and stream != self._stream:
            try:
                mx.eval(self.pools())
            except RuntimeError:
                # Built in another thread and never asked for: only that thread could still run it.
                # An older handle is the same memory, without what was never written there.
                self.flat.restore(self._evaluated)
            self._evaluated = self.flat.pools()
        self._stream = stream

    # Prefixes.

    def match(self, query: PrefixQuery) -> PrefixMatch:
        """The longest stored prefix that a sequence can continue from."""
        match = self.kv.match(query)
        return self.snapshots.limit(match) if self.has_states else match

    # The whole store.

    def retire(self) -> None:
        """The weights have changed: what is stored stays with those who hold it, for nobody new."""
        self._collect()
        self.kv.reset_prefix_cache()
        self.snapshots.clear()
        self.kv.enable_prefix_caching = False

    def stats(self) -> StoreStats:
        """Its numbers now."""
        self._collect()
        pool = self.kv.pool
        return StoreStats(
            num_blocks=pool.num_usable,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_evictions=self.kv.counters.num_evictions,
            nbytes=pool.num_blocks * self.block_bytes + self.flat.state_bytes,
        )

    def check_integrity(self) -> None:
        """Recounts blocks, prefix tree and tables; raises `IntegrityError`."""
        self._collect()
        self.kv.check_integrity()
