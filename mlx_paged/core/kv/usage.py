"""KVCounters and KVUsage: statistics of a KV store since its start, and at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_paged.core.kv.pool import BlockPool


@dataclass
class KVCounters:
    """Counters since the store was created; they only grow.

    Attributes:
        num_admissions: Admitted sequences; a resumed one counts again.
        num_queried_tokens: Tokens of admitted sequences.
        num_cached_tokens: Tokens among these that came from the cache.
        num_copied_tokens: Tokens among the cached ones that came by copy-on-write.
        num_block_copies: Blocks copied on write.
        num_evictions: Blocks of the first group evicted to make room.
        num_restored_tokens: Tokens among the cached ones that came back from a tier.
        num_refused_tokens: Tokens that a tier had, but that were computed because that is faster.
        num_deduplicated_blocks: Computed blocks that equaled an indexed one; one was dropped.
        num_resets: Calls of `reset_prefix_cache`.
    """

    num_admissions: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_copied_tokens: int = 0
    num_block_copies: int = 0
    num_evictions: int = 0
    num_restored_tokens: int = 0
    num_refused_tokens: int = 0
    num_deduplicated_blocks: int = 0
    num_resets: int = 0


@dataclass(frozen=True)
class KVUsage:
    """Block counts by state; the first four below add up to `num_usable_blocks`.

    Attributes:
        num_used_blocks: Referenced by sequences.
        num_cached_blocks: Held only by the prefix tree, so they can be evicted.
        num_free_blocks: Empty.
        num_quarantined_blocks: Freed, but a step in flight may still read them.
        num_shared_blocks: Used blocks referenced by more than one sequence.
        num_indexed_blocks: In the prefix tree, used or not.
    """

    num_usable_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_quarantined_blocks: int
    num_shared_blocks: int
    num_indexed_blocks: int

    @classmethod
    def of(cls, pool: BlockPool) -> KVUsage:
        """Reads the counts of a pool."""
        return cls(
            num_usable_blocks=pool.num_usable,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_free_blocks=pool.num_free,
            num_quarantined_blocks=pool.num_quarantined,
            num_shared_blocks=pool.num_shared,
            num_indexed_blocks=pool.num_indexed,
        )
