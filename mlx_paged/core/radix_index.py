"""RadixIndex: from token prefixes to the physical blocks that hold their keys and values.

A tree with one node per *full* block. Children are keyed by the block's tokens, so a node stands
for the whole prefix that leads to it, and no node ever splits. Block size 4, prompts "the cat sat
on the mat" and "the cat ran off" (one letter a token)::

      root(salt)
        '- [t h e _]  block 7   locks 2
             '- [c a t _]  block 3   locks 2
                  |- [s a t _]  block 9   locks 1
                  |    '- [o n _ t]  block 4   locks 1
                  '- [r a n _]  block 5   locks 1

*Locks.* Every sequence locks the path from its root to its deepest node. A node is locked by
whoever locks one of its descendants, so unlocked nodes form whole subtrees, and all of them can be
evicted, leaves first.

*Eviction.* Least recently used first among unlocked leaves, from a heap with lazy deletion: O(log
n). A node is pushed when it becomes an unlocked leaf; an entry that is no longer true when it
surfaces is dropped.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mlx_paged.core.radix_node import BlockKey, RadixNode
from mlx_paged.errors import IntegrityError


class PrefixMatch(NamedTuple):
    """The longest match of a token list.

    Attributes:
        node: Deepest node whose whole prefix matches; None where the salt has no tree.
        partial: Child of `node` whose first `num_partial_tokens` tokens match what follows; None
            where none does.
        num_partial_tokens: Matching tokens of `partial`.
    """

    node: RadixNode | None
    partial: RadixNode | None
    num_partial_tokens: int

    @property
    def num_full_blocks(self) -> int:
        return 0 if self.node is None else self.node.depth

    def num_tokens(self, block_size: int) -> int:
        return self.num_full_blocks * block_size + self.num_partial_tokens


NO_MATCH = PrefixMatch(None, None, 0)


class RadixIndex:
    """The prefix tree, one root per cache salt."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._roots: dict[str | None, RadixNode] = {}
        self._num_nodes = 0
        self._num_unlocked = 0
        self._clock = 0
        # (last_used, tie-breaker, node); true while the node is an unlocked leaf that was last used
        # then.
        self._heap: list[tuple[int, int, RadixNode]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        """Nodes, which is blocks, in all trees."""
        return self._num_nodes

    @property
    def num_unlocked(self) -> int:
        """Nodes that can be evicted, sooner or later."""
        return self._num_unlocked

    def match(self, tokens: Sequence[int], limit: int, salt: str | None = None) -> PrefixMatch:
        """The longest indexed prefix of `tokens[:limit]`; changes nothing, not even recency."""
        node = self._roots.get(salt)
        if node is None:
            return NO_MATCH
        size = self.block_size
        start = 0
        while start + size <= limit:
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            node = child
            start += size
        partial, num_partial = node.closest_child(tuple(tokens[start : min(start + size, limit)]))
        return PrefixMatch(node, partial, num_partial)

    def root(self, salt: str | None = None) -> RadixNode:
        """The root of a salt's tree, made when missing; lock it to keep it."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = RadixNode(None, (), 0, salt)
        return root

    def lock(self, node: RadixNode) -> None:
        """Protects a node and all its ancestors from eviction."""
        step: RadixNode | None = node
        while step is not None:
            if step.locks == 0 and step.parent is not None:
                self._num_unlocked -= 1
            step.locks += 1
            step = step.parent

    def unlock(self, node: RadixNode) -> None:
        """Takes back a `lock`; what nobody else locks is evictable, as most recently used."""
        self._clock += 1
        step: RadixNode | None = node
        while step is not None:
            assert step.locks > 0, "a node is unlocked more often than locked"
            step.locks -= 1
            step.last_used = self._clock
            if step.locks == 0:
                self._num_unlocked += step.parent is not None
                self._on_idle(step)
            step = step.parent

    def extend(self, node: RadixNode, key: BlockKey, block: int) -> RadixNode:
        """Moves a caller's lock from `node` one block down, to the child with `key`.

        The child is made with `block` where it is missing; otherwise it keeps the block it has, and
        the caller should use that one too. Returns the child.
        """
        assert node.locks > 0 and len(key) == self.block_size
        child = node.children.get(key)
        if child is None:
            child = RadixNode(node, key, block)
            node.children[key] = child
            insort(node.sorted_keys, key)
            self._num_nodes += 1
        elif child.locks == 0:
            self._num_unlocked -= 1
        child.locks += 1
        return child

    def least_recently_used(self) -> RadixNode | None:
        """The unlocked leaf to evict next; None when every node is locked."""
        while self._heap:
            last_used, _, node = self._heap[0]
            if node.last_used == last_used and self._is_evictable(node):
                return node
            heapq.heappop(self._heap)
        return None

    def evict(self, node: RadixNode) -> int:
        """Removes an unlocked leaf and returns its block."""
        parent = node.parent
        assert parent is not None and self._is_evictable(node)
        del parent.children[node.key]
        del parent.sorted_keys[bisect_left(parent.sorted_keys, node.key)]
        node.parent = None  # marks it as gone for entries of the heap that still name it
        self._num_nodes -= 1
        self._num_unlocked -= 1
        self._on_idle(parent)
        return node.block

    def clear(self) -> list[int]:
        """Forgets everything, locks included; returns the blocks that were held."""
        blocks = [node.block for node in self.nodes()]
        self._roots.clear()
        self._heap.clear()
        self._num_nodes = self._num_unlocked = 0
        return blocks

    def nodes(self) -> Iterator[RadixNode]:
        """Every node but the roots, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def _is_evictable(self, node: RadixNode) -> bool:
        return node.locks == 0 and not node.children and node.parent is not None

    def _on_idle(self, node: RadixNode) -> None:
        """A node lost a lock or a child: it may be an unlocked leaf now."""
        if node.locks or node.children:
            return
        if (
            node.parent is None
        ):  # an idle root goes at once, so that salts cost nothing once they are gone
            self._roots.pop(node.salt, None)
            return
        # Entries that went stale deep in the heap would pile up under a node that is locked and
        # unlocked forever.
        if len(self._heap) > 2 * self._num_nodes + 64:
            live = [e for e in self._heap if e[2].last_used == e[0] and self._is_evictable(e[2])]
            heapq.heapify(live)
            self._heap = live
        self._num_pushed += 1
        heapq.heappush(self._heap, (node.last_used, self._num_pushed, node))

    def check_integrity(self) -> None:
        """Walks the trees and recounts; raises `IntegrityError` with what disagrees."""
        num_nodes = num_unlocked = 0
        blocks: set[int] = set()
        queued = {id(node) for last_used, _, node in self._heap if node.last_used == last_used}
        for node in self.nodes():
            parent = node.parent
            assert parent is not None  # nodes() leaves the roots out
            num_nodes += 1
            num_unlocked += node.locks == 0
            where = f"node of block {node.block} at depth {node.depth}"
            if node.block in blocks or node.block == 0:
                raise IntegrityError(f"{where}: the block is indexed twice, or is block 0")
            blocks.add(node.block)
            if len(node.key) != self.block_size or parent.children.get(node.key) is not node:
                raise IntegrityError(f"{where} is not filed under its tokens")
            if node.depth != parent.depth + 1:
                raise IntegrityError(f"{where} hangs under a node of depth {parent.depth}")
            if node.sorted_keys != sorted(node.children):
                raise IntegrityError(f"{where}: sorted_keys disagree with children")
            if node.locks < sum(child.locks for child in node.children.values()):
                raise IntegrityError(f"{where} has fewer locks than its children together")
            if self._is_evictable(node) and id(node) not in queued:
                raise IntegrityError(f"{where} is an unlocked leaf, but eviction does not know it")
        for salt, root in self._roots.items():
            if not (root.locks or root.children):
                raise IntegrityError(f"the root of salt {salt!r} holds nothing")
        if (num_nodes, num_unlocked) != (self._num_nodes, self._num_unlocked):
            raise IntegrityError(
                f"{self._num_nodes} nodes, {self._num_unlocked} unlocked are booked, "
                f"but there are {num_nodes}, {num_unlocked}"
            )
