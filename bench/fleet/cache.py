"""PrefixCache: which tokens a replica has cached, and what it evicts.

It counts as `core.kv` does, with two nodes for a session instead of one for each block: the shared
prefix of its group, and the rest, which no other session has. All blocks of a node are used by all
of its prompts, so the least recently used ones are at the end of the node that was released first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from .traffic import BLOCK, Session


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


@dataclass(eq=False, slots=True)
class Node:
    """Tokens that follow each other.

    Attributes:
        tokens: Number that are computed.
        blocks: Blocks held, some for tokens that will be computed.
        pins: Running sequences that use it.
        filler: The lease whose sequence computes it; None if it is complete, or nothing does.
    """

    key: tuple[str, int]
    tokens: int = 0
    blocks: int = 0
    pins: int = 0
    filler: Lease | None = None


@dataclass(eq=False, slots=True)
class Lease:
    """The blocks of a running sequence.

    Attributes:
        shared: None if the session shares nothing.
        shared_tokens: Length of the shared prefix.
        cached_tokens: Tokens that it need not compute.
        copied: Blocks being copied on write: 1 during its first step, then 0.
    """

    shared: Node | None
    own: Node
    shared_tokens: int
    cached_tokens: int
    copied: int


class PrefixCache:
    """The cache of a replica.

    Args:
        capacity: Tokens.

    Attributes:
        num_used: Blocks of running sequences and cached ones.
        num_evicted: Blocks so far.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // BLOCK
        self.num_used = 0
        self.num_evicted = 0
        self._nodes: dict[tuple[str, int], Node] = {}
        self._released: OrderedDict[tuple[str, int], Node] = OrderedDict()  # oldest first
        self._num_released = 0  # blocks

    def match(self, session: Session, num_tokens: int) -> int:
        """Number of leading tokens of a prompt that are cached: all but the last at most."""
        shared_tokens = session.recording.shared_tokens
        found = 0
        if shared_tokens:
            shared = self._nodes.get(("group", session.recording.group))
            found = 0 if shared is None else shared.tokens
        if found == shared_tokens:
            own = self._nodes.get(("session", session.key))
            found += 0 if own is None else own.tokens
        return min(found, num_tokens - 1)

    def awaits(self, session: Session) -> bool:
        """True if a running sequence computes the shared prefix of the session."""
        if not session.recording.shared_tokens:
            return False
        shared = self._nodes.get(("group", session.recording.group))
        return shared is not None and shared.filler is not None

    def begin(self, session: Session, num_tokens: int, headroom: int = 0) -> Lease | None:
        """Takes blocks for all known tokens of a sequence; returns None if there is no room.

        Args:
            headroom: Additional blocks that must stay available.
        """
        shared_tokens = session.recording.shared_tokens
        cached = self.match(session, num_tokens)
        shared = self._node(("group", session.recording.group)) if shared_tokens else None
        own = self._node(("session", session.key))
        assert not own.pins, "a session has one running sequence"
        missing = blocks_of(num_tokens) - cached // BLOCK
        kept = sum(each.blocks for each in (shared, own) if each is not None and not each.pins)
        if missing > self.capacity - self.num_used + self._num_released - kept - headroom:
            for each in (shared, own):
                if each is not None and not each.pins and not each.blocks:
                    del self._nodes[each.key]
            return None
        copied = int(cached % BLOCK > 0)
        lease = Lease(shared, own, shared_tokens, cached, copied)
        if shared is not None:
            self._pin(shared)
            if shared.tokens < shared_tokens:
                assert shared.filler is None
                shared.filler = lease
        self._pin(own)
        self._make_room(missing)
        self.num_used += missing
        if shared is not None and shared.filler is lease:
            shared.blocks = shared_tokens // BLOCK
        own.blocks = blocks_of(num_tokens) - shared_tokens // BLOCK + copied
        return lease

    def computed(self, lease: Lease, num_tokens: int) -> None:
        """Notes how many tokens of a sequence are computed when a step has ended."""
        self._drop_copied(lease)
        shared = lease.shared
        if shared is not None and shared.filler is lease:
            shared.tokens = min(num_tokens // BLOCK * BLOCK, lease.shared_tokens)
            if shared.tokens == lease.shared_tokens:
                shared.filler = None

    def num_available(self) -> int:
        """Blocks that running sequences may still take."""
        return self.capacity - self.num_used + self._num_released

    def grow(self, lease: Lease, num_tokens: int) -> None:
        """Takes blocks for more tokens of a sequence; the caller has checked `num_available`."""
        wanted = blocks_of(num_tokens) - lease.shared_tokens // BLOCK + lease.copied
        more = wanted - lease.own.blocks
        if more > 0:
            self._make_room(more)
            self.num_used += more
            lease.own.blocks = wanted

    def end(self, lease: Lease, num_tokens: int) -> None:
        """Ends a sequence. Its computed tokens stay cached until they are evicted."""
        self.computed(lease, num_tokens)
        own, shared = lease.own, lease.shared
        self._cut(own, max(0, num_tokens - lease.shared_tokens))
        if shared is not None and shared.filler is lease:
            self._cut(shared, shared.tokens)
            shared.filler = None
        for node in (own, shared):
            if node is not None:
                self._unpin(node)

    def clear(self) -> None:
        """Forgets everything, as a restart does."""
        self.num_used = self._num_released = 0
        self._nodes.clear()
        self._released.clear()

    def check(self) -> None:
        """Raises AssertionError if the counts do not add up."""
        assert self.num_used == sum(node.blocks for node in self._nodes.values())
        assert self._num_released == sum(node.blocks for node in self._released.values())
        assert 0 <= self.num_used <= self.capacity
        for node in self._nodes.values():
            assert (node.key in self._released) == (not node.pins)
            assert node.pins or blocks_of(node.tokens) == node.blocks > 0

    def _node(self, key: tuple[str, int]) -> Node:
        return self._nodes.setdefault(key, Node(key))

    def _drop_copied(self, lease: Lease) -> None:
        if lease.copied:
            lease.own.blocks -= lease.copied
            self.num_used -= lease.copied
            lease.copied = 0

    def _cut(self, node: Node, num_tokens: int) -> None:
        node.tokens = num_tokens
        self.num_used -= node.blocks - blocks_of(num_tokens)
        node.blocks = blocks_of(num_tokens)

    def _pin(self, node: Node) -> None:
        if not node.pins and self._released.pop(node.key, None) is not None:
            self._num_released -= node.blocks
        node.pins += 1

    def _unpin(self, node: Node) -> None:
        node.pins -= 1
        if node.pins:
            return
        if not node.blocks:
            del self._nodes[node.key]
            return
        self._released[node.key] = node
        self._num_released += node.blocks

    def _make_room(self, num_blocks: int) -> None:
        missing = num_blocks - (self.capacity - self.num_used)
        while missing > 0:
            node = next(iter(self._released.values()))
            taken = min(missing, node.blocks)
            node.blocks -= taken
            node.tokens = min(node.tokens, node.blocks * BLOCK)
            self.num_used -= taken
            self._num_released -= taken
            self.num_evicted += taken
            missing -= taken
            if not node.blocks:
                del self._released[node.key], self._nodes[node.key]
