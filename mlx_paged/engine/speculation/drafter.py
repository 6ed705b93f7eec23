"""Drafter: the interface for guessing the next tokens of sequences.

A drafter may guess anything: a wrong draft costs time and never changes an answer. All sequences of
a step are drafted in one call, so that a model computes them together.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from mlx_paged.core import SchedulerOutput, Sequence, StepBatch
from mlx_paged.engine.input_tokens import DraftsInFlight
from mlx_paged.engine.speculation.acceptance import Counts, Draft, new_counts
from mlx_paged.engine.speculation.costs import StepCosts
from mlx_paged.engine.speculation.predicted import PredictedAnswer


class DraftState:
    """The state of speculation for one sequence.

    Attributes:
        own: The state of a drafter that is a model; None until it first drafts.
        index: The state of a lookup; None until it first drafts.
        counts: Its drafts and accepted drafts.
        pending: Drafts whose tokens are not all known yet.
        predicted: The caller's guess of the answer; None without one.
    """

    __slots__ = ("counts", "index", "own", "pending", "predicted")

    def __init__(self, predicted: PredictedAnswer | None = None) -> None:
        self.predicted = predicted
        self.own: Any = None
        self.index: Any = None
        self.counts: Counts = new_counts()
        self.pending: Draft | None = None


class Wanted(NamedTuple):
    """A request for drafts.

    Attributes:
        seq: A running sequence whose newest token is known.
        max_drafts: At least 1. If drafts have a price, the tables have room for that many.
    """

    seq: Sequence
    state: DraftState
    max_drafts: int


class StartedDrafts(NamedTuple):
    """Drafts that a drafter has begun.

    Attributes:
        finish: Waits for them and returns the result of `Drafter.draft`. Call it once, before the
            next drafts.
        in_flight: The drafts on the device; None if the host knows them.
    """

    finish: Callable[[], list[Draft | None]]
    in_flight: DraftsInFlight | None = None


class Price(Protocol):
    """The time that a drafter takes, to choose the number of drafts before any is made.

    Attributes:
        rounds: Estimates the time to draft one more token for some sequences.
        drafts_at_once: True if the first round makes all drafts, so more drafts cost nothing.
    """

    rounds: StepCosts | None
    drafts_at_once: bool

    def kind(self, seq: Sequence) -> int:
        """Returns the kind that a sequence's drafts would have, see `acceptance.kind_of`."""

    def num_missing(self, seq: Sequence, state: DraftState) -> int:
        """Returns the number of tokens that must be computed before the first draft; at least 1."""


class Drafter:
    """Guesses the next tokens of sequences.

    Attributes:
        price: The time that drafts take; None if it is negligible.
    """

    price: Price | None = None

    def draft(self, wanted: SequenceOf[Wanted]) -> list[Draft | None]:
        """Returns at most `max_drafts` tokens (at least 1) for each sequence, or None.

        No step is in flight if drafts have a price.
        """
        raise NotImplementedError

    def begin(self, wanted: SequenceOf[Wanted]) -> StartedDrafts:
        """Starts `draft`; may leave the drafts on the device."""
        drafts = self.draft(wanted)
        return StartedDrafts(lambda: drafts)

    def launched(self, batch: StepBatch) -> None:
        """Observes a step of the model, before it is read."""

    def observe(self, output: SchedulerOutput, hidden: mx.array | None) -> None:
        """Observes a committed step.

        Args:
            hidden: See `StepResult`.
        """

    def flush(self) -> None:
        """Does work that cannot wait for the next drafts, before another step is planned."""

    def finish(self, seq: Sequence) -> None:
        """Called when a sequence has ended."""

    def reset(self) -> None:
        """Forgets a call that an exception interrupted. The device is idle."""
