"""Counters of the KV store, for metrics and for the curious."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_paged.core.block_pool import BlockPool


@dataclass
class KVCounters:
    """What happened since the store was made; every number only grows.

    Attributes:
        num_admissions: Sequences that were given a block table (a resumed one counts again).
        num_queried_tokens: Tokens of those sequences: what could have come from the cache.
        num_cached_tokens: Tokens that did come from it: not computed again.
        num_copied_tokens: Part of `num_cached_tokens` that came by copy-on-write.
        num_block_copies: Blocks copied on write.
        num_evictions: Blocks dropped from the index to make room.
        num_deduplicated_blocks: Blocks computed although an equal one was indexed meanwhile; the
            equal one is used.
        num_resets: Calls of `reset_prefix_cache`.
    """

    num_admissions: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_copied_tokens: int = 0
    num_block_copies: int = 0
    num_evictions: int = 0
    num_deduplicated_blocks: int = 0
    num_resets: int = 0

    def count_admission(self, num_tokens: int, num_cached: int, num_copied: int) -> None:
        """A sequence got its table; `num_copied` of its `num_cached` cached tokens by copy."""
        self.num_admissions += 1
        self.num_queried_tokens += num_tokens
        self.num_cached_tokens += num_cached
        self.num_copied_tokens += num_copied
        self.num_block_copies += num_copied > 0


@dataclass(frozen=True)
class KVUsage:
    """Where the blocks are now; the first four add up to `num_usable_blocks`.

    Attributes:
        num_used_blocks: Referenced by sequences.
        num_cached_blocks: Held by the prefix index alone: free for whoever needs them.
        num_free_blocks: Empty.
        num_quarantined_blocks: Freed, but a step in flight may still read them.
        num_shared_blocks: Part of the used ones: referenced by more than one sequence.
        num_indexed_blocks: In the prefix index, used or not.
    """

    num_usable_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_quarantined_blocks: int
    num_shared_blocks: int
    num_indexed_blocks: int

    @classmethod
    def of(cls, pool: BlockPool, num_indexed_blocks: int) -> KVUsage:
        """Reads the counts of a pool."""
        return cls(
            num_usable_blocks=pool.num_usable,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_free_blocks=pool.num_free,
            num_quarantined_blocks=pool.num_quarantined,
            num_shared_blocks=pool.num_shared,
            num_indexed_blocks=num_indexed_blocks,
        )
