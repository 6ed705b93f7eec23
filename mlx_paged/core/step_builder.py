"""StepBuilder: the step being planned, its columns and its remaining token budget.

Decodes come first and are never delayed. Prompts share the remaining tokens; long prompts leave
half of them to short ones that could use it.
"""

from __future__ import annotations

import sys
from array import array

from mlx_paged.core.adapters import AdapterSlots
from mlx_paged.core.config import SchedulerConfig
from mlx_paged.core.encoder_cache import EncoderCache
from mlx_paged.core.kv.manager import KVManager
from mlx_paged.core.media_scheduler import MediaScheduler
from mlx_paged.core.outputs import SchedulerOutput
from mlx_paged.core.queues import SequenceQueue, WaitingQueue
from mlx_paged.core.request import Sequence
from mlx_paged.core.step import StepBatch
from mlx_paged.core.step_time import StepTimeBudget, StepTimeLimit

# By default, a prompt gets at most this many tokens of a step if only decodes share it. Larger
# steps would read it a little faster, but lengthen the gaps between the tokens of the others. With
# 32 decodes, this fills tiles of 128 rows, and two waves of attention on an H100 or H200.
MAX_CHUNK_BESIDE_DECODES = 1376


class StepBuilder:
    """Builds one step, from its first sequence to the finished batch.

    Args:
        number: The step's number.
        committed_step: The last step whose tokens are known.
        running, waiting: The scheduler's queues.
        max_parked_tokens: See `parking_budgets`.

    Attributes:
        batch: The columns so far.
        sequences: The sequences of the batch, in order.
        num_drafts: Number of drafts by index into `sequences`; only of sequences with drafts.
        num_sampled: Tokens that the step samples.
        num_decodes: Leading sequences that decode.
        prefilling: Running sequences with prompt tokens left. Some may have been preempted since.
        budget: Tokens left.
        prompt_budget: Tokens left after the decodes.
        long_budget: Tokens left for long prompts.
        has_preempted: True if a sequence lost its blocks for another one.
        parking_budgets: Tokens that may still be spent on parking: (short, long) sequences.
    """

    __slots__ = (
        "_config",
        "_kv",
        "_media",
        "_running",
        "_time_budget",
        "_waiting",
        "batch",
        "budget",
        "committed_step",
        "has_preempted",
        "long_budget",
        "num_decodes",
        "num_drafts",
        "num_sampled",
        "number",
        "parking_budgets",
        "prefilling",
        "prompt_budget",
        "sequences",
    )

    def __init__(
        self,
        number: int,
        config: SchedulerConfig,
        kv: KVManager,
        media: MediaScheduler,
        running: SequenceQueue,
        waiting: WaitingQueue,
        *,
        committed_step: int = 0,
        max_parked_tokens: int = 0,
    ) -> None:
        self.number = number
        self.committed_step = committed_step
        self._config = config
        self._kv = kv
        self._media = media
        self._running = running
        self._waiting = waiting
        self.batch = StepBatch(number)
        self.sequences: list[Sequence] = []
        self.num_drafts: dict[int, int] = {}
        self.num_sampled = self.num_decodes = 0
        self.prefilling: list[Sequence] = []
        self.budget = self.prompt_budget = config.max_num_batched_tokens
        self.long_budget = 0
        self._time_budget: StepTimeBudget | None = None
        self.has_preempted = False
        self.parking_budgets = [max_parked_tokens] * 2

    # Tokens.

    def begin_prompts(self, step_time: StepTimeLimit | None) -> None:
        """Divides the tokens that are left after the decodes among prompts."""
        if self._config.max_num_prompt_tokens is not None:
            self.budget = min(self.budget, self._config.max_num_prompt_tokens)
        has_prompts = bool(self.prefilling or self._waiting.size)
        if step_time is not None and has_prompts:
            self._time_budget = step_time.budget(self.num_decodes)
            self._limit_by_time()
        self.prompt_budget = self.budget
        if has_prompts:
            self.long_budget = self.budget - min(self._short_demand(), self.budget // 2)

    def limit_prompts(self, num_tokens: int) -> None:
        """Lowers the budget for prompts.

        An atomic item at the start of the first chunk may still exceed it; otherwise, it would
        never be computed.
        """
        if self.budget == self.prompt_budget:
            self.prompt_budget = min(self.budget, num_tokens)
        self.budget = min(self.budget, num_tokens)
        self.long_budget = min(self.long_budget, num_tokens)

    def is_long(self, num_tokens: int) -> bool:
        """True if a prompt with `num_tokens` tokens left counts as long."""
        return num_tokens > self._config.long_prefill_threshold

    def chunk_for(self, num_tokens: int, start: int) -> int:
        """Returns the tokens this step spends on a prompt with `num_tokens` left at position
        `start`."""
        if self.is_long(num_tokens):
            share = self.long_budget
            # A long prompt that is alone may use the whole step.
            has_own_threshold = self._config.long_prefill_token_threshold is not None
            if has_own_threshold or len(self._running) + self._waiting.size > 1:
                share = min(share, self._config.long_prefill_threshold)
            num_tokens = min(num_tokens, share)
        if self._has_one_prompt_beside_decodes:
            num_tokens = min(num_tokens, MAX_CHUNK_BESIDE_DECODES)
        if self._time_budget is not None:
            num_tokens = min(num_tokens, self._time_budget.num_tokens(start))
        return min(num_tokens, self.budget)

    @property
    def _has_one_prompt_beside_decodes(self) -> bool:
        """True if no other prompt waits for this one, so that large steps only delay decodes."""
        config = self._config
        return (
            config.enable_chunked_prefill
            and config.long_prefill_token_threshold is None
            and self.num_decodes > 0
            and len(self._running) + self._waiting.size == self.num_decodes + 1
        )

    def media_chunk(self, seq: Sequence, num_tokens: int) -> int:
        """See `MediaScheduler.chunk`."""
        return self._media.chunk(seq, num_tokens, self.budget, self.prompt_budget)

    def num_drafts_for(self, seq: Sequence, end: int) -> int:
        """Returns the number of drafts that the step verifies for a sequence. Allocates room for
        them.

        Reserves one token of the step for every running sequence. The last output token is never a
        draft.

        Args:
            end: Number of its tokens before the drafts.
        """
        assert seq.tables is not None
        spare = self.budget - len(self._running) - sum(self.num_drafts.values())
        limit = min(len(seq.draft_token_ids), spare, seq.max_num_tokens - len(seq.tokens) - 1)
        if limit <= 0:
            return 0
        return max(0, self._kv.allocate_up_to(seq.tables, end + limit) - end)

    def _limit_by_time(self) -> None:
        """Lowers the budget to the tokens of a new prompt that fit in the time left."""
        if self._time_budget is not None:
            self.budget = min(self.budget, self._time_budget.num_tokens(0))

    def _short_demand(self) -> int:
        """Returns the tokens that short prompts could use in this step. Stops counting at half the
        budget."""
        enough = self.budget // 2
        demand = 0
        for seq in self.prefilling:
            left = len(seq.tokens) - seq.num_scheduled_tokens
            if seq.is_running and not self.is_long(left):
                demand += left
        num_admissible = self._config.max_num_seqs - len(self._running)
        for seq in self._waiting.ready_short():
            if demand >= enough or num_admissible == 0:
                break
            demand += len(seq.tokens)
            num_admissible -= 1
        return demand

    # Columns.

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """Schedules the next tokens of a sequence; none if `num_tokens` is not positive."""
        if num_tokens <= 0:
            return
        assert seq.tables is not None
        start = seq.num_scheduled_tokens
        end = start + num_tokens
        batch, samples, num_drafts = self.batch, end >= len(seq.tokens), 0
        if samples and seq.draft_token_ids and start < len(seq.tokens):
            # A recurrent state that rejected drafts computes the accepted ones again.
            num_drafts = self.num_drafts_for(seq, end)
        end = seq.num_scheduled_tokens = end + num_drafts
        batch.input_from.append(-1 if start < len(seq.tokens) else seq.sampled_index)
        if samples:
            seq.sampled_index = self.num_sampled
            self.num_sampled += 1 + num_drafts
        seq.last_step = self.number
        slots = self._kv.move_state(seq.tables, end, keep=num_drafts > 0)
        if slots is not None:
            batch.slots.append(slots)
        if seq.request.prompt_media is not None:
            self._media.use(seq, start, end)
        batch.token_ids.extend(seq.tokens[start:end] if start < len(seq.tokens) else (0,))
        if num_drafts:
            batch.token_ids.extend(seq.draft_token_ids[:num_drafts])
            self.num_drafts[len(self.sequences)] = num_drafts
            num_tokens += num_drafts
        if samples:
            seq.draft_token_ids = ()
        batch.starts.append(start)
        batch.query_lens.append(num_tokens)
        batch.samples.append(samples)
        batch.tables.append(seq.tables.export())
        self.sequences.append(seq)
        self.budget = max(0, self.budget - num_tokens)
        if self._time_budget is not None:
            self._time_budget.spend(start, num_tokens)
            self._limit_by_time()
        if self.is_long(len(seq.tokens) - start):
            self.long_budget = max(0, self.long_budget - num_tokens)

    def finish(self, adapters: AdapterSlots, encoder_cache: EncoderCache) -> SchedulerOutput:
        """Completes the columns of a step with at least one sequence."""
        batch, num_seqs = self.batch, len(self.sequences)
        has_adapters = self._config.max_loras > 0 and adapters.num_in_use > 0
        if has_adapters:
            self._group_decodes()
        batch.seq_ids = [seq.seq_id for seq in self.sequences]
        batch.num_drafts = array("i", bytes(4 * num_seqs))
        for index, num_drafts in self.num_drafts.items():
            batch.num_drafts[index] = num_drafts
        batch.adapter_ids = array("i", bytes(4 * num_seqs))
        if has_adapters:
            self._add_adapters()
        batch.is_decode = len(batch.token_ids) == num_seqs and False not in batch.samples
        batch.block_copies = self._kv.launch_step(self.number)
        if encoder_cache.step == self.number:
            batch.media = encoder_cache.end()
        return SchedulerOutput(batch, self.sequences)

    def _group_decodes(self) -> None:
        """Sorts decodes by adapter: kernels read its matrices once for several adjacent rows.

        Decodes without one come last, so that adapters are aligned with the kernels' row groups.
        """
        count = self.num_decodes
        slots = [seq.adapter_slot or sys.maxsize for seq in self.sequences[:count]]
        order = sorted(range(count), key=slots.__getitem__)
        has_drafts = any(index < count for index in self.num_drafts)  # more than one token each
        if has_drafts or order == list(range(count)):
            return
        batch = self.batch
        for column in (batch.token_ids, batch.starts, batch.input_from):
            column[:count] = array(column.typecode, [column[i] for i in order])
        batch.tables[:count] = [batch.tables[i] for i in order]
        if batch.slots:
            batch.slots[:count] = [batch.slots[i] for i in order]
        self.sequences[:count] = [self.sequences[i] for i in order]
        for index, seq in enumerate(self.sequences[:count]):
            seq.sampled_index = index

    def _add_adapters(self) -> None:
        batch = self.batch
        for index, seq in enumerate(self.sequences):
            if seq.adapter_slot:
                batch.adapter_ids[index] = seq.adapter_slot
                batch.adapters[seq.adapter_slot] = seq.request.adapter
