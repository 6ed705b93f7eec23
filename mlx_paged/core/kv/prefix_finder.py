"""PrefixFinder: finds the cached prefix that a new sequence can continue from.

The prefix tree matches tokens. A sequence can continue only at a point where every KV cache group
has its content, on the device or in the tier: full attention needs all blocks before the point,
windows the last ones, and recurrent layers the state after exactly that token. Nothing here changes
the store.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_paged.core.kv.attention_group import AttentionGroup
from mlx_paged.core.kv.groups import KVCacheGroup
from mlx_paged.core.kv.state_group import StateGroup
from mlx_paged.core.kv.stored import StoredPrefix
from mlx_paged.core.kv.tables import BlockTables, PrefixSource
from mlx_paged.core.kv.tier import Tier
from mlx_paged.core.kv.tree import (
    NO_MATCH,
    TOKEN_BYTES,
    PrefixMatch,
    PrefixQuery,
    PrefixTree,
)
from mlx_paged.core.media import outside


class PrefixFinder:
    """Searches for prefixes in one KV store.

    Args:
        attention, states: The KV cache groups, see `KVManager`.
        is_on: False to find nothing, without a prefix cache.
    """

    def __init__(
        self,
        tree: PrefixTree,
        attention: Sequence[AttentionGroup],
        states: StateGroup | None,
        tier: Tier,
        *,
        is_on: bool,
    ) -> None:
        self._tree = tree
        self._attention = attention
        self._states = states
        self._groups: tuple[KVCacheGroup, ...] = (*attention,)
        if states is not None:
            self._groups += (states,)
        self._tier = tier
        self._is_on = is_on
        self._block_size = attention[0].block_size

    def match(self, query: PrefixQuery) -> PrefixMatch:
        """Returns the longest cached prefix that every group can continue from."""
        match = self._continuable(query)
        return self._cut(match, query) if query.atomic else match

    def num_indexed_blocks(self, query: PrefixQuery) -> int:
        """Returns the number of leading full blocks indexed, even if some group cannot continue
        there."""
        return self._indexed(query).num_full_blocks

    def _indexed(self, query: PrefixQuery) -> PrefixMatch:
        """Returns the longest indexed prefix, even if some group cannot continue from it."""
        return self._tree.match(query) if self._is_on else NO_MATCH

    def _present(self, query: PrefixQuery) -> PrefixMatch:
        """Returns the longest indexed prefix whose blocks of full attention are on the device."""
        match = self._indexed(query)
        if match.node is None:
            return match
        depth = self._attention[0].usable_depth(match.node, match.node.depth)
        if depth == match.node.depth:
            return match
        return PrefixMatch(match.node.ancestor(depth), None, 0)

    def _continuable(self, query: PrefixQuery) -> PrefixMatch:
        """Returns the longest cached prefix; may end in the middle of an atomic span."""
        return self._limit(self._indexed(query))

    def _cut(self, match: PrefixMatch, query: PrefixQuery) -> PrefixMatch:
        """Shortens a match until it splits no atomic span."""
        while True:
            num_tokens = match.num_tokens(self._block_size)
            end = outside(query.atomic, num_tokens)
            if end == num_tokens:
                return match
            node = match.node
            assert node is not None
            depth, num_partial = divmod(end, self._block_size)
            partial = None
            if num_partial:
                partial = match.partial if depth == node.depth else node.ancestor(depth + 1)
            match = self._limit(PrefixMatch(node.ancestor(depth), partial, num_partial))

    def _limit(self, match: PrefixMatch) -> PrefixMatch:
        """Shortens a match until every group can continue from it."""
        node = match.node
        if node is None:
            return match
        depth = node.depth
        while depth:
            usable = min(group.usable_depth(node, depth) for group in self._groups)
            if usable == depth:
                break
            depth = usable
        if depth < node.depth:
            return PrefixMatch(node.ancestor(depth), None, 0)
        partial = match.partial
        if partial is not None and not all(group.can_copy_from(partial) for group in self._groups):
            return PrefixMatch(node, None, 0)
        return match

    def _with_stored(
        self, source: PrefixSource, query: PrefixQuery, indexed: PrefixMatch
    ) -> PrefixSource:
        """Prefers a longer prefix that every group can continue from once all of it is on the
        device, unless computing it is faster."""
        if self._tier.is_empty:
            return source
        size, num_tokens, num_refused = self._block_size, source.num_tokens(self._block_size), 0
        nodes = [] if indexed.node is None else indexed.node.path()
        stored = StoredPrefix(nodes, self._tier.look_up(query))
        stored.extend(query.num_tokens // size)
        while stored.num_blocks * size > num_tokens:
            depth = stored.num_blocks
            usable = min(group.usable_stored(stored, depth) for group in self._groups)
            usable = outside(query.atomic, usable * size) // size
            if usable < depth:
                stored.shorten(usable)
                continue
            worth = self._tier.num_worth_restoring(stored, num_tokens // size)
            if worth == depth:
                return PrefixSource(
                    depth,
                    None,
                    num_known_blocks=max(depth, indexed.num_full_blocks),
                    stored=stored,
                    num_refused_tokens=max(0, num_refused - depth * size),
                )
            num_refused = max(num_refused, depth * size)
            stored.shorten(worth)
        return source._replace(num_refused_tokens=max(0, num_refused - num_tokens))

    def computing_next_block(self, tokens: Sequence[int], query: PrefixQuery) -> BlockTables | None:
        """Returns the running sequence about to fill the first block that `tokens` lacks, or None.

        A sequence that waits for it need not compute that block. If `tokens` ends inside the block,
        it must use at least half of the block to make the wait worthwhile.
        """
        match = self._continuable(query) if self._states is None else self._present(query)
        if match.node is None:
            return None
        size, first = self._block_size, match.node.depth
        start = first * size * TOKEN_BYTES
        wanted = query.tokens[start : start + size * TOKEN_BYTES]
        num_wanted = len(wanted) // TOKEN_BYTES
        if num_wanted <= match.num_partial_tokens or 2 * num_wanted < size:
            return None
        running = self._tree.filler(match.node, wanted)
        assert running is None or isinstance(running, BlockTables)
        if running is None or self._states is None or self._states.request_snapshot(running, query):
            return running
        return None

    def part_after(self, running: BlockTables, query: PrefixQuery) -> int:
        """Returns the number of leading tokens that a waiting sequence can take from a running one.

        Args:
            running: The result of `computing_next_block` for `query`.

        Returns:
            The end of the last full block in common, or the end of the next block if `query` ends
            inside that one.
        """
        assert running.tip is not None
        size, first = self._block_size, running.tip.depth
        num_equal = running.num_equal(query, first * size)
        return max(first + 1, num_equal // size) * size

    def can_fork(self, tables: BlockTables, num_tokens: int) -> bool:
        """True if a running sequence still holds all that a fork after `num_tokens` tokens
        reads."""
        return all(group.can_fork(tables, num_tokens) for group in self._groups)

    def keeps_last_token_forkable(self, num_tokens: int) -> bool:
        """True if a sequence with `num_tokens` computed tokens can be forked before the last one.

        False if a window slides with that token, or if there are recurrent layers.
        """
        return self._states is None and all(
            group.first_block(num_tokens) <= group.first_block(num_tokens - 1)
            for group in self._attention
        )

    def without_copy(self, source: PrefixSource, query: PrefixQuery) -> PrefixSource | None:
        """Returns `source` without its copy, shortened until it splits no atomic span.

        None if there is no copy, or if the windows of a forked sequence do not reach back that far.
        """
        tip, depth, size = source.tip, source.num_full_blocks, self._block_size
        if not source.num_partial_tokens:
            return None
        while (end := outside(query.atomic, depth * size)) < depth * size:
            depth = end // size
            if source.fork_of is None:
                assert tip is not None
                tip = self._limit(PrefixMatch(tip.ancestor(depth), None, 0)).node
                assert tip is not None
                depth = tip.depth
        if source.fork_of is not None and not self.can_fork(source.fork_of, depth * size):
            return None
        tip = None if tip is None else tip.ancestor(depth)
        return source._replace(num_full_blocks=depth, tip=tip, partial=None, num_partial_tokens=0)

    def source(
        self,
        query: PrefixQuery,
        read_cache: bool,
        fork_of: BlockTables | None,
        num_fork_tokens: int,
    ) -> PrefixSource:
        """Chooses the source of a new sequence's head: the tree, a running sequence that has
        computed more than is indexed, or what a tier has."""
        indexed = self._indexed(query) if read_cache else NO_MATCH
        match = self._limit(indexed)
        size = self._block_size
        if fork_of is None and read_cache and match.node is not None and self._states is None:
            start = match.node.depth * size
            wanted = query.tokens[start * TOKEN_BYTES : (start + size) * TOKEN_BYTES]
            running, num_tokens = self._tree.computed_by(
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
            # A step makes its copies in any order, so none may read what another one writes.
            and not any(group.awaits_copy(fork_of, num_fork_tokens) for group in self._attention)
        ):
            num_full, num_partial = divmod(num_fork_tokens, size)
            tip = None if fork_of.tip is None else fork_of.tip.ancestor(num_full)
            num_known = indexed.num_full_blocks
            source = PrefixSource(num_full, tip, None, num_partial, fork_of, num_known)
        else:
            source = PrefixSource(
                match.num_full_blocks,
                match.node,
                match.partial,
                match.num_partial_tokens,
                num_known_blocks=indexed.num_full_blocks,
            )
        if source.num_tokens(size) >= query.num_tokens // size * size or not read_cache:
            return source
        return self._with_stored(source, query, indexed)
