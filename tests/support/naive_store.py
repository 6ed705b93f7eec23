"""A KV store without block ids, trees and heaps: prefixes are tuples, blocks are counts.

It does by exhaustive search what `KVManager` does with pool and index, and predicts its results
exactly, including the next prefix to be evicted.
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
    released_in: int = 0  # newest launched step when its last user released it


@dataclass
class Table:
    """A sequence; `indexed` of its blocks are shared through the index, the others are `own`."""

    salt: str | None
    tokens: list[int]
    indexed: int
    own: list[int]  # ids of private blocks, used only to count sharing between forks
    is_indexed: bool = True
    cached: int = 0  # tokens that it did not compute
    computed: int = 0  # computed tokens, including cached ones
    arrived: int = 0  # when it reached the position of its next indexed block


class NaiveStore:
    def __init__(
        self, num_usable: int, block_size: int, windows: Sequence[NaiveWindow] = ()
    ) -> None:
        self.windows = windows
        self.size = block_size
        self.num_usable = num_usable
        self.nodes: dict[Prefix, Node] = {}
        self.tables: dict[int, Table] = {}
        # (indexed source, private source, sequence that gets the copy)
        self.copies: list[tuple[Prefix | None, int | None, int]] = []
        self.quarantine: list[int] = []  # step that each block waits for
        self.clock = self.launched = self.evaluated = 0
        self.next_private = 0
        self.num_arrived = 0

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
        """True if a sequence or a pending copy depends on this prefix."""
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
            if len(p) % self.size:
                continue  # a tail
            if s == salt and len(full) < len(p) <= limit and tuple(tokens[: len(p)]) == p:
                full = p
        partial, num_partial = None, 0
        # In token order: among equally good ones, the index picks the smaller.
        for s, p in sorted(self.nodes, key=lambda node: node[1]):
            is_child = len(full) < len(p) <= len(full) + self.size
            if s == salt and is_child and p[: len(full)] == full:
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
                    partial = (s, p)  # the left neighbor has priority
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
        if fork_of is None:
            fork_of, shared = self.running_match(tokens, salt, found)
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
            may_retry = source is not None
            if source is not None:
                self.copies.pop()
                self.leave(source[0])
                source, num_partial = None, 0
                for window in self.windows:
                    window.left(window.copies.pop(), kept=True)
            if may_retry and is_fork:  # it needs everything that its windows see from there
                end = num_shared * self.size
                may_retry = all(window.can_fork(fork_of, end) for window in self.windows)
                for window in self.windows if may_retry else ():
                    window.end(seq_id)
                    window.fork(seq_id, fork_of, end)
            if not may_retry or not self.has_room(seq_id, num_fresh, headroom):
                for window in self.windows:
                    window.end(seq_id)
                del self.tables[seq_id]
                if table.is_indexed:
                    self.leave((salt, tuple(tokens[: table.indexed * self.size])))
                return None
        self.arrive(table)
        table.own += self.fresh(num_fresh)
        for window in self.windows:
            if source is not None:
                window.append(seq_id)
        table.cached = table.computed = num_shared * self.size + num_partial
        return table.cached

    def running_match(
        self, tokens: list[int], salt: str | None, found: NaiveMatch
    ) -> tuple[int | None, int]:
        """The sequence that has computed most of the next block, and its total shared tokens."""
        best, most = None, found.num_tokens
        limit = min(len(tokens) - 1, len(found.full) + self.size)
        for seq_id, table in sorted(self.tables.items(), key=lambda item: item[1].arrived):
            if not table.is_indexed or table.salt != salt or table.computed == table.cached:
                continue
            if tuple(table.tokens[: table.indexed * self.size]) != found.full:
                continue
            end = len(found.full)
            while end < min(limit, table.computed) and table.tokens[end] == tokens[end]:
                end += 1
            if end > most:
                best, most = seq_id, end
        return best, most

    def arrive(self, table: Table) -> None:
        self.num_arrived += 1
        table.arrived = self.num_arrived

    def has_room(self, seq_id: int, num_fresh: int, headroom: int) -> bool:
        num_tokens = len(self.tables[seq_id].tokens)
        return self.make_room(num_fresh, headroom) and all(
            window.has_room(seq_id, num_tokens, headroom * window.num_usable // self.num_usable)
            for window in self.windows
        )

    def allocate_up_to(self, seq_id: int, num_tokens: int) -> int:
        for window in self.windows:
            num_tokens = window.coverable(seq_id, num_tokens)
        table = self.tables[seq_id]
        num_blocks = table.indexed + len(table.own)
        num_fresh = -(-num_tokens // self.size) - num_blocks
        if num_fresh > 0 and not self.make_room(num_fresh, 0):
            if num_fresh > self.num_free + self.num_cached:
                num_fresh = 0
            num_fresh = min(num_fresh, self.num_free)
            num_tokens = (num_blocks + num_fresh) * self.size
        table.own += self.fresh(max(0, num_fresh))
        for window in self.windows:
            window.allocate_slots(seq_id, num_tokens)
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
            window.allocate_slots(seq_id, num_tokens)
        return True

    def commit(self, seq_id: int, num_computed: int) -> None:
        table = self.tables[seq_id]
        table.computed = num_computed
        while table.is_indexed and (table.indexed + 1) * self.size <= num_computed:
            self.index(seq_id, (table.indexed + 1) * self.size)
            self.arrive(table)
        for window in self.windows:
            window.slide(seq_id, num_computed)

    def index(self, seq_id: int, num_tokens: int) -> Prefix:
        """Adds the first `num_tokens` tokens of a sequence to the index as a prefix."""
        table = self.tables[seq_id]
        table.indexed += 1
        own = table.own.pop(0)
        prefix = (table.salt, tuple(table.tokens[:num_tokens]))
        if prefix in self.nodes:
            self.release([own])
        else:
            self.nodes[prefix] = Node()
            self.copies = [
                (prefix, None, of) if b == own else (p, b, of) for p, b, of in self.copies
            ]
        for window in self.windows:
            window.index(seq_id, table.indexed - 1, prefix)
        for tail in [p for p in self.nodes if p != prefix and self.covers(prefix, p)]:
            self.drop_tail(tail)
        return prefix

    def covers(self, prefix: Prefix, tail: Prefix) -> bool:
        """True if a whole tail is the beginning of one block of another prefix."""
        (salt, tokens), (other_salt, wanted) = prefix, tail
        begin = len(wanted) // self.size * self.size
        return (
            salt == other_salt
            and begin < len(wanted) <= len(tokens) <= begin + self.size
            and tokens[: len(wanted)] == wanted
        )

    def drop_tail(self, tail: Prefix) -> None:
        """A longer prefix contains its block's data; a pending copy is still made."""
        node = self.nodes.pop(tail)
        [block] = self.fresh(1)
        waiting = [i for i, (prefix, _, _) in enumerate(self.copies) if prefix == tail]
        for i in waiting:
            self.copies[i] = (None, block, self.copies[i][2])
        if not waiting:
            self.retire(node.released_in)
        for window in self.windows:
            window.forget(tail)

    def index_tail(self, seq_id: int) -> Prefix | None:
        """Indexes the contents of the last block of a sequence that ends."""
        table = self.tables[seq_id]
        end = min(table.computed, len(table.tokens))
        if not table.is_indexed or end <= table.cached or end <= table.indexed * self.size:
            return None
        tail = (table.salt, tuple(table.tokens[:end]))
        if any(self.covers(prefix, tail) for prefix in self.nodes):
            return None
        return self.index(seq_id, end)

    def truncate(self, seq_id: int, num_tokens: int) -> int:
        table, size, start = self.tables[seq_id], self.size, num_tokens
        while True:
            end = start
            if start % size and not self.is_own(table, start // size):
                end = start // size * size
            end = min([end, *(window.resume_point(seq_id, start) for window in self.windows)])
            if end == start:
                break
            start = end
        place = next((i for i, copy in enumerate(self.copies) if copy[2] == seq_id), None)
        if place is not None and start <= table.cached // size * size:
            self.drop_copy(place)
        before, depth = table.indexed, start // size
        own = table.own
        keep = max(0, depth - before)
        while before <= depth and keep < len(own) and (before + keep) * size < num_tokens:
            if not self.is_own(table, before + keep):
                break
            keep += 1
        table.own = own[:keep]
        if before > depth:
            table.indexed = depth
            self.arrive(table)
            self.leave((table.salt, tuple(table.tokens[: before * size])))
        self.release(own[keep:])
        table.cached = min(table.cached, start)
        table.computed = min(table.computed, start)
        for window in self.windows:
            window.truncate(seq_id, start, num_tokens)
        return start

    def is_own(self, table: Table, index: int) -> bool:
        """True if a block belongs to this sequence alone, so that it may write to it."""
        if index < table.indexed:
            return False
        if index >= table.indexed + len(table.own):
            return True  # it will get a block
        block = table.own[index - table.indexed]
        users = [own for other in self.tables.values() for own in other.own]
        users += [own for _, own, _ in self.copies if own is not None]
        return users.count(block) == 1

    def drop_copy(self, place: int) -> None:
        """Cancels a pending copy."""
        prefix, own, _ = self.copies.pop(place)
        self.leave(prefix)
        self.release([] if own is None else [own])
        for window in self.windows:
            window.drop_copy(place)

    def free(self, seq_id: int) -> None:
        tail = self.index_tail(seq_id)
        place = next((i for i, copy in enumerate(self.copies) if copy[2] == seq_id), None)
        if place is not None:
            self.drop_copy(place)
        table = self.tables.pop(seq_id)
        if table.is_indexed:
            path = tuple(table.tokens[: table.indexed * self.size])
            self.leave((table.salt, path) if tail is None else tail)
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
        # Blocks that were shared through the index are now shared only among sequences.
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
        """Private blocks lose one user, which was already removed from the tables."""
        still_held = self.private()
        for block in blocks:
            if block not in still_held:
                self.retire(self.launched)

    def retire(self, step: int) -> None:
        if step > self.evaluated:
            self.quarantine.append(step)

    def leave(self, prefix: Prefix | None) -> None:
        """A path loses a user, which was already removed: the whole path was just used."""
        if prefix is None:
            return
        self.clock += 1
        salt, tokens = prefix
        for end in {*range(self.size, len(tokens), self.size), len(tokens)} - {0}:
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
