"""Outbox: collects the updates of a step into one message to the server process."""

from __future__ import annotations

from array import array

from mlx_paged.engine.outputs import DeferredText, RequestOutput, SequenceUpdate
from mlx_paged.engine.process.messages import (
    AnswerUpdate,
    Beginning,
    Ending,
    StepUpdates,
)


class Outbox:
    """Updates of all requests since the last message. Belongs to the engine's thread.

    Attributes:
        sinks: Sinks of unfinished requests by number; any thread may read it.
        launched: See `StepUpdates`.
    """

    def __init__(self) -> None:
        self.sinks: dict[int, RemoteSink] = {}
        self.launched: list[int] = []
        self._refuses_requests = False
        self._clear()

    def _clear(self) -> None:
        self.numbers = array("Q")
        self.tokens = array("q")
        self.updates: list[AnswerUpdate] = []
        self.mixed: set[int] = set()  # numbers in `updates`

    def take(self, *, refuses_requests: bool) -> StepUpdates | None:
        """Returns the updates since the last call, or None."""
        has_changed = refuses_requests != self._refuses_requests
        if not (self.numbers or self.updates or self.launched or has_changed):
            return None
        self._refuses_requests = refuses_requests
        taken = StepUpdates(
            self.numbers.tobytes(),
            self.tokens.tobytes(),
            self.updates,
            self.launched[:],
            refuses_requests,
        )
        self.launched.clear()
        self._clear()
        return taken


class RemoteSink:
    """The `UpdateSink` of one request whose reader is in the server process.

    Args:
        number: Number of its first answer; the other `num_answers` - 1 follow it.
    """

    def __init__(self, request_id: str, number: int, num_answers: int, outbox: Outbox) -> None:
        self.request_id = request_id
        self.number = number
        self.output: RequestOutput  # once the engine has accepted the request
        self._outbox = outbox
        self._num_sent = [0] * num_answers  # tokens of each answer
        self._has_begun = False
        outbox.sinks[number] = self

    def put(self, update: SequenceUpdate) -> None:
        """Adds an update to the next message."""
        index, token_ids, before = update.index, update.token_ids, update.num_tokens_before
        number, outbox = self.number + index, self._outbox
        if (
            before == self._num_sent[index] > 0
            and len(token_ids) == 1
            and update.finish_reason is None
            and update.reports is None
            and isinstance(update.pieces, DeferredText)
            and number not in outbox.mixed
        ):
            outbox.numbers.append(number)
            outbox.tokens.append(token_ids[0])
            self._num_sent[index] = before + 1
            return
        outbox.updates.append(self._record(number, update))
        outbox.mixed.add(number)
        self._num_sent[index] = before + len(token_ids)
        if self.output.finished:
            outbox.sinks.pop(self.number, None)

    def _record(self, number: int, update: SequenceUpdate) -> AnswerUpdate:
        pieces, reports, output = update.pieces, update.reports, self.output
        beginning = ending = None
        if not self._has_begun and output.metrics.first_token_time is not None:
            self._has_begun = True
            beginning = _beginning(output)
        if output.finished:
            ending = Ending(
                output.metrics.finished_time,
                output.num_accepted_drafts,
                output.num_rejected_drafts,
                output.pooled,
            )
        return AnswerUpdate(
            number,
            update.num_tokens_before,
            list(update.token_ids),
            None if isinstance(pieces, DeferredText) else pieces,
            update.finish_reason,
            update.stop_reason,
            update.error,
            None if reports is None else [report.parts for report in reports],
            pieces.num_text_tokens if isinstance(pieces, DeferredText) else None,
            beginning,
            ending,
        )


def _beginning(output: RequestOutput) -> Beginning:
    positions = output.prompt_logprobs
    return Beginning(
        output.num_cached_tokens,
        output.cache_miss,
        output.metrics.scheduled_time,
        output.metrics.first_token_time,
        None if positions is None else [None if p is None else p.parts for p in positions],
    )
