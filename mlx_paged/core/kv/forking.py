"""ForkingKVManager: a KV store whose sequences can also be forked, cut and overwritten.

A scheduler's sequences only grow, and write to their own blocks. Sequences here may change at any
position: `make_writable` replaces shared blocks with copies before a write.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mlx_paged.core.kv.manager import KVManager
from mlx_paged.core.kv.pool import NULL_BLOCK
from mlx_paged.core.kv.specs import BlockCopy
from mlx_paged.core.kv.tables import BlockTables, PrefixSource
from mlx_paged.core.kv.tree import PrefixNode
from mlx_paged.errors import IntegrityError


class ForkingKVManager(KVManager):
    """A `KVManager` whose sequences can be forked, cut and overwritten. Schedulers may share it."""

    def open(self, tokens: Sequence[int]) -> BlockTables:
        """Creates empty tables, to be filled by `attach_prefix` and `make_writable`.

        Args:
            tokens: The live token list of the sequence, as far as known. Committed blocks are
                indexed under it. Before a token changes, call `make_writable` to rewrite it or
                `shrink` to cut it off.
        """
        tables = BlockTables(tokens)
        for group in self.groups:
            group.begin(tables, PrefixSource(0, None))
        return self._opened(tables, self.tree.root() if self.enable_prefix_caching else None)

    @property
    def open_tables(self) -> frozenset[BlockTables]:
        """All tables that have not been freed."""
        return frozenset(self._sequences)

    def is_open(self, tables: BlockTables) -> bool:
        """True if tables have not been freed."""
        return tables in self._sequences

    def fork(self, tables: BlockTables, tokens: Sequence[int]) -> BlockTables:
        """Creates tables for another sequence that share all blocks, also partly filled ones, and
        the state."""
        copy = BlockTables(tokens)
        copy.num_computed_tokens = tables.num_computed_tokens
        for group in self.groups:
            group.fork(tables, copy)
        return self._opened(copy, tables.tip)

    def _opened(self, tables: BlockTables, tip: PrefixNode | None) -> BlockTables:
        self.tree.move_tip(tables, tip)
        self._sequences.add(tables)
        return tables

    def unindex(self, tables: BlockTables) -> None:
        """Stops indexing a sequence, because its tokens are unknown."""
        self.tree.move_tip(tables, None)

    def make_writable(
        self, tables: BlockTables, start: int, end: int, number: int = 0
    ) -> list[BlockCopy] | None:
        """Makes positions ``[start, end)`` of a sequence writable in one attention group.

        Returns:
            Block copies to run before the write, and before the copies of a later call. None if
            there is no room now; the sequence is then unchanged.
        """
        group = self.attention[number]
        num_needed = group.num_to_write(tables, start, end)
        group.supply(num_needed)
        if num_needed > group.pool.num_available or not group.make_room(num_needed):
            return None
        self._unindex_after(tables, start)
        return group.make_writable(tables, start, end)

    def slide(self, tables: BlockTables, num_tokens: int) -> None:
        """Releases blocks that rows after `num_tokens` tokens do not see, indexed or not."""
        for group in self.attention:
            group.on_computed(tables, num_tokens)

    def shrink(self, tables: BlockTables, num_tokens: int) -> None:
        """Releases the blocks past the first `num_tokens` tokens.

        Blocks that slid out of a window do not come back. The caller checks `BlockTable.first` to
        make sure that none is needed.
        """
        self._unindex_after(tables, num_tokens)
        for number, group in enumerate(self.attention):
            table, num_blocks = tables.attention[number], self.blocks_for(num_tokens)
            table.first = min(table.first, num_blocks)
            for block in reversed(tables.truncate(number, num_blocks)):
                if block != NULL_BLOCK:
                    group.pool.release(block)

    def check_recovery(self, lost: Collection[BlockTables]) -> None:
        """Raises `IntegrityError` if an interrupted change has left anything behind.

        Args:
            lost: Tables whose holder the interruption has lost.
        """
        self.check_integrity()
        if lost or any(group.has_copies for group in self.attention):
            raise IntegrityError("a step was planned but not run")

    def recount(self, lost: Collection[BlockTables] = ()) -> None:
        """Restores consistency with the open tables after an interrupted change.

        Drops the prefix tree, copies that are due, and the tables in `lost`; frees all blocks that
        no table names. No step may be in flight.
        """
        self._sequences.difference_update(lost)
        self.tree.start_anew()
        for tables in self._sequences:
            tables.tip = tables.exported = None
            for table in tables.attention:
                table.repair()
        for group in self.groups:
            group.recount(self._sequences)
        self._counters.num_resets += 1
