"""BlockTables: the blocks and the state of one sequence. PrefixSource: where it begins."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from mlx_paged.core.kv.pool import NULL_BLOCK
from mlx_paged.core.kv.restoration import Restoration
from mlx_paged.core.kv.specs import StateSlot, StepTable
from mlx_paged.core.kv.stored import StoredPrefix
from mlx_paged.core.kv.tree import TOKEN_TYPE, PrefixNode, PrefixQuery, common_prefix_len


class BlockTable:
    """A sequence's blocks in one attention group; entries before `first` are block 0.

    Attributes:
        num_shared: Number of leading entries that came from the cache or a fork.
        missing: Entries below `num_shared` whose content is elsewhere, in ascending order. They
            have no block until `take_missing`.
        copy_source: Block whose head the step being built copies to entry `num_shared`.
        dirty_from: First entry changed since the last export, ignoring entries that slid out.
    """

    __slots__ = ("blocks", "copy_source", "dirty_from", "first", "missing", "num_shared")

    def __init__(self, blocks: list[int], first: int = 0, copy_source: int | None = None) -> None:
        self.blocks = blocks
        self.first = first
        self.num_shared = len(blocks)
        self.missing: tuple[int, ...] = ()
        self.copy_source = copy_source
        self.dirty_from = 0

    @property
    def live(self) -> list[int]:
        """Blocks that the sequence references."""
        return self.blocks[self.first :]

    def repair(self) -> None:
        """Repairs the table after an interrupted change, which may leave zeros between blocks."""
        holes = [i for i, block in enumerate(self.blocks) if block == NULL_BLOCK]
        self.first = holes[-1] + 1 if holes else 0
        self.blocks[: self.first] = [NULL_BLOCK] * self.first


class BlockTables:
    """The tables of one sequence, one per KV cache group, and how far it is indexed.

    ::

        [0, tip.depth)            indexed: shared with sequences that have the same prefix
        [tip.depth, len(blocks))  not indexed: its own; without a tip, its forks may share them

    Attributes:
        tokens: The sequence's live token list. The sequence appends to it; the KV manager reads it.
        tip: Node of the last indexed block, or the root; None if the sequence is not indexed.
        attention: Its table in each attention group, full attention first.
        state: Its recurrent state; None if the model has none.
        num_prompt_tokens: Its tokens at admission. Another sequence may continue from there: the
            next turn, or an equal prompt.
        num_cached_tokens: Leading tokens found in the cache.
        num_refused_tokens: Tokens after these that a tier had, but that are computed faster.
        num_computed_tokens: Leading tokens in the blocks, cached or computed by committed steps.
        exported: The next result of `export`; None if a table has changed since the last one.
        owner: The sequence that these tables belong to.
        is_settled: True once the tier knows that the prompt is computed.
        restoration: Content that the sequence waits for; None if it waits for none.
        atomic: Spans that one step must compute as a whole (`PrefixQuery.atomic`).
    """

    __slots__ = (
        "atomic",
        "attention",
        "exported",
        "is_settled",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_refused_tokens",
        "owner",
        "restoration",
        "state",
        "tip",
        "tokens",
    )

    def __init__(
        self,
        tokens: Sequence[int],
        owner: Any = None,
        atomic: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.tokens = tokens
        self.owner = owner
        self.atomic = atomic
        self.tip: PrefixNode | None = None
        self.attention: list[BlockTable] = []
        self.state: StateSlot | None = None
        self.num_prompt_tokens = len(tokens)
        self.num_cached_tokens = 0
        self.num_refused_tokens = 0
        self.num_computed_tokens = 0
        self.exported: tuple[StepTable, ...] | None = None
        self.restoration: Restoration | None = None
        self.is_settled = False

    @property
    def blocks(self) -> list[int]:
        """Blocks of full attention, in order; read-only."""
        return self.attention[0].blocks

    def num_equal(self, query: PrefixQuery, start: int = 0) -> int:
        """Returns the number of leading tokens shared with a query; the first `start` are known to
        match."""
        tokens = self.tokens if isinstance(self.tokens, array) else array(TOKEN_TYPE, self.tokens)
        # An array does not grow while a view of it exists.
        with memoryview(tokens) as view, view.cast("B") as own:
            return common_prefix_len(query.tokens, own, start)

    def export(self) -> tuple[StepTable, ...]:
        """Returns the tables for a step, in the order of the attention groups."""
        if self.exported is not None:
            return self.exported
        tables, unchanged = [], []
        for table in self.attention:
            blocks = tuple(table.blocks)
            tables.append(StepTable(blocks, table.dirty_from))
            unchanged.append(StepTable(blocks, len(blocks)))
            table.dirty_from = len(blocks)
        self.exported = tuple(unchanged)
        return tuple(tables)

    # Table updates. `number` is the group number.

    def append(self, number: int, *blocks: int) -> None:
        """Appends blocks."""
        table = self.attention[number]
        table.dirty_from = min(table.dirty_from, len(table.blocks))
        table.blocks += blocks
        self.exported = None

    def replace(self, number: int, index: int, block: int) -> None:
        """Replaces the block of entry `index`."""
        table = self.attention[number]
        table.dirty_from = min(table.dirty_from, index)
        table.blocks[index] = block
        self.exported = None

    def slide(self, number: int, index: int) -> None:
        """Clears entry `index`, which slid out of the window."""
        self.attention[number].blocks[index] = NULL_BLOCK
        self.exported = None

    def truncate(self, number: int, num_blocks: int) -> list[int]:
        """Cuts a table to `num_blocks` entries; returns the rest."""
        table = self.attention[number]
        cut = table.blocks[num_blocks:]
        del table.blocks[num_blocks:]
        table.dirty_from = min(table.dirty_from, num_blocks)
        table.num_shared = min(table.num_shared, num_blocks)
        self.exported = None
        return cut


class PrefixSource(NamedTuple):
    """The source of a new sequence's cached head: the prefix tree, or a sequence to fork.

    Attributes:
        num_full_blocks: Full blocks, taken by reference.
        tip: Node of the last full block; the root or None if there is no full block, and None if
            the forked sequence is not indexed.
        partial: Node whose block's first `num_partial_tokens` tokens are copied; None if there is
            none or a fork provides them.
        num_partial_tokens: Tokens copied from the block after the full ones.
        fork_of: The sequence to fork; None if the blocks come from the tree.
        num_known_blocks: Full blocks of the new sequence that are indexed, even if some group
            cannot continue after them.
        stored: Its entries, if some of the content is elsewhere and must be restored first.
        num_refused_tokens: Tokens after these that a tier has, and that are computed faster.
    """

    num_full_blocks: int
    tip: PrefixNode | None
    partial: PrefixNode | None = None
    num_partial_tokens: int = 0
    fork_of: BlockTables | None = None
    num_known_blocks: int = 0
    stored: StoredPrefix | None = None
    num_refused_tokens: int = 0

    def num_tokens(self, block_size: int) -> int:
        """Returns the number of tokens that the source provides."""
        return self.num_full_blocks * block_size + self.num_partial_tokens
