"""A KV store without block ids, trees and heaps: prefixes are tuples, blocks are counts.

It does by exhaustive search what `KVManager` does with pool and index, and predicts its answers
exactly, down to which prefix is evicted next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from support.naive_groups import (  # (salt, tokens of all blocks up to and including one)
    NaiveWindow,
    Prefix,
)


class NaiveMatch(NamedTuple):
    full: tuple[int, ...]
    partial: Prefix | None
    num_partial: int

    @property
    def num_tokens(self) -> int:
        return len(self.full) + self.num_partial


@dataclass
class Node:
    """An indexed prefix."""

    last_used: int = 0
    released_in: int = 0  # newest step launched when its last user left


@dataclass
class Table:
    """A sequence: `indexed` blocks of it are shared through the index, the other ones are `own`."""

    salt: str | None
    tokens: list[int]
    indexed: int
    own: list[int]  # ids of private blocks, only to count sharing between forks
    is_indexed: bool = True


class NaiveStore:
    def __init__(
        self, num_usable: int, block_size: int, windows: Sequence[NaiveWindow] = ()
    ) -> None:
        self.windows = windows
        self.size = block_size
        self.num_usable = num_usable
        self.nodes: dict[Prefix, Node] = {}
        self.tables: dict[int, Table] = {}
        # (indexed source, private source, whose copy it is)
        self.copies: list[tuple[Prefix | None, int | None, int]] = []
        self.quarantine: list[int] = []  # the step that each block waits for
        self.clock = self.launched = self.evaluated = 0
        self.next_private = 0

    # Counts.

    @property
    def num_quarantined(self) -> int:
        return len(self.quarantine)

    @property
    def num_cached(self) -> int:
        return sum(not self.is_used(p) for p in self.nodes)

    @property
    def num_free(self) -> int:
        return self.num_usable - len(self.nodes) - len(self.private()) - len(self.quarantine)

    def private(self) -> set[int]:
        held = {block for table in self.tables.values() for block in table.own}
        return held | {own for _, own, _ in self.copies if own is not None}

    def is_used(self, prefix: Prefix) -> bool:
        """Whether a sequence or a copy being prepared builds on this prefix."""
        salt, tokens = prefix
        users = [
            (t.salt, tuple(t.tokens[: t.indexed * self.size]))
            for t in self.tables.values()
            if t.is_indexed
        ]
        users += [source for source, _, _ in self.copies if source is not None]
        return any(s == salt and tokens == u[: len(tokens)] for s, u in users)

    # Questions.

    def match(self, tokens: list[int], salt: str | None) -> NaiveMatch:
        limit = len(tokens) - 1
        full: tuple[int, ...] = ()
        for s, p in self.nodes:
            if s == salt and len(full) < len(p) <= limit and tuple(tokens[: len(p)]) == p:
                full = p
        partial, num_partial = None, 0
        # In the order of their tokens: of equally good ones the index takes the smaller.
        for s, p in sorted(self.nodes, key=lambda node: node[1]):
            if s == salt and len(p) == len(full) + self.size and p[: len(full)] == full:
                length = 0
                for a, b in zip(p[len(full) :], tokens[len(full) : limit], strict=False):
                    if a != b:
                        break
                    length += 1
                if length > num_partial:
                    partial, num_partial = (s, p), length
                elif (
                    length == num_partial
                    and length
                    and tuple(tokens[len(full) : limit]) > p[len(full) :]
                ):
                    partial = (s, p)  # its neighbour on the left is looked at first
        depth = len(full) // self.size
        while not all(window.fits(salt, full, depth) for window in self.windows):
            depth -= 1
        if depth * self.size < len(full):
            return NaiveMatch(full[: depth * self.size], None, 0)
        if partial is not None and not all(partial in w.held for w in self.windows):
            return NaiveMatch(full, None, 0)
        return NaiveMatch(full, partial, num_partial)

    # Operations.

    def admit(
        self,
        seq_id: int,
        tokens: list[int],
        salt: str | None,
        headroom: int,
        fork_of: int | None,
        shared: int,
    ) -> int | None:
        found = self.match(tokens, salt)
        table = Table(salt, tokens, len(found.full) // self.size, [])
        source: tuple[Prefix | None, int | None, int] | None = None
        num_partial = found.num_partial
        if found.partial is not None:
            source = (found.partial, None, seq_id)
        is_fork = (
            fork_of is not None
            and shared > found.num_tokens
            and all(window.can_fork(fork_of, shared) for window in self.windows)
        )
        if is_fork:
            parent = self.tables[fork_of]
            full, num_partial = divmod(shared, self.size)
            table = Table(salt, tokens, full, [], parent.is_indexed)
            if not parent.is_indexed:
                table = Table(salt, tokens, 0, parent.own[:full], False)
            source = None
            if num_partial:
                if parent.is_indexed and parent.indexed > full:
                    prefix = (salt, tuple(parent.tokens[: (full + 1) * self.size]))
                    source = (prefix, None, seq_id)
                else:
                    source = (None, parent.own[full - parent.indexed], seq_id)
        num_shared = table.indexed + len(table.own)
        for window in self.windows:
            if is_fork:
                window.fork(seq_id, fork_of, shared)
            else:
                window.begin(seq_id, salt, tokens, num_shared)
            if source is not None:
                parent = fork_of if is_fork else None
                window.copies.append(window.source_of_copy(source[0], parent, num_shared))
        num_fresh = -(-len(tokens) // self.size) - num_shared
        self.tables[seq_id] = table
        if source is not None:
            self.copies.append(source)
        if not self.has_room(seq_id, num_fresh, headroom):
            if source is not None:
                self.copies.pop()
                self.leave(source[0])
                source, num_partial = None, 0
                for window in self.windows:
                    window.left(window.copies.pop(), kept=True)
            if (is_fork and self.windows) or not self.has_room(seq_id, num_fresh, headroom):
                for window in self.windows:
                    window.end(seq_id)
                del self.tables[seq_id]
                if table.is_indexed:
                    self.leave((salt, tuple(tokens[: table.indexed * self.size])))
                return None
        table.own += self.fresh(num_fresh)
        for window in self.windows:
            if source is not None:
                window.append(seq_id)
        return num_shared * self.size + num_partial

    def has_room(self, seq_id: int, num_fresh: int, headroom: int) -> bool:
        share = headroom / self.num_usable
        num_tokens = len(self.tables[seq_id].tokens)
        return self.make_room(num_fresh, headroom) and all(
            window.has_room(seq_id, num_tokens, int(share * window.num_usable))
            for window in self.windows
        )

    def reach(self, seq_id: int, num_tokens: int) -> int:
        for window in self.windows:
            num_tokens = window.coverable(seq_id, num_tokens)
        for window in self.windows:
            window.cover(seq_id, num_tokens)
        return num_tokens

    def grow(self, seq_id: int, num_tokens: int) -> bool:
        table = self.tables[seq_id]
        if any(window.coverable(seq_id, num_tokens) < num_tokens for window in self.windows):
            return False
        num_fresh = -(-num_tokens // self.size) - table.indexed - len(table.own)
        if num_fresh > 0:
            if not self.make_room(num_fresh, 0):
                return False
            table.own += self.fresh(num_fresh)
        for window in self.windows:
            window.cover(seq_id, num_tokens)
        return True

    def commit(self, seq_id: int, num_computed: int) -> None:
        table = self.tables[seq_id]
        while table.is_indexed and (table.indexed + 1) * self.size <= num_computed:
            table.indexed += 1
            own = table.own.pop(0)
            prefix = (table.salt, tuple(table.tokens[: table.indexed * self.size]))
            if prefix in self.nodes:
                self.release([own])
            else:
                self.nodes[prefix] = Node()
            for window in self.windows:
                window.index(seq_id, table.indexed - 1, prefix)
        for window in self.windows:
            window.slide(seq_id, num_computed)

    def free(self, seq_id: int) -> None:
        place = next((i for i, copy in enumerate(self.copies) if copy[2] == seq_id), None)
        if place is not None:  # a copy that is not made yet is not made at all
            prefix, own, _ = self.copies.pop(place)
            self.leave(prefix)
            self.release([] if own is None else [own])
            for window in self.windows:
                window.drop_copy(place)
        table = self.tables.pop(seq_id)
        if table.is_indexed:
            self.leave((table.salt, tuple(table.tokens[: table.indexed * self.size])))
        self.release(table.own)
        for window in self.windows:
            window.end(seq_id)

    def launch(self, step: int) -> int:
        self.launched = step
        copies, self.copies = self.copies, []
        for i, (prefix, own, _) in enumerate(copies):
            self.copies = copies[i + 1 :]
            if prefix is not None:
                self.leave(prefix)
            if own is not None:
                self.release([own])
        for window in self.windows:
            window.launch(step)
        return len(copies)

    def evaluate(self, step: int) -> None:
        self.evaluated = step
        self.quarantine = [s for s in self.quarantine if s > step]
        for window in self.windows:
            window.evaluate(step)

    def reset(self) -> None:
        for window in self.windows:
            window.reset()
        for prefix, node in self.nodes.items():
            if not self.is_used(prefix):
                self.retire(node.released_in)
        # What was shared through the index is now shared by the sequences alone.
        blocks = {prefix: self.fresh(1) for prefix in self.nodes}
        for table in self.tables.values():
            if table.is_indexed:
                tokens = tuple(table.tokens)
                ends = range(self.size, (table.indexed + 1) * self.size, self.size)
                table.own = [
                    b for end in ends for b in blocks[table.salt, tokens[:end]]
                ] + table.own
                table.indexed, table.is_indexed = 0, False
        self.nodes.clear()

    # Parts.

    def fresh(self, count: int) -> list[int]:
        self.next_private += count
        return list(range(self.next_private - count, self.next_private))

    def release(self, blocks: list[int]) -> None:
        """Private blocks lose one user (already taken out of the tables)."""
        still_held = self.private()
        for block in blocks:
            if block not in still_held:
                self.retire(self.launched)

    def retire(self, step: int) -> None:
        if step > self.evaluated:
            self.quarantine.append(step)

    def leave(self, prefix: Prefix | None) -> None:
        """A user of a path is gone (already taken out): the whole path was just used."""
        if prefix is None:
            return
        self.clock += 1
        salt, tokens = prefix
        for end in range(self.size, len(tokens) + 1, self.size):
            node = self.nodes[salt, tokens[:end]]
            node.last_used = self.clock
            if not self.is_used((salt, tokens[:end])):
                node.released_in = self.launched

    def make_room(self, num_blocks: int, headroom: int) -> bool:
        if num_blocks + headroom > self.num_free + self.num_cached:
            return False
        while self.num_free < num_blocks:
            idle_leaves = [
                prefix
                for prefix in self.nodes
                if not self.is_used(prefix)
                and not any(
                    s == prefix[0] and len(p) > len(prefix[1]) and p[: len(prefix[1])] == prefix[1]
                    for s, p in self.nodes
                )
            ]
            if not idle_leaves:
                return False
            oldest = min(idle_leaves, key=lambda prefix: self.nodes[prefix].last_used)
            if self.nodes[oldest].released_in > self.evaluated:
                return False
            del self.nodes[oldest]
            for window in self.windows:
                window.forget(oldest)
        return True
