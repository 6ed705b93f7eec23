"""PagedSequence: the sequence behind the layer caches of one prompt cache."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.core import BlockTables, PrefixQuery
from mlx_paged.core.kv.tree import TOKEN_TYPE
from mlx_paged.drop_in.locking import exclusive
from mlx_paged.drop_in.paged_store import PagedStore, SequenceHandle
from mlx_paged.model.layout import LayerSpec
from mlx_paged.model.state_arrays import Arrays, unshared
from mlx_paged.ops import AttentionPlan


class PagedSequence:
    """A sequence in a store, or a batch of sequences of equal length.

    A forward advances all layers at once. Each layer still has its own offset, because mlx-lm
    trims, sets and sometimes writes caches one by one.

    ::

        [0, len(tokens))        known tokens: other sequences with the same prefix can find them
        [len(tokens), offset)   computed from unknown tokens

    Recurrent layers have a state in place of keys and values. It exists only at `offset`, so a step
    must end wherever a snapshot is due; see `plan_snapshots`.
    """

    def __init__(self, store: PagedStore) -> None:
        self.store = store
        self.handles = [store.open_handle()]  # one per sequence of the batch
        self.offsets = [0] * len(store.flat.specs)
        self._begin()

    def _begin(self) -> None:
        self._num_written = 0  # this sequence has written no position from here on
        # The piece being written layer by layer: (start, length, compactions), and group plans.
        self._piece: tuple[int, int, int] | None = None
        self._plans: dict[int, AttentionPlan] = {}
        # Tokens announced by a loop; they are shared as they are computed.
        self._expected: Sequence[int] = ()
        self._is_foreign = False  # a state was set from outside, so its tokens are unknown

    @classmethod
    def of(
        cls, store: PagedStore, handle: SequenceHandle, offset: int, *, is_known: bool
    ) -> PagedSequence:
        """Returns a copy of a scheduler's sequence with its first `offset` tokens.

        Args:
            is_known: True if all of these are known.
        """
        sequence = cls.__new__(cls)
        sequence.store = store
        sequence.handles = [store.fork(handle, offset if is_known else 0)]
        sequence.offsets = [offset] * len(store.flat.specs)
        sequence._begin()
        sequence._is_foreign = not is_known
        store.kv.shrink(sequence.tables, offset)  # without the blocks of later tokens
        sequence.commit()
        return sequence

    @property
    def offset(self) -> int:
        """Number of tokens in the cache."""
        return max(self.offsets)

    @property
    def tables(self) -> BlockTables:
        """Block tables of the first sequence."""
        return self.handles[0].tables

    @property
    def tokens(self) -> array[int]:
        """The known tokens at the head of the sequence; empty for a batch."""
        return self.tables.tokens  # type: ignore[return-value]

    @property
    def is_known(self) -> bool:
        """True if every token in the cache is known."""
        return len(self.tokens) >= self.offset and len(self.handles) == 1 and not self._is_foreign

    @property
    def is_empty(self) -> bool:
        """True if the cache is empty."""
        return self.offset == 0 and all(handle.state is None for handle in self.handles)

    @exclusive
    def fork(self) -> PagedSequence:
        """Returns a copy that shares every block until one of the two is written."""
        other = PagedSequence.__new__(PagedSequence)
        other.store = self.store
        other.handles = [self.store.fork(handle, self.offset) for handle in self.handles]
        other.offsets = list(self.offsets)
        other._begin()  # a write after the fork goes to new blocks
        other._is_foreign = self._is_foreign
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedSequence:
        return self.fork()

    # Writing.

    @exclusive
    def forward(
        self,
        tokens: mx.array,
        input_embeddings: mx.array | None = None,
        *,
        is_lazy: bool = False,
    ) -> mx.array:
        """``[batch, length]`` tokens -> ``[batch, length, vocab_size]`` logits.

        Raises:
            ValueError: The batch size does not match the cache, or the layers have different
                offsets.
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
            tokens = mx.zeros((batch, length), dtype=mx.int32)  # unused placeholders
        pieces: list[mx.array] = []
        done = 0
        while done < length or not pieces:
            end = self._next_stop(start + length) - start
            embeddings = None if input_embeddings is None else input_embeddings[:, done:end]
            pieces.append(self._step(tokens[:, done:end], embeddings, is_lazy))
            done = end
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)

    def _step(self, tokens: mx.array, input_embeddings: mx.array | None, is_lazy: bool) -> mx.array:
        batch, length = tokens.shape
        start = self.offset
        if input_embeddings is not None:
            input_embeddings = input_embeddings.reshape(batch * length, -1)
        logits = self.store.forward(
            self.handles,
            [start] * batch,
            [length] * batch,
            tokens.reshape(-1),
            np.arange(batch * length),
            input_embeddings,
            is_lazy=is_lazy,
        )
        self.move_to(start + length)
        if start + length <= len(self._expected):
            self._extend(self._expected, start + length)
            self.commit()
        return logits.reshape(batch, length, -1)

    @exclusive
    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Appends ``[batch, num_kv_heads, length, head_dim]`` keys and values to one layer.

        Raises:
            ValueError: The batch size does not match the cache, or the heads do not match the
                layer.
        """
        start, batch, length = self.offsets[layer], keys.shape[0], keys.shape[2]
        flat = self.store.flat
        if self._piece != (start, length, self.store.kv.num_compactions):
            self._become(batch)
            del self.tokens[start:]
            self.before_write(start, start + length)
        number = flat.group_of(flat.spec(layer).group_spec)
        if number not in self._plans:
            least = min(
                o for o, spec in zip(self.offsets, flat.specs) if isinstance(spec, LayerSpec)
            )
            plan = self.store.plan_write(self.handles, start, length, number, least)
            piece = start, length, self.store.kv.num_compactions
            if self._piece != piece:  # blocks may have moved
                self._piece, self._plans = piece, {}
            self._plans[number] = plan
        self.store.write(layer, self._plans[number], keys, values)
        self.offsets[layer] = start + length
        for other in self.store.flat.state_numbers:  # mlx-lm does not track their offsets
            self.offsets[other] = max(self.offsets[other], start + length)

    def before_write(self, start: int, end: int) -> None:
        """Prepares to write ``[start, end)``."""
        self._forget_plans()
        if start < self._num_written:
            # Backends order a write after reads of the same buffer in different ways. Finishing
            # the reads first works on all of them.
            self.store.synchronize()
        self._num_written = end

    def _forget_plans(self) -> None:
        self._piece = None
        self._plans.clear()

    def move_to(self, offset: int) -> None:
        """Sets the offset of every layer."""
        self.offsets = [offset] * len(self.offsets)

    # Recurrent layers.

    @exclusive
    def states(self, layer: int) -> list[mx.array | None]:
        """Returns the ``[batch, ...]`` arrays of a recurrent layer."""
        entries = self._joined_states()[self.store.flat.state_numbers[layer]]
        out = [None if array is None else unshared(array) for array in entries]
        mx.async_eval([array for array in out if array is not None])  # type: ignore[no-untyped-call]
        return out

    def _joined_states(self) -> Arrays:
        states = [handle.state for handle in self.handles if handle.state is not None]
        return self.store.flat.states.joined(states)

    @exclusive
    def set_states(self, layer: int, entries: Sequence[mx.array | None]) -> None:
        """Sets the arrays of a recurrent layer. The sequence's tokens are then no longer known.

        Raises:
            ValueError: The batch size or a shape does not match.
        """
        number = self.store.flat.state_numbers[layer]
        checked = self.store.flat.states.checked(number, entries)
        self._become(next((len(a) for a in checked if a is not None), len(self.handles)))
        arrays = list(self._joined_states())
        arrays[number] = checked
        for handle, state in zip(
            self.handles, self.store.flat.states.of(arrays, len(self.handles))
        ):
            handle.state = state
        self._is_foreign = True

    @exclusive
    def finish(self) -> None:
        """Ends generation.

        The sequence lets go of the batch that it was computed with, and of pending snapshots.
        """
        for handle in self.handles:
            if handle.state is not None:
                handle.state = self.store.flat.states.alone(handle.state)
            self.store.kv.plan_snapshots(handle.tables, None)
        self._expected = ()

    @exclusive
    def restart(self) -> list[int]:
        """Empties the sequence; returns the tokens that were known."""
        tokens = list(self.tokens)
        self._become_empty()
        return tokens

    @exclusive
    def plan_snapshots(self, tokens: Sequence[int]) -> None:
        """Plans snapshots of the recurrent state before a prompt is computed.

        Args:
            tokens: Tokens of the sequence plus the prompt.
        """
        if self.is_known:
            self.store.kv.plan_snapshots(self.tables, PrefixQuery(tokens))

    def _next_stop(self, end: int) -> int:
        """Returns where a step toward `end` must stop for a snapshot."""
        states = self.store.kv.states
        return end if states is None else states.try_allocate(self.tables, end)

    def is_trimmable(self, layer: int) -> bool:
        """True if a layer can be trimmed to any length, because nothing slid out of its window."""
        number = self.store.flat.group_of(self.store.flat.spec(layer).group_spec)
        return all(handle.tables.attention[number].first == 0 for handle in self.handles)

    def can_trim_all(self, num_tokens: int) -> bool:
        """True if every layer can drop its last tokens. Windows allow a few even after they
        slid."""
        if self.store.has_states:
            return False
        end = self.offset - num_tokens
        return end >= 0 and all(
            self.store.can_trim(self.handles, layer, end)
            for layer, spec in enumerate(self.store.flat.specs)
            if isinstance(spec, LayerSpec)
        )

    @exclusive
    def trim(self, layer: int, num_tokens: int) -> int:
        """Removes the last tokens of one layer; returns how many were removed.

        Raises:
            ValueError: The layer's window would need blocks that were already released.
        """
        num_tokens = max(0, min(self.offsets[layer], num_tokens))
        end = self.offsets[layer] - num_tokens
        spec = self.store.flat.specs[layer]
        is_paged = num_tokens and isinstance(spec, LayerSpec)
        if is_paged and not self.store.can_trim(self.handles, layer, end):
            raise ValueError(
                f"[paged prompt cache] n must be at most what can_trim_prompt_cache allows but got "
                f"{num_tokens}: the window of this layer has left token {end} behind"
            )
        self.offsets[layer] = end
        self._forget_plans()
        if num_tokens:
            self._shrink()
        return num_tokens

    @exclusive
    def trim_all(self, num_tokens: int) -> None:
        """Removes the last tokens of every layer; `can_trim_all` must allow it."""
        assert self.offset == num_tokens or self.can_trim_all(num_tokens)
        self.move_to(self.offset - num_tokens)
        self._forget_plans()
        self._shrink()

    def _shrink(self) -> None:
        del self.tokens[self.offset :]
        for handle in self.handles:
            self.store.kv.shrink(handle.tables, self.offset)

    def _become(self, batch: int) -> None:
        if batch == len(self.handles):
            return
        if not self.is_empty:
            raise ValueError(
                f"[paged prompt cache] batch must be {len(self.handles)} as before but got {batch}"
            )
        self.handles = [self.store.open_handle() for _ in range(batch)]

    def _become_empty(self) -> None:
        self.handles = [self.store.open_handle()]
        self.move_to(0)
        self._begin()

    # Prefixes. Token lists count from the start of the sequence, not from its offset.

    @exclusive
    def cached_tokens(self, tokens: Sequence[int], limit: int | None = None) -> int:
        """Returns the number of leading tokens of `tokens` that the sequence would have after
        `attach_prefix`.

        Args:
            limit: Maximum number of tokens; None means all but the last.
        """
        if not self.is_known:
            return self.offset
        query = PrefixQuery(tokens) if limit is None else PrefixQuery(tokens, limit=limit)
        match = self.store.kv.match(query)
        return max(self.offset, match.num_tokens(self.store.block_size))

    @exclusive
    def attach_prefix(self, tokens: Sequence[int], query: PrefixQuery | None = None) -> int:
        """Takes the stored prefix of `tokens` by reference; returns the new offset.

        Args:
            query: An existing search for `tokens`; None starts a new one for all but the last
                token.
        """
        query = PrefixQuery(tokens) if query is None else query
        if not self.is_known or query.num_tokens <= self.offset:
            return self.offset
        match = self.store.kv.match(query)
        num_tokens = match.num_tokens(self.store.block_size)
        if num_tokens > self.offset:
            self.store.kv.attach_prefix(self.tables, match)
            if self.tables.state is not None:
                self.handles[0].state = self.store.snapshots[self.tables.state.slot]
            self._extend(tokens, num_tokens)
            self.move_to(num_tokens)
            self._num_written = num_tokens
            self._forget_plans()
        return self.offset

    def expect(self, tokens: Sequence[int]) -> None:
        """Announces the tokens that later forwards compute; each is shared once built."""
        self._expected = tokens

    def expect_drafts(self, num_tokens: int) -> None:
        """Announces that the last `num_tokens` tokens may be trimmed, even across steps."""
        for handle in self.handles:
            handle.num_drafts = num_tokens

    @exclusive
    def learn(self, tokens: Sequence[int]) -> None:
        """Records the sequence's tokens; their blocks can then be shared."""
        if len(self.handles) == 1:
            self._extend(tokens, self.offset)
            self.commit()

    @exclusive
    def commit(self) -> None:
        """Indexes the full blocks of known tokens."""
        self.store.kv.commit(self.tables, min(self.offset, len(self.tokens)))

    def _extend(self, tokens: Sequence[int], num_tokens: int) -> None:
        self.tokens.extend(array(TOKEN_TYPE, tokens[len(self.tokens) : num_tokens]))

    # Dense.

    def dense(self, layer: int, start: int = 0) -> tuple[Any, Any]:
        """Returns copies of ``[batch, num_kv_heads, offset - start, head_dim]`` keys and values."""
        return self.store.read(layer, self.handles, start, self.offsets[layer])

    def nbytes(self, layer: int) -> int:
        """Memory of a layer's blocks, including shared ones."""
        return self.store.nbytes(self.handles, layer)
