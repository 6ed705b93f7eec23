"""Requests, batches, and the scheduler that turns one into the other. No arrays."""

from mlx_paged.kv import BlockCopy
from mlx_paged.scheduling.batch import (
    IN_FLIGHT_TOKEN,
    Batch,
    FinishReason,
    ScheduledSequence,
    SequenceOutcome,
)
from mlx_paged.scheduling.config import SchedulerConfig, SchedulingPolicy
from mlx_paged.scheduling.request import Request, Sequence, SequenceStatus, StopPolicy
from mlx_paged.scheduling.scheduler import Scheduler

__all__ = [
    "IN_FLIGHT_TOKEN",
    "Batch",
    "BlockCopy",
    "FinishReason",
    "Request",
    "ScheduledSequence",
    "Scheduler",
    "SchedulerConfig",
    "SchedulingPolicy",
    "Sequence",
    "SequenceOutcome",
    "SequenceStatus",
    "StopPolicy",
]
