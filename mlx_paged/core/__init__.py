"""The state half: requests, the scheduler, the KV store. Plain Python: no arrays, no mlx."""

from mlx_paged.core.batch import (
    IN_FLIGHT_TOKEN,
    Batch,
    FinishReason,
    ScheduledSequence,
    SequenceOutcome,
)
from mlx_paged.core.block_pool import NULL_BLOCK, BlockPool
from mlx_paged.core.block_table import BlockCopy, BlockTable
from mlx_paged.core.config import SchedulerConfig, SchedulingPolicy
from mlx_paged.core.manager import KVManager
from mlx_paged.core.radix_index import PrefixMatch, RadixIndex
from mlx_paged.core.radix_node import RadixNode
from mlx_paged.core.request import Request, Sequence, SequenceStatus, StopPolicy
from mlx_paged.core.scheduler import Scheduler
from mlx_paged.core.side_groups import GroupRows
from mlx_paged.core.state_group import StateGroupSpec, StateMove
from mlx_paged.core.stats import KVCounters, KVUsage
from mlx_paged.core.window_group import WindowGroupSpec, WindowRow

__all__ = [
    "Batch",
    "BlockCopy",
    "BlockPool",
    "BlockTable",
    "FinishReason",
    "GroupRows",
    "IN_FLIGHT_TOKEN",
    "KVCounters",
    "KVManager",
    "KVUsage",
    "NULL_BLOCK",
    "PrefixMatch",
    "RadixIndex",
    "RadixNode",
    "Request",
    "ScheduledSequence",
    "Scheduler",
    "SchedulerConfig",
    "SchedulingPolicy",
    "Sequence",
    "SequenceOutcome",
    "SequenceStatus",
    "StateGroupSpec",
    "StateMove",
    "StopPolicy",
    "WindowGroupSpec",
    "WindowRow",
]
