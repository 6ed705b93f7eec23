"""RadixNode: one full block of tokens in the prefix tree."""

from __future__ import annotations

from bisect import bisect_left

BlockKey = tuple[int, ...]


class RadixNode:
    """A full block of tokens under a prefix; `depth` counts blocks (the root holds none)."""

    __slots__ = (
        "block",
        "children",
        "depth",
        "key",
        "last_used",
        "locks",
        "parent",
        "salt",
        "sorted_keys",
    )

    def __init__(
        self, parent: RadixNode | None, key: BlockKey, block: int, salt: str | None = None
    ) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.salt = salt  # of a root
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[BlockKey, RadixNode] = {}
        # The keys of `children` in order: the key that shares most leading tokens with a query is a
        # neighbour of the place where the query would be inserted.
        self.sorted_keys: list[BlockKey] = []
        self.locks = 0
        self.last_used = 0

    def ancestor(self, depth: int) -> RadixNode:
        """The node at `depth` on the path from the root to this node."""
        node = self
        while node.depth > depth:
            assert node.parent is not None
            node = node.parent
        return node

    def path(self) -> list[RadixNode]:
        """The nodes that hold a block, from below the root down to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def path_blocks(self) -> list[int]:
        """Blocks from below the root down to this node."""
        return [node.block for node in self.path()]

    def closest_child(self, tokens: BlockKey) -> tuple[RadixNode | None, int]:
        """The child that shares most leading tokens with `tokens`, and how many."""
        best: BlockKey | None = None
        best_len = 0
        place = bisect_left(self.sorted_keys, tokens)
        for key in self.sorted_keys[max(0, place - 1) : place + 1]:
            length = _common_prefix_len(key, tokens)
            if length > best_len:
                best, best_len = key, length
        return (None, 0) if best is None else (self.children[best], best_len)


def _common_prefix_len(a: BlockKey, b: BlockKey) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
