"""The executable invariants of the KV store: every count is recomputed from the block tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from mlx_paged.core.block_pool import BlockPool
from mlx_paged.core.block_table import BlockCopy, BlockTable
from mlx_paged.core.frontier import Frontier
from mlx_paged.core.prefix_source import PrefixSource
from mlx_paged.core.radix_index import RadixIndex
from mlx_paged.core.radix_node import RadixNode
from mlx_paged.core.side_groups import SideGroups
from mlx_paged.errors import IntegrityError


def check_books(
    pool: BlockPool,
    index: RadixIndex,
    tables: Mapping[int, BlockTable],
    copies: Collection[tuple[BlockCopy, PrefixSource]],
    frontier: Frontier,
    groups: SideGroups,
) -> None:
    """Checks pool and index on their own, then against the tables and the copies being built.

    Raises:
        IntegrityError: With the first disagreement found.
    """
    pool.check_integrity()
    index.check_integrity()
    ref_counts = Counter(block for table in tables.values() for block in table.blocks)
    for copy, source in copies:
        ref_counts.update([n.block for n in _path(source.partial_node)] or [copy.src])
    for block in range(pool.num_blocks):
        if pool.ref_count(block) != ref_counts[block]:
            raise IntegrityError(
                f"block {block} has {pool.ref_count(block)} references, "
                f"but {ref_counts[block]} tables and copies name it"
            )
    _check_index(pool, index, tables, copies)
    tips = {(table.tip, seq_id) for seq_id, table in tables.items() if table.tip is not None}
    if tips != set(frontier):
        raise IntegrityError("the sequences filed by the node they extend are not where they say")
    groups.check_integrity(tables, set(index.nodes()))


def _check_index(
    pool: BlockPool,
    index: RadixIndex,
    tables: Mapping[int, BlockTable],
    copies: Collection[tuple[BlockCopy, PrefixSource]],
) -> None:
    locks: Counter[RadixNode] = Counter()
    for seq_id, table in tables.items():
        for node in _path(table.tip):
            locks[node] += 1
            if table.blocks[node.depth - 1] != node.block:
                raise IntegrityError(
                    f"entry {node.depth - 1} of sequence {seq_id}'s table is not the indexed block"
                )
            first = (node.depth - 1) * index.block_size
            if tuple(table.tokens[first : first + index.block_size]) != node.key:
                raise IntegrityError(
                    f"block {node.block} of sequence {seq_id} is indexed under other tokens"
                )
    for _, source in copies:
        locks.update(_path(source.partial_node))
    indexed = set()
    for node in index.nodes():
        indexed.add(node.block)
        if node.locks != locks[node]:
            raise IntegrityError(
                f"the node of block {node.block} has {node.locks} locks, but {locks[node]} holders"
            )
        if node.locks != pool.ref_count(node.block):
            raise IntegrityError(
                f"block {node.block} has {node.locks} locks, "
                f"but {pool.ref_count(node.block)} references"
            )
    cached = {block for block in range(pool.num_blocks) if pool.is_cached(block)}
    if cached != indexed:
        raise IntegrityError(f"blocks {cached ^ indexed} are in the pool's books or the index only")


def _path(node: RadixNode | None) -> list[RadixNode]:
    """The nodes that hold a block, down to `node`."""
    return [] if node is None else node.path()
