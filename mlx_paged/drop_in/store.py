"""PagedStore: the keys and values of everything that a model of mlx-lm's has cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_paged.attention.cache import LayerSpec, PagedLayerCache, StepContext, copy_blocks
from mlx_paged.attention.plan import build_plan
from mlx_paged.drop_in.ledger import Lease, Ledger
from mlx_paged.drop_in.port import Port
from mlx_paged.ops import AttentionPlan

BLOCK_SIZE = 32
_INITIAL_TOKENS = 1024


@dataclass(frozen=True)
class StoreStats:
    """Where a model's store stands.

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


class PagedStore:
    """Pools for every layer, and the ledger of their blocks.

    Args:
        specs: one for each of the model's caches.
        cache_bytes: memory up to which prefixes that nobody uses at the moment are kept.
    """

    def __init__(self, specs: Sequence[LayerSpec], *, cache_bytes: int) -> None:
        self.block_size = BLOCK_SIZE
        self.specs = list(specs)
        self.block_bytes = BLOCK_SIZE * sum(spec.bytes_per_token for spec in specs)
        num_blocks = 1 + _INITIAL_TOKENS // BLOCK_SIZE
        self.context = StepContext()
        self.layers = [
            PagedLayerCache(self.context, spec, num_blocks=num_blocks, block_size=BLOCK_SIZE)
            for spec in specs
        ]
        self.ports = [Port(layer, self.context) for layer in self.layers]
        self.ledger = Ledger(
            num_blocks,
            BLOCK_SIZE,
            settle=self._settle,
            grow=self._grow,
            max_cached_blocks=max(2, cache_bytes // self.block_bytes),
        )
        self.selects_rows = False  # whether the model's head was told to look at `context`
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._stream: Any = None
        # Handles of the pools that are known to have been evaluated.
        self._evaluated = self.pools()

    def begin_step(
        self, leases: Sequence[Lease], starts: Sequence[int], lengths: Sequence[int]
    ) -> AttentionPlan:
        """Makes ready to write ``[start, start + length)`` of each sequence; returns the plan.

        Copies on write are made here; block tables are the sequences' own afterwards.
        """
        self.follow_stream()
        copies = []
        for lease, start, length in zip(leases, starts, lengths):
            copies += self.ledger.reserve(lease, start, start + length)
        if copies:
            copy_blocks(self.layers, mx.array(copies, dtype=mx.int32))
        self.ledger.begin_step()
        return build_plan(
            [lease.blocks for lease in leases],
            [start + length for start, length in zip(starts, lengths)],
            list(lengths),
            block_size=self.block_size,
        )

    def settle(self) -> None:
        """Waits until all that was read or written has been."""
        self.ledger.settle()

    def pools(self) -> list[mx.array]:
        """Every pool as it is now."""
        return [pool for layer in self.layers for pool in (layer.key_pool, layer.value_pool)]

    def retire(self) -> None:
        """The weights have changed: what is stored stays with those who hold it, for nobody new."""
        self.ledger.forget_prefixes()
        self.ledger.indexing = False

    def stats(self) -> StoreStats:
        """Where the store stands."""
        self.ledger.collect()
        pool = self.ledger.pool
        return StoreStats(
            num_blocks=pool.num_usable,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_evictions=self.ledger.num_evictions,
            nbytes=pool.num_blocks * self.block_bytes,
        )

    def rest(self) -> None:
        """Starts on all that was built, so that another thread may go on."""
        mx.async_eval(self.pools())  # type: ignore[no-untyped-call]

    def _settle(self) -> None:
        mx.eval(self.pools())
        mx.synchronize()
        self._evaluated = self.pools()

    def _grow(self, num_blocks: int) -> None:
        for port in self.ports:
            port.grow(num_blocks)
        self._evaluated = self.pools()

    def follow_stream(self) -> None:
        """All reads and writes of a pool go through one stream, or wait for each other."""
        stream = mx.default_stream(mx.default_device())
        if self._stream is not None and stream != self._stream:
            try:
                mx.eval(self.pools())
            except RuntimeError:
                # Built in another thread and never asked for: only that thread could still run it.
                # An older handle is the same memory, without what was never written there.
                for i, layer in enumerate(self.layers):
                    layer.key_pool, layer.value_pool = self._evaluated[2 * i : 2 * i + 2]
            self._evaluated = self.pools()
        self._stream = stream
