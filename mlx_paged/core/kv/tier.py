"""Tier: stores blocks evicted from the device; the default tier drops them.

A node of the prefix tree has one integer entry per KV cache group::

    0          absent
    block > 0  on the device: a block, or a state slot
    -key < 0   elsewhere: a tier holds the content under `key`
"""

from __future__ import annotations

from typing import Protocol

from mlx_paged.core.kv.tree import PrefixNode

ABSENT = 0


class Tier(Protocol):
    """Stores blocks off the device, in host memory or on disk."""

    def store(self, node: PrefixNode, group: int, block: int) -> int:
        """Stores a block that is about to be evicted.

        No step in flight reads or writes the block. It may be reused as soon as this returns, so a
        tier must read it before the next step is launched.

        Args:
            node: The prefix that the block belongs to; `PrefixNode.path` has the tokens as keys.
            group: Number of the KV cache group.

        Returns:
            A key greater than 0 for the stored content, or 0 if it was dropped.
        """

    def drop(self, key: int) -> None:
        """Drops the content stored under a key."""


class DropTier:
    """Drops every block."""

    def store(self, node: PrefixNode, group: int, block: int) -> int:
        return 0

    def drop(self, key: int) -> None:
        raise AssertionError(f"nothing is stored, and yet key {key} is dropped")
