"""OutputProcessor: turns the results of steps into updates and outputs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from functools import partial
from typing import Protocol

from mlx_paged.core import (
    FinishReason,
    Request,
    Scheduler,
    Sequence,
    SequenceStatus,
    StepResult,
)
from mlx_paged.core.media import RejectedItem
from mlx_paged.core.request import StopChecker
from mlx_paged.engine.detokenizer import IncrementalDetokenizer
from mlx_paged.engine.faults import NO_PERMITTED_TOKEN, is_interrupt, reason_of
from mlx_paged.engine.outputs import (
    CompletionOutput,
    DeferredText,
    RequestOutput,
    SequenceUpdate,
)
from mlx_paged.engine.pooling.params import PoolingParams
from mlx_paged.engine.sampling.logprobs import LogprobReport, PositionLogprobs
from mlx_paged.engine.sampling.sequence_sampler import SequenceSampler
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import ConstraintError, RejectedMediaError, StepError

logger = logging.getLogger(__name__)

_update = partial(tuple.__new__, SequenceUpdate)  # 3 times as fast


class UpdateSink(Protocol):
    """Receives the updates of a request as they are made, in addition to `Engine.step`'s caller."""

    def put(self, update: SequenceUpdate) -> None:
        """Receives an update. Must be quick. An exception ends the answer.

        After an exception out of a step, the last update of a sequence may arrive a second time.
        """


class AnswerState:
    """One answer of an unfinished request.

    Attributes:
        state: The state of its request.
        request_id, index: Its request, and its index among the request's answers.
        completion: The caller's output.
        token_ids: The tokens so far (`completion.token_ids`).
        text: The text; deferred if there are no stop strings.
        sink: Receives its updates.
        grammar: The sampler, if the answer follows a grammar, which may end it.
        is_plain: True if it has begun, and updates consist of tokens until it ends.
        positions: Log-probabilities of the tokens of the current step.
        pieces: Texts of tokens that `check` has accepted and no update has reported.
        is_end_shown: True if the token that ended the answer is part of the text.
        stop_reason: The stop string or stop token that ended it.
        failure: Why `check` failed.
    """

    __slots__ = (
        "completion",
        "failure",
        "grammar",
        "index",
        "is_end_shown",
        "is_plain",
        "pieces",
        "positions",
        "request_id",
        "sink",
        "state",
        "stop_reason",
        "text",
        "token_ids",
    )

    def __init__(
        self,
        state: RequestState,
        completion: CompletionOutput,
        text: IncrementalDetokenizer | DeferredText,
        grammar: SequenceSampler | None = None,
    ) -> None:
        self.grammar = grammar
        self.state = state
        self.request_id = state.output.request_id
        self.index = completion.index
        self.completion = completion
        self.token_ids = completion.token_ids
        self.text = text
        self.sink = state.sink
        self.start_over()

    def start_over(self) -> None:
        """Returns to the last reported state, in case an exception interrupted a change."""
        self.is_plain = False
        self.positions: SequenceOf[PositionLogprobs] = ()
        self.pieces: list[str] = []
        self.is_end_shown = True
        self.stop_reason: str | int | None = None
        self.failure: str | None = None
        if isinstance(self.text, IncrementalDetokenizer):
            self.text.start_over()
            for token in self.token_ids:
                self.text.add(token)

    @property
    def stop_checker(self) -> StopChecker | None:
        """The check of each token, if stop strings or a grammar may end the answer."""
        is_checked = self.grammar is not None or isinstance(self.text, IncrementalDetokenizer)
        return self.check if is_checked else None

    def check(self, seq: Sequence, token: int, reason: FinishReason | None) -> FinishReason | None:
        """Checks a sequence's newest token; returns why the sequence ends, or None.

        Args:
            reason: Why the token itself ends it, or None.
        """
        if reason is FinishReason.STOP:
            self.note_end(token)
        try:
            if reason is None and self.grammar is not None and self.grammar.is_complete(seq.tokens):
                # A complete grammar ends its answer immediately. A step in flight is discarded.
                reason = FinishReason.STOP
            text = self.text
            if isinstance(text, IncrementalDetokenizer):
                piece = text.add(token) if self.is_end_shown else ""
                if reason is not None:
                    piece += text.finish()
                if text.matched_stop is not None:
                    reason, self.stop_reason = FinishReason.STOP, text.matched_stop
                self.pieces.append(piece)
        except Exception as error:  # the tokenizer cannot decode the token
            self.failure = reason_of(error)
            return FinishReason.ERROR
        return reason

    def note_end(self, token: int) -> None:
        """Notes the end token or stop token that ended the answer.

        A stop token is part of the text if requested; the model's own end token never is.
        """
        params = self.state.params
        assert not isinstance(params, PoolingParams)
        self.is_end_shown = False
        if token in (params.stop_token_ids or ()):
            self.stop_reason = token
            self.is_end_shown = params.include_stop_str_in_output


class RequestState:
    """The engine's state of an unfinished request, besides the scheduler's part.

    Attributes:
        params: How to choose tokens and when to stop, or how to pool.
        request: The scheduler's part, until all sequences have ended.
        output: The caller's output.
        sink: Receives its updates; None if only `Engine.step` returns them.
    """

    def __init__(
        self,
        params: SamplingParams | PoolingParams,
        request: Request,
        output: RequestOutput,
        sink: UpdateSink | None,
    ) -> None:
        self.params = params
        self.request = request
        self.output = output
        self.sink = sink


class OutputProcessor:
    """Fills the outputs of requests and creates their updates.

    Args:
        scheduler: Ends sequences that fail.
        report: Adds token texts to log-probabilities.

    Attributes:
        request_states: The unfinished requests by id, in order of arrival.
    """

    def __init__(self, scheduler: Scheduler, report: LogprobReport) -> None:
        self.request_states: dict[str, RequestState] = {}
        self._scheduler = scheduler
        self._report = report
        self._current: Sequence | None = None  # the sequence whose answer is being changed

    def _note_first_token(self, state: RequestState) -> None:
        output, request = state.output, state.request
        metrics, first = output.metrics, request.sequences[0]
        metrics.first_token_time = time.monotonic()
        output.num_cached_tokens = first.num_cached_tokens or 0
        output.cache_miss = miss = request.cache_miss
        metrics.scheduled_time = first.first_admission
        if miss is not None and logger.isEnabledFor(logging.DEBUG):
            texts = [self._report.text(tokens) for tokens in (miss.given, miss.earlier)]
            logger.debug("%s: cache miss: %s (%r, %r)", request.request_id, miss, *texts)

    def process_outputs(
        self, sequences: SequenceOf[Sequence], token_ids: SequenceOf[list[int]]
    ) -> list[SequenceUpdate]:
        """Records the new tokens of a step's sequences; returns their updates.

        Args:
            token_ids: For each of `sequences`, after `Scheduler.update_from_output`.
        """
        updates: list[SequenceUpdate] = []
        for seq, new_token_ids in zip(sequences, token_ids):
            answer: AnswerState | None = seq.answer
            if answer is None:
                continue  # aborted
            if not new_token_ids:
                if answer.failure is not None:
                    updates += self._fail(seq, answer.failure)
                continue
            self._current = seq
            if answer.is_plain and seq.finish_reason is None:
                # Fast path for most tokens, with the same result as below.
                tokens = answer.token_ids
                num_before = len(tokens)
                # fmt: off
                update = _update((answer.request_id, answer.index, new_token_ids, answer.text,
                                  None, None, None, None, num_before))
                # fmt: on
                tokens += new_token_ids
                updates.append(update)
                if answer.sink is not None:
                    updates += self._deliver(update, seq, answer)
                continue
            try:
                update = self._to_update(seq, new_token_ids, answer)
            except Exception as error:  # the tokenizer cannot decode a token of the report
                updates += self._fail(seq, reason_of(error))
                continue
            ended = self._record(update, seq, answer)
            updates += [update, *ended]
        self._current = None
        return updates

    def end_expired(self, sequences: SequenceOf[Sequence]) -> list[SequenceUpdate]:
        """Returns the final updates of sequences that timed out."""
        updates: list[SequenceUpdate] = []
        for seq in sequences:
            if seq.answer is not None:
                self._current = seq
                update = self._to_update(seq, [], seq.answer)
                updates += [update, *self._record(update, seq, seq.answer)]
        self._current = None
        return updates

    def end_failed(
        self, sequences: SequenceOf[Sequence], result: StepResult
    ) -> list[SequenceUpdate]:
        """Ends the sequences for which a step failed; returns their updates.

        Args:
            sequences: The step's sequences, in order.
        """
        updates = []
        for index, reason in result.failures:
            updates += self._fail(sequences[index], reason)
        self._current = None
        return updates

    def record_reports(
        self, sequences: SequenceOf[Sequence], result: StepResult
    ) -> list[SequenceUpdate]:
        """Records log-probabilities and pooled prompts; returns the updates of failed sequences."""
        updates = []
        for part in result.pooled:
            sequences[part.seq_index].prompt_report.record(part.start, part.end, part.states)
        for index, positions in result.logprobs:
            if sequences[index].answer is not None:
                sequences[index].answer.positions = positions
        for found in result.prompt_logprobs:
            seq = sequences[found.seq_index]
            if seq.answer is None or seq.finish_reason is FinishReason.ERROR:
                continue
            try:
                seq.prompt_report.record(found.start, found.positions)
            except Exception as error:  # as in `process_outputs`
                updates += self._fail(seq, reason_of(error))
        self._current = None
        return updates

    def abort(self, state: RequestState) -> list[SequenceUpdate]:
        """Ends the unfinished sequences of a request."""
        updates = []
        for seq in state.request.sequences:
            self._current = seq
            answer: AnswerState | None = seq.answer
            self._scheduler.finish_sequence(seq, FinishReason.ABORT)
            if answer is None or answer.completion.finish_reason is not None:
                continue
            answer.completion.finish_reason = FinishReason.ABORT
            seq.answer = None
            update = _end_of(seq, answer.completion)
            updates.append(update)
            if answer.sink is not None:
                self._deliver(update, seq, answer)
        self._forget(state)
        self._current = None
        return updates

    def restore(self, scheduler: Scheduler, end: Callable[[Sequence], str | None]) -> None:
        """Moves the unfinished requests to a new scheduler, after an exception in a step.

        Answers are authoritative: a sequence keeps the tokens of its answer. Only the one whose
        answer was being changed must end. If this is interrupted, call it again.

        Args:
            end: Returns why a sequence must end with an error, or None if it continues.
        """
        self._scheduler = scheduler
        if self._current is not None:
            self._close(self._current, "a step was interrupted while its answer was being changed")
        for state in list(self.request_states.values()):
            num_prompt_tokens = state.request.num_prompt_tokens
            for seq, completion in zip(state.request.sequences, state.output.outputs):
                reason = None if completion.finish_reason is not None else end(seq)
                if reason is not None:
                    self._current = seq
                    self._close(seq, reason)
                if completion.finish_reason is not None:
                    seq.status = SequenceStatus.FINISHED
                    continue
                seq.status = SequenceStatus.WAITING
                del seq.tokens[num_prompt_tokens + len(completion.token_ids) :]
                seq.sampler.start_over()
                seq.answer.start_over()
            if state.output.finished:
                self._forget(state)
        scheduler.restore([state.request for state in self.request_states.values()])
        self._current = None

    # Parts.

    def _deliver(
        self, update: SequenceUpdate, seq: Sequence, answer: AnswerState
    ) -> list[SequenceUpdate]:
        """Puts an update into its sink; returns the final update if the sink raised.

        Sinks belong to callers, so their exceptions must not end other requests.
        """
        assert answer.sink is not None
        try:
            answer.sink.put(update)
        except BaseException as error:
            if is_interrupt(error):
                raise
            sink, answer.sink = answer.sink, None
            ended = self._fail(seq, f"its sink raised {reason_of(error)}")
            # A reader that was only interrupted must learn of the end.
            with suppress(Exception, SystemExit):
                sink.put(ended[0] if ended else _end_of(seq, answer.completion))
            return ended
        return []

    def _to_update(
        self, seq: Sequence, new_token_ids: list[int], answer: AnswerState
    ) -> SequenceUpdate:
        params, text, reason = answer.state.params, answer.text, seq.finish_reason
        request_id = seq.request.request_id
        if isinstance(params, PoolingParams):
            if new_token_ids:  # The prompt has been computed.
                answer.state.output.pooled = seq.prompt_report.result()
                self._note_first_token(answer.state)
                reason = FinishReason.STOP
            return SequenceUpdate(request_id, seq.index, [], [], reason)
        reports = None
        if new_token_ids and answer.positions:
            num_likeliest = params.logprobs or 0
            found = zip(new_token_ids, answer.positions)
            reports = [self._report(position, num_likeliest) for _, position in found]
            answer.positions = ()
        num_before = len(answer.token_ids)
        pieces: list[str] | DeferredText
        if isinstance(text, DeferredText):
            pieces = text
            if new_token_ids and reason is FinishReason.STOP and seq.stop_checker is None:
                answer.note_end(new_token_ids[-1])
            if reason is not None:
                text.end(num_before + len(new_token_ids) - (not answer.is_end_shown))
        else:
            pieces, answer.pieces = answer.pieces, []
            if reason is not None and not new_token_ids:
                pieces.append(text.finish())
                if text.matched_stop is not None:
                    reason, answer.stop_reason = FinishReason.STOP, text.matched_stop
        # fmt: off
        return _update((request_id, seq.index, new_token_ids, pieces,
                        reason, answer.stop_reason, None, reports, num_before))
        # fmt: on

    def _fail(self, seq: Sequence, reason: str | RejectedItem) -> list[SequenceUpdate]:
        if seq.answer is None or seq.answer.completion.finish_reason is not None:
            return []
        self._current = seq
        self._scheduler.finish_sequence(seq, FinishReason.ERROR)
        return [self._end_with_error(seq, seq.answer, reason)]

    def _end_with_error(
        self, seq: Sequence, answer: AnswerState, reason: str | RejectedItem
    ) -> SequenceUpdate:
        text, num_tokens = answer.text, len(answer.completion.token_ids)
        pieces: list[str] | DeferredText = []
        if isinstance(text, DeferredText):
            text.end(num_tokens)
            pieces = text
        else:
            with suppress(Exception):  # Decoding may be what failed.
                pieces = [text.finish()]
        update = SequenceUpdate(
            seq.request.request_id,
            seq.index,
            [],
            pieces,
            FinishReason.ERROR,
            error=_error_of(seq, reason),
            num_tokens_before=num_tokens,
        )
        self._record(update, seq, answer)
        return update

    def _close(self, seq: Sequence, reason: str) -> None:
        """Ends an answer whose change was interrupted at any point."""
        state: RequestState = seq.request.state
        try:
            completion = state.output.outputs[seq.index]
            if completion.finish_reason is None:
                self._end_with_error(seq, seq.answer, reason)
            elif state.sink is not None:  # Its reader may not know yet.
                state.sink.put(_end_of(seq, completion))
        except Exception:  # The sink's exceptions must not stop the engine.
            logger.exception("the end of request %r was not delivered", seq.request.request_id)

    def _forget(self, state: RequestState) -> None:
        if self.request_states.pop(state.output.request_id, None) is not None:
            # The request refers to the state too; break the cycle that would keep its tokens.
            state.request.release()
            del state.request

    def _record(
        self, update: SequenceUpdate, seq: Sequence, answer: AnswerState
    ) -> list[SequenceUpdate]:
        """Applies an update to its output and its sink; returns the final update if that fails."""
        state, completion, text = answer.state, answer.completion, answer.text
        completion.text = text if isinstance(text, DeferredText) else text.text
        if update.token_ids:
            completion.token_ids += update.token_ids
            if completion.logprobs is not None and update.reports is not None:
                assert completion.cumulative_logprob is not None
                completion.logprobs += update.reports
                completion.cumulative_logprob += sum(r.logprob for r in update.reports)
            if state.output.metrics.first_token_time is None:
                self._note_first_token(state)
        if update.finish_reason is None:
            answer.is_plain = isinstance(text, DeferredText) and state.params.logprobs is None
        else:
            completion.stop_reason = update.stop_reason
            completion.error = update.error
            completion.finish_reason = update.finish_reason
            seq.answer = None  # Last, because `restore` needs it until there is a reason.
            if state.output.finished:
                state.output.metrics.finished_time = time.monotonic()
                self._forget(state)
        return [] if answer.sink is None else self._deliver(update, seq, answer)


def _end_of(seq: Sequence, completion: CompletionOutput) -> SequenceUpdate:
    """Returns the update that only says why an answer ended."""
    return SequenceUpdate(
        seq.request.request_id,
        seq.index,
        [],
        [],
        completion.finish_reason,
        completion.stop_reason,
        completion.error,
    )


def _error_of(seq: Sequence, reason: str | RejectedItem) -> StepError:
    request_id = seq.request.request_id
    if isinstance(reason, str):
        grammar = None if seq.answer is None else seq.answer.grammar
        if grammar is not None and grammar.failure is not None:
            return ConstraintError(request_id, "structured_outputs", grammar.failure)
        if reason == NO_PERMITTED_TOKEN:
            return ConstraintError(request_id, "allowed_token_ids", reason)
        return StepError(request_id, reason)
    part = "media" if seq.media is None else seq.media.part_of(reason.key)
    return RejectedMediaError(request_id, part, f"{reason}")
