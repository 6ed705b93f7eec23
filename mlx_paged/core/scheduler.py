"""Scheduler: decides what the next step computes, and takes in what it brought."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from mlx_paged.core import KVManager
from mlx_paged.core.batch import Batch, FinishReason, SequenceOutcome
from mlx_paged.core.config import SchedulerConfig, SchedulingPolicy
from mlx_paged.core.deadlines import Deadlines
from mlx_paged.core.in_flight import LaunchedStep
from mlx_paged.core.planner import Planner
from mlx_paged.core.request import Request, Sequence, SequenceStatus
from mlx_paged.core.scheduler_integrity import check_queues
from mlx_paged.errors import (
    DuplicateRequestError,
    EngineOverloadedError,
    IntegrityError,
    InvalidParameterError,
    RequestTooLargeError,
)

#: Steps that may be launched and not committed: the one whose tokens are being read, and the one
#: that runs meanwhile.
MAX_STEPS_IN_FLIGHT = 2

_outcome = partial(tuple.__new__, SequenceOutcome)  # a third of a call's time


class Scheduler:
    """Continuous batching over a paged KV cache.

    Without overlap, a step is committed before the next one is scheduled::

        while (batch := scheduler.schedule()) is not None:
            publish(scheduler.commit(batch, run(batch)))

    With one step of overlap, step N+1 is scheduled and launched before step N is committed::

        running = None
        while scheduler.has_unfinished or running:
            batch = scheduler.schedule()  # rows may take the tokens that step N is still sampling
            launched = launch(batch) if batch else None
            if running:
                publish(scheduler.commit(running.batch, running.tokens()))
            running = launched

    `schedule` may return None while a step is in flight (everything waits for it), never otherwise
    while `has_unfinished`. Sampled tokens of sequences that finished meanwhile are ignored: the row
    is discarded.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.kv = kv
        self._clock = clock
        self._planner = Planner(config, kv)
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[LaunchedStep] = deque()
        self._deadlines = Deadlines()
        self._unreported: list[SequenceOutcome] = []
        self._step = 0
        self._num_arrived = 0
        self._next_seq_id = 0

    # Requests.

    def add(self, request: Request) -> list[Sequence]:
        """Takes a request into the queue; returns its `n` sequences (their ids key sampled tokens).

        Raises:
            RequestTooLargeError: It could never be served, even alone.
            DuplicateRequestError: An unfinished request has its id.
            EngineOverloadedError: The waiting queue is full.
        """
        if request.request_id in self._requests or request.sequences:
            raise DuplicateRequestError(request.request_id)
        max_output_tokens = self._max_output_tokens(request)
        max_num_waiting = self.config.max_num_waiting
        if max_num_waiting is not None and self.num_waiting + request.n > max_num_waiting:
            raise EngineOverloadedError(self.num_waiting, max_num_waiting)

        self._num_arrived += 1
        request.arrival = self._num_arrived
        request.max_output_tokens = max_output_tokens
        if request.timeout is not None:
            request.deadline = self._clock() + request.timeout
            self._deadlines.add(request)
        rank = request.priority if self.config.policy is SchedulingPolicy.PRIORITY else 0
        for index in range(request.n):
            self._next_seq_id += 1
            seq = Sequence(self._next_seq_id, request, index, (rank, request.arrival, index))
            request.sequences.append(seq)
            self._planner.sequences[seq.seq_id] = seq
            self._planner.waiting.add(seq)
        self._requests[request.request_id] = request
        return request.sequences

    def abort(self, request_id: str) -> bool:
        """Ends a request now, wherever it is; false when there is no such unfinished request."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason, *, index: int | None = None) -> bool:
        """Ends a request, or one of its sequences, for a reason found outside (a stop string...).

        Its full blocks stay in the prefix index. No outcome is reported: the caller knows.

        Returns:
            Whether anything was left to end.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        if index is not None and not 0 <= index < request.n:
            raise InvalidParameterError("index", f"in [0, {request.n})", index)
        chosen = request.sequences if index is None else request.sequences[index : index + 1]
        alive = [seq for seq in chosen if not seq.is_finished]
        for seq in alive:
            self._finish(seq, reason)
        return bool(alive)

    # Steps.

    def schedule(self) -> Batch | None:
        """Builds the next step; None when nothing can run, or not before the next commit."""
        assert len(self._in_flight) < MAX_STEPS_IN_FLIGHT, "commit a step before scheduling another"
        self._expire()
        planned = self._planner.plan(self._step + 1)
        if planned is None:
            return None
        self._in_flight.append(planned)
        self._step = planned.batch.step
        return planned.batch

    def commit(self, batch: Batch, sampled: Mapping[int, int]) -> list[SequenceOutcome]:
        """Takes in the tokens of an evaluated step; steps are committed in order.

        Args:
            batch: The oldest step in flight; every read and write of it has been evaluated.
            sampled: Token by `seq_id`, for every row with `samples`; those of finished sequences
                may be missing (end a sequence whose logits were useless with `finish` first).

        Returns:
            One outcome for each sequence that gained a token, and for each that timed out since the
            last call.
        """
        launched = self._in_flight[0] if self._in_flight else None
        assert launched is not None and launched.batch is batch, (
            "steps are committed once, in the order they were scheduled in"
        )
        launched.check_sampled(sampled)
        self._in_flight.popleft()
        self._planner.committed_step = batch.step
        self.kv.on_step_evaluated(batch.step)
        outcomes = self.take_outcomes()
        block_size = self.kv.block_size
        running, finished = SequenceStatus.RUNNING, SequenceStatus.FINISHED
        for row, seq in launched.rows():  # as lean as `Planner._add_decodes`, for the same reason
            seq_id, request_id, token_ids, start, _, _, samples, _ = row
            status = seq.status
            if status is finished:
                continue
            # Who was preempted meanwhile (and does not run again before this commit) has lost its
            # blocks, but the token is as good as ever.
            if samples:
                token, tokens = sampled[seq_id], seq.tokens
                tokens.append(token)
            if status is running:
                seq.num_computed_tokens = now = start + len(token_ids)
                if now % block_size < len(token_ids):  # the end of a block is among them
                    self.kv.commit(seq_id, now)
            if not samples:
                continue
            # (`max_num_tokens` is never exceeded, so that the token that reaches it is the last.)
            if token in seq.end_token_ids or len(tokens) == seq.max_num_tokens:
                outcomes.append(self._judge(seq))
            else:
                outcomes.append(_outcome((request_id, seq_id, seq.index, token, None)))
        return outcomes

    def take_outcomes(self) -> list[SequenceOutcome]:
        """Outcomes that no step brought (timeouts); `commit` hands them out too, each once."""
        outcomes, self._unreported = self._unreported, []
        return outcomes

    def requeue_in_flight(self) -> int:
        """Forgets the steps in flight, after one failed: their sequences wait again.

        Nothing they wrote is trusted. Call it when the device has come to rest. Returns how many
        sequences wait anew.
        """
        seqs = {seq.seq_id: seq for launched in self._in_flight for seq in launched.owners}
        again = [seq for seq in seqs.values() if seq.is_running]
        for seq in again:
            self._planner.preempt(seq)
        while self._in_flight:
            self.kv.on_step_evaluated(self._in_flight.popleft().batch.step)
        self._planner.committed_step = self._step
        return len(again)

    def reset_prefix_cache(self) -> int:
        """Empties the prefix cache, between any two steps; returns how many blocks it held."""
        return self.kv.reset_prefix_cache()

    # Numbers.

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._planner.running)

    @property
    def num_waiting(self) -> int:
        return len(self._planner.waiting)

    @property
    def num_preemptions(self) -> int:
        return self._planner.num_preemptions

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def max_total_tokens(self) -> int:
        """Most tokens that prompt and answer of one request may have together."""
        # The last token of an answer is never computed, so it needs no slot.
        limit = self.kv.capacity + 1
        if self.config.max_model_len is not None:
            limit = min(limit, self.config.max_model_len)
        return limit

    def request(self, request_id: str) -> Request | None:
        """An unfinished request."""
        return self._requests.get(request_id)

    def sequence(self, seq_id: int) -> Sequence | None:
        """An unfinished sequence."""
        return self._planner.sequences.get(seq_id)

    def requests(self) -> Iterator[Request]:
        """The unfinished requests, in order of arrival."""
        return iter(list(self._requests.values()))

    def check_integrity(self) -> None:
        """Checks queues, requests and the KV store against each other; raises `IntegrityError`."""
        self.kv.check_integrity()
        check_queues(self._planner, self._requests)
        if len(self._in_flight) != self._step - self._planner.committed_step:
            raise IntegrityError("the steps in flight are not those after the committed one")

    # Ends.

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

    def _judge(self, seq: Sequence) -> SequenceOutcome:
        """Reports the newest token of a sequence, and ends it where the token says so."""
        request, token = seq.request, seq.tokens[-1]
        reason = request.stop.reason_to_stop(
            token, seq.num_output_tokens, request.max_output_tokens
        )
        if reason is not None:
            self._finish(seq, reason)
        return SequenceOutcome(request.request_id, seq.seq_id, seq.index, token, reason)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.is_running:
            self._planner.running.remove(seq)
            self.kv.free(seq.seq_id)
        else:
            self._planner.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.waits_for = None
        del self._planner.sequences[seq.seq_id]
        if seq.request.is_finished:
            del self._requests[seq.request.request_id]
            self._deadlines.discard(seq.request)

    def _expire(self) -> None:
        if not self._deadlines:
            return
        reason = FinishReason.TIMEOUT
        for request in self._deadlines.pop_due(self._clock()):
            for seq in request.sequences:
                if not seq.is_finished:
                    self._finish(seq, reason)
                    self._unreported.append(
                        SequenceOutcome(request.request_id, seq.seq_id, seq.index, None, reason)
                    )
