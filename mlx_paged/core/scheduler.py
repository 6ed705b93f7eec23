"""Scheduler: plans each step and commits the tokens that it sampled.

A preempted sequence loses its blocks and waits again. Preemption happens in three cases: a decode
finds no free block (`_secure`), a prompt's chunk finds none (`_secure_chunk`), or a request of a
higher class finds no room or no slot for its adapter (`Priority`).
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from mlx_paged.core.adapters import AdapterSlots
from mlx_paged.core.admission import MAX_PARKED_TOKENS, Admission
from mlx_paged.core.background import BackgroundShare
from mlx_paged.core.config import SchedulerConfig, SchedulingPolicy
from mlx_paged.core.integrity import check_integrity
from mlx_paged.core.kv.manager import KVManager
from mlx_paged.core.kv.misses import PromptHistory
from mlx_paged.core.media import MediaIdsExhaustedError, outside
from mlx_paged.core.media_scheduler import MediaScheduler
from mlx_paged.core.outputs import SchedulerOutput
from mlx_paged.core.prefix_sharing import PrefixSharing
from mlx_paged.core.priority import Priority
from mlx_paged.core.queues import Deadlines, SequenceQueue, WaitingQueue
from mlx_paged.core.request import FinishReason, Request, Sequence, SequenceStatus
from mlx_paged.core.step_builder import StepBuilder
from mlx_paged.core.step_time import StepTimeLimit
from mlx_paged.errors import (
    DuplicateRequestError,
    EngineOverloadedError,
    IntegrityError,
    InvalidParameterError,
    RequestTooLargeError,
)

#: Maximum steps launched but not committed: one whose tokens are being read, and one running.
MAX_STEPS_IN_FLIGHT = 2


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

    `schedule` returns None if everything waits for a step in flight, if all sequences wait for
    content that is being restored (`KVManager.restorations`), or if cached tokens take a request to
    one of its boundaries. Otherwise it returns a step while `has_unfinished`. Tokens of sequences
    that have finished in the meantime are ignored.

    Args:
        step_time: Limits a step's prompt tokens by their expected time; None: no limit. Requires
            chunked prefill.
        history: Explains cache misses; None: they stay unexplained.

    Attributes:
        waiting, running: The unfinished sequences, in service order.
        max_parked_tokens: `MAX_PARKED_TOKENS`; tests lower it.
        num_preemptions: Number of preemptions so far.
        adapters: The device's adapter slots.
        encoder_cache: Bookkeeping for media features on the device.
        holds_admission: While True, waiting sequences are admitted only if nothing runs.
        lacks_room: True if the last `schedule` preempted a sequence or could not admit one because
            the pools were too small.
    """

    #: Tests substitute a naive one.
    waiting_queue: type[WaitingQueue] = WaitingQueue

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
        threshold = config.long_prefill_threshold
        self.waiting = self.waiting_queue(lambda num_tokens: num_tokens > threshold)
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
        self._background = BackgroundShare(config, self.running, self._requests)
        self._admission = Admission(
            config,
            kv,
            self.running,
            self.waiting,
            sharing=self._sharing,
            media=self._media,
            adapters=self.adapters,
            background=self._background,
            history=history if kv.enable_prefix_caching else None,
        )
        self._priority = Priority(
            config, self.running, self.waiting, adapters=self.adapters, admission=self._admission
        )
        self._clock = clock
        self._step_time = step_time
        self._deadlines = Deadlines()
        self._expired: list[Sequence] = []  # since the last `take_expired`
        self._num_arrived = 0
        self._next_seq_id = 0
        # Steps.
        self._step = 0
        self._committed_step = 0
        self._in_flight: deque[SchedulerOutput] = deque()
        self._building = self._new_step()

    def _new_step(self) -> StepBuilder:
        return StepBuilder(
            self._step,
            self.config,
            self.kv,
            self._media,
            self.running,
            self.waiting,
            committed_step=self._committed_step,
            max_parked_tokens=self.max_parked_tokens,
        )

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
        self._background.num_requests += request.background
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
            self._background.num_requests -= seq.request.background
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
        if seq.pinned_features is not None:
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

        First, waiting sequences of a higher class preempt running ones for room or an adapter slot.
        Then the step takes, in this order:

        1. Running decodes in service order, one token each plus drafts. If the pool is exhausted,
           the last sequence in service order is preempted, even if it needs the block itself.
        2. Running prompts, in chunks. Their blocks were reserved at admission.
        3. Waiting sequences in service order, while there is room for *all* their known tokens.

        Parts 2 and 3 run for background requests after all others. While there are other requests,
        background requests get an eighth of the running sequences and of a step's tokens.
        """
        assert len(self._in_flight) < MAX_STEPS_IN_FLIGHT, "commit a step before scheduling another"
        self._expire()
        self._step += 1
        step = self._building = self._new_step()
        self.lacks_room = False
        if self.kv.restorations:
            self._resume_restored()
        waiting, background = self.waiting, self._background
        if waiting.size:
            waiting.wake()
            has_classes = background.num_requests or self.config.policy is SchedulingPolicy.PRIORITY
            preempts = has_classes and not self.holds_admission
            if preempts:
                for seq in self._priority.victims_for_slot():
                    self._preempt(seq)
            if waiting.first_held is not None and self.adapters.has_room:
                waiting.release_held()
            if preempts:
                for seq in self._priority.victims_for_room(step):
                    self._preempt(seq)
        self._schedule_decodes()
        step.begin_prompts(self._step_time)
        if step.prefilling or waiting.size:
            # Background prompts get the rest, after all others including waiting ones.
            for in_background in (False, True) if background.num_requests else (False,):
                if in_background and background.is_limited and self.config.enable_chunked_prefill:
                    step.limit_prompts(background.max_tokens)
                self._schedule_running_prefills(in_background)
                # Never give the blocks of a preempted sequence to waiting ones.
                if waiting.size and not step.has_preempted:
                    max_running = 1 if self.holds_admission else None
                    has_room = self._admission.fill(
                        step, background=in_background, max_running=max_running
                    )
                    self.lacks_room |= not has_room
        self.lacks_room |= step.has_preempted
        if not step.sequences:
            self._step -= 1
            self.encoder_cache.cancel(self._step)
            return None
        output = step.finish(self.adapters, self.encoder_cache)
        self._in_flight.append(output)
        return output

    def _resume_restored(self) -> None:
        """Resumes sequences whose cached tokens are back on the device.

        If the content could not be read, the sequence waits again, for a shorter prefix.
        """
        for restoration in list(self.kv.restorations.values()):
            seq = restoration.tables.owner
            if restoration.has_failed:
                seq.num_cached_tokens = None
                self._requeue(seq)
            elif restoration.is_done:
                self.kv.finish_restoration(restoration)
                seq.num_scheduled_tokens = restoration.num_tokens

    def update_from_output(self, output: SchedulerOutput, token_ids: list[list[int]]) -> None:
        """Commits the tokens of an evaluated step. Steps are committed in order.

        Args:
            output: The oldest step in flight; all its reads and writes have been evaluated.
            token_ids: New tokens of each of `output.sequences`: accepted drafts plus one, or none
                if it does not sample or has finished. Call `finish_sequence` first for a sequence
                that could not be sampled. Tokens past the end of a sequence are removed from these
                lists.
        """
        assert self._in_flight and self._in_flight[0] is output, (
            "steps are committed once, in the order they were scheduled in"
        )
        _check_new_tokens(output, token_ids)
        self._in_flight.popleft()
        batch = output.batch
        self._committed_step = batch.step
        self.kv.on_step_evaluated(batch.step)
        block_size = self.kv.block_size
        running, finished = SequenceStatus.RUNNING, SequenceStatus.FINISHED
        # A hot loop, like the one in `_schedule_decodes`.
        for seq, start, length, num_drafts, new_token_ids in zip(
            output.sequences, batch.starts, batch.query_lens, batch.num_drafts, token_ids
        ):
            status = seq.status
            if status is finished:
                new_token_ids.clear()
                continue
            if num_drafts:
                self._commit_drafts(seq, start, length, num_drafts, new_token_ids)
                continue
            # A sequence preempted since then has lost its blocks, but its token is still valid. It
            # does not run again before this commit.
            tokens = seq.tokens
            if status is not running:
                if new_token_ids:
                    self.waiting.add_token(seq, new_token_ids[0])
            else:
                if new_token_ids:
                    tokens.append(new_token_ids[0])
                tables = seq.tables
                tables.num_computed_tokens = now = start + length  # type: ignore[union-attr]
                if now % block_size < length:  # crossed the end of a block
                    self.kv.commit(tables, now)  # type: ignore[arg-type]
            # `max_num_tokens` is never exceeded, so the token that reaches it is the last.
            if new_token_ids and (
                seq.stop_checker is not None
                or new_token_ids[0] in seq.end_token_ids
                or len(tokens) == seq.max_num_tokens
            ):
                self._end(seq, self._reason_to_stop(seq, new_token_ids[0]), new_token_ids)

    def _commit_drafts(
        self, seq: Sequence, start: int, length: int, num_drafts: int, new_token_ids: list[int]
    ) -> None:
        """Commits a sequence of a step that verified its drafts.

        Rejected drafts, and all tokens after the one that ends the sequence, are rolled back before
        anything is indexed.
        """
        assert 1 <= len(new_token_ids) <= 1 + num_drafts
        reason, tokens, is_running = None, seq.tokens, seq.is_running
        # The same question as in `update_from_output`: most tokens end nothing.
        is_checked, end_token_ids = seq.stop_checker is not None, seq.end_token_ids
        for count, token in enumerate(new_token_ids, 1):
            if is_running:
                tokens.append(token)
            else:
                self.waiting.add_token(seq, token)
            if is_checked or token in end_token_ids or len(tokens) >= seq.max_num_tokens:
                reason = self._reason_to_stop(seq, token)
                if reason is not None:
                    del new_token_ids[count:]
                    break
        if seq.is_running:
            assert seq.tables is not None
            computed = start + length - num_drafts + len(new_token_ids) - 1
            if len(new_token_ids) <= num_drafts:
                # Returns less if a recurrent state must replay accepted drafts.
                computed = self.kv.truncate(seq.tables, computed)
                seq.num_scheduled_tokens = computed
            self.kv.commit(seq.tables, computed)
        if reason is not None:
            self._end(seq, reason, new_token_ids)

    def _reason_to_stop(self, seq: Sequence, token: int) -> FinishReason | None:
        """Returns why the newest token ends its sequence, or None."""
        request, reason = seq.request, None
        if token in seq.end_token_ids or len(seq.tokens) >= seq.max_num_tokens:
            reason = request.stop.reason_to_stop(
                token, seq.num_output_tokens, request.max_output_tokens
            )
        checker = seq.stop_checker
        return reason if checker is None else checker(seq, token, reason)

    def _end(self, seq: Sequence, reason: FinishReason | None, new_token_ids: list[int]) -> None:
        """Ends a sequence if there is a reason. A failed sequence keeps no token of the step."""
        if reason is FinishReason.ERROR:
            new_token_ids.clear()
        if reason is not None:
            self.finish_sequence(seq, reason)

    def take_expired(self) -> list[Sequence]:
        """Returns the sequences that timed out since the last call."""
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
                self._background.num_requests += request.background
                if request.deadline is not None:
                    self._deadlines.add(request)

    # Decodes.

    def _schedule_decodes(self) -> None:
        # Hot loop: this one and the one in `update_from_output` visit every running sequence in
        # every step. They avoid properties and most calls.
        step, number, block_size = self._building, self._step, self.kv.block_size
        batch, scheduled, running = step.batch, step.sequences, SequenceStatus.RUNNING
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
                step.prefilling.append(seq)
                continue
            # Skip sequences whose last token or drafts are in flight, and those just preempted.
            if num_left < 0 or start + 1 >= seq.max_num_tokens or seq.status is not running:
                continue
            # A new block is needed only when the last one is full; a state needs a slot every step.
            if (start % block_size == 0 or has_states) and not self._secure(seq):
                continue
            num_drafts = 0
            if seq.draft_token_ids:
                num_drafts = step.num_drafts_for(seq, start + 1) if num_left else 0
                seq.draft_token_ids = seq.draft_token_ids[:num_drafts]
            end = seq.num_scheduled_tokens = start + 1 + num_drafts
            seq.last_step = number
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
                    step.num_drafts[len(scheduled)] = num_drafts
                    seq.draft_token_ids = ()
            else:
                token_ids.append(0)
                input_from.append(seq.sampled_index)
            seq.sampled_index = num_sampled
            num_sampled += 1 + num_drafts
            starts.append(start)
            batch.tables.append(tables.exported or tables.export())
            scheduled.append(seq)
        num_decodes = step.num_decodes = len(scheduled)
        step.num_sampled = num_sampled
        batch.query_lens = array("q", (1,)) * num_decodes
        batch.samples = [True] * num_decodes
        for index, num_drafts in step.num_drafts.items():
            batch.query_lens[index] += num_drafts
        step.budget -= len(token_ids)

    def _in_turn(self) -> list[Sequence]:
        """Returns the running sequences that this step may schedule: background ones only within
        their share."""
        items, background = self.running.items, self._background
        if not background.num_requests or not background.is_limited:
            return items.copy()  # preemption changes the queue
        return items[: background.num_others_running + background.max_seqs]

    def _secure(self, seq: Sequence) -> bool:
        """Finds room for one more token; may preempt the last sequences in service order."""
        assert seq.tables is not None
        num_tokens = seq.num_scheduled_tokens + 1
        while not self.kv.grow(seq.tables, num_tokens):
            if self.kv.can_grow_later(seq.tables, num_tokens, seq.num_scheduled_tokens):
                return False  # the step in flight will free enough: skip a step, preempt nothing
            victim = self.running.last
            self._preempt(victim)
            self._building.has_preempted = True
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
        step = self._building
        for seq in step.prefilling:
            # An earlier sequence may have preempted this one.
            if seq.is_running and seq.request.background == background:
                start = seq.num_scheduled_tokens
                num_tokens = self._until_boundary(
                    seq, step.chunk_for(len(seq.tokens) - start, start)
                )
                if seq.request.prompt_media is not None:
                    num_tokens = step.media_chunk(seq, num_tokens)
                step.add(seq, self._secure_chunk(seq, num_tokens))

    def _until_boundary(self, seq: Sequence, num_tokens: int) -> int:
        """Cuts a chunk at the request's next boundary; returns its number of tokens.

        At a boundary, the sequence first takes cached blocks up to the next one, or to the end. The
        chunk is empty if nothing is left to compute before the next boundary.
        """
        request, start = seq.request, seq.num_scheduled_tokens
        if not request.boundaries:
            return num_tokens
        boundary = request.next_boundary(start)
        if start in request.boundaries and request.read_prefix_cache:
            start = seq.num_scheduled_tokens = self._sharing.extend(seq, boundary)
            num_tokens = min(num_tokens, len(seq.tokens) - start)
        return num_tokens if boundary is None else min(num_tokens, boundary - start)

    def _secure_chunk(self, seq: Sequence, num_tokens: int) -> int:
        """Returns the number of tokens of a chunk that fit; always all of them with full attention
        only.

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
            self._building.has_preempted = True
            min_tokens = start + 1
            if outside(atomic, min_tokens) == start:
                min_tokens = next(end for _, end in atomic if end > start)
            if self.kv.can_grow_later(seq.tables, min_tokens, start):
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
        max_items = (
            self.config.max_encoder_items_with_decodes if self._building.num_decodes else None
        )
        self.encoder_cache.begin(self._step, self._committed_step, max_items)

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
        check_integrity(
            self._requests,
            self.running,
            self.waiting,
            self.kv,
            adapters=self.adapters,
            encoder_cache=self.encoder_cache,
            in_flight=self._in_flight,
            max_num_seqs=self.config.max_num_seqs,
        )
        if len(self._in_flight) != self._step - self._committed_step:
            raise IntegrityError("the steps in flight are not those after the committed one")


def _check_new_tokens(output: SchedulerOutput, token_ids: SequenceOf[SequenceOf[int]]) -> None:
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
