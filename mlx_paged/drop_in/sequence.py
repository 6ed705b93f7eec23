"""PagedSequence: what the caches of all layers of one prompt cache have in common."""

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

# Blocks between two states that are kept on the way through an answer, as in the engine.
_INTERVAL = 8


class PagedSequence:
    """A sequence (or several of equal length, side by side) in a store.

    A forward moves all layers on at once. Each has an offset of its own all the same, because
    mlx-lm trims, sets and sometimes writes caches one by one.

    ::

        [0, len(tokens))        known: these can be found by others with the same prefix
        [len(tokens), offset)   computed from whatever the model was given

    (While a batch computes its prompt, `tokens` goes past `offset`: see `announce`.)

    Recurrent layers have a state in the place of keys and values, which is that of `offset` and of
    no other length. Where it is kept for others (`plan_snapshots`) a step ends.
    """

    def __init__(self, store: PagedStore) -> None:
        self.store = store
        self.leases = [store.lease()]  # one for each of the sequences side by side
        self.offsets = [0] * len(store.flat.specs)
        self._begin()

    def _begin(self) -> None:
        self._num_written = 0  # positions from here on were never written by this sequence
        # The piece that is being written layer by layer: its place, and each group's plan.
        self._piece: tuple[int, int, int] | None = None
        self._plans: dict[int, AttentionPlan] = {}
        # Tokens that a loop has announced: they are shared as they are computed.
        self._expected: Sequence[int] = ()
        self._is_foreign = False  # a state was set from outside, which says nothing of its tokens
        # Where the state is kept for others: at these positions of the prompt, and in the answer.
        self._due: set[int] = set()
        self._answer_from: int | None = None
        self._kept: dict[int, State] = {}  # by depth in blocks: their nodes are not there yet
        self._newest: PrefixNode | None = None  # has the last state of the answer that was kept

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
        """True if every token in the cache is known."""
        return len(self.tokens) >= self.offset and len(self.leases) == 1 and not self._is_foreign

    @property
    def is_empty(self) -> bool:
        """True if there is nothing in the cache."""
        return self.offset == 0 and all(lease.state is None for lease in self.leases)

    @exclusive
    def fork(self) -> PagedSequence:
        """A copy that shares every block until one of the two is written."""
        other = PagedSequence.__new__(PagedSequence)
        other.store = self.store
        other.leases = [self.store.fork(lease, self.offset) for lease in self.leases]
        other.offsets = list(self.offsets)
        other._begin()  # what is written after the fork is written to blocks of its own
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
        """Moves one layer on by ``[batch, num_kv_heads, length, head_dim]`` keys and values.

        Raises:
            ValueError: for another number of sequences than the cache holds, or other heads.
        """
        start, batch, length = self.offsets[layer], keys.shape[0], keys.shape[2]
        flat = self.store.flat
        if self._piece != (start, length, self.store.num_compactions):
            self._become(batch)
            del self.tokens[start:]
            self.before_write(start, start + length)
        number = flat.group_of(flat.spec(layer).reach)
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
        for other in self.store.flat.state_numbers:  # nobody says how far these are
            self.offsets[other] = max(self.offsets[other], start + length)

    def before_write(self, start: int, end: int) -> None:
        """Makes ready to write ``[start, end)``."""
        self._forget_plans()
        if start < self._num_written:
            # Backends order a write after the reads of a buffer in different ways; finishing them
            # first is right on all.
            self.store.settle()
        self._num_written = end

    def _forget_plans(self) -> None:
        self._piece = None
        self._plans.clear()

    def move_to(self, offset: int) -> None:
        """Sets the offset of every layer."""
        self.offsets = [offset] * len(self.offsets)

    def advance_to(self, offset: int) -> None:
        """A step of all layers at once has been built."""
        self.move_to(offset)
        depth, rest = divmod(offset, self.store.block_size)
        state = self.leases[0].state
        if self._answer_from is None or rest or state is None:
            return
        # A state costs nothing as long as its sequence runs alone; else it is copied.
        is_answer = offset >= self._answer_from
        if offset in self._due or (is_answer and (state.batch.size == 1 or depth % _INTERVAL == 0)):
            self._due.discard(offset)
            self._kept[depth] = state

    # Recurrent layers.

    @exclusive
    def states(self, layer: int) -> list[mx.array | None]:
        """``[batch, ...]`` arrays of a recurrent layer."""
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
        """Sets the arrays of a recurrent layer; the tokens before it are not known any more.

        Raises:
            ValueError: for another number of sequences than the cache holds, or other shapes.
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
        """The answer is complete.

        The sequence keeps nothing of those that it was computed with, and no states for others.
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
        """Forgets everything; returns the tokens that were known."""
        tokens = list(self.tokens)
        self._become_empty()
        return tokens

    @exclusive
    def plan_snapshots(self, tokens: Sequence[int]) -> None:
        """Has the recurrent state kept where others may continue: a prompt is about to be computed.

        At the last full block, for an equal prompt or the next turn; and where the prompt leaves
        what is stored, as a third one may do there too. Further positions: `stop_at`.

        Args:
            tokens: what the sequence has and the prompt.
        """
        if not self.store.has_states or not self.is_known:
            return
        query = PrefixQuery(tokens)
        num_known = self.store.kv.num_indexed_blocks(query)
        self._answer_from = len(tokens)
        for depth in (query.num_tokens // self.store.block_size, num_known):
            self.stop_at(depth * self.store.block_size)

    def stop_at(self, position: int) -> None:
        """Has the state kept after `position` tokens, the end of a block, if it is not past it."""
        if position > self.offset:
            self._due.add(position)

    def next_stop(self, end: int) -> int:
        """Where a step that would go to `end` ends."""
        return min([end, *(due for due in self._due if due > self.offset)])

    def is_trimmable(self, layer: int) -> bool:
        """True if a layer can be trimmed at any length: nothing of it slid out of a window."""
        number = self.store.flat.group_of(self.store.flat.spec(layer).reach)
        return all(lease.tables.attention[number].first == 0 for lease in self.leases)

    def can_trim_all(self, num_tokens: int) -> bool:
        """True if every layer can forget its last tokens: a little is possible after windows slid
        too."""
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
        """Forgets the last tokens of one layer; returns how many that were.

        Raises:
            ValueError: what the layer's window would reach then has been given back.
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
        """Forgets the last tokens of every layer, which `can_trim_all` allows."""
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
        """How many leading tokens of `tokens` a sequence that adopts them has afterwards.

        Args:
            limit: most of them; None: all but the last.
        """
        if not self.is_known:
            return self.offset
        query = PrefixQuery(tokens) if limit is None else PrefixQuery(tokens, limit=limit)
        match = self.store.match(query)
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
        """Says what forwards are going to compute; each is shared when it has been built."""
        self._expected = tokens

    def expect_drafts(self, num_tokens: int) -> None:
        """Says that so many tokens may be trimmed, however many steps those took."""
        for lease in self.leases:
            lease.num_drafts = num_tokens

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
        for depth in [*self._kept]:
            self._keep(depth)

    def _keep(self, depth: int) -> None:
        """Gives a state to the node of its block, if that exists by now."""
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
            # Later prompts are likely to want the newest state of an answer, and a few on the way.
            if self._newest is not None and self._newest.depth % _INTERVAL:
                store.snapshots.drop(self._newest)
            self._newest = node

    def _extend(self, tokens: Sequence[int], num_tokens: int) -> None:
        self.tokens.extend(array(TOKEN_TYPE, tokens[len(self.tokens) : num_tokens]))

    # Dense.

    def dense(self, layer: int, start: int = 0) -> tuple[Any, Any]:
        """``[batch, num_kv_heads, offset - start, head_dim]`` keys and values, copied."""
        return self.store.read(layer, self.leases, start, self.offsets[layer])

    def nbytes(self, layer: int) -> int:
        """Memory of a layer's blocks, those it shares included."""
        spec = self.store.flat.specs[layer]
        if isinstance(spec, StateSpec):
            return sum(lease.state is not None for lease in self.leases) * spec.bytes_per_slot
        if not isinstance(spec, LayerSpec):
            return 0
        number = self.store.flat.group_of(spec.reach)
        num_blocks = sum(len(lease.tables.attention[number].live) for lease in self.leases)
        return num_blocks * self.store.block_size * spec.bytes_per_token
