"""The block table of one sequence, as KVManager keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mlx_paged.core.radix_node import BlockKey, RadixNode


class BlockCopy(NamedTuple):
    """Copy-on-write: copy block `src` to `dst`, in every layer, before the step's first write."""

    src: int
    dst: int


class BlockTable:
    """Blocks of a sequence, and how many of them the prefix index holds.

    ::

        [0, tip.depth)            indexed: shared with whoever has the same prefix
        [tip.depth, len(blocks))  not indexed: its own (or, uncached, its forks' too)

    Attributes:
        tokens: The sequence's live token list: the sequence appends to it, the manager reads it.
        blocks: Physical blocks in order.
        tip: Node of the last indexed block (or the root); None when this sequence is not indexed at
            all.
    """

    __slots__ = ("_dirty_from", "_unchanged", "blocks", "tip", "tokens")

    def __init__(self, tokens: Sequence[int], blocks: list[int], tip: RadixNode | None) -> None:
        self.tokens = tokens
        self.blocks = blocks
        self.tip = tip
        self._dirty_from = 0
        self._unchanged: tuple[tuple[int, ...], int] | None = None  # the next export, if so

    def append(self, block: int) -> None:
        self._dirty_from = min(self._dirty_from, len(self.blocks))
        self.blocks.append(block)
        self._unchanged = None

    def replace(self, index: int, block: int) -> None:
        self._dirty_from = min(self._dirty_from, index)
        self.blocks[index] = block
        self._unchanged = None

    def export(self) -> tuple[tuple[int, ...], int]:
        """The table as a tuple, and its first entry that may differ from the last export."""
        if self._unchanged is not None:
            return self._unchanged
        table, dirty_from = tuple(self.blocks), self._dirty_from
        self._dirty_from = len(table)
        self._unchanged = table, len(table)
        return table, dirty_from

    def key_of(self, index: int, block_size: int) -> BlockKey:
        """Tokens of block `index`; fewer than `block_size` where they are not all known."""
        return tuple(self.tokens[index * block_size : (index + 1) * block_size])
