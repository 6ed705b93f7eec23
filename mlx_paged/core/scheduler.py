"""Scheduler: plans each step and commits the tokens that it sampled.

A preempted sequence loses its blocks and waits again. Preemption happens in three cases: a decode
finds no free block (`_secure`), a prompt's chunk finds none (`_secure_chunk`), or a request of a
higher class finds no room (`_preempt_for_waiting`).
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from mlx_paged.core.adapters import AdapterSlots
from mlx_paged.core.config import SchedulerConfig, SchedulingPolicy
from mlx_paged.core.kv.manager import KVManager
from mlx_paged.core.kv.misses import PromptHistory
from mlx_paged.core.media import MediaIdsExhaustedError, outside
from mlx_paged.core.media_scheduler import MediaScheduler
from mlx_paged.core.outputs import SchedulerOutput
from mlx_paged.core.prefix_sharing import PrefixSharing
from mlx_paged.core.queues import Deadlines, SequenceQueue, WaitingQueue
from mlx_paged.core.request import FinishReason, Request, Sequence, SequenceStatus
from mlx_paged.core.step import StepBatch
from mlx_paged.core.step_time import StepTimeBudget, StepTimeLimit
from mlx_paged.errors import (
    DuplicateRequestError,
    EngineOverloadedError,
    IntegrityError,
    InvalidParameterError,
    RequestTooLargeError,
)

#: Maximum steps launched but not committed: one whose tokens are being read, and one running.
MAX_STEPS_IN_FLIGHT = 2

#: Budget of a step for parking short sequences; long ones have the same budget again. Each parked
#: sequence costs its tokens plus `PARKING_COST`. The rest waits for the next step, which bounds the
#: cost of a burst of requests with a common prompt.
MAX_PARKED_TOKENS = 1 << 17
PARKING_COST = 1 << 12

# Background requests get 1/8 of places and tokens while other requests are unfinished.
_BACKGROUND_PART = 8


class Scheduler:
    """Continuous batching over a paged KV cache.

    Without overlap, a step is committed before the next one is scheduled::

        while (output := scheduler.schedule()) is not None:
            scheduler.update_from_output(output, run(output.batch).token_ids)
            publish(output.sequences)

    With one step of overlap, step N+1 is scheduled and launched before step N is committed::

        running = None
        while scheduler.has_unfinished or running:
            output = scheduler.schedule()  # may take the tokens that step N is still sampling
            if output:
                launch(output.batch)
            if running:
                scheduler.update_from_output(running, read().token_ids)
                publish(running.sequences)
            running = output

    `schedule` may return None while a step is in flight, because everything waits for it, while all
    sequences wait for content that is being restored (`KVManager.restorations`), and when cached
    tokens take a request to one of its stops. Otherwise it returns a step as long as
    `has_unfinished`. Tokens of sequences that have finished since are ignored.

    Args:
        step_time: Limits the prompt tokens of a step by their expected time; None: no such limit.
            Only with chunked prefill.
        history: Tells why prompts were not cached; None: nothing does.

    Attributes:
        waiting, running: The unfinished sequences, in service order.
        max_parked_tokens: `MAX_PARKED_TOKENS`; tests lower it.
        num_preemptions: Number of preemptions so far.
        adapters: The slots of the device for adapters.
        encoder_cache: Bookkeeping for media features on the device.
        holds_admission: While True, waiting sequences are admitted only if nothing runs.
        lacks_room: True if the last `schedule` preempted a sequence or could not admit one because
            the pools were too small.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        *,
        clock: Callable[[], float] = time.monotonic,
        step_time: StepTimeLimit | None = None,
        history: PromptHistory | None = None,
    ) -> None:
        assert step_time is None or config.enable_chunked_prefill
        self.config = config
        self.kv = kv
        self._long_prefill_threshold = config.long_prefill_threshold
        self._has_own_threshold = config.long_prefill_token_threshold is not None
        self.waiting = WaitingQueue(self._is_long)
        self.running = SequenceQueue()
        self.num_preemptions = 0
        self.holds_admission = False
        self.lacks_room = False
        self.max_parked_tokens = MAX_PARKED_TOKENS
        self._requests: dict[str, Request] = {}  # unfinished ones by id
        self.adapters = AdapterSlots(config.max_loras)
        self._sharing = PrefixSharing(kv, self._requests)
        self._media = MediaScheduler(config, kv, self._begin_media)
        self.encoder_cache = self._media.encoder_cache
        self._history = history if kv.enable_prefix_caching else None
        self._clock = clock
        self._step_time = step_time
        self._num_background = 0  # among them
        self._background_places = max(1, config.max_num_seqs // _BACKGROUND_PART)
        self._background_tokens = max(1, config.max_num_batched_tokens // _BACKGROUND_PART)
        self._deadlines = Deadlines()
        self._expired: list[Sequence] = []  # since the last `take_expired`
        self._num_arrived = 0
        self._next_seq_id = 0
        # Steps.
        self._step = 0
        self._committed_step = 0
        self._in_flight: deque[SchedulerOutput] = deque()
        # State of the step being built.
        self._batch = StepBatch()
        self._scheduled: list[Sequence] = []  # its sequences, in order
        self._num_drafts: dict[int, int] = {}  # by index; only sequences with drafts
        self._num_sampled = 0
        self._prefilling: list[Sequence] = []  # running, with prompt tokens left
        self._budget = 0
        self._prompt_budget = 0  # left by the decodes
        self._time_budget: StepTimeBudget | None = None
        self._long_budget = 0
        self._preempted = False
        self._parking_budgets = [0, 0]  # short, long

    # Requests.

    def add(self, request: Request) -> list[Sequence]:
        """Queues a request; returns its `n` sequences.

        Raises:
            RequestTooLargeError: It does not fit even when it runs alone.
            DuplicateRequestError: An unfinished request has the same id.
            EngineOverloadedError: The waiting queue is full.
            InvalidParameterError: An atomic media item does not fit in one step, or the request has
                an adapter and no slot may hold any.
        """
        if request.request_id in self._requests or request.sequences:
            raise DuplicateRequestError(request.request_id)
        max_output_tokens = self._max_output_tokens(request)
        max_num_waiting = self.config.max_num_waiting
        num_waiting = self.waiting.num_background
        if not request.background:
            num_waiting = self.num_waiting - num_waiting
        if max_num_waiting is not None and num_waiting + request.n > max_num_waiting:
            raise EngineOverloadedError(num_waiting, max_num_waiting)
        if request.adapter is not None and not self.config.max_loras:
            raise InvalidParameterError("adapter", "None where max_loras is 0", request.adapter)
        if request.prompt_media is not None:
            self._media.check_atomic(request.prompt_media)
            self._name_media(request)

        self._num_arrived += 1
        request.arrival = self._num_arrived
        request.max_output_tokens = max_output_tokens
        if request.timeout is not None:
            request.deadline = self._clock() + request.timeout
            self._deadlines.add(request)
        by_priority = self.config.policy is SchedulingPolicy.PRIORITY
        rank = (request.background, request.priority if by_priority else 0)
        query = None
        for index in range(request.n):
            self._next_seq_id += 1
            seq = Sequence(self._next_seq_id, request, index, (rank, request.arrival, index))
            # Built here, where O(prompt) work already happens, to keep it out of the step.
            query = self._sharing.query(seq) if query is None else query.copy()
            seq.query = query
            request.sequences.append(seq)
            self.waiting.add(seq)
        request.num_unfinished = request.n
        self._requests[request.request_id] = request
        self._num_background += request.background
        return request.sequences

    def _max_output_tokens(self, request: Request) -> int:
        limit = self.max_total_tokens
        wanted = request.stop.max_tokens or max(1, request.stop.min_tokens)
        if request.num_prompt_tokens + wanted > limit:
            by_model = limit == self.config.max_model_len
            raise RequestTooLargeError(
                request.request_id,
                num_prompt_tokens=request.num_prompt_tokens,
                max_tokens=wanted,
                limit=limit,
                limited_by="max_model_len" if by_model else "kv_cache",
            )
        return request.stop.max_tokens or limit - request.num_prompt_tokens

    def _name_media(self, request: Request) -> None:
        """Assigns prefix tree ids to the media of a request."""
        try:
            self._media.name_items(request)
        except MediaIdsExhaustedError:
            # Reached after two billion positions of distinct content. Start over with an empty
            # prefix cache; running sequences keep their blocks but no longer share them.
            self.reset_prefix_cache()
            self._media.rename_items(self._requests.values())
            for seq in self.waiting:
                seq.query = None
            try:
                self._media.name_items(request)
            except MediaIdsExhaustedError:
                raise EngineOverloadedError(self.num_waiting, self.num_waiting) from None

    def abort(self, request_id: str) -> bool:
        """Ends a request now; returns False if no unfinished request has this id."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason, *, index: int | None = None) -> bool:
        """Ends a request, or one of its sequences, for an external reason.

        Its blocks stay in the prefix tree. The scheduler does not report the outcome.

        Returns:
            True if anything was unfinished.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        if index is not None and not 0 <= index < request.n:
            raise InvalidParameterError("index", f"in [0, {request.n})", index)
        chosen = request.sequences if index is None else request.sequences[index : index + 1]
        num_ended = sum(self.finish_sequence(seq, reason) for seq in chosen)
        return num_ended > 0

    def finish_sequence(self, seq: Sequence, reason: FinishReason) -> bool:
        """Ends a sequence, as `finish` does; returns True if it was unfinished."""
        if seq.is_finished:
            return False
        if seq.is_running:
            self.running.remove(seq)
            self._free(seq)
        else:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.query, seq.draft_token_ids = None, ()
        seq.request.num_unfinished -= 1
        if seq.request.is_finished:
            del self._requests[seq.request.request_id]
            self._num_background -= seq.request.background
            self._deadlines.discard(seq.request)
        return True

    def _free(self, seq: Sequence) -> None:
        assert seq.tables is not None
        self.waiting.wake_from(seq.tables)
        self.kv.free(seq.tables)
        seq.tables = None
        if seq.adapter_slot:
            self.adapters.release(seq.adapter_slot)
            seq.adapter_slot = 0
        if seq.begun is not None:
            self._media.release(seq)

    def _expire(self) -> None:
        if not self._deadlines.heap:
            return
        for request in self._deadlines.pop_due(self._clock()):
            for seq in request.sequences:
                if self.finish_sequence(seq, FinishReason.TIMEOUT):
                    self._expired.append(seq)

    # Steps.

    def schedule(self) -> SchedulerOutput | None:
        """Builds the next step; returns None if nothing can run before the next commit.

        The order is:

        1. Running decodes in service order, one token each plus drafts. If the pool is exhausted,
           the last sequence in service order is preempted, even if it needs the block itself.
        2. Running prompts, in chunks. Their blocks were reserved at admission.
        3. Waiting sequences in service order, while there is room for *all* their known tokens.

        Steps 2 and 3 run for background requests after all others. While there are other requests,
        background requests get an eighth of the places and of the tokens of a step.
        """
        assert len(self._in_flight) < MAX_STEPS_IN_FLIGHT, "commit a step before scheduling another"
        self._expire()
        self._step += 1
        self._batch, self._scheduled, self._prefilling = StepBatch(self._step), [], []
        self._num_drafts = {}
        self._num_sampled = self._num_decodes = 0
        self._budget = self.config.max_num_batched_tokens
        self._preempted = self.lacks_room = False
        self._parking_budgets = [self.max_parked_tokens] * 2
        if self.kv.restorations:
            self._resume_restored()
        waiting = self.waiting
        if waiting.size:
            waiting.wake()
            if waiting.first_held is not None and self.adapters.has_room:
                waiting.release_held()
            has_classes = self._num_background or self.config.policy is SchedulingPolicy.PRIORITY
            if has_classes and not self.holds_admission:
                self._preempt_for_waiting()
        self._schedule_decodes()
        if self.config.max_num_prompt_tokens is not None:
            self._budget = min(self._budget, self.config.max_num_prompt_tokens)
        if self._step_time is not None and (self._prefilling or waiting.size):
            self._time_budget = self._step_time.budget(self._num_decodes)
            self._limit_by_time()
        self._prompt_budget = self._budget
        if self._prefilling or waiting.size:
            self._long_budget = self._budget - min(self._short_demand(), self._budget // 2)
            # Background prompts get the rest, after all others including waiting ones.
            for background in (False, True) if self._num_background else (False,):
                if background and self._has_both_kinds and self.config.enable_chunked_prefill:
                    self._budget = min(self._budget, self._background_tokens)
                    self._long_budget = min(self._long_budget, self._background_tokens)
                self._schedule_running_prefills(background)
                # Never give the blocks of a preempted sequence to waiting ones.
                if waiting.size and not self._preempted:
                    self._admit_waiting(background)
        self.lacks_room |= self._preempted
        if not self._scheduled:
            self._step -= 1
            self.encoder_cache.cancel(self._step)
            return None
        batch, num_seqs = self._batch, len(self._scheduled)
        batch.seq_ids = [seq.seq_id for seq in self._scheduled]
        batch.num_drafts = array("i", bytes(4 * num_seqs))
        for index, num_drafts in self._num_drafts.items():
            batch.num_drafts[index] = num_drafts
        batch.adapter_ids = array("i", bytes(4 * num_seqs))
        if self.adapters.num_in_use:
            self._add_adapters()
        batch.is_decode = len(batch.token_ids) == num_seqs and False not in batch.samples
        batch.block_copies = self.kv.launch_step(self._step)
        if self.encoder_cache.step == self._step:
            batch.media = self.encoder_cache.end()
        output = SchedulerOutput(batch, self._scheduled)
        self._in_flight.append(output)
        return output

    def _resume_restored(self) -> None:
        """Lets sequences go on whose cached tokens are on the device again.

        A sequence whose content could not be read waits again, for a shorter prefix.
        """
        for restoration in list(self.kv.restorations.values()):
            seq = restoration.tables.owner
            if restoration.has_failed:
                seq.num_cached_tokens = None
                self._requeue(seq)
            elif restoration.is_done:
                self.kv.finish_restoration(restoration)
                seq.num_scheduled_tokens = restoration.num_tokens

    def _add_adapters(self) -> None:
        batch = self._batch
        for index, seq in enumerate(self._scheduled):
            if seq.adapter_slot:
                batch.adapter_ids[index] = seq.adapter_slot
                batch.adapters[seq.adapter_slot] = seq.request.adapter

    def update_from_output(self, output: SchedulerOutput, token_ids: list[list[int]]) -> None:
        """Commits the tokens of an evaluated step. Steps are committed in order.

        Args:
            output: The oldest step in flight; all its reads and writes have been evaluated.
            token_ids: New tokens of each of `output.sequences`: accepted drafts plus one, or none
                if it does not sample or has finished. The caller must first end sequences that got
                no token because of bad logits. Tokens past the end of a sequence are removed from
                these lists.
        """
        assert self._in_flight and self._in_flight[0] is output, (
            "steps are committed once, in the order they were scheduled in"
        )
        _check_gained(output, token_ids)
        self._in_flight.popleft()
        batch = output.batch
        self._committed_step = batch.step
        self.kv.on_step_evaluated(batch.step)
        block_size = self.kv.block_size
        running, finished = SequenceStatus.RUNNING, SequenceStatus.FINISHED
        # A hot loop, like the one in `_schedule_decodes`.
        for seq, start, length, num_drafts, gained in zip(
            output.sequences, batch.starts, batch.query_lens, batch.num_drafts, token_ids
        ):
            status = seq.status
            if status is finished:
                gained.clear()
                continue
            if num_drafts:
                self._commit_drafts(seq, start, length, num_drafts, gained)
                continue
            # A sequence preempted since then has lost its blocks, but its token is still valid. It
            # does not run again before this commit.
            tokens = seq.tokens
            if status is not running:
                if gained:
                    self.waiting.add_token(seq, gained[0])
            else:
                if gained:
                    tokens.append(gained[0])
                tables = seq.tables
                tables.num_computed_tokens = now = start + length  # type: ignore[union-attr]
                if now % block_size < length:  # crossed the end of a block
                    self.kv.commit(tables, now)  # type: ignore[arg-type]
            # `max_num_tokens` is never exceeded, so the token that reaches it is the last.
            if gained and (
                seq.stop_checker is not None
                or gained[0] in seq.end_token_ids
                or len(tokens) == seq.max_num_tokens
            ):
                self._end(seq, self._reason_to_stop(seq, gained[0]), gained)

    def _commit_drafts(
        self, seq: Sequence, start: int, length: int, num_drafts: int, gained: list[int]
    ) -> None:
        """Commits a sequence of a step that verified its drafts.

        Rejected drafts, and all tokens after the one that ends the sequence, are rolled back before
        anything is indexed.
        """
        assert 1 <= len(gained) <= 1 + num_drafts
        reason = None
        for count, token in enumerate(gained, 1):
            if seq.is_running:
                seq.tokens.append(token)
            else:
                self.waiting.add_token(seq, token)
            reason = self._reason_to_stop(seq, token)
            if reason is not None:
                del gained[count:]
                break
        if seq.is_running:
            assert seq.tables is not None
            computed = start + length - num_drafts + len(gained) - 1
            if len(gained) <= num_drafts:
                # Returns less if a recurrent state must replay accepted drafts.
                computed = self.kv.truncate(seq.tables, computed)
                seq.num_scheduled_tokens = computed
            self.kv.commit(seq.tables, computed)
        self._end(seq, reason, gained)

    def _reason_to_stop(self, seq: Sequence, token: int) -> FinishReason | None:
        """Returns why the newest token ends its sequence, or None."""
        request, reason = seq.request, None
        if token in seq.end_token_ids or len(seq.tokens) >= seq.max_num_tokens:
            reason = request.stop.reason_to_stop(
                token, seq.num_output_tokens, request.max_output_tokens
            )
        checker = seq.stop_checker
        return reason if checker is None else checker(seq, token, reason)

    def _end(self, seq: Sequence, reason: FinishReason | None, gained: list[int]) -> None:
        """Ends a sequence if there is a reason. A failed sequence keeps no token of the step."""
        if reason is FinishReason.ERROR:
            gained.clear()
        if reason is not None:
            self.finish_sequence(seq, reason)

    def take_expired(self) -> list[Sequence]:
        """The sequences that timed out since the last call."""
        expired, self._expired = self._expired, []
        return expired

    def propose(self, seq: Sequence, token_ids: SequenceOf[int]) -> None:
        """Gives a sequence drafts: guesses of the tokens after its newest one.

        Its next step verifies as many as fit. Drafts are dropped if the newest token is still being
        sampled.
        """
        if seq.is_running:
            seq.draft_token_ids = tuple(token_ids)

    def reserve(self, seq: Sequence, num_drafts: int) -> int:
        """Allocates blocks for drafts of a running sequence before they are made.

        A draft model computes them in the same blocks. Call `propose` before the next step.

        Returns:
            Number of drafts that there is room for, at most `num_drafts`.
        """
        assert seq.tables is not None
        num_tokens = len(seq.tokens)
        return max(0, self.kv.allocate_up_to(seq.tables, num_tokens + num_drafts) - num_tokens)

    def restore(self, requests: Iterable[Request]) -> None:
        """Takes over the requests of a discarded scheduler. Call it on a new scheduler.

        Unfinished sequences wait again and keep their tokens. Nothing else is taken from the old
        scheduler or its KV store.
        """
        for request in sorted(requests, key=lambda request: request.arrival):
            self._num_arrived = request.arrival
            unfinished = [seq for seq in request.sequences if not seq.is_finished]
            request.num_unfinished, request.prompt_source = len(unfinished), None
            for seq in request.sequences:  # finished ones too may refer to the old store
                seq.tables = seq.query = seq.waits_for = None
            request.tree_prompt = None
            self._name_media(request)
            for seq in unfinished:
                self._next_seq_id += 1
                seq.start_over(self._next_seq_id)
                self.waiting.add(seq)
            if unfinished:
                self._requests[request.request_id] = request
                self._num_background += request.background
                if request.deadline is not None:
                    self._deadlines.add(request)

    # Decodes.

    def _schedule_decodes(self) -> None:
        # Hot loop: this one and the one in `update_from_output` visit every running sequence in
        # every step. They avoid properties and most calls.
        step, block_size = self._step, self.kv.block_size
        batch, scheduled, running = self._batch, self._scheduled, SequenceStatus.RUNNING
        token_ids, starts, input_from = batch.token_ids, batch.starts, batch.input_from
        has_states, move_state = self.kv.states is not None, self.kv.move_state
        some_wait = bool(self.kv.restorations)
        num_sampled = 0
        for seq in self._in_turn():
            start = seq.num_scheduled_tokens
            tokens = seq.tokens
            num_left = len(tokens) - start
            if some_wait and seq.tables is not None and seq.tables.restoration is not None:
                continue
            # The last token of a prompt may belong to a media item.
            if num_left > 1 or (
                num_left and seq.tree_tokens is not tokens and start < seq.request.num_prompt_tokens
            ):
                self._prefilling.append(seq)
                continue
            # Skip sequences whose last token or drafts are in flight, and those just preempted.
            if num_left < 0 or start + 1 >= seq.max_num_tokens or seq.status is not running:
                continue
            # A new block is needed only when the last one is full; a state needs a slot every step.
            if (start % block_size == 0 or has_states) and not self._secure(seq):
                continue
            num_drafts = 0
            if seq.draft_token_ids:
                num_drafts = self._num_drafts_for(seq, start + 1) if num_left else 0
                seq.draft_token_ids = seq.draft_token_ids[:num_drafts]
            end = seq.num_scheduled_tokens = start + 1 + num_drafts
            seq.last_step = step
            tables = seq.tables
            assert tables is not None
            if has_states:
                slots = move_state(tables, end, keep=num_drafts > 0)
                assert slots is not None
                batch.slots.append(slots)
            if num_left:
                token_ids.append(tokens[start])
                input_from.append(-1)
                if num_drafts:
                    token_ids.extend(seq.draft_token_ids)
                    self._num_drafts[len(scheduled)] = num_drafts
                    seq.draft_token_ids = ()
            else:
                token_ids.append(0)
                input_from.append(seq.sampled_index)
            seq.sampled_index = num_sampled
            num_sampled += 1 + num_drafts
            starts.append(start)
            batch.tables.append(tables.exported or tables.export())
            scheduled.append(seq)
        num_decodes = self._num_decodes = len(scheduled)
        self._num_sampled = num_sampled
        batch.query_lens = array("q", (1,)) * num_decodes
        batch.samples = [True] * num_decodes
        for index, num_drafts in self._num_drafts.items():
            batch.query_lens[index] += num_drafts
        self._budget -= len(token_ids)

    def _num_drafts_for(self, seq: Sequence, end: int) -> int:
        """Number of drafts that the step verifies for a sequence. Allocates room for them.

        Reserves one token of the step for every running sequence. The last output token is never a
        draft.

        Args:
            end: Number of its tokens before the drafts.
        """
        assert seq.tables is not None
        spare = self._budget - len(self.running) - sum(self._num_drafts.values())
        most = min(len(seq.draft_token_ids), spare, seq.max_num_tokens - len(seq.tokens) - 1)
        if most <= 0:
            return 0
        return max(0, self.kv.allocate_up_to(seq.tables, end + most) - end)

    def _in_turn(self) -> list[Sequence]:
        """The running sequences that this step may schedule. Limits background ones if there are
        others."""
        items = self.running.items
        if not self._has_both_kinds:
            return items.copy()  # preemption changes the queue
        return items[: self._num_running_before_background() + self._background_places]

    @property
    def _has_both_kinds(self) -> bool:
        """True while background requests and others are unfinished."""
        return 0 < self._num_background < len(self._requests)

    def _num_running_before_background(self) -> int:
        """Number of running sequences ahead of the background ones."""
        return bisect_left(self.running.items, True, key=lambda seq: seq.request.background)

    def _secure(self, seq: Sequence) -> bool:
        """Finds room for one more token; may preempt the last sequences in service order."""
        assert seq.tables is not None
        num_tokens = seq.num_scheduled_tokens + 1
        while not self.kv.grow(seq.tables, num_tokens):
            if self.kv.can_grow_later(seq.tables, num_tokens, seq.num_scheduled_tokens):
                return False  # the step in flight will free enough: skip a step, preempt nothing
            victim = self.running.last
            self._preempt(victim)
            self._preempted = True
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Releases a running sequence's blocks and requeues it. Committed blocks stay indexed."""
        self._requeue(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1

    def _requeue(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._free(seq)
        seq.draft_token_ids = ()
        seq.status = SequenceStatus.WAITING
        seq.num_scheduled_tokens = 0
        self.waiting.add(seq)

    # Prompts.

    def _schedule_running_prefills(self, background: bool) -> None:
        for seq in self._prefilling:
            # An earlier sequence may have preempted this one.
            if seq.is_running and seq.request.background == background:
                start = seq.num_scheduled_tokens
                num_tokens = self._until_stop(seq, self._chunk_for(len(seq.tokens) - start, start))
                if seq.request.prompt_media is not None:
                    num_tokens = self._media_chunk(seq, num_tokens)
                self._add(seq, self._secure_chunk(seq, num_tokens))

    def _until_stop(self, seq: Sequence, num_tokens: int) -> int:
        """Number of tokens of a chunk before the request's next stop.

        At a stop, the sequence first takes cached blocks up to the next one, or to the end. The
        chunk is empty if nothing is left to compute before the next stop.
        """
        request, start = seq.request, seq.num_scheduled_tokens
        if not request.stops:
            return num_tokens
        stop = request.stop_after(start)
        if start in request.stops and request.read_prefix_cache:
            start = seq.num_scheduled_tokens = self._sharing.extend(seq, stop)
            num_tokens = min(num_tokens, len(seq.tokens) - start)
        return num_tokens if stop is None else min(num_tokens, stop - start)

    def _secure_chunk(self, seq: Sequence, num_tokens: int) -> int:
        """Number of tokens of a chunk that fit; always all of them with full attention only.

        Admission does not reserve windows and states, because a long prompt never needs most of
        them at once. If nothing fits, the last sequence in service order is preempted. If that one
        is already in this step, this sequence skips the step and no waiting one is admitted.
        """
        assert seq.tables is not None
        start = seq.num_scheduled_tokens
        if num_tokens == 0:
            return 0
        atomic = seq.tables.atomic
        while (
            end := outside(atomic, self.kv.allocate_up_to(seq.tables, start + num_tokens))
        ) <= start:
            self._preempted = True
            least = start + 1
            if outside(atomic, least) == start:
                least = next(end for _, end in atomic if end > start)
            if self.kv.can_grow_later(seq.tables, least, start):
                return 0
            victim = self.running.last
            if victim.last_step == self._step:
                return 0
            self._preempt(victim)
            if victim is seq:
                return 0
        return end - start

    def _begin_media(self) -> None:
        """Prepares the encoder cache; limits new items during decodes, which encoding delays."""
        most = self.config.max_encoder_items_with_decodes if self._num_decodes else None
        self.encoder_cache.begin(self._step, self._committed_step, most)

    def _media_chunk(self, seq: Sequence, num_tokens: int) -> int:
        return self._media.chunk(seq, num_tokens, self._budget, self._prompt_budget)

    def _is_long(self, num_tokens: int) -> bool:
        return num_tokens > self._long_prefill_threshold

    def _limit_by_time(self) -> None:
        """Lowers the tokens of the step to what the time left allows to a new prompt."""
        if self._time_budget is not None:
            self._budget = min(self._budget, self._time_budget.num_tokens(0))

    def _chunk_for(self, num_tokens: int, start: int) -> int:
        """Tokens this step spends on a prompt with `num_tokens` left at position `start`."""
        if self._is_long(num_tokens):
            share = self._long_budget
            # A long prompt that is alone may use the whole step.
            if self._has_own_threshold or len(self.running) + self.waiting.size > 1:
                share = min(share, self._long_prefill_threshold)
            num_tokens = min(num_tokens, share)
        if self._time_budget is not None:
            num_tokens = min(num_tokens, self._time_budget.num_tokens(start))
        return min(num_tokens, self._budget)

    def _short_demand(self) -> int:
        """Tokens that short prompts could use in this step. Stops counting at half the budget."""
        enough = self._budget // 2
        demand = 0
        for seq in self._prefilling:
            left = len(seq.tokens) - seq.num_scheduled_tokens
            if seq.is_running and not self._is_long(left):
                demand += left
        num_free_places = self.config.max_num_seqs - len(self.running)
        for seq in self.waiting.ready_short():
            if demand >= enough or num_free_places == 0:
                break
            demand += len(seq.tokens)
            num_free_places -= 1
        return demand

    def _add(self, seq: Sequence, num_tokens: int) -> None:
        """Schedules the next tokens of a sequence."""
        if num_tokens <= 0:
            return
        assert seq.tables is not None
        start = seq.num_scheduled_tokens
        end = start + num_tokens
        batch, samples, num_drafts = self._batch, end >= len(seq.tokens), 0
        if samples and seq.draft_token_ids and start < len(seq.tokens):
            # A recurrent state that rejected drafts computes the accepted ones again.
            num_drafts = self._num_drafts_for(seq, end)
        end = seq.num_scheduled_tokens = end + num_drafts
        batch.input_from.append(-1 if start < len(seq.tokens) else seq.sampled_index)
        if samples:
            seq.sampled_index = self._num_sampled
            self._num_sampled += 1 + num_drafts
        seq.last_step = self._step
        slots = self.kv.move_state(seq.tables, end, keep=num_drafts > 0)
        if slots is not None:
            batch.slots.append(slots)
        if seq.request.prompt_media is not None:
            self._media.use(seq, start, end)
        batch.token_ids.extend(seq.tokens[start:end] if start < len(seq.tokens) else (0,))
        if num_drafts:
            batch.token_ids.extend(seq.draft_token_ids[:num_drafts])
            self._num_drafts[len(self._scheduled)] = num_drafts
            num_tokens += num_drafts
        if samples:
            seq.draft_token_ids = ()
        batch.starts.append(start)
        batch.query_lens.append(num_tokens)
        batch.samples.append(samples)
        batch.tables.append(seq.tables.export())
        self._scheduled.append(seq)
        self._budget = max(0, self._budget - num_tokens)
        if self._time_budget is not None:
            self._time_budget.spend(start, num_tokens)
            self._limit_by_time()
        if self._is_long(len(seq.tokens) - start):
            self._long_budget = max(0, self._long_budget - num_tokens)

    # Admission.

    def _admit_waiting(self, background: bool) -> None:
        # The first sequence is admitted or parked, or it blocks all behind it.
        most = len(self.running) + self._num_prefill_places()
        if self.holds_admission:
            most = min(most, 1)
        while self._budget > 0 and len(self.running) < min(most, self.config.max_num_seqs):
            # Once long prompts have had their share, short ones behind them use the rest.
            seq = self._first_to_admit(with_long=self._long_budget > 0)
            if seq is None or seq.request.background > background:
                return
            if seq.request.background and self._has_both_kinds:
                num_others = self._num_running_before_background()
                if len(self.running) - num_others >= self._background_places:
                    return
            if not self.config.enable_chunked_prefill and not self._fits_whole(seq):
                return  # waits for a step with room for the whole prompt; nothing overtakes it
            if not self._admit(seq):
                self.lacks_room = True
                return  # waits for memory; nothing overtakes it

    def _watermark(self) -> int:
        """Blocks that admission leaves free for running sequences."""
        return int(self.config.watermark * self.kv.pool.num_usable)

    def _num_prefill_places(self) -> int:
        """Number of sequences that the limit on prompts lets in."""
        most = self.config.max_num_prefills
        if most is None:
            return self.config.max_num_seqs
        return most - sum(seq.is_running for seq in self._prefilling)

    def _fits_whole(self, seq: Sequence) -> bool:
        """True if the step has room for the whole prompt and may encode all its items."""
        if len(seq.tokens) > self._budget:
            return False
        media = seq.request.prompt_media
        return media is None or self._media.fits_whole(media)

    def _may_have_slot(self, seq: Sequence) -> bool:
        """True if a sequence has no adapter, or may take a slot for it.

        No sequence takes a slot before an earlier one that waits for one. Otherwise, a stream of
        requests for the adapters on the device could keep another one out forever.
        """
        if seq.request.adapter is None:
            return True
        held = self.waiting.first_held
        if held is not None and held.order < seq.order:
            return False
        return self.adapters.can_take(seq.request.adapter)

    def _first_to_admit(self, *, with_long: bool) -> Sequence | None:
        """The first waiting sequence that need not wait for a running one; parks those before it,
        and sets those aside that wait for a slot of their adapter."""
        budgets = self._parking_budgets
        while budgets[False] > 0:
            seq = self.waiting.first(with_long=with_long and budgets[True] > 0)
            if seq is None or seq.last_step > self._committed_step:
                break  # preempted while in flight: its newest token is not known yet
            if not self._may_have_slot(seq):
                self.waiting.hold(seq)
                continue
            awaited = self._sharing.awaited(seq)
            if awaited is None:
                return seq
            self.waiting.park(seq, *awaited)
            budgets[self._is_long(len(seq.tokens))] -= PARKING_COST + len(seq.tokens)
        return None

    def _admit(self, seq: Sequence) -> bool:
        request = seq.request
        source = self._sharing.fork_source(request)
        if self.running and source is None and self._sharing.is_still_blocked(seq):
            return False
        tables = self.kv.admit(
            seq.tree_tokens,
            query=self._sharing.query(seq),
            headroom=self._watermark() if self.running else 0,
            read_cache=request.read_prefix_cache,
            fork_of=request.parent if source is None else source.tables,
            num_fork_tokens=(
                request.num_parent_tokens if source is None else request.num_prompt_tokens - 1
            ),
            owner=seq,
        )
        if tables is None:
            seq.blocked_at = self.kv.num_freed
            return False
        self.waiting.remove(seq)
        self.running.add(seq)
        seq.status = SequenceStatus.RUNNING
        seq.tables = tables
        if request.adapter is not None:
            seq.adapter_slot = self.adapters.take(request.adapter)
        seq.query = None
        seq.blocked_at = -1
        num_cached = tables.num_cached_tokens
        seq.num_scheduled_tokens = num_cached
        is_first = seq.num_cached_tokens is None
        if is_first:
            seq.num_cached_tokens = num_cached
            seq.first_admission = time.monotonic()
            if self._history is not None and seq.index == 0 and request.read_prefix_cache:
                request.cache_miss = self._history.note(
                    seq.tree_tokens,
                    request.cache_salt,
                    request.adapter,
                    num_cached=num_cached,
                    block_size=self.kv.block_size,
                )
        if tables.restoration is not None:
            seq.num_scheduled_tokens = tables.num_computed_tokens
            if is_first and request.prompt_media is not None:
                self.encoder_cache.count_prefix_hits(request.prompt_media.num_before(num_cached))
            return True
        num_tokens = self._chunk_for(len(seq.tokens) - num_cached, num_cached)
        if request.stops:
            stop = request.stop_after(num_cached)
            if num_cached in request.stops:
                num_tokens = 0
            elif stop is not None:
                num_tokens = min(num_tokens, stop - num_cached)
        media = request.prompt_media
        if media is None:
            self._add(seq, self.kv.allocate_up_to(tables, num_cached + num_tokens) - num_cached)
            return True
        if is_first:
            self.encoder_cache.count_prefix_hits(media.num_before(num_cached))
        end = num_cached + self._media_chunk(seq, num_tokens)
        end = outside(media.atomic, self.kv.allocate_up_to(tables, end))
        if end <= num_cached < request.num_prompt_tokens:
            self.kv.defer_copy(tables)
        self._add(seq, end - num_cached)
        return True

    # Priority.

    def _preempt_for_waiting(self) -> None:
        """Preempts running sequences of a lower class if the first waiting one needs room."""
        head = self._first_to_admit(with_long=True)
        if head is None:
            return
        while self.running and self.running.last.order[0] > head.order[0]:
            if len(self.running) < self.config.max_num_seqs and self.kv.will_have_room(
                len(head.tokens), self._sharing.query(head), headroom=self._watermark()
            ):
                return
            self._preempt(self.running.last)

    # Prefix cache and counts.

    def reset_prefix_cache(self) -> int:
        """Empties the prefix cache; call it between steps. Returns how many blocks it held."""
        self.waiting.wake_all()  # their blocks will not be indexed
        return self.kv.reset_prefix_cache()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def max_total_tokens(self) -> int:
        """Maximum tokens of one request's prompt plus output."""
        # The last output token is never computed, so it needs no slot.
        limit = self.kv.capacity + 1
        if self.config.max_model_len is not None:
            limit = min(limit, self.config.max_model_len)
        return limit

    def request(self, request_id: str) -> Request | None:
        """Returns an unfinished request by id, or None."""
        return self._requests.get(request_id)

    def requests(self) -> Iterator[Request]:
        """The unfinished requests, in order of arrival."""
        return iter(list(self._requests.values()))

    # Integrity.

    def check_integrity(self) -> None:
        """Checks queues, requests and the KV store against each other; raises `IntegrityError`."""
        self.kv.check_integrity()
        self.waiting.check_integrity()
        self.adapters.check_integrity([s.adapter_slot for s in self.running if s.adapter_slot])
        self.encoder_cache.check_integrity([s.begun for s in self.running if s.begun is not None])
        alive = [s for r in self._requests.values() for s in r.sequences if not s.is_finished]
        if any(r.num_unfinished < 1 for r in self._requests.values()) or len(alive) != sum(
            r.num_unfinished for r in self._requests.values()
        ):
            raise IntegrityError("an unfinished request miscounts its sequences")
        if len(alive) != len(self.running) + len(self.waiting):
            raise IntegrityError(
                f"{len(self.running)} running + {len(self.waiting)} waiting sequences, "
                f"but {len(alive)} are unfinished"
            )
        if len(self.running) > self.config.max_num_seqs:
            raise IntegrityError(f"{len(self.running)} sequences run")
        for seq in alive:
            if seq not in (self.running if seq.is_running else self.waiting):
                raise IntegrityError(f"{seq!r} is not in the queue of its status")
            if seq.is_running:
                self._check_running(seq)
            elif seq.num_computed_tokens or seq.num_scheduled_tokens or seq.tables is not None:
                raise IntegrityError(f"{seq!r} waits, and yet holds computed tokens")
        if len(self._in_flight) != self._step - self._committed_step:
            raise IntegrityError("the steps in flight are not those after the committed one")

    def _check_running(self, seq: Sequence) -> None:
        num_drafts = 0  # in flight
        for output in self._in_flight:
            if seq in output.sequences:
                num_drafts += output.batch.num_drafts[output.sequences.index(seq)]
        end = len(seq.tokens) + max(1, num_drafts)
        if not seq.num_computed_tokens <= seq.num_scheduled_tokens <= end:
            raise IntegrityError(f"{seq!r}: computed <= scheduled <= {end} does not hold")
        if seq.tables is None:
            raise IntegrityError(f"{seq!r} runs without block tables")
        adapter = seq.request.adapter
        if adapter is not None and self.adapters.adapter_in(seq.adapter_slot) != adapter:
            raise IntegrityError(f"{seq!r} runs with another adapter than its own")
        size, num_blocks = self.kv.block_size, len(seq.tables.blocks)
        if num_blocks * size < max(seq.num_scheduled_tokens, len(seq.tokens) - 1):
            raise IntegrityError(f"{seq!r} has only {num_blocks} blocks of {size}")
        # A sequence writes only to blocks of its own.
        restoration = seq.tables.restoration
        start = seq.num_scheduled_tokens if restoration is None else restoration.num_tokens
        for group in self.kv.attention:
            blocks = seq.tables.attention[group.number].blocks
            for block in blocks[start // size :]:
                if not group.is_written_by_one(block):
                    raise IntegrityError(f"{seq!r} will write to block {block}, not its own")


def _check_gained(output: SchedulerOutput, token_ids: SequenceOf[SequenceOf[int]]) -> None:
    """Raises `InvalidParameterError` if a live sequence that samples has no token."""
    sequences = output.sequences
    if len(token_ids) == len(sequences) and [] not in token_ids:
        return
    missing = [
        seq.seq_id
        for i, (seq, samples) in enumerate(zip(sequences, output.batch.samples))
        if samples and not seq.is_finished and (i >= len(token_ids) or not token_ids[i])
    ]
    if missing or len(token_ids) != len(sequences):
        expected = f"one entry for each of {len(sequences)} sequences"
        expected += f", and a token where one samples (none for {missing})" if missing else ""
        raise InvalidParameterError("token_ids", expected, list(token_ids))
