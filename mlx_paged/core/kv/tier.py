"""Tier: stores blocks evicted from the device; the default tier drops them.

A node of the prefix tree has one integer entry per KV cache group::

    0          absent
    block > 0  on the device: a block, or a state slot
    -key < 0   elsewhere: a tier holds the content under `key`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from mlx_paged.core.kv.tree import PrefixNode

ABSENT = 0

#: Called with (node, group) when a tier drops that content by itself.
OnLost = Callable[[PrefixNode, int], None]


class Tier(Protocol):
    """Stores blocks off the device, in host memory or on disk."""

    def attach(self, on_lost: OnLost) -> None:
        """Connects the tier to a KV manager, which has nothing in it yet.

        Args:
            on_lost: To be called before the tier drops content by itself. It clears the entry of
                the node, and may drop other keys and remove nodes from the tree.
        """

    def store(self, node: PrefixNode, group: int, block: int) -> int:
        """Stores a block that is about to be evicted.

        No step in flight reads or writes the block. It may be reused as soon as this returns, so a
        tier must read it before the next step is launched. To make room, a tier may drop other
        content, and `node` itself may leave the tree thereby; then nothing is stored.

        Args:
            node: The prefix that the block belongs to; `PrefixNode.path` has the tokens as keys.
            group: Number of the KV cache group.

        Returns:
            A key greater than 0 for the stored content, or 0 if it was dropped.
        """

    def drop(self, key: int) -> None:
        """Drops the content stored under a key, once it is not pinned."""

    def pin(self, key: int) -> None:
        """Keeps content until `unpin`, because it is being restored."""

    def unpin(self, key: int) -> None:
        """Ends one `pin`."""

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if the tier disagrees with itself or with the tree."""


class DropTier:
    """Drops every block."""

    def attach(self, on_lost: OnLost) -> None:
        pass

    def store(self, node: PrefixNode, group: int, block: int) -> int:
        return 0

    def drop(self, key: int) -> None:
        raise AssertionError(f"nothing is stored, and yet key {key} is dropped")

    pin = unpin = drop

    def check_integrity(self) -> None:
        pass
