"""PrefixTree: maps token prefixes to the physical blocks that hold their keys and values.

The tree has one node per block. Children are keyed by the block's tokens, so a node stands for the
whole prefix that leads to it, and no node ever splits. Example with block size 4 and one token per
letter, after the prompts "the cat sat on the mat" and "the cat ran off" have ended::

      root(salt)
        '- [t h e _]  block 7
             '- [c a t _]  block 3
                  |- [s a t _]  block 9
                  |    '- [o n _ t]  block 4
                  |         '- [h e _ m]  block 8
                  |              '- [a t]  block 2
                  '- [r a n _]  block 5
                       '- [o f f]  block 6

A *tail* is the partly filled last block of a sequence that has ended. It is a leaf; other sequences
copy from it. No child's key is a prefix of a sibling's key, so a tail is removed once a longer
block that begins with its tokens is indexed.

A node has one entry per KV cache group, indexed by group number: absent, a block on the device, or
elsewhere (`core/kv/tier.py`). A node that loses its full-attention entry leaves the tree, because
nothing can continue there; other entries come and go.

*Eviction order* is not stored here. A sequence that uses a node references the blocks of its whole
path, and `AttentionGroup.end` releases them last block first. A child's block therefore loses its
last reference before its parent's, and since the pool evicts in that order, the next one is always
a leaf.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from mlx_paged.errors import IntegrityError

#: Array type of the token ids that the tree compares, 4 bytes each.
TOKEN_TYPE = "I"
TOKEN_BYTES = array(TOKEN_TYPE).itemsize

#: A search over at least this many blocks is kept, to speed up searches with the same prefix.
LONG_SEARCH = 16
MAX_LONG_SEARCHES = 8

_PIECE = 2048  # tokens compared at once

_NO_CHILDREN: dict[bytes, PrefixNode] = {}  # shared by all leaves; never written


class Filler(Protocol):
    """Interface of a running sequence to the tree."""

    @property
    def tokens(self) -> Sequence[int]:
        """The sequence's known tokens."""

    tip: PrefixNode | None
    num_cached_tokens: int
    num_computed_tokens: int


class PrefixNode:
    """A block of tokens under a prefix. `depth` counts blocks; the root has depth 0.

    Only leaves may be partly filled: a tail's key is shorter than a block.
    """

    __slots__ = (
        *("children", "depth", "digest", "entries", "fillers", "is_indexed", "key", "parent"),
        "sorted_keys",
    )

    def __init__(self, parent: PrefixNode | None, key: bytes, num_groups: int) -> None:
        self.parent = parent
        self.key = key
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.entries = [0] * num_groups  # by group; encoded as in `tier.py`
        self.digest: bytes | None = None  # a name for the prefix, if a tier has given it one
        self.is_indexed = False  # true while in the tree; always false for roots
        self.children = _NO_CHILDREN
        # Sorted keys of `children`, if there is more than one. The key that shares the most leading
        # tokens with a query is next to the query's insertion point.
        self.sorted_keys: list[bytes] | None = None
        # Running sequences whose next block will be a child of this node.
        self.fillers: list[Filler] | None = None

    def ancestor(self, depth: int) -> PrefixNode:
        """Returns the node at `depth` on the path from the root to this node."""
        node = self
        while node.depth > depth:
            assert node.parent is not None
            node = node.parent
        return node

    @property
    def salt(self) -> str | None:
        """The salt of the tree that the node is in."""
        root = self.ancestor(0)
        assert isinstance(root, _Root)
        return root.salt

    def path(self) -> list[PrefixNode]:
        """Returns the nodes from below the root down to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def closest_child(self, wanted: bytes) -> tuple[PrefixNode | None, int]:
        """Returns the child that shares the most leading tokens with `wanted`, and how many."""
        best: bytes | None = None
        best_len = 0
        keys: Sequence[bytes] = (
            tuple(self.children) if self.sorted_keys is None else self.sorted_keys
        )
        index = bisect_left(keys, wanted)
        for key in keys[max(0, index - 1) : index + 1]:
            length = common_prefix_len(key, wanted)
            if length > best_len:
                best, best_len = key, length
        return (None, 0) if best is None else (self.children[best], best_len)


class _Root(PrefixNode):
    __slots__ = ("_salt",)

    def __init__(self, salt: str | None) -> None:
        super().__init__(None, b"", 0)
        self._salt = salt

    @property
    def salt(self) -> str | None:
        return self._salt


class PrefixMatch(NamedTuple):
    """The longest match of a query.

    Attributes:
        node: Deepest full node whose whole prefix matches; None if the salt has no tree.
        partial: Child of `node` whose first `num_partial_tokens` tokens match next; None if there
            is none.
        num_partial_tokens: Matching tokens of `partial`.
    """

    node: PrefixNode | None
    partial: PrefixNode | None
    num_partial_tokens: int

    @property
    def num_full_blocks(self) -> int:
        return 0 if self.node is None else self.node.depth

    def num_tokens(self, block_size: int) -> int:
        return self.num_full_blocks * block_size + self.num_partial_tokens


NO_MATCH = PrefixMatch(None, None, 0)


class PrefixQuery:
    """A waiting sequence's prefix search, and the node that it has reached.

    The next search continues from that node, so it visits only nodes that were indexed or evicted
    on the sequence's own path since then.

    Args:
        tokens: All known tokens. The last one is excluded, since it must be computed.
        salt: Only blocks indexed under the same salt are found.
        limit: Maximum number of leading tokens to look for; None means all but the last.
        atomic: Spans (start, end), in order, that must be found as a whole or not at all.
    """

    __slots__ = ("atomic", "digests", "node", "num_tokens", "salt", "tokens")

    def __init__(
        self,
        tokens: Sequence[int],
        salt: str | None = None,
        *,
        limit: int | None = None,
        atomic: Sequence[tuple[int, int]] = (),
    ) -> None:
        limit = len(tokens) - 1 if limit is None else limit
        self.tokens = token_bytes(tokens[:limit])
        self.num_tokens = limit
        self.salt = salt
        self.atomic = atomic
        self.node: PrefixNode | None = None
        self.digests: list[bytes] = []  # names of its first blocks, if a tier has made some

    def copy(self) -> PrefixQuery:
        """Returns a new search for the same tokens."""
        query = PrefixQuery((), self.salt, limit=0, atomic=self.atomic)
        query.tokens, query.num_tokens = self.tokens, self.num_tokens
        query.digests = self.digests
        return query

    @property
    def depth(self) -> int:
        """Number of blocks that the last search found."""
        return 0 if self.node is None else self.node.depth


class PrefixTree:
    """The prefix tree, one root per cache salt.

    Args:
        num_groups: Number of KV cache groups; each may hold a block per node.
    """

    def __init__(self, block_size: int, num_groups: int = 1) -> None:
        self.block_size = block_size
        self._num_groups = num_groups
        self._key_bytes = block_size * TOKEN_BYTES
        self._roots: dict[str | None, _Root] = {}
        self._num_nodes = 0
        self._long_searches: list[PrefixQuery] = []  # newest first

    def start_anew(self) -> None:
        """Drops everything, whatever an interrupted change has left. The caller resets the tips of
        sequences."""
        for node in self.nodes():
            node.is_indexed = False  # searches that have reached it start over
        self._roots, self._num_nodes, self._long_searches = {}, 0, []

    def __len__(self) -> int:
        """Returns the number of nodes in all trees."""
        return self._num_nodes

    def match(self, query: PrefixQuery) -> PrefixMatch:
        """Returns the longest indexed prefix of a query; changes only the state of the query."""
        root = self._roots.get(query.salt)
        if root is None:
            return NO_MATCH
        node = query.node
        while node is not None and node.parent is not None and not node.is_indexed:
            node = node.parent  # evicted since the last search
        if node is None or node.parent is None:
            node = root
        tokens, key_bytes = query.tokens, self._key_bytes
        if len(tokens) >= (node.depth + LONG_SEARCH) * key_bytes:
            node = self._search_far(query, node)
        else:
            node = self._search(query, node)
        query.node = node
        rest = tokens[node.depth * key_bytes : (node.depth + 1) * key_bytes]
        partial, num_partial = node.closest_child(rest) if rest else (None, 0)
        return PrefixMatch(node, partial, num_partial)

    def _search(self, query: PrefixQuery, node: PrefixNode) -> PrefixNode:
        """Returns the deepest full node on a query's path, starting at `node`."""
        tokens, key_bytes = query.tokens, self._key_bytes
        # Full blocks only: the rest of a query may equal a tail, which is not a full node.
        for start in range(node.depth * key_bytes, len(tokens) - key_bytes + 1, key_bytes):
            child = node.children.get(tokens[start : start + key_bytes])
            if child is None:
                break
            node = child
        return node

    def _search_far(self, query: PrefixQuery, node: PrefixNode) -> PrefixNode:
        """Like `_search`, for long paths: starts where an earlier search with equal tokens ended.

        Comparing the tokens of many blocks at once is cheaper than looking up each block.
        """
        tokens, key_bytes = query.tokens, self._key_bytes
        equal = None
        for other in self._long_searches:
            far = other.node
            if far is None or far.depth < node.depth + LONG_SEARCH or not far.is_indexed:
                continue
            end = far.depth * key_bytes
            if (
                other.salt == query.salt
                and tokens[end - key_bytes : end] == far.key
                and common_prefix_len(tokens, other.tokens) >= far.depth * self.block_size
            ):
                node, equal = far, other
        begin, node = node.depth, self._search(query, node)
        if node.depth >= begin + LONG_SEARCH:
            kept = [q for q in self._long_searches if q is not equal and q is not query]
            self._long_searches = [query, *kept[: MAX_LONG_SEARCHES - 1]]
        return node

    def root(self, salt: str | None = None) -> PrefixNode:
        """Returns the root of a salt's tree; creates it if missing. It is dropped with its last
        child or filler."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = _Root(salt)
        return root

    def extend(self, node: PrefixNode, key: bytes) -> PrefixNode:
        """Returns the child of `node` with `key`. If missing, creates it without blocks."""
        child = node.children.get(key)
        if child is None:
            assert 0 < len(key) <= self._key_bytes and len(node.key) in (0, self._key_bytes)
            child = PrefixNode(node, key, self._num_groups)
            child.is_indexed = True
            if not node.children:
                node.children = {}
            node.children[key] = child
            if node.sorted_keys is not None:
                insort(node.sorted_keys, key)
            elif len(node.children) > 1:
                node.sorted_keys = sorted(node.children)
            self._num_nodes += 1
        return child

    def covers(self, node: PrefixNode, key: bytes) -> bool:
        """True if a child of `node` begins with all of `key`."""
        keys = tuple(node.children) if node.sorted_keys is None else node.sorted_keys
        index = bisect_left(keys, key)  # keys that begin with `key` follow it
        return index < len(keys) and keys[index].startswith(key)

    def tail_within(self, child: PrefixNode) -> PrefixNode | None:
        """Returns the sibling whose tokens the new `child` begins with, or None. It is now
        redundant."""
        parent = child.parent
        assert parent is not None
        if parent.sorted_keys is None:
            return None
        # Any key sorted between the two would also begin with the shorter one.
        index = bisect_left(parent.sorted_keys, child.key) - 1
        if index < 0 or not child.key.startswith(parent.sorted_keys[index]):
            return None
        return parent.children[parent.sorted_keys[index]]

    def remove(self, node: PrefixNode) -> None:
        """Removes a leaf that holds no blocks."""
        parent = node.parent
        assert parent is not None and not node.children and not node.fillers
        node.is_indexed = False
        del parent.children[node.key]
        if not parent.children:
            parent.children = _NO_CHILDREN
        if parent.sorted_keys is not None:
            del parent.sorted_keys[bisect_left(parent.sorted_keys, node.key)]
        self._num_nodes -= 1
        if parent.parent is None:
            self._drop_idle_root(parent)

    def clear(self) -> list[PrefixNode]:
        """Empties the tree; returns its nodes. Running sequences are no longer indexed."""
        nodes = list(self.nodes())
        for node in [*self._roots.values(), *nodes]:
            node.is_indexed = False
            for tables in node.fillers or ():
                tables.tip = None
            node.fillers = None
        self._roots.clear()
        self._long_searches.clear()
        self._num_nodes = 0
        return nodes

    def nodes(self) -> Iterator[PrefixNode]:
        """Yields every node except the roots, parents before children."""
        stack: list[PrefixNode] = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    # Fillers: running sequences and the nodes that they extend.

    def move_tip(self, tables: Filler, tip: PrefixNode | None) -> None:
        """Moves a sequence's tip: its next block becomes a child of `tip`. None unindexes it."""
        old = tables.tip
        tables.tip = tip
        if tip is not None:
            if tip.fillers is None:
                tip.fillers = []
            tip.fillers.append(tables)
        if old is not None:
            assert old.fillers is not None
            old.fillers.remove(tables)
            if not old.fillers:
                old.fillers = None
                self._drop_idle_root(old)

    def filler(self, node: PrefixNode, wanted: bytes) -> Filler | None:
        """Returns the first sequence about to fill a child of `node` that begins with `wanted`.

        Only blocks whose tokens are all known count: the rest of a prompt, never future output.
        """
        start = node.depth * self.block_size
        end = start + self.block_size
        first = start + len(wanted) // TOKEN_BYTES
        for tables in node.fillers or ():
            tokens = tables.tokens
            if len(tokens) >= end and token_bytes(tokens[start:first]) == wanted:
                return tables
        return None

    def computed_by(
        self, node: PrefixNode, wanted: bytes, min_tokens: int
    ) -> tuple[Filler | None, int]:
        """Returns the running sequence that has computed the most tokens of `wanted` after `node`,
        and how many.

        Returns (None, 0) if there are fewer than `min_tokens`. Skips sequences that have computed
        nothing yet, because their initial copy may still be pending.
        """
        start = node.depth * self.block_size
        best = None
        for tables in node.fillers or ():
            end = tables.num_computed_tokens
            if end - start < min_tokens or end == tables.num_cached_tokens:
                continue
            computed = token_bytes(tables.tokens[start:end])
            length = common_prefix_len(computed, wanted)
            if length >= min_tokens:
                best, min_tokens = tables, length + 1
        return (None, 0) if best is None else (best, min_tokens - 1)

    def _drop_idle_root(self, node: PrefixNode) -> None:
        """Drops a root without children and fillers, so an unused salt costs nothing."""
        if not isinstance(node, _Root) or node.children or node.fillers:
            return
        if self._roots.get(node.salt) is node:
            del self._roots[node.salt]

    def check_integrity(self) -> None:
        """Walks the trees and recounts; raises `IntegrityError` on a mismatch."""
        num_nodes = 0
        for node in self.nodes():
            parent = node.parent
            assert parent is not None  # nodes() leaves the roots out
            num_nodes += 1
            where = f"node of entries {node.entries} at depth {node.depth}"
            if not node.is_indexed or not any(node.entries):
                raise IntegrityError(f"{where} is in the tree but holds nothing")
            if parent.children.get(node.key) is not node:
                raise IntegrityError(f"{where} is not filed under its tokens")
            num_bytes, is_leaf = len(node.key), not (node.children or node.fillers)
            if num_bytes != self._key_bytes and not (is_leaf and 0 < num_bytes < self._key_bytes):
                raise IntegrityError(f"{where} has {num_bytes // TOKEN_BYTES} tokens")
            if node.depth != parent.depth + 1:
                raise IntegrityError(f"{where} hangs under a node of depth {parent.depth}")
        for node in [*self._roots.values(), *self.nodes()]:
            children = sorted(node.children)
            if children != (children[:1] if node.sorted_keys is None else node.sorted_keys):
                raise IntegrityError(f"sorted_keys of {node.key!r} disagree with its children")
            if any(longer.startswith(key) for key, longer in pairwise(children)):
                raise IntegrityError(f"a child of {node.key!r} begins with the key of another")
            if any(tables.tip is not node for tables in node.fillers or ()):
                raise IntegrityError(f"a sequence is filed under {node.key!r}, not its tip")
        for salt, root in self._roots.items():
            if not (root.fillers or root.children):
                raise IntegrityError(f"the root of salt {salt!r} holds nothing")
        if num_nodes != self._num_nodes:
            raise IntegrityError(f"{self._num_nodes} nodes are counted, but there are {num_nodes}")


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Returns tokens as bytes, the form that the tree compares."""
    if not isinstance(tokens, array):
        tokens = array(TOKEN_TYPE, tokens)
    return tokens.tobytes()


def common_prefix_len(a: bytes, b: bytes | memoryview, start: int = 0) -> int:
    """Returns the number of leading tokens that two keys share; the first `start` are known to be
    equal."""
    end = min(len(a), len(b)) // TOKEN_BYTES
    low = start
    while low < end:  # small slices are cheap to allocate, and most are equal
        high = min(low + _PIECE, end)
        part = slice(low * TOKEN_BYTES, high * TOKEN_BYTES)
        if a[part] != bytes(b[part]):  # a memoryview is compared item by item
            break
        low = high
    else:
        return low
    high -= 1
    while low < high:  # the first `low` are equal, the first `high + 1` are not
        middle = (low + high + 1) // 2
        part = slice(low * TOKEN_BYTES, middle * TOKEN_BYTES)
        if a[part] == bytes(b[part]):
            low = middle
        else:
            high = middle - 1
    return low
