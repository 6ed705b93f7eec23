"""A tier that records evictions, and stores selected blocks."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

from mlx_paged.core import BlockTables, PrefixNode, PrefixQuery
from mlx_paged.core.kv.stored import LookUp, StoredPrefix
from mlx_paged.core.kv.tier import TierOwner


class Handed(NamedTuple):
    tokens: tuple[int, ...]
    group: int
    block: int


class RecordingTier:
    """Attributes:
    handed: All evicted blocks, in order.
    kept: Stored blocks, by key.
    """

    def __init__(self, keeps: Callable[[Handed], bool] = lambda handed: True) -> None:
        self.keeps = keeps
        self.handed: list[Handed] = []
        self.kept: dict[int, Handed] = {}

    @property
    def is_empty(self) -> bool:
        return not self.kept

    def attach(self, owner: TierOwner) -> None:
        pass

    def look_up(self, query: PrefixQuery) -> LookUp | None:
        return None

    def num_worth_restoring(self, stored: StoredPrefix, first: int) -> int:
        return stored.num_blocks

    def on_refused(self) -> None:
        pass

    def settle(self, tables: BlockTables, depth: int) -> None:
        pass

    def store(self, node: PrefixNode, group: int, block: int) -> int:
        tokens = array("I", b"".join(each.key for each in node.path()))
        handed = Handed(tuple(tokens), group, block)
        self.handed.append(handed)
        if not self.keeps(handed):
            return 0
        self.kept[len(self.handed)] = handed
        return len(self.handed)

    def forget(self, node: PrefixNode, group: int) -> None:
        pass

    def drop(self, key: int) -> None:
        del self.kept[key]

    def pin(self, key: int) -> None:
        assert key in self.kept

    def unpin(self, key: int) -> None:
        pass

    def check_integrity(self) -> None:
        pass
