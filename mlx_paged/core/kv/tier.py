"""Tier: takes the blocks that leave the device; the default one drops them.

A node of the prefix tree has one entry for each KV cache group, an int::

    0          absent
    block > 0  on the device: a block, or a state slot
    -key < 0   elsewhere: a tier holds the content under `key`
"""

from __future__ import annotations

from typing import Protocol

from mlx_paged.core.kv.tree import PrefixNode

ABSENT = 0


class Tier(Protocol):
    """Holds blocks elsewhere, in host memory or on a disk."""

    def store(self, node: PrefixNode, group: int, block: int) -> int:
        """Takes over a block that is about to be evicted.

        No step in flight reads or writes the block. It may be handed out again as soon as this
        returns, so a tier reads it before the next step is launched.

        Args:
            node: the prefix whose block it is (`PrefixNode.path` has the tokens, as keys).
            group: number of the KV cache group.

        Returns:
            A key, greater than 0, under which the content is from now on; 0 if it is dropped.
        """

    def drop(self, key: int) -> None:
        """The content under a key is not needed any more."""


class DropTier:
    """Drops every block."""

    def store(self, node: PrefixNode, group: int, block: int) -> int:
        return 0

    def drop(self, key: int) -> None:
        raise AssertionError(f"nothing is stored, and yet key {key} is dropped")
