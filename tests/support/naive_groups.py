"""A window group without counters and queues: every question is answered by a search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Prefix = tuple[str | None, tuple[int, ...]]


@dataclass
class Held:
    """A node's block; the last three fields record when and how it became idle."""

    block: int
    kept: bool = False
    order: int = 0
    released_in: int = 0


class NaiveWindow:
    """Blocks are numbers that are never reused; a table has None for a missing block."""

    def __init__(
        self, num_usable: int, span: int, first_visible: Callable[[int], int], size: int
    ) -> None:
        self.num_usable = num_usable
        self.first_visible = first_visible
        self.size = size
        # Maximum number of blocks that a window's tokens span, wherever they begin.
        self.view = max((offset + span - 1) // size + 1 for offset in range(size))
        self.held: dict[Prefix, Held] = {}
        self.tables: dict[int, list[int | None]] = {}
        self.first: dict[int, int] = {}
        self.shared: dict[int, int] = {}
        self.prompt: dict[int, int] = {}  # tokens at admission
        self.copies: list[int] = []
        self.quarantine: list[int] = []
        self.clock = self.launched = self.evaluated = self.next_block = 0

    # Counts.

    def users(self, block: int) -> int:
        in_tables = sum(table.count(block) for table in self.tables.values())
        return in_tables + self.copies.count(block)

    @property
    def num_cached(self) -> int:
        return sum(not self.users(held.block) for held in self.held.values())

    @property
    def num_free(self) -> int:
        used = {b for table in self.tables.values() for b in table if b is not None}
        used |= set(self.copies)
        return self.num_usable - len(used) - self.num_cached - len(self.quarantine)

    # Questions.

    def fits(self, salt: str | None, tokens: tuple[int, ...], depth: int) -> bool:
        """True if a sequence can continue after `depth` blocks."""
        first = self.first_visible(depth * self.size) // self.size
        return all((salt, tokens[: (i + 1) * self.size]) in self.held for i in range(first, depth))

    def can_fork(self, seq_id: int, num_tokens: int) -> bool:
        return self.first[seq_id] <= self.first_visible(num_tokens) // self.size

    # Sequences.

    def begin(self, seq_id: int, salt: str | None, tokens: list[int], depth: int) -> None:
        first = self.first_visible(depth * self.size) // self.size
        table: list[int | None] = [None] * depth
        for i in range(first, depth):
            table[i] = self.held[salt, tuple(tokens[: (i + 1) * self.size])].block
        self.tables[seq_id], self.first[seq_id], self.shared[seq_id] = table, first, depth

    def drop_copy(self, place: int) -> None:
        self.left(self.copies.pop(place), kept=True)

    def fork(self, seq_id: int, parent: int, num_tokens: int) -> None:
        depth = num_tokens // self.size
        first = self.first_visible(num_tokens) // self.size
        table = self.tables[parent][:depth]
        table[:first] = [None] * min(first, depth)
        self.tables[seq_id], self.first[seq_id], self.shared[seq_id] = table, first, depth

    def source_of_copy(self, prefix: Prefix | None, parent: int | None, depth: int) -> int:
        block = self.tables[parent][depth] if parent is not None else None
        if prefix is not None and parent is None:
            block = self.held[prefix].block
        assert block is not None
        return block

    def has_room(self, seq_id: int, num_tokens: int, headroom: int) -> bool:
        self.prompt[seq_id] = num_tokens
        wanted = min(self.blocks_for(num_tokens), self.first[seq_id] + self.view)
        fresh = max(0, wanted - len(self.tables[seq_id]))
        return fresh + headroom <= self.num_free + self.num_cached and self.make_room(fresh)

    def coverable(self, seq_id: int, num_tokens: int) -> int:
        length = len(self.tables[seq_id])
        fresh = self.blocks_for(num_tokens) - length
        if fresh <= 0 or self.make_room(fresh):
            return num_tokens
        return (length + self.num_free) * self.size

    def allocate_slots(self, seq_id: int, num_tokens: int) -> None:
        while len(self.tables[seq_id]) < self.blocks_for(num_tokens):
            self.append(seq_id)

    def append(self, seq_id: int) -> None:
        self.next_block += 1
        self.tables[seq_id].append(self.next_block)

    def index(self, seq_id: int, i: int, prefix: Prefix) -> None:
        own = self.tables[seq_id][i]
        if own is None:
            return
        held = self.held.setdefault(prefix, Held(own))
        if held.block != own:
            self.tables[seq_id][i] = held.block
            self.left(own, kept=True)

    def slide(self, seq_id: int, num_computed: int) -> None:
        table = self.tables[seq_id]
        first = min(self.first_visible(num_computed) // self.size, len(table))
        for i in range(self.first[seq_id], first):
            block, table[i] = table[i], None
            assert block is not None
            depth = max(0, self.prompt.get(seq_id, 0) - 1) // self.size
            continues = self.first_visible(depth * self.size) // self.size <= i < depth
            self.left(block, kept=i < self.shared[seq_id] or continues)
        self.first[seq_id] = max(first, self.first[seq_id])

    def is_own(self, block: int | None) -> bool:
        is_held = any(held.block == block for held in self.held.values())
        return block is not None and self.users(block) == 1 and not is_held

    def resume_point(self, seq_id: int, num_tokens: int) -> int:
        if self.first_visible(num_tokens) // self.size < self.first[seq_id]:
            return 0
        depth, rest = divmod(num_tokens, self.size)
        table = self.tables[seq_id]
        if rest and depth < len(table) and not self.is_own(table[depth]):
            return depth * self.size
        return num_tokens

    def truncate(self, seq_id: int, start: int, num_tokens: int) -> None:
        table = self.tables[seq_id]
        keep = start // self.size
        while keep < min(len(table), self.blocks_for(num_tokens)) and self.is_own(table[keep]):
            keep += 1
        while len(table) > keep:
            block = table.pop()
            if block is not None:
                self.left(block, kept=True)
        self.first[seq_id] = min(self.first[seq_id], keep)
        self.shared[seq_id] = min(self.shared[seq_id], keep)

    def end(self, seq_id: int) -> None:
        table = self.tables[seq_id]
        for i, block in reversed(list(enumerate(table))):
            table[i] = None
            if block is not None:
                self.left(block, kept=True)
        del self.tables[seq_id]

    def launch(self, step: int) -> None:
        self.launched = step
        while self.copies:
            self.left(self.copies.pop(0), kept=True)

    def left(self, block: int, *, kept: bool) -> None:
        """A block lost a user, which was already removed."""
        if self.users(block):
            return
        for held in self.held.values():
            if held.block == block:
                self.clock += 1
                held.kept, held.order, held.released_in = kept, self.clock, self.launched
                return
        self.retire(self.launched)

    def retire(self, step: int) -> None:
        if step > self.evaluated:
            self.quarantine.append(step)

    def evaluate(self, step: int) -> None:
        self.evaluated = step
        self.quarantine = [s for s in self.quarantine if s > step]

    def forget(self, prefix: Prefix) -> None:
        held = self.held.pop(prefix, None)
        if held is not None and not self.users(held.block):
            self.retire(held.released_in)

    def reset(self) -> None:
        for prefix in list(self.held):
            self.forget(prefix)

    def make_room(self, num_blocks: int) -> bool:
        while self.num_free < num_blocks:
            idle = {p: held for p, held in self.held.items() if not self.users(held.block)}
            for kept in (False, True):
                ranks = {p: held.order for p, held in idle.items() if held.kept is kept}
                oldest = min(ranks, key=lambda p: ranks[p], default=None)
                if oldest is not None and idle[oldest].released_in <= self.evaluated:
                    self.forget(oldest)
                    break
            else:
                return False
        return True

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)
