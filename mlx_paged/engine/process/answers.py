"""RemoteAnswer: an answer that grows in the engine's process, for its reader in this one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mlx_paged.core import FinishReason
from mlx_paged.engine.outputs import (
    CompletionOutput,
    DeferredText,
    PositionReport,
    RequestMetrics,
    RequestOutput,
    SequenceUpdate,
)
from mlx_paged.engine.pooling.params import PoolingParams
from mlx_paged.engine.process.messages import Accepted, AnswerUpdate, Beginning, Ending
from mlx_paged.engine.request_stream import Channel
from mlx_paged.engine.sampling.logprobs import LogprobReport
from mlx_paged.engine.sampling_params import SamplingParams

_update = partial(tuple.__new__, SequenceUpdate)  # as in `output_processor`


class RemoteRequest:
    """A request of the engine's process: fills its output, and hands its updates to its reader.

    Args:
        number: Number of its first answer.
        params: As the caller gave them; None: the runner's defaults.
        report: Adds the texts of the tokens to log-probabilities.

    Attributes:
        output: Its output in this process, which lags the engine's by a message.
        answers: Its answers, whose numbers follow each other.
    """

    def __init__(
        self,
        request_id: str,
        number: int,
        params: SamplingParams | PoolingParams | None,
        channel: Channel,
        report: LogprobReport,
    ) -> None:
        self.request_id = request_id
        self.number = number
        self.channel = channel
        self.report = report
        num_answers = params.n if isinstance(params, SamplingParams) else 1
        completions = [CompletionOutput(i) for i in range(num_answers)]
        if isinstance(params, SamplingParams) and params.logprobs is not None:
            for completion in completions:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
        self.output = RequestOutput(request_id, None, [], completions, RequestMetrics(0.0))
        self.answers: Sequence[RemoteAnswer] = ()

    def accept(self, accepted: Accepted, prompt: Any) -> None:
        """Fills in what the engine knows when it accepts the request."""
        output, token_ids = self.output, accepted.prompt_token_ids
        output.prompt = accepted.prompt
        output.prompt_token_ids = list(prompt) if token_ids is None else token_ids
        output.relaxed = accepted.relaxed
        output.metrics.arrival_time = accepted.arrival_time

    def begin(self, beginning: Beginning) -> None:
        """Takes what is known with the first token."""
        output, metrics = self.output, self.output.metrics
        output.num_cached_tokens = beginning.num_cached_tokens
        output.cache_miss = beginning.cache_miss
        metrics.scheduled_time = beginning.scheduled_time
        metrics.first_token_time = beginning.first_token_time
        if (positions := beginning.prompt_logprobs) is not None:
            report = self.report.of_parts
            output.prompt_logprobs = [None if p is None else report(p) for p in positions]

    def end(self, ending: Ending) -> None:
        """Takes what is known with the last token."""
        output = self.output
        output.metrics.finished_time = ending.finished_time
        output.num_accepted_drafts = ending.num_accepted_drafts
        output.num_rejected_drafts = ending.num_rejected_drafts
        output.pooled = ending.pooled


class RemoteAnswer:
    """One answer of a request.

    Args:
        text: Decodes its tokens when they are read; it reads `completion.token_ids`.
    """

    def __init__(
        self, request: RemoteRequest, completion: CompletionOutput, text: DeferredText
    ) -> None:
        self.request = request
        self._completion = completion
        self._tokens = completion.token_ids
        self._text = text
        self._pieces: list[str] = []  # of a text that the engine decodes
        completion.text = text  # type: ignore[assignment]

    def take_token(self, token: int) -> None:
        """Takes a token without further news."""
        request, tokens = self.request, self._tokens
        # fmt: off
        update = _update((request.request_id, self._completion.index, [token], self._text,
                          None, None, None, None, len(tokens)))
        # fmt: on
        tokens.append(token)
        request.channel.put(update)

    def take(self, news: AnswerUpdate) -> None:
        """Takes any update."""
        request, completion, tokens = self.request, self._completion, self._tokens
        if news.beginning is not None:
            request.begin(news.beginning)
        reports = self._reports(news)
        if news.token_ids:
            del tokens[news.num_tokens_before :]  # After an exception, they may come twice.
            tokens += news.token_ids
        pieces: list[str] | DeferredText = self._text
        if news.pieces is not None:
            pieces = news.pieces
            if pieces:
                self._pieces += pieces
                completion.text = ""  # type: ignore[assignment]
        elif news.num_text_tokens is not None:
            self._text.end(news.num_text_tokens)
        if news.finish_reason is not None:
            self._finish(news, news.finish_reason)
        request.channel.put(
            SequenceUpdate(
                request.request_id,
                completion.index,
                news.token_ids,
                pieces,
                news.finish_reason,
                news.stop_reason,
                news.error,
                reports,
                news.num_tokens_before,
            )
        )

    def _reports(self, news: AnswerUpdate) -> list[PositionReport] | None:
        if news.reports is None:
            return None
        completion = self._completion
        reports = list(map(self.request.report.of_parts, news.reports))
        if completion.logprobs is not None and completion.cumulative_logprob is not None:
            completion.logprobs += reports
            completion.cumulative_logprob += sum(report.logprob for report in reports)
        return reports

    def _finish(self, news: AnswerUpdate, reason: FinishReason) -> None:
        completion = self._completion
        if self._pieces:
            completion.text = "".join(self._pieces)  # type: ignore[assignment]
        completion.stop_reason = news.stop_reason
        completion.error = news.error
        completion.finish_reason = reason
        if news.ending is not None:
            self.request.end(news.ending)
