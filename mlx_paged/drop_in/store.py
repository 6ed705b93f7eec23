"""PagedStore: the keys and values of everything that a model of mlx-lm's has cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged.drop_in.flat_model import FlatModel
from mlx_paged.drop_in.ledger import Lease, Ledger
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
    """Pools for every layer of a model, and the ledger of their blocks.

    Args:
        model: see `FlatModel`; the store does not keep it alive.
        cache_bytes: memory up to which prefixes that nobody uses at the moment are kept.

    Raises:
        UnsupportedModelError: the model cannot have one.
    """

    def __init__(self, model: nn.Module, *, cache_bytes: int) -> None:
        num_blocks = 1 + _INITIAL_TOKENS // BLOCK_SIZE
        self.block_size = BLOCK_SIZE
        self.flat = FlatModel(model, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self.block_bytes = BLOCK_SIZE * self.flat.bytes_per_token
        self.ledger = Ledger(
            num_blocks,
            BLOCK_SIZE,
            settle=self._settle,
            grow=self._grow,
            max_cached_blocks=max(2, cache_bytes // self.block_bytes),
        )
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._stream: Any = None
        # Handles of the pools that are known to have been evaluated.
        self._evaluated = self.pools()

    @property
    def specs(self) -> Sequence[Any]:
        """What each of the model's caches holds."""
        return self.flat.specs

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
        self._reserve(leases, starts, lengths)
        ends = [start + length for start, length in zip(starts, lengths)]
        tables = [lease.blocks for lease in leases]
        return self.flat.forward(
            tokens.astype(mx.int32), tables, ends, lengths, logit_rows, input_embeddings
        )

    def plan_write(self, leases: Sequence[Lease], start: int, length: int) -> AttentionPlan:
        """Makes ready to write ``[start, start + length)`` of sequences, layer by layer."""
        self._reserve(leases, [start] * len(leases), [length] * len(leases))
        tables = [lease.blocks for lease in leases]
        return self.flat.plan(tables, [start + length] * len(leases), [length] * len(leases))

    def _reserve(
        self, leases: Sequence[Lease], starts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Copies on write what is shared; block tables are the sequences' own afterwards."""
        self.follow_stream()
        copies = []
        for lease, start, length in zip(leases, starts, lengths):
            copies += self.ledger.reserve(lease, start, start + length)
        if copies:
            self.flat.copy_blocks(copies)
        self.ledger.begin_step()

    def settle(self) -> None:
        """Waits until all that was read or written has been."""
        self.ledger.settle()

    def pools(self) -> list[mx.array]:
        """Every pool as it is now."""
        return self.flat.pools()

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
        self.flat.grow(num_blocks)
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
                self.flat.restore(self._evaluated)
            self._evaluated = self.pools()
        self._stream = stream
