"""EngineStats: the engine's statistics at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from mlx_paged.core import EncoderCacheStats, KVCounters, KVUsage, MissReason
from mlx_paged.engine.memory import MemoryUsage
from mlx_paged.engine.offload.stats import OffloadStats
from mlx_paged.engine.pressure import PressureStats
from mlx_paged.model.compilation import Compilation


@dataclass(frozen=True)
class SpecDecodingStats:
    """Drafts since the engine was made.

    Attributes:
        num_drafts: Times that drafts of a sequence were verified.
        num_draft_tokens: Draft tokens.
        num_accepted_tokens: Accepted draft tokens.
        num_accepted_tokens_per_pos: Accepted draft tokens by position in the draft.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()

    @classmethod
    def zero(cls, max_drafts: int) -> SpecDecodingStats:
        """Returns the statistics of no drafts."""
        return cls(num_accepted_tokens_per_pos=(0,) * max_drafts)

    def plus(
        self, num_drafts: int, num_draft_tokens: int, accepted_per_pos: Sequence[int]
    ) -> SpecDecodingStats:
        """Adds the drafts of one step.

        Args:
            accepted_per_pos: Number of sequences that accepted their first draft, their second...
        """
        per_pos = list(self.num_accepted_tokens_per_pos)
        for index, count in enumerate(accepted_per_pos):
            per_pos[index] += count
        return SpecDecodingStats(
            self.num_drafts + num_drafts,
            self.num_draft_tokens + num_draft_tokens,
            self.num_accepted_tokens + sum(accepted_per_pos),
            tuple(per_pos),
        )


@dataclass(frozen=True)
class LoraStats:
    """The adapters of unfinished requests, by name.

    Attributes:
        max_loras: Maximum different adapters of a step.
        running: Adapters of sequences that run.
        waiting: Adapters of sequences that wait.
    """

    max_loras: int
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineStats:
    """The engine's statistics at one moment.

    Attributes:
        usage: Where the blocks are now.
        group_usage: The same for the blocks of each window group, then for the state slots.
        counters: Events of the KV store since the engine was made.
        num_running: Sequences that run.
        num_waiting: Sequences that wait.
        num_preemptions: Times a sequence lost its blocks to others.
        num_steps: Steps launched.
        max_used_blocks: Most blocks that sequences held at once.
        max_shared_blocks: Most blocks that more than one sequence held at once.
        memory: MLX's memory.
        num_faults: Steps that failed and were run again in parts.
        pool_copies: Whole-pool copies in this process; anything but 0 is a fault.
        num_recoveries: Times the engine was repaired after a call raised.
        encoder_cache: Features of images, video and audio.
        compilation: The compilation of the model's steps.
        pressure: The system's memory pressure, and what was given back.
        spec_decoding: Drafts; None without speculation.
        offloading: Blocks outside of the device; None if evicted blocks are dropped.
        lora: Adapters of requests; None if the engine takes none.
        cache_misses: Prompts that were not cached as far as they could have been, by reason.
    """

    usage: KVUsage
    group_usage: tuple[KVUsage, ...]
    counters: KVCounters
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_steps: int
    max_used_blocks: int
    max_shared_blocks: int
    memory: MemoryUsage
    num_faults: int
    pool_copies: int
    num_recoveries: int = 0
    encoder_cache: EncoderCacheStats = field(default_factory=EncoderCacheStats)
    compilation: Compilation = field(default_factory=Compilation)
    pressure: PressureStats = field(default_factory=PressureStats)
    spec_decoding: SpecDecodingStats | None = None
    offloading: OffloadStats | None = None
    lora: LoraStats | None = None
    cache_misses: Mapping[MissReason, int] = field(default_factory=dict)


def sum_counters(one: KVCounters, other: KVCounters) -> KVCounters:
    """Adds the counters of two KV stores."""
    return KVCounters(
        **{f.name: getattr(one, f.name) + getattr(other, f.name) for f in fields(KVCounters)}
    )


def sum_encoder_stats(past: EncoderCacheStats, now: EncoderCacheStats) -> EncoderCacheStats:
    """Adds the counters of two encoder caches, and takes the current values of the later one."""
    counted = {
        f.name: getattr(past, f.name) + getattr(now, f.name) for f in fields(EncoderCacheStats)
    }
    return replace(
        EncoderCacheStats(**counted),
        num_items=now.num_items,
        num_bytes=now.num_bytes,
        max_bytes=max(past.max_bytes, now.max_bytes),
    )
