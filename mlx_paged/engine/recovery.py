"""Recovery: the state that lets an engine continue after an exception in a call."""

from __future__ import annotations

from mlx_paged.core import EncoderCacheStats, KVCounters, KVManager, Scheduler, Sequence
from mlx_paged.engine.faults import reason_of
from mlx_paged.engine.stats import sum_counters, sum_encoder_stats


class Recovery:
    """Tracks whether the engine is whole, and keeps the counts of discarded parts.

    An exception in the middle of a change leaves `is_whole` False without any handler, which could
    itself be interrupted.

    Attributes:
        is_whole: False while a call changes the engine, and after a call that raised.
        failed: The exception that the last step raised.
        num_failed_steps: Consecutive failed steps, without the last one until the engine is
            repaired.
        num_recoveries: Number of repairs.
        counters: Counters of the discarded KV stores.
        num_preemptions: Preemptions by the discarded schedulers.
        encoder_cache: Statistics of their encoder caches.
        max_used_blocks, max_shared_blocks: Peaks of those stores.
    """

    def __init__(self) -> None:
        self.is_whole = True
        self.failed: Exception | None = None
        self.num_recoveries = 0
        self.counters = KVCounters()
        self.num_preemptions = 0
        self.encoder_cache = EncoderCacheStats()
        self.max_used_blocks = self.max_shared_blocks = 0
        self.num_failed_steps = 0

    @property
    def cause(self) -> str:
        """The cause of the recovery, for the log."""
        if self.failed is None:
            return "an interrupted call"
        return f"a failed step: {reason_of(self.failed)}"

    def reason_to_end(self, sequence: Sequence) -> str | None:
        """Returns why a sequence ends instead of being recomputed, or None.

        After two consecutive failed steps, every sequence that has run is suspect.
        """
        if self.failed is None or self.num_failed_steps == 0:
            return None
        return None if sequence.first_admission is None else reason_of(self.failed)

    def complete(self, kv: KVManager, scheduler: Scheduler) -> None:
        """Marks the engine as whole again, and keeps the counts of the two discarded parts."""
        # Computed first and then assigned at once, because Ctrl-C may come in between.
        self.counters, self.num_preemptions, self.encoder_cache = (
            sum_counters(self.counters, kv.counters),
            self.num_preemptions + scheduler.num_preemptions,
            sum_encoder_stats(self.encoder_cache, scheduler.encoder_cache.stats),
        )
        self.max_used_blocks = max(self.max_used_blocks, kv.pool.max_used)
        self.max_shared_blocks = max(self.max_shared_blocks, kv.pool.max_shared)
        self.num_failed_steps += self.failed is not None
        self.failed = None
        self.num_recoveries += 1
        self.is_whole = True
