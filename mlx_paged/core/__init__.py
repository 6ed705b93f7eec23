"""The state half: requests, the scheduler, the KV store. Plain Python: no arrays, no mlx."""

from mlx_paged.core.config import SchedulerConfig, SchedulingPolicy
from mlx_paged.core.encoder_cache import EncoderCacheStats, ScheduledMedia
from mlx_paged.core.kv.elastic import DevicePools, ElasticKVManager
from mlx_paged.core.kv.forking import ForkingKVManager
from mlx_paged.core.kv.manager import KVManager
from mlx_paged.core.kv.memory_tier import MemoryTier
from mlx_paged.core.kv.misses import CacheMiss, MissReason, PromptHistory
from mlx_paged.core.kv.pool import NULL_BLOCK, BlockPool
from mlx_paged.core.kv.restoration import BlockRead, Restoration
from mlx_paged.core.kv.restore_rates import Level, RestoreRates
from mlx_paged.core.kv.specs import (
    BlockCopy,
    StateGroupSpec,
    StateMove,
    StepTable,
    WindowGroupSpec,
)
from mlx_paged.core.kv.tables import BlockTables
from mlx_paged.core.kv.tree import PrefixMatch, PrefixNode, PrefixQuery, PrefixTree
from mlx_paged.core.kv.usage import KVCounters, KVUsage
from mlx_paged.core.media import MediaSpan, PromptMedia
from mlx_paged.core.outputs import SchedulerOutput
from mlx_paged.core.request import FinishReason, Request, Sequence, SequenceStatus, StopPolicy
from mlx_paged.core.scheduler import Scheduler
from mlx_paged.core.step import PooledStates, PromptLogprobs, StepBatch, StepResult, StepTime
from mlx_paged.core.step_time import StepTimeLimit

__all__ = [
    "NULL_BLOCK",
    "BlockCopy",
    "BlockPool",
    "BlockRead",
    "BlockTables",
    "CacheMiss",
    "DevicePools",
    "ElasticKVManager",
    "EncoderCacheStats",
    "FinishReason",
    "ForkingKVManager",
    "KVCounters",
    "KVManager",
    "KVUsage",
    "MediaSpan",
    "Level",
    "MemoryTier",
    "MissReason",
    "PooledStates",
    "PrefixMatch",
    "PrefixNode",
    "PrefixQuery",
    "PrefixTree",
    "PromptHistory",
    "PromptLogprobs",
    "PromptMedia",
    "Request",
    "Restoration",
    "RestoreRates",
    "ScheduledMedia",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulingPolicy",
    "Sequence",
    "SequenceStatus",
    "StateGroupSpec",
    "StateMove",
    "StopPolicy",
    "StepBatch",
    "StepResult",
    "StepTable",
    "StepTime",
    "StepTimeLimit",
    "WindowGroupSpec",
]
