"""SchedulerOutput: one scheduled step."""

from __future__ import annotations

from typing import NamedTuple

from mlx_paged.core.request import Sequence
from mlx_paged.core.step import StepBatch


class SchedulerOutput(NamedTuple):
    """One step of the engine: data for the device half, and the scheduler's sequences.

    Attributes:
        batch: The step as data. Never empty.
        sequences: In batch order. Their counters belong to the scheduler and may be ahead of this
            step.
    """

    batch: StepBatch
    sequences: list[Sequence]
