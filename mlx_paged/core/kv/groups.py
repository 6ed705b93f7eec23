"""KV cache groups: model layers that need the same past tokens share blocks and tables.

`AttentionGroup` and `StateGroup` implement `KVCacheGroup` for three kinds of layers:

- *Full attention* sees every token.
- *Windows* see only the newest tokens. Their tables are as long as the sequence, but hold only
  blocks that later tokens will read; entries that slid out are block 0::

      window of 8 tokens, blocks of 4, 14 tokens computed
      full attention  [ 3 | 7 | 2 | 9 ]
      window          [ 0 | 5 | 8 | 6 ]      position 14 sees 7 .. 14

- *Recurrent layers* keep a state of fixed size. A step reads a sequence's state from one slot and
  writes the new state to another, so a slot never changes once written::

      step         1        2        3        4
      tokens     0..63    64..95     96       97
      slots      0 -> 5   5 -> 2   2 -> 7   7 -> 4
                      |        |
                      |        snapshot of 96 tokens: slot 2 stays, for sequences with this prefix
                      freed once step 2 has been evaluated

  Slot 0 is the state before the first token. A snapshot needs no copy, and any sequence can
  continue from its slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from mlx_paged.core.kv.pool import BlockPool
from mlx_paged.core.kv.restoration import BlockRead
from mlx_paged.core.kv.specs import BlockCopy
from mlx_paged.core.kv.stored import StoredPrefix
from mlx_paged.core.kv.tables import BlockTables, PrefixSource
from mlx_paged.core.kv.tier import ABSENT, Tier
from mlx_paged.core.kv.tree import PrefixNode
from mlx_paged.errors import IntegrityError

#: Called with (group number, num_blocks); makes that many blocks free or evictable.
Supply = Callable[[int, int], None]


class KVCacheGroup(ABC):
    """A pool of blocks or slots, and their use by sequences and by the prefix tree.

    Attributes:
        number: Its index among the groups, and in `PrefixNode.entries`.
        pool: Its blocks or slots.
        num_evictions: Cached blocks evicted to make room.
        is_full_attention: True if a row reads every token before it. A node without an entry in
            such a group is useless and leaves the tree with everything below it. Sequences only
            grow in such a group; in the others they release blocks as they advance.
    """

    is_full_attention = False

    def __init__(
        self,
        number: int,
        num_blocks: int,
        block_size: int,
        tier: Tier,
        remove: Callable[[PrefixNode], None],
    ) -> None:
        self.number = number
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.num_evictions = 0
        self._tier = tier
        self._remove = remove  # removes a node from the tree and from all groups

    # The prefix tree.

    def forget(self, node: PrefixNode) -> None:
        """Clears a node's entry, which no sequence references."""
        entry = node.entries[self.number]
        node.entries[self.number] = ABSENT
        if entry > ABSENT:
            self.pool.uncache(entry)
            self._tier.forget(node, self.number)
        elif entry < ABSENT:
            self._tier.drop(-entry)

    def cache_block(self, node: PrefixNode, block: int) -> int:
        """Makes a node hold a block in use. Returns the node's block: `block`, or the one that it
        already held."""
        present = node.entries[self.number]
        if present > ABSENT:
            return present
        if present < ABSENT:
            self._tier.drop(-present)  # recomputed, so the stored copy is redundant
        node.entries[self.number] = block
        self.pool.cache(block, node)
        return block

    def evict(self, node: PrefixNode) -> None:
        """Moves a node's block off the device; the tier stores or drops it.

        What running sequences have passed is dropped: others rarely continue there.
        """
        block = node.entries[self.number]
        key = 0
        if self.is_full_attention or not self.pool.is_passed(block):
            key = self._tier.store(node, self.number, block)
        else:
            self._tier.forget(node, self.number)
        if not node.is_indexed:
            pass  # To make room, the tier dropped content that removed the node from the tree.
        elif not key and self.is_full_attention:
            self._remove(node)
        else:
            node.entries[self.number] = -key
            self.pool.uncache(block)
        self.num_evictions += 1

    def make_room(self, num_blocks: int) -> bool:
        """Evicts until `num_blocks` are free; returns False if not enough can be freed now."""
        while self.pool.num_free < num_blocks:
            node = self.pool.next_to_evict()
            if node is None:
                return False
            self.evict(node)
        return True

    def evict_idle(self) -> None:
        """Evicts every cached block that no step in flight may read."""
        while (node := self.pool.next_to_evict()) is not None:
            self.evict(node)

    def limit_cached(self, num_blocks: int) -> None:
        """Evicts until at most `num_blocks` cached blocks are left. No step may be in flight."""
        while self.pool.num_cached > num_blocks:
            node = self.pool.next_to_evict()
            assert node is not None
            self.evict(node)

    @abstractmethod
    def usable_depth(self, node: PrefixNode, depth: int) -> int:
        """Largest number of leading blocks on the path to `node`, up to `depth`, from which a
        sequence can continue."""

    @abstractmethod
    def usable_stored(self, stored: StoredPrefix, depth: int) -> int:
        """Like `usable_depth`, for a prefix whose content is partly elsewhere."""

    @abstractmethod
    def view(self, depth: int) -> range:
        """Returns the blocks that a sequence needs to continue after its first `depth` blocks."""

    @abstractmethod
    def can_copy_from(self, node: PrefixNode) -> bool:
        """True if a sequence may start from a copy of part of a node's block."""

    # Lifecycle of a sequence.

    @property
    @abstractmethod
    def capacity(self) -> int | None:
        """Longest sequence in tokens; None if any length fits."""

    @abstractmethod
    def can_fork(self, parent: BlockTables, num_tokens: int) -> bool:
        """True if `parent` still holds everything that a fork after `num_tokens` tokens reads."""

    @abstractmethod
    def begin(self, tables: BlockTables, source: PrefixSource) -> None:
        """Takes references to the blocks that a new sequence shares."""

    @abstractmethod
    def fork(self, parent: BlockTables, tables: BlockTables) -> None:
        """Shares everything that `parent` holds with a new sequence."""

    @abstractmethod
    def attach(self, tables: BlockTables, nodes: Sequence[PrefixNode], num_tokens: int) -> None:
        """Replaces a sequence's blocks with the blocks of a prefix."""

    @abstractmethod
    def make_room_for(self, tables: BlockTables, headroom: int) -> bool:
        """Makes room for the blocks that a new sequence holds at once; returns False if it cannot.

        Args:
            headroom: Additional blocks that must stay available.
        """

    @abstractmethod
    def missing_keys(self, tables: BlockTables, stored: StoredPrefix) -> list[int]:
        """Returns the tier's keys of content that a new sequence needs and that is elsewhere.

        Args:
            stored: The prefix after which the sequence continues.
        """

    @abstractmethod
    def take_missing(self, tables: BlockTables, keys: Sequence[int]) -> list[BlockRead]:
        """Gives an admitted sequence blocks for that content. There is room.

        Args:
            keys: The result of `missing_keys`.
        """

    @abstractmethod
    def will_have_room(self, num_tokens: int, node: PrefixNode | None, headroom: int) -> bool:
        """True if a new sequence that continues after `node` will find room once the steps in
        flight are evaluated."""

    @abstractmethod
    def try_allocate(self, tables: BlockTables, num_tokens: int) -> int:
        """Returns the number of tokens, at most `num_tokens`, that the next step may reach.

        Evicts as needed, so there is room for them on return.
        """

    @abstractmethod
    def could_allocate_later(
        self, tables: BlockTables, num_tokens: int, num_scheduled: int
    ) -> bool:
        """True if there will be room for `num_tokens` once the steps in flight are committed."""

    @abstractmethod
    def on_computed(self, tables: BlockTables, num_tokens: int) -> None:
        """Releases everything that tokens after the first `num_tokens` do not need."""

    @abstractmethod
    def resume_point(self, tables: BlockTables, num_tokens: int) -> int:
        """Largest number of leading tokens, at most `num_tokens`, from which a running sequence
        can continue after it drops the rest."""

    @abstractmethod
    def truncate(self, tables: BlockTables, start: int, num_tokens: int) -> None:
        """Rolls a sequence back to its first `num_tokens` tokens.

        Args:
            start: Tokens that need no recomputation; a resume point of every group.
        """

    @abstractmethod
    def end(self, tables: BlockTables) -> None:
        """Releases everything that a sequence holds. Indexed blocks stay cached until evicted."""

    # Steps.

    @abstractmethod
    def launch_step(self, step: int) -> tuple[BlockCopy, ...]:
        """Finishes building a step; returns its block copies. Stamps later releases with `step`."""

    def on_step_evaluated(self, step: int) -> None:
        """Frees what waited for an evaluated step."""
        self.pool.on_step_evaluated(step)

    def recount(self, all_tables: Collection[BlockTables]) -> None:
        """Frees everything that no table names, after an interrupted change. The prefix tree is
        now empty."""
        self.pool.recount(self.references(all_tables))

    @abstractmethod
    def references(self, all_tables: Collection[BlockTables]) -> Counter[int]:
        """Counts references to each block by sequences and by the step being built.

        Raises:
            IntegrityError: A table is inconsistent.
        """

    def check_integrity(
        self, all_tables: Collection[BlockTables], nodes: Collection[PrefixNode]
    ) -> None:
        """Recounts pool and tables; raises `IntegrityError` on a mismatch."""
        self.pool.check_integrity(self.references(all_tables))
        holders = [node for node in nodes if node.entries[self.number] > ABSENT]
        held = {node.entries[self.number]: node for node in holders}
        if len(held) != len(holders):
            raise IntegrityError("two nodes of the prefix tree hold the same block")
        if self.is_full_attention and not all(node.entries[self.number] for node in nodes):
            raise IntegrityError("a node of the prefix tree has no entry for full attention")
        for block in range(self.pool.num_blocks):
            if self.pool.node_of(block) is not held.get(block):
                raise IntegrityError(f"the pool and the prefix tree disagree about block {block}")
