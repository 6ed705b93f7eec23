"""WritePolicy: chooses the blocks worth writing to disk when a sequence reaches the end of a turn.

Writing wears out a disk, so only prefixes that were used twice or are long are written. A write
creates a *point* from which every group can continue: all blocks of full attention before it, the
windows that end there, and the recurrent state at exactly that token. Windows and states are
written again for every point, so points must not be too close together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx_paged.core.kv.attention_group import AttentionGroup
from mlx_paged.core.kv.groups import KVCacheGroup
from mlx_paged.core.kv.stored import StoredPrefix
from mlx_paged.core.kv.tables import BlockTables
from mlx_paged.core.kv.tree import PrefixNode

#: Prefixes of at least this many tokens are written at first use.
LONG_TOKENS = 2048
#: Minimum new tokens worth writing.
MIN_TOKENS = 256
# Maximum bytes of a point's windows and states, as a multiple of the bytes of its new tokens.
_MAX_POINT_COST = 2
# Minimum new tokens of a point of a model without attention.
_STATE_TOKENS = 1024


class WritePolicy:
    """Chooses blocks of one KV manager.

    Args:
        block_bytes: Bytes of a block of each group.
        is_stored: Returns True if a node's content of a group is on disk, or being written.
    """

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        block_bytes: Sequence[int],
        block_size: int,
        is_stored: Callable[[PrefixNode, int], bool],
    ) -> None:
        self._groups = groups
        self._block_bytes = block_bytes
        self._block_size = block_size
        self._is_stored = is_stored
        # A pool has a block of each of these groups for every block of tokens.
        self._bytes_per_block = sum(
            num_bytes
            for group, num_bytes in zip(groups, block_bytes, strict=True)
            if isinstance(group, AttentionGroup)
        )

    def choose(self, tables: BlockTables, depth: int) -> list[tuple[PrefixNode, int]]:
        """Returns the (node, group) of a sequence to write now, in order; empty if it can wait.

        Args:
            depth: Maximum number of blocks.
        """
        size, tip = self._block_size, tables.tip
        assert tip is not None
        depth = min(depth, tip.depth)
        if depth * size < LONG_TOKENS:
            depth = min(depth, tables.num_cached_tokens // size)
        if depth * size < MIN_TOKENS:
            return []
        nodes = tip.ancestor(depth).path()
        prefix = StoredPrefix(nodes, None)
        while depth:
            usable = min(group.usable_stored(prefix, depth) for group in self._groups)
            if usable == depth:
                break
            depth = usable
        new = [
            (nodes[index], group.number)
            for group in self._groups
            for index in (group.view(depth) if depth else ())
            if not self._is_stored(nodes[index], group.number)
        ]
        num_new = sum(number == 0 for _, number in new)
        return new if self._is_worthwhile(new, num_new, depth) else []

    def _is_worthwhile(self, new: list[tuple[PrefixNode, int]], num_new: int, depth: int) -> bool:
        size = self._block_size
        if num_new * size < MIN_TOKENS:
            return False
        if not self._bytes_per_block:
            return num_new == depth or num_new * size >= _STATE_TOKENS
        cost = sum(self._block_bytes[number] for _, number in new if number)
        return cost <= _MAX_POINT_COST * num_new * self._bytes_per_block
