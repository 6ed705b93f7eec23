"""RemoteAnswer: the server's copy of an answer that the engine process generates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mlx_paged.core import FinishReason
from mlx_paged.engine.client import EngineRequest
from mlx_paged.engine.outputs import (
    CompletionOutput,
    DeferredText,
    PositionReport,
    RequestMetrics,
    RequestOutput,
    SequenceUpdate,
)
from mlx_paged.engine.process.messages import Accepted, AnswerUpdate, Beginning, Ending
from mlx_paged.engine.request_stream import Channel
from mlx_paged.engine.sampling.logprobs import LogprobReport
from mlx_paged.engine.sampling_params import SamplingParams

_update = partial(tuple.__new__, SequenceUpdate)  # as in `output_processor`


class RemoteRequest:
    """The server's copy of a request: fills its output, and passes updates to its reader.

    Args:
        number: Number of its first answer; the others follow it.
        request: As submitted.
        report: Adds token texts to log-probabilities.

    Attributes:
        output: Its output in this process, at most one message behind the engine's.
        answers: Its answers, in the order of their numbers.
    """

    def __init__(
        self,
        request_id: str,
        number: int,
        request: EngineRequest,
        channel: Channel,
        report: LogprobReport,
    ) -> None:
        self.request_id = request_id
        self.number = number
        self.channel = channel
        self.report = report
        completions = [CompletionOutput(i) for i in range(request.num_answers)]
        if isinstance(request.params, SamplingParams) and request.params.logprobs is not None:
            for completion in completions:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
        self.output = RequestOutput(request_id, None, [], completions, RequestMetrics(0.0))
        self.answers: Sequence[RemoteAnswer] = ()

    def accept(self, accepted: Accepted, prompt: Any) -> None:
        """Fills in the fields that are known once the engine accepts the request."""
        output, token_ids = self.output, accepted.prompt_token_ids
        output.prompt = accepted.prompt
        output.prompt_token_ids = list(prompt) if token_ids is None else token_ids
        output.relaxed = accepted.relaxed
        output.metrics.arrival_time = accepted.arrival_time

    def begin(self, beginning: Beginning) -> None:
        """Fills in the fields that are known with the first token."""
        output, metrics = self.output, self.output.metrics
        output.num_cached_tokens = beginning.num_cached_tokens
        output.cache_miss = beginning.cache_miss
        metrics.scheduled_time = beginning.scheduled_time
        metrics.first_token_time = beginning.first_token_time
        if (positions := beginning.prompt_logprobs) is not None:
            report = self.report.of_parts
            output.prompt_logprobs = [None if p is None else report(p) for p in positions]

    def end(self, ending: Ending) -> None:
        """Fills in the fields that are known with the last token."""
        output = self.output
        output.metrics.finished_time = ending.finished_time
        output.num_accepted_drafts = ending.num_accepted_drafts
        output.num_rejected_drafts = ending.num_rejected_drafts
        output.pooled = ending.pooled


class RemoteAnswer:
    """One answer of a request.

    Args:
        completion: Its part of the request's output, which this object fills.
        text: Decodes `completion.token_ids` when the text is read.
    """

    def __init__(
        self, request: RemoteRequest, completion: CompletionOutput, text: DeferredText
    ) -> None:
        self.request = request
        self._completion = completion
        self._tokens = completion.token_ids
        self._text = text
        self._pieces: list[str] = []  # the text so far, if the engine decodes it
        completion.text = text  # type: ignore[assignment]

    def take_token(self, token: int) -> None:
        """Adds one token: the fast path, for an update with nothing else in it."""
        request, tokens = self.request, self._tokens
        # fmt: off
        update = _update((request.request_id, self._completion.index, [token], self._text,
                          None, None, None, None, len(tokens)))
        # fmt: on
        tokens.append(token)
        request.channel.put(update)

    def take(self, update: AnswerUpdate) -> None:
        """Applies any update."""
        request, completion, tokens = self.request, self._completion, self._tokens
        if update.beginning is not None:
            request.begin(update.beginning)
        reports = self._reports(update)
        if update.token_ids:
            del tokens[update.num_tokens_before :]  # The engine resends them after an exception.
            tokens += update.token_ids
        pieces: list[str] | DeferredText = self._text
        if update.pieces is not None:
            pieces = update.pieces
            if pieces:
                self._pieces += pieces
                completion.text = ""  # type: ignore[assignment]
        elif update.num_text_tokens is not None:
            self._text.end(update.num_text_tokens)
        if update.finish_reason is not None:
            self._finish(update, update.finish_reason)
        request.channel.put(
            SequenceUpdate(
                request.request_id,
                completion.index,
                update.token_ids,
                pieces,
                update.finish_reason,
                update.stop_reason,
                update.error,
                reports,
                update.num_tokens_before,
            )
        )

    def _reports(self, update: AnswerUpdate) -> list[PositionReport] | None:
        if update.reports is None:
            return None
        completion = self._completion
        reports = list(map(self.request.report.of_parts, update.reports))
        if completion.logprobs is not None and completion.cumulative_logprob is not None:
            completion.logprobs += reports
            completion.cumulative_logprob += sum(report.logprob for report in reports)
        return reports

    def _finish(self, update: AnswerUpdate, reason: FinishReason) -> None:
        completion = self._completion
        if self._pieces:
            completion.text = "".join(self._pieces)  # type: ignore[assignment]
        completion.stop_reason = update.stop_reason
        completion.error = update.error
        completion.finish_reason = reason
        if update.ending is not None:
            self.request.end(update.ending)
