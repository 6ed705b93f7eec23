"""Where a new sequence's cached head comes from: the index, or a sequence it forks."""

from __future__ import annotations

from typing import NamedTuple

from mlx_paged.core.block_table import BlockTable
from mlx_paged.core.radix_index import PrefixMatch
from mlx_paged.core.radix_node import RadixNode


class PrefixSource(NamedTuple):
    """Blocks to take over.

    Attributes:
        blocks: Full blocks, taken by reference.
        tip: Node of the last of them (or the root); None when the new sequence is not to be
            indexed.
        partial: Block whose first `num_partial_tokens` tokens are taken by copy; None when there is
            none.
        partial_node: Node of `partial`, where it is indexed.
        fork_of: The running sequence that is forked; None where the blocks come from the index.
        num_known_blocks: Full blocks of the new sequence that are indexed, whether or not every
            group can continue after them.
    """

    blocks: list[int]
    tip: RadixNode | None
    partial: int | None = None
    partial_node: RadixNode | None = None
    num_partial_tokens: int = 0
    fork_of: int | None = None
    num_known_blocks: int = 0

    def num_tokens(self, block_size: int) -> int:
        """Tokens that need not be computed."""
        return len(self.blocks) * block_size + self.num_partial_tokens

    @property
    def held_for_copy(self) -> list[int]:
        """Blocks to hold until the copy is launched.

        An indexed source is held with its whole path, as its lock covers that too.
        """
        if self.partial_node is not None:
            return self.partial_node.path_blocks()
        return [] if self.partial is None else [self.partial]

    @classmethod
    def from_match(
        cls, root: RadixNode, match: PrefixMatch, num_known_blocks: int = 0
    ) -> PrefixSource:
        """Cached blocks; `root` is where a sequence that matches nothing begins."""
        tip, partial = match.node or root, match.partial
        return cls(
            tip.path_blocks(),
            tip,
            None if partial is None else partial.block,
            partial,
            match.num_partial_tokens,
            num_known_blocks=num_known_blocks,
        )

    def without_copy(self) -> PrefixSource:
        """The full blocks alone."""
        return self._replace(partial=None, partial_node=None, num_partial_tokens=0)

    @classmethod
    def from_fork(
        cls, seq_id: int, table: BlockTable, num_tokens: int, block_size: int
    ) -> PrefixSource:
        """Blocks of a running sequence; its first `num_tokens` tokens are committed."""
        num_full, num_partial = divmod(num_tokens, block_size)
        assert table.tip is None or table.tip.depth >= num_full
        tip = None if table.tip is None else table.tip.ancestor(num_full)
        blocks = table.blocks[:num_full]
        if num_partial == 0:
            return cls(blocks, tip, fork_of=seq_id)
        node = None
        if table.tip is not None and table.tip.depth > num_full:
            node = table.tip.ancestor(num_full + 1)
        return cls(blocks, tip, table.blocks[num_full], node, num_partial, fork_of=seq_id)
