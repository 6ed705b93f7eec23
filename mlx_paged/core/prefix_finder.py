"""PrefixFinder: what a sequence could take over, and what is worth waiting for."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_paged.core.block_table import BlockTable
from mlx_paged.core.frontier import Frontier
from mlx_paged.core.prefix_source import PrefixSource
from mlx_paged.core.radix_index import NO_MATCH, PrefixMatch, RadixIndex
from mlx_paged.core.side_groups import SideGroups


class PrefixFinder:
    """Questions to the index that every group must agree to."""

    def __init__(
        self, index: RadixIndex, groups: SideGroups, frontier: Frontier, *, enabled: bool
    ) -> None:
        self._index = index
        self._groups = groups
        self._frontier = frontier
        self._enabled = enabled
        self._block_size = index.block_size

    def match(self, tokens: Sequence[int], salt: str | None) -> PrefixMatch:
        """The longest prefix that a new sequence can continue from: all but the last token."""
        match = self._indexed(tokens, salt)
        return self._groups.limit(match) if self._groups else match

    def _indexed(self, tokens: Sequence[int], salt: str | None) -> PrefixMatch:
        """The longest indexed prefix, whether or not every group can continue from there."""
        if not self._enabled:
            return NO_MATCH
        return self._index.match(tokens, len(tokens) - 1, salt)

    def computing_next_block(self, tokens: Sequence[int], salt: str | None) -> int | None:
        """The running sequence that is about to fill the first block that `tokens` lacks."""
        states = self._groups.states
        match = self.match(tokens, salt) if states is None else self._indexed(tokens, salt)
        if match.node is None:
            return None
        size, first = self._block_size, match.node.depth
        wanted = tuple(tokens[first * size : min((first + 1) * size, len(tokens) - 1)])
        if len(wanted) <= match.num_partial_tokens or 2 * len(wanted) < size:
            return None
        seq_id = self._frontier.filling(match.node, wanted, size)
        if states is None or seq_id is None or states.wait_for(seq_id, tokens):
            return seq_id
        return None

    def source(
        self,
        tokens: Sequence[int],
        salt: str | None,
        *,
        read_cache: bool,
        fork_of: int | None,
        fork_table: BlockTable | None,
        num_fork_tokens: int,
    ) -> PrefixSource:
        """Where a new sequence's head comes from: a running one that it forks, or the index."""
        indexed = match = self._indexed(tokens, salt) if read_cache else NO_MATCH
        if self._groups:
            match = self._groups.limit(indexed)
        size = self._block_size
        if (
            fork_of is not None
            and fork_table is not None
            and num_fork_tokens > match.num_tokens(size)
            and self._groups.can_fork(fork_of, num_fork_tokens)
        ):
            return PrefixSource.from_fork(fork_of, fork_table, num_fork_tokens, size)
        if not self._enabled:
            return PrefixSource([], None)
        root = self._index.root(salt)
        return PrefixSource.from_match(root, match, indexed.num_full_blocks)
