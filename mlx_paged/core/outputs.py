"""SchedulerOutput: a step that was scheduled."""

from __future__ import annotations

from typing import NamedTuple

from mlx_paged.core.request import Sequence
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
