"""The KV store: one pool of blocks, one prefix index, one writer of block tables."""

from mlx_paged.kv.block_pool import NULL_BLOCK, BlockPool
from mlx_paged.kv.block_table import BlockCopy, BlockTable
from mlx_paged.kv.manager import KVManager
from mlx_paged.kv.radix_index import PrefixMatch, RadixIndex
from mlx_paged.kv.radix_node import RadixNode
from mlx_paged.kv.side_groups import GroupRows
from mlx_paged.kv.state_group import StateGroupSpec, StateMove
from mlx_paged.kv.stats import KVCounters, KVUsage
from mlx_paged.kv.window_group import WindowGroupSpec, WindowRow

__all__ = [
    "NULL_BLOCK",
    "BlockCopy",
    "BlockPool",
    "BlockTable",
    "GroupRows",
    "KVCounters",
    "KVManager",
    "KVUsage",
    "PrefixMatch",
    "RadixIndex",
    "RadixNode",
    "StateMove",
    "StateGroupSpec",
    "WindowRow",
    "WindowGroupSpec",
]
