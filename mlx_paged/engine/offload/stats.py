"""OffloadStats: statistics of blocks outside of the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlx_paged.engine.roles.stats import TransferStats


@dataclass(frozen=True)
class OffloadStats:
    """Blocks outside of the device at one moment, and since the engine was made.

    Attributes:
        memory_bytes: Bytes stored in host memory.
        memory_capacity: Their maximum.
        num_stored_blocks: Evicted blocks of all groups that were kept in host memory.
        num_lost_blocks: Stored blocks dropped for lack of room.
        num_skipped_blocks: Evicted blocks that were not kept, because a step had copied enough.
        disk_bytes: Bytes of this model's blocks on disk; 0 without a disk.
        num_written_bytes, num_read_bytes: Bytes written to and read from disk.
        num_damaged_blocks: Blocks that could not be read.
        disk_warnings: Faults of the disk, by kind.
        transfers: Prompts computed for another engine, or by one; None without a role.
    """

    memory_bytes: int = 0
    memory_capacity: int = 0
    num_stored_blocks: int = 0
    num_lost_blocks: int = 0
    num_skipped_blocks: int = 0
    disk_bytes: int = 0
    num_written_bytes: int = 0
    num_read_bytes: int = 0
    num_damaged_blocks: int = 0
    disk_warnings: Mapping[str, int] = field(default_factory=dict)
    transfers: TransferStats | None = None
