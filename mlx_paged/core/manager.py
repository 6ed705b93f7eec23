"""KVManager: joins the block pool and the prefix index; the only writer of block tables.

Prefix reuse and paged batching are the same mechanism here: a sequence that arrives takes the
blocks of its longest indexed prefix by reference, one more by copy-on-write where it matches only
in part, and fresh ones for the rest::

      prompt     [t h e _][c a t _][s a t _][o n _ t][h]
      in index   [t h e _][c a t _][s a w _]
      table        7        3        12       14      15
                   |        |        |        '-------'--- fresh
                   |        |        '-------------------- copy of [s a w _]: reuses 2 tokens
                   '--------'----------------------------- shared
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlx_paged.core.block_pool import BlockPool
from mlx_paged.core.block_store import BlockStore
from mlx_paged.core.block_table import BlockCopy, BlockTable
from mlx_paged.core.frontier import Frontier
from mlx_paged.core.integrity import check_books
from mlx_paged.core.prefix_finder import PrefixFinder
from mlx_paged.core.prefix_source import PrefixSource
from mlx_paged.core.radix_index import PrefixMatch, RadixIndex
from mlx_paged.core.side_groups import GroupRows, SideGroups
from mlx_paged.core.state_group import StateGroupSpec
from mlx_paged.core.stats import KVCounters, KVUsage
from mlx_paged.core.window_group import WindowGroupSpec
from mlx_paged.errors import InvalidParameterError


class KVManager:
    """The KV store of an engine: `num_blocks - 1` usable blocks of `block_size` tokens.

    Args:
        num_blocks: Of the layers that see everything. Where a model has none, no memory stands
            behind them, and they only keep the books.
        windows: The groups of layers that see the newest tokens only.
        states: What recurrent layers need; None where there are none.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 32,
        *,
        enable_prefix_caching: bool = True,
        windows: Sequence[WindowGroupSpec] = (),
        states: StateGroupSpec | None = None,
    ) -> None:
        if block_size < 1:
            raise InvalidParameterError("block_size", "at least 1", block_size)
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.index = RadixIndex(block_size)
        self.groups = SideGroups(windows, states, block_size)
        self._counters = KVCounters()
        self._store = BlockStore(self.pool, self.index, self.groups, self._counters)
        self._tables: dict[int, BlockTable] = {}
        self._frontier = Frontier()
        self._finder = PrefixFinder(
            self.index, self.groups, self._frontier, enabled=enable_prefix_caching
        )
        # Copies of the step being built. Their sources are held until the step is launched.
        self._copies: list[tuple[BlockCopy, PrefixSource]] = []
        #: Of the step launched last, for each window group.
        self.window_copies: tuple[tuple[BlockCopy, ...], ...] = ()

    # Questions.

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that the pools can hold."""
        return self.groups.capacity(self.pool.num_usable * self.block_size)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def block_table(self, seq_id: int) -> tuple[tuple[int, ...], int]:
        """A sequence's table, and its first entry that may differ from the previous call's."""
        return self._tables[seq_id].export()

    def blocks_of(self, seq_id: int) -> list[int]:
        """A sequence's blocks in order (a copy; for tests and inspection)."""
        return self._tables[seq_id].blocks.copy()

    def match(self, tokens: Sequence[int], salt: str | None = None) -> PrefixMatch:
        """The longest cached prefix of a new sequence, at most `len(tokens) - 1` tokens."""
        return self._finder.match(tokens, salt)

    def computing_next_block(self, tokens: Sequence[int], salt: str | None = None) -> int | None:
        """The running sequence about to fill the first block that `tokens` lacks, if any.

        Whoever waits for it need not compute that block. Where `tokens` ends inside the block, it
        must use at least half of it for the wait to be worth its while.
        """
        return self._finder.computing_next_block(tokens, salt)

    # The life of a block table.

    def admit(
        self,
        seq_id: int,
        tokens: Sequence[int],
        *,
        salt: str | None = None,
        headroom: int = 0,
        read_cache: bool = True,
        fork_of: int | None = None,
        num_fork_tokens: int = 0,
    ) -> int | None:
        """Gives a sequence a block table that covers all its tokens; None when there is no room.

        Args:
            tokens: The live token list of the sequence: it may grow later, and must not change
                otherwise.
            salt: Only blocks indexed under the same salt are shared.
            headroom: Blocks that must stay available besides.
            read_cache: Whether to reuse cached blocks.
            fork_of: A running sequence that begins with the same `num_fork_tokens` tokens, all
                committed; its blocks are shared where they reach further than the index (which
                knows no partly filled block).

        Returns:
            How many leading tokens need not be computed: less than `len(tokens)`.
        """
        assert seq_id not in self._tables and tokens
        source = self._finder.source(
            tokens,
            salt,
            read_cache=read_cache,
            fork_of=fork_of,
            fork_table=None if fork_of is None else self._tables[fork_of],
            num_fork_tokens=num_fork_tokens,
        )
        self._store.hold(source)
        self.groups.begin(seq_id, tokens, source)
        num_fresh = self.blocks_for(len(tokens)) - len(source.blocks)
        if not self._has_room(seq_id, num_fresh, tokens, headroom):
            # In a pool filled to the brim the source of a copy may be the very block that is
            # missing. (A fork's windows may not reach back to where its copy begins.)
            is_fork = source.fork_of is not None
            self._store.let_go(source.held_for_copy, source.partial_node)
            self.groups.drop_copy(seq_id)
            source = source.without_copy()
            if (is_fork and self.groups) or not self._has_room(seq_id, num_fresh, tokens, headroom):
                self._store.let_go(source.blocks, source.tip)
                self.groups.end(seq_id)
                return None
        self.groups.settle(seq_id)
        table = BlockTable(tokens, list(source.blocks), source.tip)
        for _ in range(num_fresh):
            table.append(self.pool.allocate())
        if source.partial is not None:
            copy = BlockCopy(source.partial, table.blocks[len(source.blocks)])
            self._copies.append((copy, source))
        self._tables[seq_id] = table
        self._frontier.enter(seq_id, table)
        num_cached = source.num_tokens(self.block_size)
        self._counters.count_admission(len(tokens), num_cached, source.num_partial_tokens)
        return num_cached

    def _has_room(self, seq_id: int, num_fresh: int, tokens: Sequence[int], headroom: int) -> bool:
        return self._store.make_room(num_fresh, headroom) and self.groups.make_room(
            seq_id, len(tokens), headroom / self.pool.num_usable
        )

    def grow(self, seq_id: int, num_tokens: int) -> bool:
        """Makes a table cover `num_tokens` tokens; false, and no change, when there is no room."""
        if self.groups and self.groups.coverable(seq_id, num_tokens) < num_tokens:
            return False
        table = self._tables[seq_id]
        num_fresh = self.blocks_for(num_tokens) - len(table.blocks)
        if num_fresh > 0 and not self._store.make_room(num_fresh):
            return False
        for _ in range(num_fresh):
            table.append(self.pool.allocate())
        self.groups.cover(seq_id, num_tokens)
        return True

    def reach(self, seq_id: int, num_tokens: int) -> int:
        """Makes the side groups cover as many tokens as there is room for, `num_tokens` at most.

        (The full group covers all known tokens from admission on.) A step must not go further than
        the answer; it may be less where a state is to be kept, too.
        """
        if not self.groups:
            return num_tokens
        num_tokens = self.groups.coverable(seq_id, num_tokens)
        self.groups.cover(seq_id, num_tokens)
        return num_tokens

    def can_grow_later(self, seq_id: int, num_tokens: int, num_scheduled: int = 0) -> bool:
        """Whether there will be room once the steps in flight are committed.

        Args:
            num_scheduled: tokens of the sequence that are scheduled or computed.
        """
        num_fresh = self.blocks_for(num_tokens) - len(self._tables[seq_id].blocks)
        return num_fresh <= self._store.num_available_later and self.groups.can_cover_later(
            seq_id, num_tokens, num_scheduled
        )

    def will_have_room(
        self, tokens: Sequence[int], *, salt: str | None = None, headroom: int = 0
    ) -> bool:
        """Whether `admit` will find room once the steps in flight are evaluated."""
        node = self.match(tokens, salt).node
        num_needed = self.blocks_for(len(tokens)) + headroom
        while node is not None and node.parent is not None:
            # Either it is in use and costs nothing, or it is among the available ones and is taken
            # from them.
            num_needed -= node.locks > 0
            node = node.parent
        return num_needed <= self._store.num_available_later and self.groups.will_have_room(
            len(tokens), headroom / self.pool.num_usable
        )

    def commit(self, seq_id: int, num_computed_tokens: int) -> None:
        """Indexes the blocks of a sequence that are filled by now.

        Where an equal block was indexed meanwhile, that one replaces the sequence's own: content is
        stored once.
        """
        assert not self._copies, "steps are committed before or after one is built, not meanwhile"
        table = self._tables[seq_id]
        size = self.block_size
        tip = table.tip
        while tip is not None and (tip.depth + 1) * size <= num_computed_tokens:
            index = tip.depth
            own = table.blocks[index]
            child = self.index.extend(tip, table.key_of(index, size), own)
            if child.block != own:
                self.pool.retain(child.block)
                self.pool.release(own)
                table.replace(index, child.block)
                self._counters.num_deduplicated_blocks += 1
            elif not self.pool.is_cached(own):
                self.pool.cache(own)
            if self.groups:
                self.groups.on_indexed(seq_id, index, child)
            tip = child
        if tip is not table.tip:
            self._frontier.leave(seq_id, table)
            table.tip = tip
            self._frontier.enter(seq_id, table)
        if self.groups:
            self.groups.on_computed(seq_id, num_computed_tokens, tip)

    def free(self, seq_id: int) -> None:
        """Takes a sequence's blocks back; those that are indexed stay cached."""
        table = self._tables.pop(seq_id)
        self._frontier.leave(seq_id, table)
        self._store.let_go(table.blocks, table.tip)
        self.groups.end(seq_id)

    def reset_prefix_cache(self) -> int:
        """Empties the index; returns how many blocks it held.

        Running sequences keep their blocks, and are not indexed any more until they are admitted
        anew.
        """
        assert not self._copies, "the prefix cache is reset between steps, not while one is built"
        blocks = self.index.clear()
        for block in blocks:
            self.pool.uncache(block)
        self.groups.clear()
        for table in self._tables.values():
            table.tip = None
        self._frontier.clear()
        self._counters.num_resets += 1
        return len(blocks)

    # Steps.

    def launch_step(self, step: int) -> tuple[BlockCopy, ...]:
        """Ends the building of a step: returns its copies, and dates later releases."""
        self.pool.on_step_launched(step)
        copies = tuple(copy for copy, _ in self._copies)
        for _, source in self._copies:
            self._store.let_go(source.held_for_copy, source.partial_node)
        self._copies.clear()
        self.window_copies = self.groups.launch_step(step)
        return copies

    def group_rows(self, seq_id: int, end: int) -> GroupRows:
        """What the side groups tell a step that brings a sequence to `end` tokens.

        Called once for each row; a state moves with it.
        """
        return self.groups.rows(seq_id, end, is_indexed=self._tables[seq_id].tip is not None)

    def on_step_evaluated(self, step: int) -> None:
        """A step ran to its end: blocks that waited for it are free."""
        self.pool.on_step_evaluated(step)
        self.groups.on_step_evaluated(step)

    # Numbers.

    @property
    def counters(self) -> KVCounters:
        """What happened so far (a copy)."""
        return replace(self._counters)

    @property
    def usage(self) -> KVUsage:
        """Where the blocks are now."""
        return KVUsage.of(self.pool, len(self.index))

    @property
    def group_usage(self) -> tuple[KVUsage, ...]:
        """Where the blocks of each window group are now, then the state slots."""
        return tuple(KVUsage.of(group.pool, len(group.blocks)) for group in self.groups)

    def check_integrity(self) -> None:
        """Recounts pool, index and tables against each other; raises `IntegrityError`."""
        check_books(self.pool, self.index, self._tables, self._copies, self._frontier, self.groups)
