"""IdleQueue: what the index holds of a side group and nobody references, in the order it goes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from mlx_paged.core.radix_node import RadixNode


class IdleQueue:
    """Nodes whose block (or state) of one group can be given up; O(1) each.

    *Passed* ones go first: they were left behind by a sequence that went on, and nobody has come
    back to them yet. *Kept* ones are where a sequence ended, or where another one took over: that
    may happen again. Within both, least recently used first.
    """

    def __init__(self) -> None:
        self._passed: OrderedDict[RadixNode, int] = OrderedDict()
        self._kept: OrderedDict[RadixNode, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._passed) + len(self._kept)

    def __contains__(self, node: RadixNode) -> bool:
        return node in self._passed or node in self._kept

    def add(self, node: RadixNode, block: int, *, passed: bool) -> None:
        """A node's block lost its last reference."""
        (self._passed if passed else self._kept)[node] = block

    def discard(self, node: RadixNode) -> None:
        """It is referenced again, or gone."""
        if self._passed.pop(node, None) is None:
            self._kept.pop(node, None)

    def first(self, is_settled: Callable[[int], bool]) -> RadixNode | None:
        """The node whose block goes next; None when steps in flight may read all of them."""
        for queue in (self._passed, self._kept):
            # In both the oldest comes first: if it may still be read, so may all others.
            node = next(iter(queue), None)
            if node is not None and is_settled(queue[node]):
                return node
        return None

    def clear(self) -> None:
        self._passed.clear()
        self._kept.clear()
