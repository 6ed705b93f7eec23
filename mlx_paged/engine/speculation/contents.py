"""BlockContents: records the tokens whose keys and values a draft model has in each block.

A draft model has pools of its own, over the block tables of the model's full attention. The KV
store decides what a block holds for the model; this records what it holds for the draft model,
which computes nothing while no drafts are made. A record names a block's tokens and, by a
fingerprint, all tokens before them. So a record is right or does not match, and nothing needs to be
undone after preemption, eviction or a rollback.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mlx_paged.core import BlockCopy
from mlx_paged.core.kv.tables import BlockTables
from mlx_paged.core.kv.tree import common_prefix_len

_START = 0  # fingerprint of no tokens


class _Content(NamedTuple):
    """The tokens of a block, from its first slot on."""

    before: int  # fingerprint of all tokens before the block
    tokens: bytes


class DraftProgress:
    """A draft model's progress in one sequence.

    ::

        [0, num_computed)    in the blocks, of known tokens
        [drafted_from, ...)  in the blocks, of drafts; known tokens may turn out to be others

    Attributes:
        tables: Its tables when it was last seen. While it has them, nothing else writes its blocks.
        blocks: Their blocks of full attention then.
        num_computed: Number of leading tokens.
        drafted: Drafts whose keys and values were computed.
        drafted_from: Position of the first one.
    """

    __slots__ = ("blocks", "drafted", "drafted_from", "num_computed", "prints", "tables")

    def __init__(self) -> None:
        self.tables: BlockTables | None = None
        self.blocks: tuple[int, ...] = ()
        self.num_computed = 0
        self.drafted: tuple[int, ...] = ()
        self.drafted_from = 0
        self.prints = [_START]  # [i]: fingerprint of the tokens of the first i blocks


class BlockContents:
    """Records of blocks, and the sequences that use them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._contents: dict[int, _Content] = {}

    def clear(self) -> None:
        """Forgets everything."""
        self._contents.clear()

    def copied(self, copies: Iterable[BlockCopy]) -> list[BlockCopy]:
        """Records copies of blocks; returns those worth making."""
        made = [copy for copy in copies if copy.src in self._contents]
        for src, dst in made:
            self._contents[dst] = self._contents[src]
        return made

    def cut(self, num_blocks: int) -> None:
        """Forgets blocks from `num_blocks` on."""
        self._contents = {b: c for b, c in self._contents.items() if b < num_blocks}

    def drop(self, runs: Iterable[tuple[int, int]]) -> None:
        """Forgets blocks; each run is (first, end)."""
        for first, end in runs:
            for block in range(first, end):
                self._contents.pop(block, None)

    def follow(self, progress: DraftProgress, tokens: array[int], tables: BlockTables) -> None:
        """Updates `num_computed` for a sequence as it is now.

        Args:
            tokens: All known tokens.
            tables: Its tables, which cover at least all tokens but the last.
        """
        num_equal = 0
        if tables is progress.tables:
            num_equal = _num_equal(progress.blocks, tables.blocks)
        num_kept = num_equal * self._block_size
        self._accept(progress, tokens, num_kept)
        progress.num_computed = min(progress.num_computed, num_kept)
        progress.tables, progress.blocks = tables, tuple(tables.blocks)
        self._extend(progress, tokens)
        # The newest token is always computed, because drafts begin after it.
        progress.num_computed = min(progress.num_computed, len(tokens) - 1)

    def _accept(self, progress: DraftProgress, tokens: array[int], num_kept: int) -> None:
        """Counts drafts that were accepted as computed, among the first `num_kept` positions."""
        begin = end = progress.drafted_from
        for drafted, token in zip(progress.drafted, tokens[begin:num_kept]):
            if drafted != token:
                break
            end += 1
        progress.drafted = ()
        if end > begin:
            self.record(progress, tokens, begin, end)

    def _extend(self, progress: DraftProgress, tokens: array[int]) -> None:
        """Extends `num_computed` over blocks that another sequence has computed."""
        size, blocks = self._block_size, progress.blocks
        index = progress.num_computed // size
        while index < len(blocks):
            content = self._contents.get(blocks[index])
            if content is None or content.before != self._print(progress, tokens, index):
                return
            wanted = tokens[index * size : (index + 1) * size].tobytes()
            length = common_prefix_len(content.tokens, wanted)
            progress.num_computed = max(progress.num_computed, index * size + length)
            if length < size:
                return
            index += 1

    def record(self, progress: DraftProgress, tokens: array[int], begin: int, end: int) -> None:
        """Records that tokens ``[begin, end)`` of a sequence were computed, after all before."""
        size = self._block_size
        for index in range(begin // size, -(-end // size)):
            own = tokens[index * size : min(end, (index + 1) * size)].tobytes()
            content = _Content(self._print(progress, tokens, index), own)
            self._contents[progress.blocks[index]] = content
        progress.num_computed = end

    def overwritten(self, progress: DraftProgress, end: int) -> None:
        """Records that drafts overwrite the slots after the known tokens, up to `end`."""
        size = self._block_size
        for index in range(-(-progress.num_computed // size), -(-end // size)):
            self._contents.pop(progress.blocks[index], None)

    def _print(self, progress: DraftProgress, tokens: array[int], index: int) -> int:
        """Returns the fingerprint of the tokens before block `index`, which must be known."""
        prints, size = progress.prints, self._block_size
        for i in range(len(prints) - 1, index):
            prints.append(hash((prints[i], tokens[i * size : (i + 1) * size].tobytes())))
        return prints[index]


def _num_equal(before: Sequence[int], now: Sequence[int]) -> int:
    """Returns the number of equal leading blocks."""
    if tuple(now[: len(before)]) == before:
        return len(before)
    for index, (old, new) in enumerate(zip(before, now)):
        if old != new:
            return index
    return min(len(before), len(now))
