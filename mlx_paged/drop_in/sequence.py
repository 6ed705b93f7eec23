"""PagedSequence: the sequence behind the layer caches of one prompt cache."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.core import BlockTables, PrefixQuery
from mlx_paged.core.kv.tree import TOKEN_TYPE, PrefixNode
from mlx_paged.drop_in.locking import exclusive
from mlx_paged.drop_in.paged_store import PagedStore
from mlx_paged.drop_in.states import Arrays, State, unshared
from mlx_paged.model.layout import LayerSpec, StateSpec
from mlx_paged.ops import AttentionPlan

# Blocks between two state snapshots during generation, as in the engine.
_INTERVAL = 8


class PagedSequence:
    """A sequence in a store, or a batch of sequences of equal length.

    A forward advances all layers at once. Each layer still has its own offset, because mlx-lm
    trims, sets and sometimes writes caches one by one.

    ::

        [0, len(tokens))        known tokens: other sequences with the same prefix can find them
        [len(tokens), offset)   computed from unknown tokens

    While a batch computes its prompt, `tokens` extends past `offset`; see `announce`.

    Recurrent layers have a state in place of keys and values. It exists only at `offset`, so a step
    must end wherever `plan_snapshots` wants to keep it.
    """

    def __init__(self, store: PagedStore) -> None:
        self.store = store
        self.leases = [store.lease()]  # one per sequence of the batch
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
        # Snapshots: at these prompt positions, and during the output from `_answer_from` on.
        self._due: set[int] = set()
        self._answer_from: int | None = None
        self._kept: dict[int, State] = {}  # by depth in blocks; their nodes do not exist yet
        self._newest: PrefixNode | None = None  # node of the newest output snapshot

    @property
    def offset(self) -> int:
        """Number of tokens in the cache."""
        return max(self.offsets)

    @property
    def tables(self) -> BlockTables:
        """Block tables of the first sequence."""
        return self.leases[0].tables

    @property
    def tokens(self) -> array[int]:
        """The known tokens at the head of the sequence; empty for a batch."""
        return self.tables.tokens  # type: ignore[return-value]

    @property
    def is_known(self) -> bool:
        """True if every token in the cache is known."""
        return len(self.tokens) >= self.offset and len(self.leases) == 1 and not self._is_foreign

    @property
    def is_empty(self) -> bool:
        """True if the cache is empty."""
        return self.offset == 0 and all(lease.state is None for lease in self.leases)

    @exclusive
    def fork(self) -> PagedSequence:
        """Returns a copy that shares every block until one of the two is written."""
        other = PagedSequence.__new__(PagedSequence)
        other.store = self.store
        other.leases = [self.store.fork(lease, self.offset) for lease in self.leases]
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
            end = self.next_stop(start + length) - start
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
            self.leases,
            [start] * batch,
            [length] * batch,
            tokens.reshape(-1),
            np.arange(batch * length),
            input_embeddings,
            is_lazy=is_lazy,
        )
        self.advance_to(start + length)
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
        if self._piece != (start, length, self.store.num_compactions):
            self._become(batch)
            del self.tokens[start:]
            self.before_write(start, start + length)
        number = flat.group_of(flat.spec(layer).group_spec)
        if number not in self._plans:
            least = min(
                o for o, spec in zip(self.offsets, flat.specs) if isinstance(spec, LayerSpec)
            )
            plan = self.store.plan_write(self.leases, start, length, number, least)
            piece = start, length, self.store.num_compactions
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
            self.store.settle()
        self._num_written = end

    def _forget_plans(self) -> None:
        self._piece = None
        self._plans.clear()

    def move_to(self, offset: int) -> None:
        """Sets the offset of every layer."""
        self.offsets = [offset] * len(self.offsets)

    def advance_to(self, offset: int) -> None:
        """Sets the offset after a step of all layers; keeps the state if a snapshot is due."""
        self.move_to(offset)
        depth, rest = divmod(offset, self.store.block_size)
        state = self.leases[0].state
        if self._answer_from is None or rest or state is None:
            return
        # A state of a sequence that runs alone is free to keep; others must be copied.
        is_answer = offset >= self._answer_from
        if offset in self._due or (is_answer and (state.batch.size == 1 or depth % _INTERVAL == 0)):
            self._due.discard(offset)
            self._kept[depth] = state

    # Recurrent layers.

    @exclusive
    def states(self, layer: int) -> list[mx.array | None]:
        """Returns the ``[batch, ...]`` arrays of a recurrent layer."""
        entries = self._state_arrays()[self.store.flat.state_numbers[layer]]
        out = [None if array is None else unshared(array) for array in entries]
        mx.async_eval([array for array in out if array is not None])  # type: ignore[no-untyped-call]
        return out

    def _state_arrays(self) -> Arrays:
        states = [lease.state for lease in self.leases if lease.state is not None]
        if not states:
            return [[None] * len(spec.shapes) for spec in self.store.flat.layout.states]
        if len(states) == states[0].batch.size and [s.row for s in states] == [*range(len(states))]:
            return states[0].batch.arrays
        return [
            [None if rows[0] is None else mx.concatenate(list(rows)) for rows in zip(*caches)]
            for caches in zip(*(state.arrays for state in states))
        ]

    @exclusive
    def set_states(self, layer: int, entries: Sequence[mx.array | None]) -> None:
        """Sets the arrays of a recurrent layer. The sequence's tokens are then no longer known.

        Raises:
            ValueError: The batch size or a shape does not match.
        """
        number = self.store.flat.state_numbers[layer]
        checked = self.store.flat.checked_states(number, entries)
        self._become(next((len(a) for a in checked if a is not None), len(self.leases)))
        arrays = list(self._state_arrays())
        arrays[number] = checked
        for lease, state in zip(self.leases, self.store.flat.states_of(arrays, len(self.leases))):
            lease.state = state
        self._is_foreign = True

    @exclusive
    def finish(self) -> None:
        """Ends generation.

        The sequence lets go of the batch that it was computed with, and of pending snapshots.
        """
        for lease in self.leases:
            if lease.state is not None:
                lease.state = self.store.flat.alone(lease.state)
        self._expected = ()
        self._due.clear()
        self._kept.clear()
        self._answer_from = self._newest = None

    @exclusive
    def restart(self) -> list[int]:
        """Empties the sequence; returns the tokens that were known."""
        tokens = list(self.tokens)
        self._become_empty()
        return tokens

    @exclusive
    def plan_snapshots(self, tokens: Sequence[int]) -> None:
        """Plans snapshots of the recurrent state before a prompt is computed.

        One is at the last full block, for an equal prompt or the next turn. Another is where the
        prompt diverges from stored prefixes, because a third prompt may diverge there too. Use
        `stop_at` for further positions.

        Args:
            tokens: Tokens of the sequence plus the prompt.
        """
        if not self.store.has_states or not self.is_known:
            return
        query = PrefixQuery(tokens)
        num_known = self.store.kv.num_indexed_blocks(query)
        self._answer_from = len(tokens)
        for depth in (query.num_tokens // self.store.block_size, num_known):
            self.stop_at(depth * self.store.block_size)

    def stop_at(self, position: int) -> None:
        """Plans a snapshot at `position`, a block boundary, unless the sequence is past it."""
        if position > self.offset:
            self._due.add(position)

    def next_stop(self, end: int) -> int:
        """Returns where a step toward `end` must stop for a snapshot."""
        return min([end, *(due for due in self._due if due > self.offset)])

    def is_trimmable(self, layer: int) -> bool:
        """True if a layer can be trimmed to any length, because nothing slid out of its window."""
        number = self.store.flat.group_of(self.store.flat.spec(layer).group_spec)
        return all(lease.tables.attention[number].first == 0 for lease in self.leases)

    def can_trim_all(self, num_tokens: int) -> bool:
        """True if every layer can drop its last tokens. Windows allow a few even after they
        slid."""
        if self.store.has_states:
            return False
        end = self.offset - num_tokens
        return end >= 0 and all(
            self.store.can_trim(self.leases, layer, end)
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
        if is_paged and not self.store.can_trim(self.leases, layer, end):
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
        for lease in self.leases:
            self.store.kv.shrink(lease.tables, self.offset)

    def _become(self, batch: int) -> None:
        if batch == len(self.leases):
            return
        if not self.is_empty:
            raise ValueError(
                f"[paged prompt cache] batch must be {len(self.leases)} as before but got {batch}"
            )
        self.leases = [self.store.lease() for _ in range(batch)]

    def _become_empty(self) -> None:
        self.leases = [self.store.lease()]
        self.move_to(0)
        self._begin()

    # Prefixes. Token lists count from the start of the sequence, not from its offset.

    @exclusive
    def cached_tokens(self, tokens: Sequence[int], limit: int | None = None) -> int:
        """Number of leading tokens of `tokens` that the sequence would have after `adopt`.

        Args:
            limit: Maximum number of tokens; None means all but the last.
        """
        if not self.is_known:
            return self.offset
        query = PrefixQuery(tokens) if limit is None else PrefixQuery(tokens, limit=limit)
        match = self.store.match(query)
        return max(self.offset, match.num_tokens(self.store.block_size))

    @exclusive
    def adopt(self, tokens: Sequence[int], query: PrefixQuery | None = None) -> int:
        """Takes the stored prefix of `tokens` by reference; returns the new offset.

        Args:
            query: An existing search for `tokens`; None starts a new one for all but the last
                token.
        """
        query = PrefixQuery(tokens) if query is None else query
        if not self.is_known or query.num_tokens <= self.offset:
            return self.offset
        match = self.store.match(query)
        num_tokens = match.num_tokens(self.store.block_size)
        if num_tokens > self.offset:
            self.store.kv.attach_prefix(self.tables, match)
            if self.store.has_states:
                assert match.node is not None
                self.leases[0].state = self.store.snapshots.take(match.node)
                self._kept.clear()
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
        for lease in self.leases:
            lease.num_drafts = num_tokens

    def announce(self, tokens: Sequence[int]) -> None:
        """Announces the tokens that the sequence will compute, so that others can wait for it."""
        self._extend(tokens, len(tokens))

    @exclusive
    def learn(self, tokens: Sequence[int]) -> None:
        """Records the sequence's tokens; their blocks can then be shared."""
        if len(self.leases) == 1:
            self._extend(tokens, self.offset)
            self.commit()

    @exclusive
    def commit(self) -> None:
        """Indexes the full blocks of known tokens, for others to share. Their steps are built."""
        self.store.kv.commit(self.tables, min(self.offset, len(self.tokens)))
        for depth in [*self._kept]:
            self._keep(depth)

    def _keep(self, depth: int) -> None:
        """Hands a kept state to the node of its block, if the node exists by now."""
        tip, store = self.tables.tip, self.store
        if tip is not None and depth > tip.depth:
            return
        state = self._kept.pop(depth)
        if tip is None:
            return
        node = tip.ancestor(depth)
        if node not in store.snapshots:
            store.snapshots.add(node, store.flat.alone(state))
        if self._answer_from is not None and depth * store.block_size >= self._answer_from:
            # Later prompts most likely need the newest state of an output, plus a few on the way.
            if self._newest is not None and self._newest.depth % _INTERVAL:
                store.snapshots.drop(self._newest)
            self._newest = node

    def _extend(self, tokens: Sequence[int], num_tokens: int) -> None:
        self.tokens.extend(array(TOKEN_TYPE, tokens[len(self.tokens) : num_tokens]))

    # Dense.

    def dense(self, layer: int, start: int = 0) -> tuple[Any, Any]:
        """Returns copies of ``[batch, num_kv_heads, offset - start, head_dim]`` keys and values."""
        return self.store.read(layer, self.leases, start, self.offsets[layer])

    def nbytes(self, layer: int) -> int:
        """Memory of a layer's blocks, including shared ones."""
        spec = self.store.flat.specs[layer]
        if isinstance(spec, StateSpec):
            return sum(lease.state is not None for lease in self.leases) * spec.bytes_per_slot
        if not isinstance(spec, LayerSpec):
            return 0
        number = self.store.flat.group_of(spec.group_spec)
        num_blocks = sum(len(lease.tables.attention[number].live) for lease in self.leases)
        return num_blocks * self.store.block_size * spec.bytes_per_token
