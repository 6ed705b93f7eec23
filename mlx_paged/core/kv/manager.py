"""KVManager: the KV store. It joins the prefix tree and the KV cache groups, and is the only writer
of block tables.

Prefix reuse and paged batching are the same mechanism here: a sequence that arrives takes the
blocks of its longest indexed prefix by reference, one more by copy-on-write where it matches only
in part, and fresh ones for the rest::

      prompt     [t h e _][c a t _][s a t _][o n _ t][h]
      in tree    [t h e _][c a t _][s a w _]
      table        7        3        12       14      15
                   |        |        |        '-------'--- fresh
                   |        |        '-------------------- copy of [s a w _]: reuses 2 tokens
                   '--------'----------------------------- shared

The order of calls: `match` looks up a waiting sequence, any number of times; `admit` references the
blocks found, and copies a partial one; `commit` indexes what steps have filled; `free` indexes the
last block, filled in part, and drops the references. What is indexed stays until it is evicted.

The engine's sequences grow, and lose drafts that were rejected (`truncate`). Those of the drop-in
(`mlx_paged.drop_in`) are also forked as a whole and overwritten: `open`, `fork`, `attach_prefix`,
`make_writable` and `shrink` are for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_paged.core.kv.groups import AttentionGroup, BlockTables, KVCacheGroup, PrefixSource
from mlx_paged.core.kv.pool import NULL_BLOCK, BlockPool
from mlx_paged.core.kv.specs import BlockCopy, StateGroupSpec, StateMove, WindowGroupSpec
from mlx_paged.core.kv.state_group import StateGroup
from mlx_paged.core.kv.tier import DropTier, Tier
from mlx_paged.core.kv.tree import (
    NO_MATCH,
    TOKEN_BYTES,
    PrefixMatch,
    PrefixNode,
    PrefixQuery,
    PrefixTree,
    token_bytes,
)
from mlx_paged.core.media import MediaIds, outside
from mlx_paged.errors import IntegrityError, InvalidParameterError


@dataclass
class KVCounters:
    """Counters since the store was made; every number only grows.

    Attributes:
        num_admissions: Sequences that were given a block table (a resumed one counts again).
        num_queried_tokens: Tokens of those sequences: what could have come from the cache.
        num_cached_tokens: Tokens that did come from it: not computed again.
        num_copied_tokens: Part of `num_cached_tokens` that came by copy-on-write.
        num_block_copies: Blocks copied on write.
        num_evictions: Blocks of the first group that left the device to make room.
        num_deduplicated_blocks: Blocks computed although an equal one was indexed first; the
            equal one is used.
        num_resets: Calls of `reset_prefix_cache`.
    """

    num_admissions: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_copied_tokens: int = 0
    num_block_copies: int = 0
    num_evictions: int = 0
    num_deduplicated_blocks: int = 0
    num_resets: int = 0


@dataclass(frozen=True)
class KVUsage:
    """Where the blocks are now; the first four add up to `num_usable_blocks`.

    Attributes:
        num_used_blocks: Referenced by sequences.
        num_cached_blocks: Held only by the prefix tree: they can be evicted.
        num_free_blocks: Empty.
        num_quarantined_blocks: Freed, but a step in flight may still read them.
        num_shared_blocks: Part of the used ones: referenced by more than one sequence.
        num_indexed_blocks: In the prefix tree, used or not.
    """

    num_usable_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_quarantined_blocks: int
    num_shared_blocks: int
    num_indexed_blocks: int

    @classmethod
    def of(cls, pool: BlockPool) -> KVUsage:
        """Reads the counts of a pool."""
        return cls(
            num_usable_blocks=pool.num_usable,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_free_blocks=pool.num_free,
            num_quarantined_blocks=pool.num_quarantined,
            num_shared_blocks=pool.num_shared,
            num_indexed_blocks=pool.num_indexed,
        )


class KVManager:
    """The KV store of an engine: `num_blocks - 1` usable blocks of `block_size` tokens.

    Args:
        num_blocks: of the layers that see everything. Where a model has none, they use no memory.
        windows: the groups of layers that see the newest tokens only.
        states: what recurrent layers need; None where there are none.
        tier: takes the blocks that are evicted; None: they are dropped.

    Attributes:
        groups: All KV cache groups; `attention` are those with blocks, full attention first, then
            the windows in their order; `states` is the one with slots.
        media_ids: What stands for media in the prefix tree.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 32,
        *,
        enable_prefix_caching: bool = True,
        windows: Sequence[WindowGroupSpec] = (),
        states: StateGroupSpec | None = None,
        tier: Tier | None = None,
    ) -> None:
        if block_size < 1:
            raise InvalidParameterError("block_size", "at least 1", block_size)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        tier = DropTier() if tier is None else tier

        def attention(number: int, size: int, spec: WindowGroupSpec | None) -> AttentionGroup:
            return AttentionGroup(number, size, block_size, spec, tier, self._remove_node)

        self.attention = (
            attention(0, num_blocks, None),
            *(attention(number, spec.num_blocks, spec) for number, spec in enumerate(windows, 1)),
        )
        self.groups: tuple[KVCacheGroup, ...] = self.attention
        self.states = None
        if states is not None:
            number = len(self.attention)
            self.states = StateGroup(number, states, block_size, tier, self._remove_node)
            self.groups += (self.states,)
        # A group that sees everything evicts whole nodes, so it takes blocks after the others have
        # found theirs.
        self._by_eviction = sorted(self.groups, key=lambda group: group.sees_everything)
        self._advancing = [group for group in self.groups if not group.sees_everything]
        self.tree = PrefixTree(block_size, len(self.groups))
        self.media_ids = MediaIds()
        self._counters = KVCounters()
        self._sequences: set[BlockTables] = set()  # that hold blocks

    @property
    def pool(self) -> BlockPool:
        """The pool of the first group."""
        return self.groups[0].pool

    # The prefix cache.

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that the pools can hold."""
        capacities = [group.capacity for group in self.groups]
        return min(capacity for capacity in capacities if capacity is not None)

    @property
    def num_freed(self) -> int:
        """Counts blocks that became available; while it stays the same there is no more room."""
        return sum(group.pool.num_freed for group in self.groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, query: PrefixQuery) -> PrefixMatch:
        """The longest cached prefix that a new sequence can continue from, in every group."""
        match = self._continuable(query)
        return self._cut(match, query) if query.atomic else match

    def num_indexed_blocks(self, query: PrefixQuery) -> int:
        """Leading full blocks that are indexed, whether or not every group can continue there."""
        return self._indexed(query).num_full_blocks

    def _indexed(self, query: PrefixQuery) -> PrefixMatch:
        """The longest indexed prefix, whether or not every group can continue from there."""
        return self.tree.match(query) if self.enable_prefix_caching else NO_MATCH

    def _continuable(self, query: PrefixQuery) -> PrefixMatch:
        """The longest cached prefix, also in the middle of an atomic span."""
        return self.limit(self._indexed(query))

    def _cut(self, match: PrefixMatch, query: PrefixQuery) -> PrefixMatch:
        """The part of a match that does not end in the middle of an atomic span."""
        while True:
            num_tokens = match.num_tokens(self.block_size)
            end = outside(query.atomic, num_tokens)
            if end == num_tokens:
                return match
            node = match.node
            assert node is not None
            depth, num_partial = divmod(end, self.block_size)
            partial = None
            if num_partial:
                partial = match.partial if depth == node.depth else node.ancestor(depth + 1)
            match = self.limit(PrefixMatch(node.ancestor(depth), partial, num_partial))

    def limit(self, match: PrefixMatch) -> PrefixMatch:
        """The part of a match that every group can continue from."""
        node = match.node
        if node is None:
            return match
        depth = node.depth
        while depth:
            usable = min(group.usable_depth(node, depth) for group in self.groups)
            if usable == depth:
                break
            depth = usable
        if depth < node.depth:
            return PrefixMatch(node.ancestor(depth), None, 0)
        partial = match.partial
        if partial is not None and not all(group.can_copy_from(partial) for group in self.groups):
            return PrefixMatch(node, None, 0)
        return match

    def computing_next_block(self, tokens: Sequence[int], query: PrefixQuery) -> BlockTables | None:
        """The running sequence about to fill the first block that `tokens` lacks, if any.

        A sequence that waits for it need not compute that block. Where `tokens` ends inside the
        block, it must use at least half of it for the wait to be worthwhile.
        """
        match = self._continuable(query) if self.states is None else self._indexed(query)
        if match.node is None:
            return None
        size, first = self.block_size, match.node.depth
        start = first * size * TOKEN_BYTES
        wanted = query.tokens[start : start + size * TOKEN_BYTES]
        num_wanted = len(wanted) // TOKEN_BYTES
        if num_wanted <= match.num_partial_tokens or 2 * num_wanted < size:
            return None
        running = self.tree.filler(match.node, wanted)
        assert running is None or isinstance(running, BlockTables)
        if running is None or self.states is None or self.states.request_snapshot(running, query):
            return running
        return None

    def part_after(self, running: BlockTables, query: PrefixQuery) -> int:
        """Tokens up to which a waiting sequence can use what a running one computes.

        Args:
            running: what `computing_next_block` has just found for `query`.

        Returns:
            The end of the last block of which both have all tokens, or of the very next one, where
            `query` ends within that.
        """
        assert running.tip is not None
        size, first = self.block_size, running.tip.depth
        num_equal = running.num_equal(query, first * size)
        return max(first + 1, num_equal // size) * size

    def can_fork(self, tables: BlockTables, num_tokens: int) -> bool:
        """True if a running sequence still holds what a fork after `num_tokens` tokens reads."""
        return all(group.can_fork(tables, num_tokens) for group in self.groups)

    def keeps_last_token_forkable(self, num_tokens: int) -> bool:
        """True if a sequence that has computed `num_tokens` tokens can be forked before the last.

        Not where its windows slide with that token, and not where there are recurrent layers.
        """
        return self.states is None and all(
            group.first_block(num_tokens) <= group.first_block(num_tokens - 1)
            for group in self.attention
        )

    def reset_prefix_cache(self) -> int:
        """Empties the prefix tree; returns how many nodes it had.

        Running sequences keep their blocks, and are no longer indexed until they are admitted
        again.
        """
        nodes = self.tree.clear()
        for node in nodes:
            for group in self.groups:
                group.forget(node)
        self._counters.num_resets += 1
        return len(nodes)

    def _remove_node(self, node: PrefixNode) -> None:
        """Takes a node out of the tree, with what each group holds of it.

        Only what is elsewhere can be below a node that no sequence uses; it goes too.
        """
        for child in [*node.children.values()]:
            self._remove_node(child)
        for group in self.groups:
            group.forget(node)
        self.tree.remove(node)

    # The life of a sequence's tables.

    def admit(
        self,
        tokens: Sequence[int],
        *,
        query: PrefixQuery | None = None,
        salt: str | None = None,
        headroom: int = 0,
        read_cache: bool = True,
        fork_of: BlockTables | None = None,
        num_fork_tokens: int = 0,
        owner: Any = None,
    ) -> BlockTables | None:
        """Gives a sequence block tables that cover all its tokens; None when there is no room.

        Args:
            tokens: the live token list of the sequence: it may grow later, and must not change
                otherwise.
            query: what it looks for in the prefix cache; None: all of `tokens` but the last.
            salt: only blocks indexed under the same salt are shared.
            headroom: further blocks that must stay available.
            read_cache: whether to reuse cached blocks.
            fork_of: tables of a running sequence that begins with the same `num_fork_tokens`
                tokens, all committed; its blocks are shared where they reach further than the
                tree. None: the one that has computed most, if prefixes are shared.
            owner: kept in `BlockTables.owner`.

        Returns:
            The tables; their `num_cached_tokens`, less than `len(tokens)`, need not be computed.
        """
        assert len(tokens)
        query = PrefixQuery(tokens, salt) if query is None else query
        source: PrefixSource | None = self._source(query, read_cache, fork_of, num_fork_tokens)
        tables = None
        while source is not None:
            tables = self._begin(tokens, query, owner, source)
            if self._has_room(tables, headroom):
                break
            for group in self.groups:
                group.end(tables)
            # In a full pool the source of a copy may be the very block that is missing.
            source = self._without_copy(source, query)
        if source is None or tables is None:
            return None
        for attention in self.attention:
            attention.reserve(tables)
        is_indexed = source.fork_of is None or source.fork_of.tip is not None
        if self.enable_prefix_caching and is_indexed:
            # (A root may have gone with its last child, while room was made.)
            is_root = source.tip is None or source.tip.depth == 0
            self.tree.move_tip(tables, self.tree.root(query.salt) if is_root else source.tip)
        self._sequences.add(tables)
        tables.num_cached_tokens = source.num_tokens(self.block_size)
        tables.num_computed_tokens = tables.num_cached_tokens
        self._count_admission(tables, source.num_partial_tokens)
        return tables

    def _begin(
        self, tokens: Sequence[int], query: PrefixQuery, owner: Any, source: PrefixSource
    ) -> BlockTables:
        tables = BlockTables(tokens, owner, query.tokens, query.atomic)
        for group in self.groups:
            group.begin(tables, source)
        return tables

    def _without_copy(self, source: PrefixSource, query: PrefixQuery) -> PrefixSource | None:
        """The same without a copy; it ends earlier where it would cut an atomic span.

        None where there is no copy, or where windows of a forked sequence do not reach back so far.
        """
        tip, depth, size = source.tip, source.num_full_blocks, self.block_size
        if not source.num_partial_tokens:
            return None
        while (end := outside(query.atomic, depth * size)) < depth * size:
            depth = end // size
            if source.fork_of is None:
                assert tip is not None
                tip = self.limit(PrefixMatch(tip.ancestor(depth), None, 0)).node
                assert tip is not None
                depth = tip.depth
        if source.fork_of is not None and not self.can_fork(source.fork_of, depth * size):
            return None
        tip = None if tip is None else tip.ancestor(depth)
        return source._replace(num_full_blocks=depth, tip=tip, partial=None, num_partial_tokens=0)

    def _source(
        self,
        query: PrefixQuery,
        read_cache: bool,
        fork_of: BlockTables | None,
        num_fork_tokens: int,
    ) -> PrefixSource:
        """Where a new sequence's head comes from: the tree, or a running sequence, where that has
        computed more of it than is indexed."""
        indexed = self._indexed(query) if read_cache else NO_MATCH
        match = self.limit(indexed)
        size = self.block_size
        if fork_of is None and read_cache and match.node is not None:
            start = match.node.depth * size
            wanted = query.tokens[start * TOKEN_BYTES : (start + size) * TOKEN_BYTES]
            running, num_tokens = self.tree.computed_by(
                match.node, wanted, match.num_partial_tokens + 1
            )
            assert running is None or isinstance(running, BlockTables)
            fork_of, num_fork_tokens = running, start + num_tokens
        if query.atomic:
            match = self._cut(match, query)
            num_fork_tokens = outside(query.atomic, num_fork_tokens)
        if (
            fork_of is not None
            and num_fork_tokens > match.num_tokens(size)
            and self.can_fork(fork_of, num_fork_tokens)
        ):
            num_full, num_partial = divmod(num_fork_tokens, size)
            tip = None if fork_of.tip is None else fork_of.tip.ancestor(num_full)
            return PrefixSource(num_full, tip, None, num_partial, fork_of)
        return PrefixSource(
            match.num_full_blocks,
            match.node,
            match.partial,
            match.num_partial_tokens,
            num_known_blocks=indexed.num_full_blocks,
        )

    def _has_room(self, tables: BlockTables, headroom: int) -> bool:
        return all(g.make_room_for(tables, self._headroom(g, headroom)) for g in self.groups)

    def _headroom(self, group: KVCacheGroup, headroom: int) -> int:
        """The same share of a group's pool as `headroom` is of the first group's."""
        return headroom * group.pool.num_usable // self.pool.num_usable

    def _count_admission(self, tables: BlockTables, num_copied: int) -> None:
        counters = self._counters
        counters.num_admissions += 1
        counters.num_queried_tokens += len(tables.tokens)
        counters.num_cached_tokens += tables.num_cached_tokens
        counters.num_copied_tokens += num_copied
        counters.num_block_copies += num_copied > 0

    def defer_copy(self, tables: BlockTables) -> None:
        """A sequence has just been admitted, and is not part of the step being built: the copy that
        it begins with is left to the step that it will be part of."""
        for attention in self.attention:
            attention.defer_copy(tables)

    def resume_copy(self, tables: BlockTables) -> None:
        """The sequence is part of the step being built: a copy that was deferred is made in it."""
        for attention in self.attention:
            attention.resume_copy(tables)

    def most_atomic_tokens(self) -> int | None:
        """The longest span that every group can take in one step; None where only the pool limits.

        (A window group needs room for what the span's first row sees, and for a copy's source.)
        """
        limits = [
            (group.pool.num_usable - group.view_blocks - 1) * self.block_size
            for group in self.attention
            if group.view_blocks is not None
        ]
        return max(0, min(limits)) if limits else None

    def grow(self, tables: BlockTables, num_tokens: int) -> bool:
        """Makes tables cover `num_tokens` tokens; false, and no change, when there is no room."""
        for group in self._by_eviction:
            if group.try_allocate(tables, num_tokens) < num_tokens:
                return False
        for attention in self.attention:
            attention.allocate_slots(tables, num_tokens)
        return True

    def reach(self, tables: BlockTables, num_tokens: int) -> int:
        """Makes tables cover as many tokens as there is room for, `num_tokens` at most.

        A step must not go further than the answer; it may be less where a state is to be kept, too.
        """
        for group in self._by_eviction:
            num_tokens = group.try_allocate(tables, num_tokens)
        for attention in self.attention:
            attention.allocate_slots(tables, num_tokens)
        return num_tokens

    def can_grow_later(self, tables: BlockTables, num_tokens: int, num_scheduled: int = 0) -> bool:
        """True if there will be room once the steps in flight are committed.

        Args:
            num_scheduled: tokens of the sequence that are scheduled or computed.
        """
        return all(g.could_allocate_later(tables, num_tokens, num_scheduled) for g in self.groups)

    def will_have_room(self, num_tokens: int, query: PrefixQuery, *, headroom: int = 0) -> bool:
        """True if `admit` will find room once the steps in flight are evaluated."""
        node = self.match(query).node
        return all(
            group.will_have_room(num_tokens, node, self._headroom(group, headroom))
            for group in self.groups
        )

    def commit(self, tables: BlockTables, num_computed_tokens: int) -> None:
        """Indexes the blocks of a sequence that are filled by now, and releases what slid out of
        windows.

        ::

            [0, tip)        indexed before
            [tip, new tip)  indexed now; where an equal block is indexed already, it replaces ours
            [new tip, end)  own, not indexed
        """
        size, tip = self.block_size, tables.tip
        end = num_computed_tokens // size  # (of full blocks)
        if tip is not None and tip.depth < end:
            first = tip.depth
            keys, length = token_bytes(tables.tokens[first * size : end * size]), size * TOKEN_BYTES
            for i in range(end - first):
                tip = self._index(tables, tip, first + i, keys[i * length : (i + 1) * length])
            self.tree.move_tip(tables, tip)
        tables.num_computed_tokens = num_computed_tokens
        for each in self._advancing:
            each.on_computed(tables, num_computed_tokens)

    def _index(self, tables: BlockTables, parent: PrefixNode, index: int, key: bytes) -> PrefixNode:
        """Indexes block `index` of a sequence as a child of `parent`."""
        node = self.tree.extend(parent, key)
        tail = self.tree.tail_within(node)
        if tail is not None:  # (perhaps of this very block: a fork that was cut has ended)
            self._remove_node(tail)
        for group in self.attention:
            group.on_indexed(tables, index, node)
        return node

    def truncate(self, tables: BlockTables, num_tokens: int) -> int:
        """Takes back all but the first `num_tokens` tokens of a sequence, computed or not.

        The tokens after them may change then. What others share with the sequence stays as it is.
        Rejected drafts are taken back before their step is committed: a block that is indexed is
        not written again, not even with accepted tokens that a recurrent state has to replay.

        ::

            [0, start)           computed, as before
            [start, num_tokens)  computed again; `reach` makes the tables cover them where they do
                                 not any more
            [num_tokens, end)    taken back

        Returns:
            `start`. It is less than `num_tokens` where a group holds nothing to go on from there: a
            block that others read is not overwritten, a recurrent state is that before a step which
            kept it (`move_state`), and a window that has slid past is computed from the beginning.
        """
        start = num_tokens
        while True:
            points = [group.resume_point(tables, start) for group in self.groups]
            end = min(outside(tables.atomic, start), *points)
            if end == start:
                break
            start = end
        self._lower_tip(tables, start)
        tables.num_cached_tokens = min(tables.num_cached_tokens, start)
        tables.prompt = tables.prompt[: num_tokens * TOKEN_BYTES]
        for group in self.groups:
            group.truncate(tables, start, num_tokens)
        return start

    def free(self, tables: BlockTables) -> None:
        """Releases a sequence's blocks; those that are indexed stay cached, with its tail."""
        self._sequences.remove(tables)
        self._index_tail(tables)
        for group in self.groups:
            group.end(tables)
        if tables.tip is not None:
            self.tree.move_tip(tables, None)

    def _index_tail(self, tables: BlockTables) -> None:
        """Indexes the partly filled block at the end of a sequence that computes no more.

        Nothing that is not committed counts: a step in flight may fail, and until a step of the
        sequence is committed, so may the copy that it begins with. (A recurrent state in the middle
        of a block is not kept, so there nobody could continue.)
        """
        tip, size = tables.tip, self.block_size
        end = min(tables.num_computed_tokens, len(tables.tokens))
        if tip is None or self.states is not None or end <= tables.num_cached_tokens:
            return
        start = tip.depth * size
        if not start < end < start + size:
            return
        key = token_bytes(tables.tokens[start:end])
        if not self.tree.covers(tip, key):
            self._index(tables, tip, tip.depth, key)

    # Sequences that shrink, are forked and are overwritten.

    def open(self, tokens: Sequence[int]) -> BlockTables:
        """Tables without a block, which take what they hold by `attach_prefix` and `make_writable`.

        Args:
            tokens: the live token list of the sequence, as far as it is known. Blocks are indexed
                under it when they are committed; so a token that changes is written anew
                (`make_writable`) or cut off (`shrink`) first.
        """
        tables = BlockTables(tokens)
        for group in self.groups:
            group.begin(tables, PrefixSource(0, None))
        return self._opened(tables, self.tree.root() if self.enable_prefix_caching else None)

    def is_open(self, tables: BlockTables) -> bool:
        """True if tables hold blocks: they have not been freed."""
        return tables in self._sequences

    def fork(self, tables: BlockTables, tokens: Sequence[int]) -> BlockTables:
        """The same blocks, partly filled ones included, and the same state for another sequence."""
        copy = BlockTables(tokens)
        copy.num_computed_tokens = tables.num_computed_tokens
        for group in self.groups:
            group.fork(tables, copy)
        return self._opened(copy, tables.tip)

    def _opened(self, tables: BlockTables, tip: PrefixNode | None) -> BlockTables:
        self.tree.move_tip(tables, tip)
        self._sequences.add(tables)
        return tables

    def attach_prefix(self, tables: BlockTables, match: PrefixMatch) -> None:
        """Replaces what a sequence holds by what a match has, a partial block included.

        All is taken by reference: `make_writable` copies the partial block before it is written.
        """
        assert match.node is not None
        nodes = match.node.path() + ([] if match.partial is None else [match.partial])
        num_tokens = match.num_tokens(self.block_size)
        for group in self.groups:
            group.attach(tables, nodes, num_tokens)
        tables.num_computed_tokens = num_tokens
        self.tree.move_tip(tables, match.node)

    def num_to_write(self, tables: BlockTables, start: int, end: int, number: int = 0) -> int:
        """Blocks that `make_writable` will take of a group's pool."""
        return self.attention[number].num_to_write(tables, start, end)

    def make_writable(
        self, tables: BlockTables, start: int, end: int, number: int = 0
    ) -> list[BlockCopy] | None:
        """Makes positions ``[start, end)`` of a sequence its own to write, in one attention group.

        Returns:
            Copies to make before anything is written, and before a later call's; None, and no
            change to the sequence, when there is no room for now.
        """
        group = self.attention[number]
        num_needed = group.num_to_write(tables, start, end)
        if num_needed > group.pool.num_available or not group.make_room(num_needed):
            return None
        self._lower_tip(tables, start)
        return group.make_writable(tables, start, end)

    def slide(self, tables: BlockTables, num_tokens: int) -> None:
        """Releases what rows after `num_tokens` tokens do not see, whether or not it is indexed."""
        for group in self.attention:
            group.on_computed(tables, num_tokens)

    def shrink(self, tables: BlockTables, num_tokens: int) -> None:
        """Gives back the blocks past the first `num_tokens` tokens.

        What slid out of a window does not come back: the caller sees to it that none of it is
        needed (`BlockTable.first`).
        """
        self._lower_tip(tables, num_tokens)
        for number, group in enumerate(self.attention):
            table, num_blocks = tables.attention[number], self.blocks_for(num_tokens)
            table.first = min(table.first, num_blocks)
            for block in reversed(tables.truncate(number, num_blocks)):
                if block != NULL_BLOCK:
                    group.pool.release(block)

    def _lower_tip(self, tables: BlockTables, num_tokens: int) -> None:
        """Unindexes everything after the first `num_tokens`, which is about to change."""
        tables.num_computed_tokens = min(tables.num_computed_tokens, num_tokens)
        depth = num_tokens // self.block_size
        if tables.tip is not None and tables.tip.depth > depth:
            self.tree.move_tip(tables, tables.tip.ancestor(depth))

    def compact(self, num_blocks: int, number: int = 0) -> list[BlockCopy]:
        """Makes the pool of an attention group one of `num_blocks` blocks, all that are used among
        them; evicts what has no place. No step is in flight.

        Returns:
            Copies to make before the pools are cut.
        """
        return self.attention[number].compact(num_blocks, self._sequences)

    def recount(self) -> None:
        """Makes everything agree with the tables that are open, after something was cut off in the
        middle: forgets the prefix tree, and frees what no table names. No step is in flight.
        """
        self.tree = PrefixTree(self.block_size, len(self.groups))
        for tables in self._sequences:
            tables.tip = tables.exported = None
            for table in tables.attention:
                table.repair()
        for group in self.groups:
            references = group.references(self._sequences)
            group.pool.recount(references)
        self._counters.num_resets += 1

    # Steps.

    def launch_step(self, step: int) -> tuple[tuple[BlockCopy, ...], ...]:
        """Ends the building of a step, and dates later releases.

        Returns:
            Its block copies, for each attention group.
        """
        copies = tuple([group.launch_step(step) for group in self.attention])
        if self.states is not None:
            self.states.launch_step(step)
        return copies

    def move_state(self, tables: BlockTables, end: int, *, keep: bool = False) -> StateMove | None:
        """Slots of a step that brings a sequence to `end` tokens; None where there are no states.

        Called once for each scheduled sequence.

        Args:
            keep: tokens of the step may be rejected, so the state before it is kept until it is
                committed (`truncate`).
        """
        return None if self.states is None else self.states.move(tables, end, keep=keep)

    def on_step_evaluated(self, step: int) -> None:
        """A step was evaluated: blocks that waited for it are free."""
        for group in self.groups:
            group.pool.on_step_evaluated(step)

    # Numbers.

    @property
    def counters(self) -> KVCounters:
        """A copy of the counters so far."""
        first = self.attention[0]
        return replace(
            self._counters,
            num_evictions=first.num_evictions,
            num_deduplicated_blocks=first.num_deduplicated,
        )

    @property
    def usage(self) -> KVUsage:
        """Where the blocks of the first group are now."""
        return KVUsage.of(self.pool)

    @property
    def group_usage(self) -> tuple[KVUsage, ...]:
        """Where the blocks, or slots, of each further group are now."""
        return tuple(KVUsage.of(group.pool) for group in self.groups[1:])

    def check_integrity(self) -> None:
        """Recounts pools, tree and tables against each other; raises `IntegrityError`."""
        self.tree.check_integrity()
        nodes = list(self.tree.nodes())
        for group in self.groups:
            group.check_integrity(self._sequences, nodes)
        standing: Counter[int] = Counter()
        for tables in self._sequences:
            self._check_tip(tables)
            standing[id(tables.tip)] += tables.tip is not None
        for node in [*nodes, *{t.tip for t in self._sequences if t.tip is not None}]:
            if len(node.fillers or ()) != standing[id(node)]:
                raise IntegrityError("a node does not know the sequences that will extend it")

    def _check_tip(self, tables: BlockTables) -> None:
        """The indexed part of a sequence is filed under its tokens."""
        size = self.block_size
        for node in [] if tables.tip is None else tables.tip.path():
            first = (node.depth - 1) * size
            if token_bytes(tables.tokens[first : first + size]) != node.key:
                raise IntegrityError(f"blocks {node.entries} are indexed under other tokens")
