"""KVManager: the KV store. It connects the prefix tree and the KV cache groups, and is the only
writer of block tables.

Prefix reuse and paged batching are one mechanism: a new sequence takes the blocks of its longest
indexed prefix by reference, a partly matching block by copy-on-write, and fresh blocks for the
rest::

      prompt     [t h e _][c a t _][s a t _][o n _ t][h]
      in tree    [t h e _][c a t _][s a w _]
      table        7        3        12       14      15
                   |        |        |        '-------'--- fresh
                   |        |        '-------------------- copy of [s a w _]: reuses 2 tokens
                   '--------'----------------------------- shared

Order of calls: `match` looks up a waiting sequence, any number of times; `admit` references the
blocks found and copies a partial one; `commit` indexes the blocks that steps have filled; `free`
indexes the last, partly filled block and drops the references. Indexed blocks stay until evicted.

Sequences grow, and drop rejected drafts with `truncate`. `ForkingKVManager` has sequences that are
also forked as a whole, cut and overwritten.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mlx_paged.core.kv.attention_group import AttentionGroup
from mlx_paged.core.kv.groups import KVCacheGroup, Supply
from mlx_paged.core.kv.pool import BlockPool
from mlx_paged.core.kv.prefix_finder import PrefixFinder
from mlx_paged.core.kv.restoration import BlockRead, Restoration
from mlx_paged.core.kv.specs import BlockCopy, StateGroupSpec, StateMove, WindowGroupSpec
from mlx_paged.core.kv.state_group import StateGroup
from mlx_paged.core.kv.stored import StoredPrefix
from mlx_paged.core.kv.tables import BlockTables, PrefixSource
from mlx_paged.core.kv.tier import ABSENT, DropTier, Tier
from mlx_paged.core.kv.tree import (
    TOKEN_BYTES,
    PrefixMatch,
    PrefixNode,
    PrefixQuery,
    PrefixTree,
    token_bytes,
)
from mlx_paged.core.kv.usage import KVCounters, KVUsage
from mlx_paged.core.media import MediaIds, outside
from mlx_paged.errors import IntegrityError, InvalidParameterError


class KVManager:
    """The KV store of an engine: `num_blocks - 1` usable blocks of `block_size` tokens.

    Args:
        num_blocks: Blocks for full attention. They use no memory if the model has no such layers.
        windows: The groups of windowed layers.
        states: Spec of the recurrent layers; None if there are none.
        tier: Stores evicted blocks; None drops them.
        supply: Called with a group number and a number of blocks when a group has fewer free
            blocks than it needs. It makes that many free or evictable, for example by growing the
            pool. None for pools of fixed size.

    Attributes:
        groups: All KV cache groups. `attention` lists the groups with blocks, full attention first,
            then `windows` in order; `states` is the group with slots.
        prefixes: Finds where a sequence can continue.
        media_ids: Ids that stand for media in the prefix tree.
        restorations: Content that admitted sequences wait for, oldest first. The code that moves
            the bytes counts them in `Restoration.num_done`; `finish_restoration` then lets the
            sequence continue. The sequence of a failed one must be freed and admitted again.
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
        supply: Supply | None = None,
    ) -> None:
        if block_size < 1:
            raise InvalidParameterError("block_size", "at least 1", block_size)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        tier = DropTier() if tier is None else tier
        self.tier = tier

        def attention(number: int, size: int, spec: WindowGroupSpec | None) -> AttentionGroup:
            return AttentionGroup(number, size, block_size, spec, tier, self._remove_node, supply)

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
        # Full attention evicts whole nodes, so it allocates after the other groups.
        self._by_eviction = sorted(self.groups, key=lambda group: group.is_full_attention)
        self._advancing = [group for group in self.groups if not group.is_full_attention]
        self.tree = PrefixTree(block_size, len(self.groups))
        self.prefixes = PrefixFinder(
            self.tree, self.attention, self.states, tier, is_on=enable_prefix_caching
        )
        self.media_ids = MediaIds()
        self._counters = KVCounters()
        self._sequences: set[BlockTables] = set()  # sequences that hold blocks
        self.restorations: dict[BlockTables, Restoration] = {}
        tier.attach(self)

    @property
    def pool(self) -> BlockPool:
        """The pool of the first group."""
        return self.groups[0].pool

    # The prefix cache.

    @property
    def capacity(self) -> int:
        """Length in tokens of the longest sequence that the pools can hold."""
        capacities = [group.capacity for group in self.groups]
        return min((c for c in capacities if c is not None), default=sys.maxsize)

    @property
    def num_freed(self) -> int:
        """Counter of blocks that became available. While it is unchanged, there is no more room."""
        return sum(group.pool.num_freed for group in self.groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, query: PrefixQuery) -> PrefixMatch:
        """Returns the longest cached prefix that every group can continue from."""
        return self.prefixes.match(query)

    def reset_prefix_cache(self) -> int:
        """Empties the prefix tree; returns how many nodes it had.

        Running sequences keep their blocks, but are not indexed until they are admitted again.
        """
        nodes = self.tree.clear()
        for node in nodes:
            for group in self.groups:
                group.forget(node)
        self._counters.num_resets += 1
        return len(nodes)

    def evict_idle(self) -> int:
        """Evicts every cached block that no step in flight may read; returns how many of the first
        group."""
        before = self.attention[0].num_evictions
        # A node that full attention evicts also leaves the other groups.
        for group in reversed(self._by_eviction):
            group.evict_idle()
        return self.attention[0].num_evictions - before

    def compact(self, num_blocks: int, number: int = 0) -> list[BlockCopy]:
        """Shrinks the pool of an attention group to `num_blocks` blocks.

        Keeps all used blocks and evicts cached ones that do not fit. No step may be in flight.

        Returns:
            Block copies to run before the device pool is cut.
        """
        copies = self.attention[number].compact(num_blocks, self._sequences)
        moved = dict(copies)
        for restoration in self.restorations.values():
            restoration.reads = [
                read._replace(block=moved.get(read.block, read.block))
                if read.group == number
                else read
                for read in restoration.reads
            ]
        return copies

    def _remove_node(self, node: PrefixNode) -> None:
        """Removes a node, and everything below it, from the tree and from all groups.

        Below a node that no sequence uses, all content is in the tier.
        """
        if node.children:
            for child in [*node.children.values()]:
                self._remove_node(child)
        for group in self.groups:
            group.forget(node)
        self.tree.remove(node)

    # The tier; see `TierOwner`.

    def on_lost(self, node: PrefixNode, group: int) -> None:
        """Clears the entry of content that the tier drops."""
        node.entries[group] = ABSENT
        if self.groups[group].is_full_attention:
            self._remove_node(node)

    def media_content(self, token: int) -> tuple[bytes, int] | None:
        """Returns (key of a media item, position in it) of a media id; None if it is forgotten."""
        return self.media_ids.content(token)

    # Lifecycle of a sequence's tables.

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
        """Gives a sequence block tables that cover all its tokens; returns None if there is no
        room.

        Args:
            tokens: The live token list of the sequence; append-only from now on.
            query: Its prefix cache search; None searches for all of `tokens` but the last.
            salt: Only blocks indexed under the same salt are shared.
            headroom: Additional blocks that must stay available.
            read_cache: True to reuse cached blocks.
            fork_of: Tables of a running sequence that begins with the same `num_fork_tokens`
                tokens, all committed. Its blocks are shared if they reach further than the tree.
                None uses the running sequence that has computed most, if `read_cache` is set.
            owner: Stored in `BlockTables.owner`.

        Returns:
            The tables. Their first `num_cached_tokens` tokens need no computation; there are fewer
            of them than `len(tokens)`. If `BlockTables.restoration` is set, the sequence must wait
            for `finish_restoration`.
        """
        assert len(tokens)
        query = PrefixQuery(tokens, salt) if query is None else query
        source: PrefixSource | None = self.prefixes.source(
            query, read_cache, fork_of, num_fork_tokens
        )
        tables = None
        missing: list[list[int]] = []
        while source is not None:
            tables = self._begin(tokens, query, owner, source)
            if source.stored is not None:
                missing = self._pin_missing(tables, source.stored)
            if self._has_room(tables, headroom):
                break
            self._unpin(missing)
            for group in self.groups:
                group.end(tables)
            # In a full pool, the source of a copy may be the one block that is missing.
            source = self.prefixes.without_copy(source, query)
        if source is None or tables is None:
            return None
        reads: list[BlockRead] = []
        num_present = self._num_present(tables)
        for group, keys in zip(self.groups, missing):
            reads += group.take_missing(tables, keys)
        for attention in self.attention:
            attention.reserve(tables)
        is_indexed = source.fork_of is None or source.fork_of.tip is not None
        if self.enable_prefix_caching and is_indexed:
            # Making room may have dropped a root along with its last child. Content that must be
            # restored first is indexed afterwards.
            tip = source.tip if source.stored is None else source.stored.node(num_present)
            is_root = tip is None or tip.depth == 0
            self.tree.move_tip(tables, self.tree.root(query.salt) if is_root else tip)
        self._sequences.add(tables)
        tables.num_cached_tokens = source.num_tokens(self.block_size)
        tables.num_computed_tokens = tables.num_cached_tokens
        if reads:
            self._begin_restoration(tables, reads, num_present)
        if source.num_refused_tokens:
            tables.num_refused_tokens = source.num_refused_tokens
            self._counters.num_refused_tokens += source.num_refused_tokens
            self.tier.on_refused()
        self._count_admission(tables, source.num_partial_tokens)
        return tables

    def _num_present(self, tables: BlockTables) -> int:
        """Returns the number of leading blocks whose content is on the device, in every attention
        group."""
        return min(t.missing[0] if t.missing else t.num_shared for t in tables.attention)

    def _pin_missing(self, tables: BlockTables, stored: StoredPrefix) -> list[list[int]]:
        """Pins what a new sequence needs of the tier, because making room may drop content.

        Returns:
            The keys, by group.
        """
        missing = [group.missing_keys(tables, stored) for group in self.groups]
        for keys in missing:
            for key in keys:
                self.tier.pin(key)
        return missing

    def _unpin(self, missing: list[list[int]]) -> None:
        for keys in missing:
            for key in keys:
                self.tier.unpin(key)
        missing.clear()

    def _begin_restoration(
        self, tables: BlockTables, reads: list[BlockRead], num_present: int
    ) -> None:
        """Lets an admitted sequence wait. Its first `num_present` blocks are on the device."""
        size = self.block_size
        num_missing = tables.num_cached_tokens - num_present * size
        restoration = Restoration(tables, tables.num_cached_tokens, num_missing, reads)
        tables.num_computed_tokens = num_present * size
        tables.restoration = self.restorations[tables] = restoration

    def finish_restoration(self, restoration: Restoration) -> None:
        """Indexes the blocks of a sequence whose content has been restored, so it can continue."""
        assert restoration.is_done
        self._counters.num_restored_tokens += restoration.num_restored_tokens
        self._end_restoration(restoration)
        self.commit(restoration.tables, restoration.num_tokens)

    def _end_restoration(self, restoration: Restoration) -> None:
        del self.restorations[restoration.tables]
        restoration.tables.restoration = None
        for read in restoration.reads:
            self.tier.unpin(read.key)

    def _begin(
        self, tokens: Sequence[int], query: PrefixQuery, owner: Any, source: PrefixSource
    ) -> BlockTables:
        tables = BlockTables(tokens, owner, query.atomic)
        for group in self.groups:
            group.begin(tables, source)
        return tables

    def _has_room(self, tables: BlockTables, headroom: int) -> bool:
        return all(g.make_room_for(tables, self._headroom(g, headroom)) for g in self.groups)

    def _headroom(self, group: KVCacheGroup, headroom: int) -> int:
        """Scales `headroom` from the first group's pool to a group's pool."""
        return headroom * group.pool.num_usable // self.pool.num_usable

    def _count_admission(self, tables: BlockTables, num_copied: int) -> None:
        counters = self._counters
        counters.num_admissions += 1
        counters.num_queried_tokens += len(tables.tokens)
        counters.num_cached_tokens += tables.num_cached_tokens
        counters.num_copied_tokens += num_copied
        counters.num_block_copies += num_copied > 0

    def extend_cached(self, tables: BlockTables, query: PrefixQuery, start: int) -> int:
        """Gives a running sequence cached full blocks past its first `start` tokens, if there are
        any.

        Returns:
            Number of its tokens that need no computation, at least `start`.
        """
        node, num_tokens = self.match(query).node, len(tables.tokens)
        if node is None or node.depth * self.block_size <= start:
            return start
        reserving = [group for group in self.attention if group.is_full_attention]
        num_fresh = self.blocks_for(num_tokens) - node.depth
        # Blocks that it gives up may be in use by a step in flight, so they do not count as room.
        if all(group.make_room(num_fresh) for group in reserving) and node.is_indexed:
            self.attach_prefix(tables, PrefixMatch(node, None, 0))
            for group in reserving:
                group.allocate_slots(tables, num_tokens)
            return tables.num_computed_tokens
        return start

    def defer_copy(self, tables: BlockTables) -> None:
        """Defers the initial copy of a sequence that was admitted but is not in the step being
        built."""
        for attention in self.attention:
            attention.defer_copy(tables)

    def resume_copy(self, tables: BlockTables) -> None:
        """Adds a sequence's deferred copy, if any, to the step being built."""
        for attention in self.attention:
            attention.resume_copy(tables)

    def max_atomic_tokens(self) -> int | None:
        """Longest span that every group can take in one step; None if there are no windows.

        A window group needs room for everything that the span's first row sees, and for the source
        of a copy.
        """
        limits = [
            (group.max_usable - group.view_blocks - 1) * self.block_size
            for group in self.attention
            if group.view_blocks is not None
        ]
        return max(0, min(limits)) if limits else None

    def grow(self, tables: BlockTables, num_tokens: int) -> bool:
        """Extends tables to `num_tokens` tokens; returns False and changes nothing if there is no
        room."""
        for group in self._by_eviction:
            if group.try_allocate(tables, num_tokens) < num_tokens:
                return False
        for attention in self.attention:
            attention.allocate_slots(tables, num_tokens)
        return True

    def allocate_up_to(self, tables: BlockTables, num_tokens: int) -> int:
        """Extends tables as far as there is room, up to `num_tokens` tokens.

        Returns:
            Number of tokens that the step may reach; also limited by state snapshots.
        """
        for group in self._by_eviction:
            num_tokens = group.try_allocate(tables, num_tokens)
        for attention in self.attention:
            attention.allocate_slots(tables, num_tokens)
        return num_tokens

    def can_grow_later(self, tables: BlockTables, num_tokens: int, num_scheduled: int = 0) -> bool:
        """True if there will be room once the steps in flight are committed.

        Args:
            num_scheduled: Tokens of the sequence that are scheduled or computed.
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
        """Indexes the newly filled blocks of a sequence, and releases blocks that slid out of
        windows.

        ::

            [0, tip)        indexed before
            [tip, new tip)  indexed now; of two equal blocks, the one in use by others remains
            [new tip, end)  own, not indexed
        """
        size, tip = self.block_size, tables.tip
        end = num_computed_tokens // size  # in full blocks
        if tip is not None and tip.depth < end:
            first = tip.depth
            keys, length = token_bytes(tables.tokens[first * size : end * size]), size * TOKEN_BYTES
            for i in range(end - first):
                tip = self._index(tables, tip, first + i, keys[i * length : (i + 1) * length])
            self.tree.move_tip(tables, tip)
        tables.num_computed_tokens = num_computed_tokens
        for each in self._advancing:
            each.on_computed(tables, num_computed_tokens)
        if not tables.is_settled:
            last = (tables.num_prompt_tokens - 1) // size  # where an equal prompt continues
            if end >= last:
                tables.is_settled = True
                self.tier.settle(tables, last)

    def _index(self, tables: BlockTables, parent: PrefixNode, index: int, key: bytes) -> PrefixNode:
        """Indexes block `index` of a sequence as a child of `parent`."""
        node = self.tree.extend(parent, key)
        tail = self.tree.tail_within(node)
        if tail is not None:  # may hold this very block, if a fork of it was cut and ended
            self._remove_node(tail)
        for group in self.attention:
            group.on_indexed(tables, index, node)
        return node

    def truncate(self, tables: BlockTables, num_tokens: int) -> int:
        """Rolls a sequence back to its first `num_tokens` tokens, computed or not.

        Later tokens may change afterwards. Blocks shared with other sequences are not touched.
        Rejected drafts are rolled back before their step is committed, because an indexed block
        must never be written again, not even to replay accepted tokens for a recurrent state.

        ::

            [0, start)           still computed
            [start, num_tokens)  to be recomputed; `reach` extends the tables again if needed
            [num_tokens, end)    dropped

        Returns:
            `start`. It is less than `num_tokens` if a group cannot continue from there: a shared
            block is not overwritten, a recurrent state falls back to one that `move_state` kept,
            and a window that has slid past is recomputed from the beginning.
        """
        start = num_tokens
        while True:
            points = [group.resume_point(tables, start) for group in self.groups]
            end = min(outside(tables.atomic, start), *points)
            if end == start:
                break
            start = end
        self._unindex_after(tables, start)
        tables.num_cached_tokens = min(tables.num_cached_tokens, start)
        for group in self.groups:
            group.truncate(tables, start, num_tokens)
        return start

    def free(self, tables: BlockTables) -> None:
        """Releases a sequence's blocks; indexed ones and its tail stay cached."""
        if tables.restoration is not None:
            self._end_restoration(tables.restoration)
        elif tables.tip is not None:
            self.tier.settle(tables, tables.tip.depth)
        self._sequences.remove(tables)
        self._index_tail(tables)
        for group in self.groups:
            group.end(tables)
        if tables.tip is not None:
            self.tree.move_tip(tables, None)

    def _index_tail(self, tables: BlockTables) -> None:
        """Indexes the partly filled last block of a sequence that has ended.

        Only committed tokens count: a step in flight may fail, and so may the initial copy until a
        step of the sequence is committed. With recurrent layers there is nothing to index, because
        no state is kept in the middle of a block.
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

    def attach_prefix(self, tables: BlockTables, match: PrefixMatch) -> None:
        """Replaces a sequence's blocks with those of a match, including a partial block.

        All blocks are taken by reference. `make_writable` copies the partial one before a write.
        """
        assert match.node is not None
        nodes = match.node.path() + ([] if match.partial is None else [match.partial])
        num_tokens = match.num_tokens(self.block_size)
        for group in self.groups:
            group.attach(tables, nodes, num_tokens)
        tables.num_computed_tokens = num_tokens
        self.tree.move_tip(tables, match.node)

    def _unindex_after(self, tables: BlockTables, num_tokens: int) -> None:
        """Unindexes a sequence past its first `num_tokens` tokens, because they will change."""
        tables.num_computed_tokens = min(tables.num_computed_tokens, num_tokens)
        depth = num_tokens // self.block_size
        if tables.tip is not None and tables.tip.depth > depth:
            self.tree.move_tip(tables, tables.tip.ancestor(depth))

    # Steps.

    def launch_step(self, step: int) -> tuple[tuple[BlockCopy, ...], ...]:
        """Finishes building a step. Stamps later releases with `step`.

        Returns:
            Its block copies, per attention group.
        """
        copies = tuple([group.launch_step(step) for group in self.attention])
        if self.states is not None:
            self.states.launch_step(step)
        return copies

    def move_state(self, tables: BlockTables, end: int, *, keep: bool = False) -> StateMove | None:
        """Returns the slots of a step that brings a sequence to `end` tokens; None if the model has
        no states.

        Called once per scheduled sequence.

        Args:
            keep: Keep the state before the step until its commit, because `truncate` may reject
                tokens of the step.
        """
        return None if self.states is None else self.states.move(tables, end, keep=keep)

    def on_step_evaluated(self, step: int) -> None:
        """Frees the blocks that waited for an evaluated step."""
        for group in self.groups:
            group.on_step_evaluated(step)

    def plan_snapshots(self, tables: BlockTables, query: PrefixQuery | None) -> None:
        """Plans the state snapshots of a sequence that goes on with a prompt, as `admit` does.

        Args:
            query: For all of its tokens but the last; None plans none.
        """
        if self.states is None:
            return
        if query is None:
            self.states.plan(tables, None)
        else:
            self.states.plan(tables, query.num_tokens + 1, self.prefixes.num_indexed_blocks(query))

    # Statistics.

    @property
    def counters(self) -> KVCounters:
        """A snapshot of the counters."""
        first = self.attention[0]
        return replace(
            self._counters,
            num_evictions=first.num_evictions,
            num_deduplicated_blocks=first.num_deduplicated,
        )

    @property
    def usage(self) -> KVUsage:
        """Block counts of the first group."""
        return KVUsage.of(self.pool)

    @property
    def group_usage(self) -> tuple[KVUsage, ...]:
        """Block or slot counts of each further group."""
        return tuple(KVUsage.of(group.pool) for group in self.groups[1:])

    def check_integrity(self) -> None:
        """Checks pools, tree and tables against each other; raises `IntegrityError`."""
        self.tree.check_integrity()
        self.tier.check_integrity()
        nodes = list(self.tree.nodes())
        for group in self.groups:
            group.check_integrity(self._sequences, nodes)
        standing: Counter[int] = Counter()
        waiting = {tables for tables in self._sequences if tables.restoration is not None}
        if waiting != self.restorations.keys():
            raise IntegrityError("a sequence waits for content that will not come")
        for tables in self._sequences:
            self._check_tip(tables)
            standing[id(tables.tip)] += tables.tip is not None
        for node in [*nodes, *{t.tip for t in self._sequences if t.tip is not None}]:
            if len(node.fillers or ()) != standing[id(node)]:
                raise IntegrityError("a node does not know the sequences that will extend it")

    def _check_tip(self, tables: BlockTables) -> None:
        """Checks that a sequence's indexed blocks are filed under its tokens."""
        size = self.block_size
        for node in [] if tables.tip is None else tables.tip.path():
            first = (node.depth - 1) * size
            if token_bytes(tables.tokens[first : first + size]) != node.key:
                raise IntegrityError(f"blocks {node.entries} are indexed under other tokens")
