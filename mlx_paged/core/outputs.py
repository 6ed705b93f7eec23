"""SchedulerOutput: a step that was scheduled, and the scheduler's report on its new tokens."""

from __future__ import annotations

from typing import NamedTuple

from mlx_paged.core.request import FinishReason, Sequence
from mlx_paged.core.step import StepBatch


class SchedulerOutput(NamedTuple):
    """One step of the engine: data for the device half, and the scheduler's sequences.

    Attributes:
        batch: The step as data. Never empty.
        sequences: In the order of the batch; their numbers are the scheduler's and may be ahead of
            this step.
    """

    batch: StepBatch
    sequences: list[Sequence]


class SequenceOutcome(NamedTuple):
    """Result of a step for one sequence.

    Attributes:
        sequence: The sequence.
        token_id: The token it gained; None when it ended without one (timeout).
        finish_reason: Why it ended; None while it continues.
    """

    sequence: Sequence
    token_id: int | None
    finish_reason: FinishReason | None
