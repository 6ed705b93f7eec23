"""BlockPool: who owns which block of the KV pool, and when a freed one may be handed out again.

A block is in exactly one of four states, and every change of state is O(1)::

      free ----------- allocate ----------> used    referenced by one or more sequences
       ^                                   |  ^
       |        last release,              |  |  retain
       |        not cached                 |  |
       +--<-- quarantined <----------------+  |
       |           ^                       |  |
       |           | uncache               v  |  last release, cached
       +--<--------+--------------------- cached  held by the prefix index alone

*Quarantine.* Steps run asynchronously: when a block loses its last owner, a step that reads it may
still be in flight. Every release stamps the block with the newest launched step, and the block is
handed out again only after that step has been evaluated. Without a step in flight the quarantine is
empty and blocks become free at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlx_paged.errors import IntegrityError, InvalidParameterError

#: Never handed out: padding entries of block tables point at it.
NULL_BLOCK = 0


class BlockPool:
    """Ids and reference counts of the blocks `1 .. num_blocks - 1`."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise InvalidParameterError(
                "num_blocks", "at least 2 (block 0 is never handed out)", num_blocks
            )
        self.num_blocks = num_blocks
        self.launched_step = 0
        self.evaluated_step = 0
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack: recently used blocks first
        self._ref_counts = [0] * num_blocks  # references by sequences
        self._is_cached = bytearray(num_blocks)  # whether the prefix index holds the block too
        self._last_step = [
            0
        ] * num_blocks  # newest step that may touch the block, as of its last release
        self._quarantine: dict[int, list[int]] = {}  # step -> blocks that wait for it
        self._num_quarantined = 0
        self._num_cached = 0
        self._num_shared = 0

    # Numbers.

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
        """Blocks that only the prefix index holds: they can be evicted."""
        return self._num_cached

    @property
    def num_used(self) -> int:
        """Blocks that sequences reference."""
        return self.num_usable - self.num_free - self._num_quarantined - self._num_cached

    @property
    def num_shared(self) -> int:
        """Blocks that more than one sequence references."""
        return self._num_shared

    def ref_count(self, block: int) -> int:
        """References to `block` by sequences."""
        return self._ref_counts[block]

    def is_cached(self, block: int) -> bool:
        """Whether the prefix index holds `block`."""
        return bool(self._is_cached[block])

    def is_settled(self, block: int) -> bool:
        """Whether no step in flight can touch a block that no sequence references."""
        return self._last_step[block] <= self.evaluated_step

    def grow(self, num_blocks: int) -> None:
        """Adds blocks, all of them free; the store they index must have grown before."""
        more = num_blocks - self.num_blocks
        assert more >= 0, f"a pool of {self.num_blocks} blocks cannot become one of {num_blocks}"
        self._free[:0] = range(num_blocks - 1, self.num_blocks - 1, -1)  # handed out last
        self._ref_counts += [0] * more
        self._is_cached += bytes(more)
        self._last_step += [0] * more
        self.num_blocks = num_blocks

    # Ownership by sequences.

    def allocate(self) -> int:
        """Hands out a free block with one reference; the caller made sure that there is one."""
        block = self._free.pop()
        self._ref_counts[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Adds a reference to a block that is used or cached."""
        count = self._ref_counts[block]
        if count == 0:
            assert self._is_cached[block], f"block {block} has no owner to share it"
            self._num_cached -= 1
        elif count == 1:
            self._num_shared += 1
        self._ref_counts[block] = count + 1

    def release(self, block: int) -> None:
        """Drops a reference; after the last one the block is cached, or on its way to be free."""
        count = self._ref_counts[block] - 1
        assert count >= 0, f"block {block} is released more often than retained"
        self._ref_counts[block] = count
        if count == 1:
            self._num_shared -= 1
        elif count == 0:
            self._last_step[block] = self.launched_step
            if self._is_cached[block]:
                self._num_cached += 1
            else:
                self._reclaim(block)

    # Ownership by the prefix index.

    def cache(self, block: int) -> None:
        """The prefix index takes hold of a block that a sequence is using."""
        assert self._ref_counts[block] > 0 and not self._is_cached[block]
        self._is_cached[block] = 1

    def uncache(self, block: int) -> None:
        """The prefix index lets go of a block."""
        assert self._is_cached[block], f"block {block} is not cached"
        self._is_cached[block] = 0
        if self._ref_counts[block] == 0:
            self._num_cached -= 1
            self._reclaim(block)

    # Steps.

    def on_step_launched(self, step: int) -> None:
        """From now on a released block may be in use by `step`."""
        assert step > self.launched_step, f"step {step} launched after step {self.launched_step}"
        self.launched_step = step

    def on_step_evaluated(self, step: int) -> None:
        """Steps up to `step` have run to their end: what waited for them is free."""
        assert self.evaluated_step < step <= self.launched_step, (
            f"step {step} evaluated; launched are {self.evaluated_step + 1}..{self.launched_step}"
        )
        # A loop over step numbers, not over the dict: steps are evaluated one by one, in order.
        for waited_for in range(self.evaluated_step + 1, step + 1):
            blocks = self._quarantine.pop(waited_for, ())
            self._num_quarantined -= len(blocks)
            self._free.extend(blocks)
        self.evaluated_step = step

    def _reclaim(self, block: int) -> None:
        if self.is_settled(block):
            self._free.append(block)
        else:
            self._quarantine.setdefault(self._last_step[block], []).append(block)
            self._num_quarantined += 1

    # Truth.

    def check_integrity(self) -> None:
        """Recounts everything from the block states; O(num_blocks).

        Raises:
            IntegrityError: With what disagrees.
        """
        quarantined = [b for blocks in self._quarantine.values() for b in blocks]
        used = [b for b in range(self.num_blocks) if self._ref_counts[b] > 0]
        cached = [
            b for b in range(self.num_blocks) if self._is_cached[b] and not self._ref_counts[b]
        ]
        _expect_partition(self.num_blocks, self._free, quarantined, used, cached)
        shared = sum(count > 1 for count in self._ref_counts)
        for name, stored, counted in (
            ("quarantined", self._num_quarantined, len(quarantined)),
            ("cached", self._num_cached, len(cached)),
            ("used", self.num_used, len(used)),
            ("shared", self._num_shared, shared),
        ):
            if stored != counted:
                raise IntegrityError(f"{stored} blocks are booked as {name}, but {counted} are")
        for step, blocks in self._quarantine.items():
            if not self.evaluated_step < step <= self.launched_step:
                raise IntegrityError(
                    f"blocks {blocks} wait for step {step}, which is not in flight"
                )
        if self._is_cached[NULL_BLOCK]:
            raise IntegrityError("block 0 is cached")


def _expect_partition(num_blocks: int, *groups: Iterable[int]) -> None:
    """Every block but 0 is in exactly one group."""
    seen = [0] * num_blocks
    for group in groups:
        for block in group:
            seen[block] += 1
    if seen[NULL_BLOCK]:
        raise IntegrityError("block 0 has been handed out")
    wrong = [block for block in range(1, num_blocks) if seen[block] != 1]
    if wrong:
        raise IntegrityError(
            f"blocks {wrong} are not in exactly one of the states free, quarantined, used, cached"
        )
