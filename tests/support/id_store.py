"""A KV store addressed by sequence numbers, which makes some tests more readable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_paged.core import (
    BlockCopy,
    BlockTables,
    ForkingKVManager,
    PrefixMatch,
    PrefixQuery,
    StateMove,
)


class IdStore:
    """`ForkingKVManager` by sequence id; other attributes are the manager's own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.kv = ForkingKVManager(*args, **options)
        self.tables: dict[int, BlockTables] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kv, name)

    def admit(
        self, seq_id: int, tokens: Sequence[int], *, fork_of: int | None = None, **options: Any
    ) -> int | None:
        source = None if fork_of is None else self.tables[fork_of]
        tables = self.kv.admit(tokens, fork_of=source, owner=seq_id, **options)
        if tables is None:
            return None
        self.tables[seq_id] = tables
        return tables.num_cached_tokens

    def match(self, tokens: Sequence[int], salt: str | None = None) -> PrefixMatch:
        return self.kv.match(PrefixQuery(tokens, salt))

    def computing_next_block(self, tokens: Sequence[int], salt: str | None = None) -> int | None:
        running = self.kv.prefixes.computing_next_block(tokens, PrefixQuery(tokens, salt))
        return None if running is None else running.owner

    def will_have_room(
        self, tokens: Sequence[int], *, salt: str | None = None, headroom: int = 0
    ) -> bool:
        return self.kv.will_have_room(len(tokens), PrefixQuery(tokens, salt), headroom=headroom)

    def grow(self, seq_id: int, num_tokens: int) -> bool:
        return self.kv.grow(self.tables[seq_id], num_tokens)

    def allocate_up_to(self, seq_id: int, num_tokens: int) -> int:
        return self.kv.allocate_up_to(self.tables[seq_id], num_tokens)

    def can_grow_later(self, seq_id: int, num_tokens: int, num_scheduled: int = 0) -> bool:
        return self.kv.can_grow_later(self.tables[seq_id], num_tokens, num_scheduled)

    def commit(self, seq_id: int, num_computed_tokens: int) -> None:
        self.kv.commit(self.tables[seq_id], num_computed_tokens)

    def open(self, seq_id: int, tokens: list[int]) -> None:
        """A sequence of the drop-in, without blocks."""
        self.tables[seq_id] = self.kv.open(tokens)

    def fork(self, seq_id: int, source: int, tokens: list[int]) -> None:
        self.tables[seq_id] = self.kv.fork(self.tables[source], tokens)

    def attach_prefix(self, seq_id: int, match: PrefixMatch) -> None:
        self.kv.attach_prefix(self.tables[seq_id], match)

    def make_writable(self, seq_id: int, start: int, end: int) -> list[BlockCopy] | None:
        """Also checks that it takes the number of blocks that `num_to_write` predicts."""
        needed, before = self.num_to_write(seq_id, start, end), set(self.blocks_of(seq_id))
        copies = self.kv.make_writable(self.tables[seq_id], start, end)
        assert len(set(self.blocks_of(seq_id)) - before) == (0 if copies is None else needed)
        return copies

    def num_to_write(self, seq_id: int, start: int, end: int) -> int:
        return self.kv.attention[0].num_to_write(self.tables[seq_id], start, end)

    def shrink(self, seq_id: int, num_tokens: int) -> None:
        self.kv.shrink(self.tables[seq_id], num_tokens)

    def truncate(self, seq_id: int, num_tokens: int) -> int:
        return self.kv.truncate(self.tables[seq_id], num_tokens)

    def free(self, seq_id: int) -> None:
        self.kv.free(self.tables.pop(seq_id))

    def move_state(self, seq_id: int, end: int) -> StateMove | None:
        return self.kv.move_state(self.tables[seq_id], end)

    def blocks_of(self, seq_id: int, group: int = 0) -> list[int]:
        return self.tables[seq_id].attention[group].blocks.copy()

    def block_table(self, seq_id: int) -> tuple[tuple[int, ...], int]:
        return self.tables[seq_id].export()[0]

    def launch(self, step: int) -> list[BlockCopy]:
        """Launches a step; returns its copies for full attention."""
        return list(self.kv.launch_step(step)[0])
