"""Frontier: which running sequence is about to fill which block."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_paged.core.block_table import BlockTable
from mlx_paged.core.radix_node import BlockKey, RadixNode


class Frontier:
    """Running sequences, filed by the node that their next block will hang under."""

    def __init__(self) -> None:
        self._at: dict[RadixNode, dict[int, BlockTable]] = {}

    def enter(self, seq_id: int, table: BlockTable) -> None:
        """Files a sequence under its tip; one that is not indexed has none."""
        if table.tip is not None:
            self._at.setdefault(table.tip, {})[seq_id] = table

    def leave(self, seq_id: int, table: BlockTable) -> None:
        """Takes a sequence out, before its tip moves or its table goes."""
        if table.tip is not None:
            at_tip = self._at[table.tip]
            del at_tip[seq_id]
            if not at_tip:
                del self._at[table.tip]

    def clear(self) -> None:
        self._at.clear()

    def filling(self, node: RadixNode, wanted: BlockKey, block_size: int) -> int | None:
        """The first sequence about to fill a child of `node` that begins with `wanted`.

        Only blocks whose tokens are all known count: the rest of a prompt, never text that is yet
        to be generated.
        """
        for seq_id, table in self._at.get(node, {}).items():
            key = table.key_of(node.depth, block_size)
            if len(key) == block_size and key[: len(wanted)] == wanted:
                return seq_id
        return None

    def __iter__(self) -> Iterator[tuple[RadixNode, int]]:
        return ((node, seq_id) for node, seq_ids in self._at.items() for seq_id in seq_ids)
