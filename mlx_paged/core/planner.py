"""Planner: fills one step with rows, under the token budget and the room in the KV pool."""

from __future__ import annotations

import time
from functools import partial

from mlx_paged.core import KVManager
from mlx_paged.core.batch import IN_FLIGHT_TOKEN, Batch, ScheduledSequence
from mlx_paged.core.config import SchedulerConfig, SchedulingPolicy
from mlx_paged.core.in_flight import LaunchedStep
from mlx_paged.core.queue import SequenceQueue
from mlx_paged.core.request import Sequence, SequenceStatus
from mlx_paged.core.side_groups import NO_ROWS

_ONE_IN_FLIGHT = (IN_FLIGHT_TOKEN,)
_row = partial(tuple.__new__, ScheduledSequence)  # a third of a call's time


class Planner:
    """Builds the steps of a scheduler; it owns the queues' movement between waiting and running.

    A step is built in this order:

    1. Running decodes, one token each, in service order. Where the pool is exhausted, the last in
       service order is preempted, be it the very sequence that asks.
    2. Running prompts, in chunks. Their blocks were reserved when they were admitted.
    3. Waiting sequences, in service order, while there is room for *all* their known tokens.
    """

    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        self.config = config
        self.kv = kv
        self.waiting = SequenceQueue()
        self.running = SequenceQueue()
        self.sequences: dict[int, Sequence] = {}  # unfinished ones by id
        self.committed_step = 0
        self.num_preemptions = 0
        self._watermark = int(config.watermark * kv.pool.num_usable)
        # Of the step being built.
        self._step = 0
        self._rows: list[ScheduledSequence] = []
        self._owners: list[Sequence] = []
        self._prefilling: list[Sequence] = []  # who ran before it, with more than one token to go
        self._budget = 0
        self._long_budget = 0
        self._preempted = False

    def plan(self, step: int) -> LaunchedStep | None:
        """Builds step number `step`, marks its tokens as scheduled; None when no row can run."""
        self._step = step
        self._rows, self._owners, self._prefilling = [], [], []
        self._budget = self.config.max_num_batched_tokens
        self._preempted = False
        if self.config.policy is SchedulingPolicy.PRIORITY:
            self._make_way()
        self._add_decodes()
        self._long_budget = self._budget - min(self._short_demand(), self._budget // 2)
        self._add_running_prefills()
        if not self._preempted:  # what was taken from one sequence is not for newcomers
            self._admit_waiting()
        if not self._rows:
            return None
        copies = self.kv.launch_step(step)
        batch = Batch(step, tuple(self._rows), copies, self.kv.window_copies)
        return LaunchedStep(batch, self._owners)

    def preempt(self, seq: Sequence) -> None:
        """Takes a running sequence's blocks and lets it wait; what it committed stays indexed."""
        self.running.remove(seq)
        self.kv.free(seq.seq_id)
        seq.status = SequenceStatus.WAITING
        seq.num_computed_tokens = seq.num_scheduled_tokens = 0
        seq.num_preemptions += 1
        self.waiting.add(seq)
        self.num_preemptions += 1

    # Decodes.

    def _add_decodes(self) -> None:
        # This loop and the one of `Scheduler.commit` see every running sequence in every step; all
        # else is for those with which something happens. Hence no properties and no calls here.
        step, block_size, export = self._step, self.kv.block_size, self.kv.block_table
        rows, owners, running = self._rows, self._owners, SequenceStatus.RUNNING
        groups, has_groups = NO_ROWS, bool(self.kv.groups)
        has_states = self.kv.groups.states is not None
        for seq in self.running:
            start = seq.num_scheduled_tokens
            num_left = len(seq.tokens) - start
            if num_left > 1:
                self._prefilling.append(seq)
                continue
            # What is scheduled or in flight now may be all that it will ever have.
            if start + 1 >= seq.max_num_tokens or seq.status is not running:
                continue  # (not running: preempted for one before it)
            # The blocks hold all that is scheduled: only where they are full is another one needed.
            # (A state takes another slot in every step.)
            if (start % block_size == 0 or has_states) and not self._secure(seq):
                continue
            seq.num_scheduled_tokens = start + 1
            seq.last_step = step
            seq_id, request_id = seq.seq_id, seq.request.request_id
            token_ids = (seq.tokens[start],) if num_left else _ONE_IN_FLIGHT
            table, dirty_from = export(seq_id)
            if has_groups:
                groups = self.kv.group_rows(seq_id, start + 1)
            rows.append(
                _row((seq_id, request_id, token_ids, start, table, dirty_from, True, groups))
            )
            owners.append(seq)
        self._budget -= len(rows)

    def _secure(self, seq: Sequence) -> bool:
        """Finds room for one more token, if need be by preempting the last in service order."""
        num_tokens = seq.num_scheduled_tokens + 1
        while not self.kv.grow(seq.seq_id, num_tokens):
            if self.kv.can_grow_later(seq.seq_id, num_tokens, seq.num_scheduled_tokens):
                return False  # the step in flight holds enough: sit this one out, preempt nobody
            victim = self.running.last
            self.preempt(victim)
            self._preempted = True
            if victim is seq:
                return False
        return True

    # Prompts.

    def _add_running_prefills(self) -> None:
        for seq in self._prefilling:
            if seq.is_running:  # (not preempted for one before it)
                num_tokens = self._chunk_for(len(seq.tokens) - seq.num_scheduled_tokens)
                self._add_row(seq, self._secure_chunk(seq, num_tokens))

    def _secure_chunk(self, seq: Sequence, num_tokens: int) -> int:
        """Tokens of a chunk that there is room for; all of them where attention is full.

        Windows and states are not reserved at admission: most of a long prompt's would never be
        needed at the same time. Where there is no room at all, the last in service order is
        preempted, unless it has a row in this step already; then this sequence sits it out, and
        newcomers do too.
        """
        start = seq.num_scheduled_tokens
        if num_tokens == 0 or not self.kv.groups:
            return num_tokens
        while (end := self.kv.reach(seq.seq_id, start + num_tokens)) <= start:
            self._preempted = True
            if self.kv.can_grow_later(seq.seq_id, start + 1, start):
                return 0
            victim = self.running.last
            if victim.last_step == self._step:
                return 0
            self.preempt(victim)
            if victim is seq:
                return 0
        return end - start

    def _is_long(self, num_tokens: int) -> bool:
        return num_tokens > self.config.long_prefill_threshold

    def _chunk_for(self, num_tokens: int) -> int:
        """Tokens this step spends on a prompt with `num_tokens` left."""
        if self._is_long(num_tokens):
            share = min(self._long_budget, self.config.long_prefill_threshold)
            return min(share, self._budget)
        return min(num_tokens, self._budget)

    def _short_demand(self) -> int:
        """Tokens that short prompts could use in this step, counted up to half of the budget."""
        enough = self._budget // 2
        demand = 0
        for seq in self._prefilling:
            left = len(seq.tokens) - seq.num_scheduled_tokens
            if seq.is_running and not self._is_long(left):
                demand += left
        num_free_places = self.config.max_num_seqs - len(self.running)
        for seq in self.waiting:
            if demand >= enough or num_free_places == 0:
                break
            if not self._is_long(len(seq.tokens)):
                demand += len(seq.tokens)
                num_free_places -= 1
        return demand

    # Admission.

    def _admit_waiting(self) -> None:
        for seq in self.waiting:
            if self._budget == 0 or len(self.running) >= self.config.max_num_seqs:
                return
            if seq.last_step > self.committed_step:
                return  # preempted while in flight: its newest token is not known yet
            if self._must_wait(seq):
                continue
            if self._is_long(len(seq.tokens)) and self._long_budget == 0:
                continue
            if len(seq.tokens) > self._budget and not self.config.enable_chunked_prefill:
                return  # it is not cut, so it waits for a step with room, and nobody overtakes it
            if not self._admit(seq):
                return  # nobody overtakes who waits for memory

    def _admit(self, seq: Sequence) -> bool:
        request = seq.request
        source = self._fork_source(seq)
        num_cached = self.kv.admit(
            seq.seq_id,
            seq.tokens,
            salt=request.cache_salt,
            headroom=self._watermark if self.running else 0,
            read_cache=request.read_prefix_cache,
            fork_of=None if source is None else source.seq_id,
            num_fork_tokens=request.num_prompt_tokens - 1,
        )
        if num_cached is None:
            return False
        self.waiting.remove(seq)
        self.running.add(seq)
        seq.status = SequenceStatus.RUNNING
        seq.waits_for = None
        seq.num_computed_tokens = seq.num_scheduled_tokens = num_cached
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = num_cached
            seq.first_admission = time.monotonic()
        num_tokens = self._chunk_for(len(seq.tokens) - num_cached)
        self._add_row(seq, self.kv.reach(seq.seq_id, num_cached + num_tokens) - num_cached)
        return True

    def _fork_source(self, seq: Sequence) -> Sequence | None:
        """A running sibling whose committed blocks hold the whole prompt."""
        request = seq.request
        if request.n == 1:
            return None
        for sibling in request.sequences:
            # (One admitted in this very step, whose copy is still to be made, has a whole prompt
            # only from the index: this one finds as much there, and the manager prefers that.)
            if sibling.is_running and sibling.num_computed_tokens >= request.num_prompt_tokens:
                return sibling
        return None

    def _must_wait(self, seq: Sequence) -> bool:
        """Whether a running sequence is computing what this one needs next."""
        if seq.waits_for is not None:
            awaited, num_computed = seq.waits_for
            if awaited.is_running and awaited.num_computed_tokens == num_computed:
                return True
            seq.waits_for = None
        provider = self._provider_for(seq)
        # One of a lower class may be starved for longer than the wait is worth.
        if provider is None or provider.order[0] > seq.order[0]:
            return False
        seq.waits_for = (provider, provider.num_computed_tokens)
        return True

    def _provider_for(self, seq: Sequence) -> Sequence | None:
        request = seq.request
        for sibling in request.sequences:
            # One sibling computes the prompt; the others fork it.
            if sibling.is_running and sibling.num_computed_tokens < request.num_prompt_tokens:
                return sibling
        if not (self.config.wait_for_shared_blocks and request.read_prefix_cache):
            return None
        seq_id = self.kv.computing_next_block(seq.tokens, request.cache_salt)
        return None if seq_id is None else self.sequences[seq_id]

    # Priority.

    def _make_way(self) -> None:
        """Preempts running sequences of a lower class for the first in the queue."""
        if not self.waiting:
            return
        head = self.waiting.first
        if head.last_step > self.committed_step or self._must_wait(head):
            return
        while self.running and self.running.last.request.priority > head.request.priority:
            if len(self.running) < self.config.max_num_seqs and self.kv.will_have_room(
                head.tokens, salt=head.request.cache_salt, headroom=self._watermark
            ):
                return
            self.preempt(self.running.last)

    # Rows.

    def _add_row(self, seq: Sequence, num_tokens: int) -> None:
        if num_tokens <= 0:
            return
        start = seq.num_scheduled_tokens
        token_ids = tuple(seq.tokens[start : start + num_tokens]) or (IN_FLIGHT_TOKEN,)
        seq.num_scheduled_tokens = start + num_tokens
        seq.last_step = self._step
        table, dirty_from = self.kv.block_table(seq.seq_id)
        samples = seq.num_scheduled_tokens >= len(seq.tokens)
        self._rows.append(
            ScheduledSequence(
                seq.seq_id,
                seq.request.request_id,
                token_ids,
                start,
                table,
                dirty_from,
                samples,
                self.kv.group_rows(seq.seq_id, seq.num_scheduled_tokens),
            )
        )
        self._owners.append(seq)
        self._budget -= num_tokens
        if self._is_long(len(seq.tokens) - start):
            self._long_budget = max(0, self._long_budget - num_tokens)
