"""BlockPool: ownership, reuse and eviction order of the blocks of a KV pool.

A block is in exactly one of four states. Every transition is O(1)::

      free ----------- allocate ----------> used    referenced by one or more sequences
       ^                                   |  ^
       |        last release,              |  |  retain
       |        not cached                 |  |
       +--<-- quarantined <----------------+  |
       |           ^                       |  |
       |           | uncache               v  |  last release, cached
       +--<--------+--------------------- cached  held only by a node of the prefix tree

*Quarantine.* Steps run asynchronously: when a block loses its last owner, a step in flight may
still read it. Every release stamps the block with the newest launched step; the block is reused
only after that step has been evaluated. With no step in flight the quarantine is empty and blocks
become free at once.

*Eviction.* Cached blocks are evicted in the order in which they lost their last owner. `passed`
blocks, which slid out of a running sequence's window, go before blocks of sequences that ended:
another sequence is more likely to continue from those.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from mlx_paged.core.kv.tree import PrefixNode  # for annotations only
from mlx_paged.errors import IntegrityError, InvalidParameterError

#: Never handed out; padding entries of block tables point to it.
NULL_BLOCK = 0


class BlockPool:
    """Ids, reference counts and cached nodes of the blocks `1 .. num_blocks - 1`.

    Attributes:
        num_freed: Grows whenever a block becomes free, or cached and not in use by a step in
            flight. While it is unchanged, no more blocks are available than before.
        max_used, max_shared: Largest `num_used` and `num_shared` of any launched step.
        on_free: Called with each block that becomes free, if set.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise InvalidParameterError(
                "num_blocks", "at least 2 (block 0 is never handed out)", num_blocks
            )
        self.num_blocks = num_blocks
        self.launched_step = 0
        self.evaluated_step = 0
        self.num_freed = 0
        self.max_used = self.max_shared = 0
        self.on_free: Callable[[int], None] | None = None
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack: recently used blocks go first
        self._ref_counts = [0] * num_blocks  # references by sequences
        self._nodes: list[PrefixNode | None] = [None] * num_blocks  # the node that holds the block
        # Newest step that may touch the block, as of its last release.
        self._last_step = [0] * num_blocks
        self._quarantine: dict[int, list[int]] = {}  # step -> blocks that wait for it
        self._num_quarantined = 0
        self._num_shared = 0
        self._num_indexed = 0
        self._last_cached_step = 0  # newest step that may use a cached block
        # Cached blocks without an owner, in eviction order.
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()

    # Counts.

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be handed out."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        """Blocks without an owner that a step in flight may still read."""
        return self._num_quarantined

    @property
    def num_cached(self) -> int:
        """Blocks that only the prefix tree holds, so they can be evicted."""
        return len(self._passed) + len(self._kept)

    @property
    def num_available(self) -> int:
        """Blocks that are free or can be evicted, some only after a step is evaluated."""
        return len(self._free) + len(self._passed) + len(self._kept)

    @property
    def num_available_later(self) -> int:
        """Blocks that will be available once the steps in flight are evaluated."""
        return self.num_available + self._num_quarantined

    @property
    def num_used(self) -> int:
        """Blocks that sequences reference."""
        cached = len(self._passed) + len(self._kept)
        return self.num_blocks - 1 - len(self._free) - cached - self._num_quarantined

    @property
    def num_shared(self) -> int:
        """Blocks that more than one sequence references."""
        return self._num_shared

    @property
    def num_indexed(self) -> int:
        """Blocks that the prefix tree holds, used or not."""
        return self._num_indexed

    def ref_count(self, block: int) -> int:
        """References to `block` by sequences."""
        return self._ref_counts[block]

    def node_of(self, block: int) -> PrefixNode | None:
        """Returns the node of the prefix tree that holds `block`, or None."""
        return self._nodes[block]

    def is_own(self, block: int) -> bool:
        """True if the one sequence that references `block` may write to it."""
        return self._ref_counts[block] == 1 and self._nodes[block] is None

    def is_passed(self, block: int) -> bool:
        """True if running sequences released a cached block as they went on."""
        return block in self._passed

    # Ownership by sequences.

    def allocate(self) -> int:
        """Hands out a free block with one reference. The caller made sure that one is free."""
        [block] = self.allocate_many(1)
        return block

    # A long prompt takes or shares hundreds of blocks, so the loops below make no calls.

    def allocate_many(self, count: int) -> list[int]:
        """Hands out free blocks with one reference each. The caller made sure they are free."""
        free, counts = self._free, self._ref_counts
        assert 0 <= count <= len(free), f"{count} blocks are wanted but {len(free)} are free"
        blocks = free[len(free) - count :]
        del free[len(free) - count :]
        blocks.reverse()
        for block in blocks:
            counts[block] = 1
        return blocks

    def retain(self, *blocks: int) -> None:
        """Adds a reference to each block. All must be used or cached."""
        counts, nodes, kept, passed = self._ref_counts, self._nodes, self._kept, self._passed
        num_shared = 0
        for block in blocks:
            count = counts[block]
            counts[block] = count + 1
            if count == 0:
                assert nodes[block] is not None, f"block {block} has no owner to share it"
                del (kept if block in kept else passed)[block]
            elif count == 1:
                num_shared += 1
        self._num_shared += num_shared

    def release(self, *blocks: int, passed: bool = False) -> None:
        """Drops a reference to each block. A block without references is cached, quarantined or
        free.

        Args:
            passed: True if the sequence continues without the blocks; they are evicted first.
        """
        counts, nodes, last_step = self._ref_counts, self._nodes, self._last_step
        queue, launched_step = self._passed if passed else self._kept, self.launched_step
        is_idle = launched_step <= self.evaluated_step
        num_unshared = num_freed = 0
        is_cached = False
        for block in blocks:
            count = counts[block] - 1
            counts[block] = count
            if count == 0:
                last_step[block] = launched_step
                num_freed += 1
                if nodes[block] is None:
                    self._reclaim(block)
                else:
                    queue[block] = None
                    is_cached = True
            elif count == 1:
                num_unshared += 1
            else:
                assert count > 0, f"block {block} is released more often than retained"
        self._num_shared -= num_unshared
        if is_idle:
            self.num_freed += num_freed
        if is_cached:
            self._last_cached_step = launched_step

    # Ownership by the prefix tree.

    def cache(self, block: int, node: PrefixNode) -> None:
        """Makes a node hold a block that a sequence is using."""
        assert self._ref_counts[block] > 0 and self._nodes[block] is None
        self._nodes[block] = node
        self._num_indexed += 1

    def uncache(self, block: int) -> None:
        """Detaches a block from the node that holds it."""
        assert self._nodes[block] is not None, f"block {block} is not cached"
        self._nodes[block] = None
        self._num_indexed -= 1
        if self._ref_counts[block] == 0:
            del (self._kept if block in self._kept else self._passed)[block]
            self._reclaim(block)

    def next_to_evict(self) -> PrefixNode | None:
        """Returns the node whose block is evicted next; None if steps in flight may read all of
        them."""
        for queue in (self._passed, self._kept):
            # Oldest first: if it may still be read, so may all others.
            block = next(iter(queue), None)
            if block is not None and self._last_step[block] <= self.evaluated_step:
                return self._nodes[block]
        return None

    def free_since(self, step: int) -> list[int]:
        """Free blocks whose last owner left after step `step` was launched; -1 means all of them.

        No step in flight touches them.
        """
        last_step = self._last_step
        return [block for block in self._free if last_step[block] > step]

    # Steps.

    def on_step_launched(self, step: int) -> None:
        """Records a launched step; blocks released from now on may be in use by it."""
        assert step > self.launched_step, f"step {step} launched after step {self.launched_step}"
        self.launched_step = step
        num_used = self.num_used
        if num_used > self.max_used:
            self.max_used = num_used
        if self._num_shared > self.max_shared:
            self.max_shared = self._num_shared

    def on_step_evaluated(self, step: int) -> None:
        """Frees the blocks that waited for steps up to `step`, which have been evaluated."""
        assert self.evaluated_step < step <= self.launched_step, (
            f"step {step} evaluated; launched are {self.evaluated_step + 1}..{self.launched_step}"
        )
        self.num_freed += self._last_cached_step > self.evaluated_step
        # Loops over step numbers, not over the dict: steps are evaluated in order.
        for waited_for in range(self.evaluated_step + 1, step + 1):
            blocks = self._quarantine.pop(waited_for, ())
            self._num_quarantined -= len(blocks)
            self.num_freed += len(blocks)
            self._free.extend(blocks)
            if self.on_free is not None:
                for block in blocks:
                    self.on_free(block)
        self.evaluated_step = step

    def grow(self, num_blocks: int) -> None:
        """Adds free blocks. The device pools must have grown before."""
        more = num_blocks - self.num_blocks
        assert more >= 0, f"a pool of {self.num_blocks} blocks cannot become one of {num_blocks}"
        self._free[:0] = range(num_blocks - 1, self.num_blocks - 1, -1)  # handed out last
        self._ref_counts += [0] * more
        self._nodes += [None] * more
        self._last_step += [0] * more
        self.num_blocks = num_blocks
        self.num_freed += more

    def compact(self, num_blocks: int) -> dict[int, int]:
        """Drops the ids from `num_blocks` on. No block may be in quarantine.

        Returns:
            Old id -> new id of the blocks that had these ids.
        """
        assert not self._quarantine, "a step in flight may read what is to move"
        free = sorted((block for block in self._free if block < num_blocks), reverse=True)
        moved: dict[int, int] = {}
        for block in range(num_blocks, self.num_blocks):
            if self._ref_counts[block] or self._nodes[block] is not None:
                moved[block] = to = free.pop()
                self._ref_counts[to] = self._ref_counts[block]
                self._nodes[to] = self._nodes[block]
                self._last_step[to] = self._last_step[block]
        for name in ("_passed", "_kept"):
            queue = getattr(self, name)
            setattr(self, name, OrderedDict((moved.get(block, block), None) for block in queue))
        for per_block in (self._ref_counts, self._nodes, self._last_step):
            del per_block[num_blocks:]  # type: ignore[attr-defined]
        self._free = free
        self.num_blocks = num_blocks
        return moved

    def recount(self, references: Counter[int]) -> None:
        """Rebuilds the pool from the references of sequences; the prefix tree is now empty."""
        launched_step, num_freed, on_free = self.launched_step, self.num_freed, self.on_free
        max_used, max_shared = self.max_used, self.max_shared
        BlockPool.__init__(self, self.num_blocks)
        self.max_used, self.max_shared = max_used, max_shared
        self.launched_step = self.evaluated_step = launched_step
        self.on_free = on_free
        for block, count in references.items():
            self._ref_counts[block] = count
        self._free = [block for block in self._free if not self._ref_counts[block]]
        self._num_shared = sum(count > 1 for count in self._ref_counts)
        self.num_freed = num_freed + len(self._free)

    def _reclaim(self, block: int) -> None:
        if self._last_step[block] <= self.evaluated_step:
            self._free.append(block)
            if self.on_free is not None:
                self.on_free(block)
        else:
            self._quarantine.setdefault(self._last_step[block], []).append(block)
            self._num_quarantined += 1

    # Integrity.

    def check_integrity(self, references: Counter[int] | None = None) -> None:
        """Recounts everything from the block states; O(num_blocks).

        Args:
            references: Expected reference count of each block; None skips this check.

        Raises:
            IntegrityError: A count does not match.
        """
        quarantined = [b for blocks in self._quarantine.values() for b in blocks]
        used = [b for b in range(self.num_blocks) if self._ref_counts[b] > 0]
        cached = [b for b, node in enumerate(self._nodes) if node and not self._ref_counts[b]]
        _expect_partition(self.num_blocks, self._free, quarantined, used, cached)
        if sorted([*self._passed, *self._kept]) != cached:
            raise IntegrityError(f"blocks {cached} are cached, but eviction knows others")
        shared = sum(count > 1 for count in self._ref_counts)
        for name, stored, counted in (
            ("quarantined", self._num_quarantined, len(quarantined)),
            ("used", self.num_used, len(used)),
            ("shared", self._num_shared, shared),
            ("indexed", self._num_indexed, sum(node is not None for node in self._nodes)),
        ):
            if stored != counted:
                raise IntegrityError(f"{stored} blocks are counted as {name}, but {counted} are")
        for step, blocks in self._quarantine.items():
            if not self.evaluated_step < step <= self.launched_step:
                raise IntegrityError(
                    f"blocks {blocks} wait for step {step}, which is not in flight"
                )
        for block, count in enumerate(self._ref_counts):
            if references is not None and count != references[block]:
                raise IntegrityError(
                    f"block {block} has {count} references, but {references[block]} tables and "
                    "copies name it"
                )


def _expect_partition(num_blocks: int, *states: Iterable[int]) -> None:
    """Checks that every block except 0 is in exactly one state."""
    seen = [0] * num_blocks
    for blocks in states:
        for block in blocks:
            seen[block] += 1
    if seen[NULL_BLOCK]:
        raise IntegrityError("block 0 has been handed out")
    wrong = [block for block in range(1, num_blocks) if seen[block] != 1]
    if wrong:
        raise IntegrityError(
            f"blocks {wrong} are not in exactly one of the states free, quarantined, used, cached"
        )
