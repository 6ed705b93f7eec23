"""Admission: chooses the waiting sequences that run next, and schedules their first chunks.

Sequences are admitted in service order, while there is room for *all* their known tokens. A
sequence is parked while a running one computes a prefix that it needs, and held while its adapter
has no slot. Others may pass it meanwhile, but it keeps its turn.
"""

from __future__ import annotations

import time

from mlx_paged.core.adapters import AdapterSlots
from mlx_paged.core.background import BackgroundShare
from mlx_paged.core.config import SchedulerConfig
from mlx_paged.core.kv.manager import KVManager
from mlx_paged.core.kv.misses import PromptHistory
from mlx_paged.core.media import outside
from mlx_paged.core.media_scheduler import MediaScheduler
from mlx_paged.core.prefix_sharing import PrefixSharing
from mlx_paged.core.queues import SequenceQueue, WaitingQueue
from mlx_paged.core.request import Sequence, SequenceStatus
from mlx_paged.core.step_builder import StepBuilder

#: Budget of a step for parking short sequences, and again for long ones. Each parked sequence costs
#: its tokens plus `PARKING_COST`. The budget bounds the time that a burst of requests with a common
#: prompt adds to one step.
MAX_PARKED_TOKENS = 1 << 17
PARKING_COST = 1 << 12


class Admission:
    """Moves sequences from the waiting queue to the running one, and into a step.

    Args:
        running, waiting: The scheduler's queues.
        sharing: Finds prefixes that running sequences are computing.
        adapters: The device's slots for adapters.
        background: Limits background requests while others are unfinished.
        history: Explains cache misses; None: they stay unexplained.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        running: SequenceQueue,
        waiting: WaitingQueue,
        *,
        sharing: PrefixSharing,
        media: MediaScheduler,
        adapters: AdapterSlots,
        background: BackgroundShare,
        history: PromptHistory | None,
    ) -> None:
        self._config = config
        self._kv = kv
        self._running = running
        self._waiting = waiting
        self._sharing = sharing
        self._media = media
        self._adapters = adapters
        self._background = background
        self._history = history

    @property
    def watermark(self) -> int:
        """Blocks that admission leaves free for running sequences."""
        return int(self._config.watermark * self._kv.pool.num_usable)

    def will_fit(self, seq: Sequence) -> bool:
        """True if a waiting sequence has room, or will have when the step in flight is done."""
        query = self._sharing.query(seq)
        return self._kv.will_have_room(len(seq.tokens), query, headroom=self.watermark)

    def fill(self, step: StepBuilder, *, background: bool, max_running: int | None) -> bool:
        """Admits sequences to a step, until one finds no room: nothing overtakes it.

        Args:
            background: True to admit background requests, too.
            max_running: Maximum running sequences, if lower than the configured one; None: no such
                limit.

        Returns:
            False if a sequence found no memory.
        """
        running, config = self._running, self._config
        limit = min(len(running) + self._num_admissible_prefills(step), config.max_num_seqs)
        if max_running is not None:
            limit = min(limit, max_running)
        while step.budget > 0 and len(running) < limit:
            # Once long prompts have had their share, short ones behind them use the rest.
            seq = self.first(step, with_long=step.long_budget > 0)
            if seq is None or seq.request.background > background:
                return True
            if seq.request.background and self._background.is_limited:
                num_others = self._background.num_others_running
                if len(running) - num_others >= self._background.max_seqs:
                    return True
            if not config.enable_chunked_prefill and not self._fits_whole(seq, step):
                return True  # waits for a step with room for the whole prompt
            if not self._admit(seq, step):
                return False  # waits for memory; nothing overtakes it
        return True

    def first(self, step: StepBuilder, *, with_long: bool) -> Sequence | None:
        """Returns the first waiting sequence that could be admitted. Parks or holds those before
        it."""
        budgets = step.parking_budgets
        while budgets[False] > 0:
            seq = self._waiting.first(with_long=with_long and budgets[True] > 0)
            if seq is None or seq.last_step > step.committed_step:
                break  # preempted while in flight: its newest token is not known yet
            if not self._may_have_slot(seq):
                self._waiting.hold(seq)
                continue
            awaited = self._sharing.awaited(seq)
            if awaited is None:
                return seq
            self._waiting.park(seq, *awaited)
            budgets[step.is_long(len(seq.tokens))] -= PARKING_COST + len(seq.tokens)
        return None

    def _num_admissible_prefills(self, step: StepBuilder) -> int:
        """Returns the number of sequences that `max_num_prefills` still admits."""
        limit = self._config.max_num_prefills
        if limit is None:
            return self._config.max_num_seqs
        return limit - sum(seq.is_running for seq in step.prefilling)

    def _fits_whole(self, seq: Sequence, step: StepBuilder) -> bool:
        """True if the step has room for the whole prompt and may encode all its items."""
        if len(seq.tokens) > step.budget:
            return False
        media = seq.request.prompt_media
        return media is None or self._media.fits_whole(media)

    def _may_have_slot(self, seq: Sequence) -> bool:
        """True if a sequence has no adapter, or may take a slot for it.

        A sequence must not take a slot while an earlier one waits for one. Otherwise, a stream of
        requests for the adapters on the device could keep another adapter out forever.
        """
        if seq.request.adapter is None:
            return True
        held = self._waiting.first_held
        if held is not None and held.order < seq.order:
            return False
        return self._adapters.can_take(seq.request.adapter)

    def _admit(self, seq: Sequence, step: StepBuilder) -> bool:
        request = seq.request
        source = self._sharing.fork_source(request)
        if self._running and source is None and self._sharing.is_still_blocked(seq):
            return False
        tables = self._kv.admit(
            seq.tree_tokens,
            query=self._sharing.query(seq),
            headroom=self.watermark if self._running else 0,
            read_cache=request.read_prefix_cache,
            fork_of=request.parent if source is None else source.tables,
            num_fork_tokens=(
                request.num_parent_tokens if source is None else request.num_prompt_tokens - 1
            ),
            owner=seq,
        )
        if tables is None:
            seq.blocked_at = self._kv.num_freed
            return False
        self._waiting.remove(seq)
        self._running.add(seq)
        seq.status = SequenceStatus.RUNNING
        seq.tables = tables
        if request.adapter is not None:
            seq.adapter_slot = self._adapters.take(request.adapter)
        seq.query = None
        seq.blocked_at = -1
        seq.num_scheduled_tokens = tables.num_cached_tokens
        is_first = seq.num_cached_tokens is None
        if is_first:
            self._note_first(seq, tables.num_cached_tokens, tables.num_refused_tokens)
        if tables.restoration is not None:
            seq.num_scheduled_tokens = tables.num_computed_tokens
            return True
        self._begin(seq, step)
        return True

    def _note_first(self, seq: Sequence, num_cached: int, num_refused: int) -> None:
        """Records what a sequence's first admission found in the cache."""
        request = seq.request
        seq.num_cached_tokens = num_cached
        seq.first_admission = time.monotonic()
        if request.prompt_media is not None:
            num_hits = request.prompt_media.num_before(num_cached)
            self._media.encoder_cache.count_prefix_hits(num_hits)
        if self._history is not None and seq.index == 0 and request.read_prefix_cache:
            request.cache_miss = self._history.note(
                seq.tree_tokens,
                request.cache_salt,
                request.adapter,
                num_cached=num_cached,
                num_refused=num_refused,
                transfer_failure=request.transfer_failure,
                block_size=self._kv.block_size,
            )

    def _begin(self, seq: Sequence, step: StepBuilder) -> None:
        """Schedules the first chunk after the cached tokens."""
        request, tables = seq.request, seq.tables
        assert tables is not None
        num_cached = seq.num_scheduled_tokens
        num_tokens = step.chunk_for(len(seq.tokens) - num_cached, num_cached)
        if request.boundaries:
            boundary = request.next_boundary(num_cached)
            if num_cached in request.boundaries:
                num_tokens = 0
            elif boundary is not None:
                num_tokens = min(num_tokens, boundary - num_cached)
        media = request.prompt_media
        if media is None:
            end = self._kv.allocate_up_to(tables, num_cached + num_tokens)
            step.add(seq, end - num_cached)
            return
        end = num_cached + step.media_chunk(seq, num_tokens)
        end = outside(media.atomic, self._kv.allocate_up_to(tables, end))
        if end <= num_cached < request.num_prompt_tokens:
            self._kv.defer_copy(tables)
        step.add(seq, end - num_cached)
