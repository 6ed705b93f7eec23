"""StoredPrefix: a prefix whose content is partly on the device and partly in a tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx_paged.core.kv.tier import ABSENT
from mlx_paged.core.kv.tree import PrefixNode

#: (group, index of a block) -> the tier's key of that content; 0 if it has none.
LookUp = Callable[[int, int], int]


class StoredPrefix:
    """The entries of a prefix, by group and block.

    Args:
        nodes: The indexed blocks of the prefix.
        look_up: What the tier has besides; None if it has nothing.

    Attributes:
        num_blocks: Number of leading blocks; `shorten` lowers it.
    """

    def __init__(self, nodes: Sequence[PrefixNode], look_up: LookUp | None) -> None:
        self._nodes = nodes
        self._look_up = look_up
        self.num_blocks = len(nodes)

    def extend(self, num_blocks: int) -> None:
        """Adds up to `num_blocks` blocks in all that only the tier has, by the first group."""
        if self._look_up is not None:
            while self.num_blocks < num_blocks and self._look_up(0, self.num_blocks):
                self.num_blocks += 1

    def shorten(self, num_blocks: int) -> None:
        """Cuts the prefix to its first `num_blocks` blocks."""
        assert num_blocks <= self.num_blocks
        self.num_blocks = num_blocks

    def entry(self, group: int, index: int) -> int:
        """Returns the entry of a block, encoded as in a node: a block, minus a key, or 0."""
        entry = ABSENT
        if index < len(self._nodes):
            entry = self._nodes[index].entries[group]
        if entry == ABSENT and self._look_up is not None:
            return -self._look_up(group, index)
        return entry

    def node(self, depth: int) -> PrefixNode | None:
        """Returns the node after the first `depth` blocks; None if there is none, or it is the
        root."""
        return self._nodes[depth - 1] if 0 < depth <= len(self._nodes) else None
