"""PagedSequence: what the caches of all layers of one prompt cache have in common."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.core import BlockTables, PrefixQuery
from mlx_paged.core.prefix_tree import TOKEN_TYPE
from mlx_paged.drop_in.locking import exclusive
from mlx_paged.drop_in.paged_store import PagedStore
from mlx_paged.ops import AttentionPlan


class PagedSequence:
    """A sequence (or several of equal length, side by side) in a store.

    A forward moves all layers on at once. Each has an offset of its own all the same, because
    mlx-lm trims, sets and sometimes writes caches one by one.

    ::

        [0, len(tokens))        known: these can be found by others with the same prefix
        [len(tokens), offset)   computed from whatever the model was given

    (While a batch computes its prompt, `tokens` goes past `offset`: see `announce`.)
    """

    def __init__(self, store: PagedStore) -> None:
        self.store = store
        self.leases = [store.lease()]  # one for each of the sequences side by side
        self.offsets = [0] * len(store.flat.specs)
        self._num_written = 0  # positions from here on were never written by this sequence
        self._plan: tuple[tuple[int, int, int], AttentionPlan] | None = None

    @property
    def offset(self) -> int:
        """Tokens in the cache."""
        return max(self.offsets)

    @property
    def tables(self) -> BlockTables:
        """Block tables of the first of the sequences."""
        return self.leases[0].tables

    @property
    def tokens(self) -> array[int]:
        """The known tokens at the head of the sequence; none where several lie side by side."""
        return self.tables.tokens  # type: ignore[return-value]

    @property
    def is_known(self) -> bool:
        """Whether every token in the cache is known."""
        return len(self.tokens) >= self.offset and len(self.leases) == 1

    @exclusive
    def fork(self) -> PagedSequence:
        """A copy that shares every block until one of the two is written."""
        other = PagedSequence.__new__(PagedSequence)
        other.store = self.store
        other.leases = [self.store.fork(lease, self.offset) for lease in self.leases]
        other.offsets = list(self.offsets)
        # What is written after the fork is written to blocks of its own.
        other._num_written = 0
        other._plan = None
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedSequence:
        return self.fork()

    # Writing.

    @exclusive
    def forward(self, tokens: mx.array, input_embeddings: mx.array | None = None) -> mx.array:
        """``[batch, length]`` tokens -> ``[batch, length, vocab_size]`` logits.

        Raises:
            ValueError: for another number of sequences than the cache holds, or for layers that
                were trimmed by different numbers of tokens.
        """
        batch, length = (tokens if input_embeddings is None else input_embeddings).shape[:2]
        start = self.offset
        if min(self.offsets) != start:
            raise ValueError(
                f"[paged prompt cache] layers must have one offset but are at {self.offsets}"
            )
        self._become(batch)
        del self.tokens[start:]
        self.before_write(start, start + length)
        if input_embeddings is not None:
            tokens = mx.zeros((batch, length), dtype=mx.int32)  # the embeddings stand for them
            input_embeddings = input_embeddings.reshape(batch * length, -1)
        logits = self.store.forward(
            self.leases,
            [start] * batch,
            [length] * batch,
            tokens.reshape(-1),
            np.arange(batch * length),
            input_embeddings,
        )
        self.move_to(start + length)
        return logits.reshape(batch, length, -1)

    @exclusive
    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Moves one layer on by ``[batch, num_kv_heads, length, head_dim]`` keys and values.

        Raises:
            ValueError: for another number of sequences than the cache holds, or other heads.
        """
        start, batch, length = self.offsets[layer], keys.shape[0], keys.shape[2]
        where = start, length, self.store.num_compactions
        if self._plan is None or self._plan[0] != where:
            self._become(batch)
            del self.tokens[start:]
            self.before_write(start, start + length)
            plan = self.store.plan_write(self.leases, start, length)
            self._plan = (start, length, self.store.num_compactions), plan
        self.store.write(layer, self._plan[1], keys, values)
        self.offsets[layer] = start + length

    def before_write(self, start: int, end: int) -> None:
        """Makes ready to write ``[start, end)``."""
        self._plan = None
        if start < self._num_written:
            # Backends order a write after the reads of a buffer in different ways; finishing them
            # first is right on all.
            self.store.settle()
        self._num_written = end

    def move_to(self, offset: int) -> None:
        """Sets the offset of every layer: a step of all layers at once has been built."""
        self.offsets = [offset] * len(self.offsets)

    @exclusive
    def trim(self, layer: int, num_tokens: int) -> int:
        """Forgets the last tokens of one layer; returns how many that were."""
        num_tokens = max(0, min(self.offsets[layer], num_tokens))
        self.offsets[layer] -= num_tokens
        self._plan = None
        if num_tokens:
            self._shrink()
        return num_tokens

    @exclusive
    def trim_all(self, num_tokens: int) -> None:
        """Forgets the last tokens of every layer."""
        self.move_to(self.offset - num_tokens)
        self._plan = None
        self._shrink()

    def _shrink(self) -> None:
        del self.tokens[self.offset :]
        for lease in self.leases:
            self.store.kv.shrink(lease.tables, self.offset)

    def _become(self, batch: int) -> None:
        if batch == len(self.leases):
            return
        if self.offset:
            raise ValueError(
                f"[paged prompt cache] batch must be {len(self.leases)} as before but got {batch}"
            )
        self.leases = [self.store.lease() for _ in range(batch)]

    # Prefixes. Token lists count from the start of the sequence, not from its offset.

    @exclusive
    def cached_tokens(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of `tokens` the store has; at most all but the last."""
        if not self.is_known:
            return self.offset
        match = self.store.kv.match(PrefixQuery(tokens))
        return max(self.offset, match.num_tokens(self.store.block_size))

    @exclusive
    def adopt(self, tokens: Sequence[int], query: PrefixQuery | None = None) -> int:
        """Takes what the store has of `tokens` by reference; returns the new offset.

        Args:
            query: a search for `tokens` that goes on; None: a new one, which leaves the last token
                to be computed.
        """
        query = PrefixQuery(tokens) if query is None else query
        if not self.is_known or query.num_tokens <= self.offset:
            return self.offset
        match = self.store.kv.match(query)
        num_tokens = match.num_tokens(self.store.block_size)
        if num_tokens > self.offset:
            self.store.kv.adopt(self.tables, match)
            self._extend(tokens, num_tokens)
            self.move_to(num_tokens)
            self._num_written = num_tokens
            self._plan = None
        return self.offset

    def announce(self, tokens: Sequence[int]) -> None:
        """Says what the sequence is going to compute, so that others wait for it."""
        self._extend(tokens, len(tokens))

    @exclusive
    def learn(self, tokens: Sequence[int]) -> None:
        """Says what the sequence's tokens are; from now on their blocks can be shared."""
        if len(self.leases) == 1:
            self._extend(tokens, self.offset)
            self.commit()

    @exclusive
    def commit(self) -> None:
        """Lets others share the full blocks of known tokens, which steps that were built fill."""
        self.store.kv.commit(self.tables, min(self.offset, len(self.tokens)))

    def _extend(self, tokens: Sequence[int], num_tokens: int) -> None:
        self.tokens.extend(array(TOKEN_TYPE, tokens[len(self.tokens) : num_tokens]))

    # Dense.

    def dense(self, layer: int) -> tuple[Any, Any]:
        """``[batch, num_kv_heads, offset, head_dim]`` keys and values of a layer, copied."""
        return self.store.read(layer, self.leases, self.offsets[layer])

    def nbytes(self, layer: int) -> int:
        """Memory of a layer's blocks, those it shares included."""
        num_blocks = sum(len(lease.tables.blocks) for lease in self.leases)
        spec = self.store.flat.specs[layer]
        return num_blocks * self.store.block_size * getattr(spec, "bytes_per_token", 0)
