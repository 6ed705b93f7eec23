"""Publisher: turns what steps brought into updates and outputs."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from mlx_paged.core import FinishReason, Request, Scheduler, SequenceOutcome
from mlx_paged.engine.deferred_text import DeferredText
from mlx_paged.engine.executor import StepResult
from mlx_paged.engine.faults import reason_of
from mlx_paged.engine.outputs import RequestOutput, SequenceUpdate
from mlx_paged.engine.runner import LaunchedStep
from mlx_paged.engine.sampling.logprobs import LogprobReport, PositionLogprobs
from mlx_paged.engine.sampling.prompt_report import PromptReport
from mlx_paged.engine.sampling.request_sampler import RequestSampler
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.engine.text_stream import TextStream
from mlx_paged.errors import StepError

_update = partial(tuple.__new__, SequenceUpdate)  # a third of a call's time


@dataclass
class Generation:
    """A request on its way."""

    params: SamplingParams
    sampler: RequestSampler
    request: Request
    output: RequestOutput
    streams: list[TextStream | DeferredText]  # deferred where there are no stop strings
    prompt_report: PromptReport | None

    def owns(self, seq_id: int) -> bool:
        """Whether a sequence is one of its answers, and not of an earlier request of its id."""
        return any(sequence.seq_id == seq_id for sequence in self.request.sequences)


class Publisher:
    """Fills the outputs of requests and makes their updates.

    Args:
        generations: by request id; those that are finished are taken out.
        scheduler: told of sequences that end at a stop string, or for an error.
        report: gives the tokens of log-probabilities their texts.
    """

    def __init__(
        self, generations: dict[str, Generation], scheduler: Scheduler, report: LogprobReport
    ) -> None:
        self._generations = generations
        self._scheduler = scheduler
        self._report = report
        # By seq_id: answers that have begun, and whose further tokens need no look at their text
        # and no report. Their tokens and text.
        self._plain: dict[int, tuple[list[int], DeferredText]] = {}

    def forget(self, generation: Generation) -> None:
        """A request was aborted."""
        for sequence in generation.request.sequences:
            self._plain.pop(sequence.seq_id, None)

    def end_failed(self, result: StepResult) -> list[SequenceUpdate]:
        """Ends the sequences that a step failed for."""
        updates = []
        for seq_id, reason in result.failures.items():
            sequence = self._scheduler.sequence(seq_id)
            if sequence is not None:
                updates += self._fail(sequence.request.request_id, sequence.index, reason)
        return updates

    def record_prompts(self, result: StepResult) -> list[SequenceUpdate]:
        """Takes the log-probabilities of prompts that a step found; returns what that ended."""
        updates = []
        for part in result.parts:
            updates += self._record_prompts(part, result.failures)
        return updates

    def publish(
        self, outcomes: Sequence[SequenceOutcome], parts: Sequence[LaunchedStep] = ()
    ) -> list[SequenceUpdate]:
        """Records what the sequences gained, and ends those that come to a stop string.

        Args:
            parts: the step that brought them; log-probabilities are in it.
        """
        reports: dict[int, list[PositionLogprobs]] = {}
        for part in parts:
            if part.logprobs is not None:
                reports.update(part.logprobs.read())
        updates: list[SequenceUpdate] = []
        for outcome in outcomes:
            request_id, seq_id, index, token, reason = outcome
            answer = self._plain.get(seq_id)
            if answer is not None and reason is None:
                # What the rest comes to, for nearly every row of nearly every step.
                assert token is not None
                token_ids, text = answer
                num_before = len(token_ids)
                updates.append(
                    _update((request_id, index, token, text, None, None, None, None, num_before))
                )
                token_ids.append(token)
                continue
            generation = self._generations.get(request_id)
            if generation is None:
                continue  # aborted
            try:
                update = _to_update(outcome, generation)
                if token is not None and seq_id in reports:
                    [position] = reports[seq_id]
                    report = self._report(position, generation.params.logprobs or 0)
                    update = update._replace(logprobs=report)
            except Exception as error:  # a tokenizer that cannot decode what the model said
                updates += self._fail(request_id, index, reason_of(error))
                continue
            if update.finish_reason is not None and reason is None:
                self._scheduler.finish(request_id, update.finish_reason, index=index)
            self._record(update, generation)
            updates.append(update)
        return updates

    # Parts.

    def _fail(self, request_id: str, index: int, reason: str) -> list[SequenceUpdate]:
        self._scheduler.finish(request_id, FinishReason.ERROR, index=index)
        generation = self._generations.get(request_id)
        if generation is None:
            return []
        stream, num_tokens = (
            generation.streams[index],
            len(generation.output.outputs[index].token_ids),
        )
        piece: str | DeferredText = ""
        if isinstance(stream, DeferredText):
            stream.end(num_tokens)
            piece = stream
        else:
            with suppress(Exception):  # the text may be what failed
                piece = stream.finish()
        update = SequenceUpdate(
            request_id,
            index,
            None,
            piece,
            FinishReason.ERROR,
            error=StepError(request_id, reason),
            num_tokens_before=num_tokens,
        )
        self._record(update, generation)
        return [update]

    def _record_prompts(
        self, part: LaunchedStep, failures: Collection[int]
    ) -> list[SequenceUpdate]:
        if part.prompt_logprobs is None:
            return []
        found: Mapping[int, Sequence[PositionLogprobs]] = part.prompt_logprobs.read()
        updates = []
        for row in part.batch.sequences:
            generation = self._generations.get(row.request_id)
            if row.seq_id not in found or row.seq_id in failures:
                continue
            # (Its id may have been aborted, and taken by another request, since the launch.)
            if generation is None or not generation.owns(row.seq_id):
                continue
            assert generation.prompt_report is not None
            sequence = self._scheduler.sequence(row.seq_id)
            try:
                generation.prompt_report.record(row.start, found[row.seq_id])
            except Exception as error:  # as in `publish`
                if sequence is not None:
                    updates += self._fail(row.request_id, sequence.index, reason_of(error))
        return updates

    def _record(self, update: SequenceUpdate, generation: Generation) -> None:
        output = generation.output
        completion = output.outputs[update.index]
        stream = generation.streams[update.index]
        completion.text = stream if isinstance(stream, DeferredText) else stream.text
        if update.token_id is not None:
            completion.token_ids.append(update.token_id)
            if completion.logprobs is not None and update.logprobs is not None:
                assert completion.cumulative_logprob is not None
                completion.logprobs.append(update.logprobs)
                completion.cumulative_logprob += update.logprobs[update.token_id].logprob
            if output.metrics.first_token_time is None:
                output.metrics.first_token_time = time.monotonic()
                first = generation.request.sequences[0]
                output.num_cached_tokens = first.num_cached_tokens or 0
                output.metrics.scheduled_time = first.first_admission
        seq_id = generation.request.sequences[update.index].seq_id
        if update.finish_reason is None:
            if isinstance(stream, DeferredText) and generation.params.logprobs is None:
                self._plain[seq_id] = completion.token_ids, stream
            return
        self._plain.pop(seq_id, None)
        completion.finish_reason = update.finish_reason
        completion.stop_reason = update.stop_reason
        completion.error = update.error
        if output.finished:
            output.metrics.finished_time = time.monotonic()
            del self._generations[update.request_id]


def _to_update(outcome: SequenceOutcome, generation: Generation) -> SequenceUpdate:
    request_id, _, index, token, reason = outcome
    params, stream = generation.params, generation.streams[index]
    ends_text = reason is FinishReason.STOP
    stop_reason: str | int | None = None
    if ends_text and token in (params.stop_token_ids or ()):
        stop_reason = token
    # A stop token is part of the text if asked for; the model's own end token never is.
    is_text = token is not None and (
        not ends_text or (params.include_stop_str_in_output and stop_reason is not None)
    )
    if isinstance(stream, DeferredText):
        num_before = len(generation.output.outputs[index].token_ids)
        if reason is not None:
            stream.end(num_before + is_text)
        return SequenceUpdate(
            request_id, index, token, stream, reason, stop_reason, num_tokens_before=num_before
        )
    text = stream.add(token) if is_text and token is not None else ""
    if reason is not None:
        text += stream.finish()
    if stream.matched_stop is not None:
        reason, stop_reason = FinishReason.STOP, stream.matched_stop
    return SequenceUpdate(request_id, index, token, text, reason, stop_reason)
