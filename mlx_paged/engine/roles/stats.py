"""TransferStats: counts what an engine with a role has sent or received."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TransferStats:
    """Prompts that one engine computed for another, since the engine was made.

    Attributes:
        num_prompts: Prompts requested from the prefill engine, or by a decode engine.
        num_failed_prompts: Prompts whose blocks were not all received, or not all sent.
        num_blocks, num_bytes: Blocks received or sent, and their bytes.
        num_shared_bytes: Bytes of those in memory that both engines share.
    """

    num_prompts: int = 0
    num_failed_prompts: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    num_shared_bytes: int = 0

    def add(self, num_blocks: int, num_bytes: int, num_shared_bytes: int) -> None:
        """Counts blocks."""
        self.num_blocks += num_blocks
        self.num_bytes += num_bytes
        self.num_shared_bytes += num_shared_bytes
