"""Publisher: turns what steps brought into updates and outputs."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

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
from mlx_paged.scheduling import FinishReason, Request, Scheduler, SequenceOutcome


@dataclass
class Generation:
    """A request on its way."""

    params: SamplingParams
    sampler: RequestSampler
    request: Request
    output: RequestOutput
    streams: list[TextStream]
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
        """Turns tokens into text, and ends sequences at a stop string.

        Args:
            parts: the step that brought them; log-probabilities are in it.
        """
        reports: dict[int, list[PositionLogprobs]] = {}
        for part in parts:
            if part.logprobs is not None:
                reports.update(part.logprobs.read())
        updates: list[SequenceUpdate] = []
        for outcome in outcomes:
            generation = self._generations.get(outcome.request_id)
            if generation is None:
                continue  # aborted
            try:
                update = _to_text(outcome, generation.streams[outcome.index], generation.params)
                if outcome.token_id is not None and outcome.seq_id in reports:
                    [position] = reports[outcome.seq_id]
                    update.logprobs = self._report(position, generation.params.logprobs or 0)
            except Exception as error:  # a tokenizer that cannot decode what the model said
                updates += self._fail(outcome.request_id, outcome.index, reason_of(error))
                continue
            if update.finish_reason is not None and outcome.finish_reason is None:
                self._scheduler.finish(
                    outcome.request_id, update.finish_reason, index=outcome.index
                )
            self._record(update, generation)
            updates.append(update)
        return updates

    # Parts.

    def _fail(self, request_id: str, index: int, reason: str) -> list[SequenceUpdate]:
        self._scheduler.finish(request_id, FinishReason.ERROR, index=index)
        generation = self._generations.get(request_id)
        if generation is None:
            return []
        error = StepError(request_id, reason)
        try:
            text = generation.streams[index].finish()
        except Exception:  # the text may be what failed
            text = ""
        update = SequenceUpdate(request_id, index, None, text, FinishReason.ERROR, error=error)
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
        completion.text += update.text
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
        if update.finish_reason is None:
            return
        completion.finish_reason = update.finish_reason
        completion.stop_reason = update.stop_reason
        completion.error = update.error
        if output.finished:
            output.metrics.finished_time = time.monotonic()
            del self._generations[update.request_id]


def _to_text(
    outcome: SequenceOutcome, stream: TextStream, params: SamplingParams
) -> SequenceUpdate:
    token, reason = outcome.token_id, outcome.finish_reason
    ends_text = reason is FinishReason.STOP
    stop_reason: str | int | None = None
    if ends_text and token in (params.stop_token_ids or ()):
        stop_reason = token
    # A stop token is part of the text if asked for; the model's own end token never is.
    is_text = not ends_text or (params.include_stop_str_in_output and stop_reason is not None)
    text = stream.add(token) if token is not None and is_text else ""
    if reason is not None:
        text += stream.finish()
    if stream.matched_stop is not None:
        reason, stop_reason = FinishReason.STOP, stream.matched_stop
    return SequenceUpdate(outcome.request_id, outcome.index, token, text, reason, stop_reason)
