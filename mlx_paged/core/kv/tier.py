"""Tier: stores blocks evicted from the device; the default tier drops them.

A node of the prefix tree has one integer entry per KV cache group::

    0          absent
    block > 0  on the device: a block, or a state slot
    -key < 0   elsewhere: a tier holds the content under `key`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mlx_paged.core.kv.tree import PrefixNode, PrefixQuery

if TYPE_CHECKING:
    from mlx_paged.core.kv.groups import KVCacheGroup
    from mlx_paged.core.kv.stored import LookUp, StoredPrefix
    from mlx_paged.core.kv.tables import BlockTables

ABSENT = 0


class TierOwner(Protocol):
    """The interface of a KV manager to its tier."""

    @property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        """All KV cache groups, by number."""

    def on_lost(self, node: PrefixNode, group: int) -> None:
        """To be called before the tier drops content by itself.

        It clears the entry of the node, and may drop other keys and remove nodes from the tree.
        """

    def media_content(self, token: int) -> tuple[bytes, int] | None:
        """Returns (key of a media item, position in it) of a media id; None if it is forgotten."""


class Tier(Protocol):
    """Stores blocks off the device, in host memory or on disk.

    Attributes:
        is_empty: True if no prefix can be restored.
    """

    @property
    def is_empty(self) -> bool: ...

    def attach(self, owner: TierOwner) -> None:
        """Connects the tier to a KV manager that is still empty."""

    def look_up(self, query: PrefixQuery) -> LookUp | None:
        """Looks for content that is not in the prefix tree; None if there is none.

        A key that the result returns is valid until the next call of the tier, unless pinned.
        """

    def num_worth_restoring(self, stored: StoredPrefix, first: int) -> int:
        """Returns how many leading blocks of a prefix come back faster than they are computed.

        Args:
            stored: The prefix. Every group can continue from its end.
            first: Leading blocks that need no restoration.

        Returns:
            `stored.num_blocks` to restore the whole prefix. A smaller number is the length of a
            shorter prefix that may be worth restoring, judged by full attention alone; `first` or
            less if none is.
        """

    def on_refused(self) -> None:
        """Called when an admitted sequence computes blocks because of `num_worth_restoring`."""

    def settle(self, tables: BlockTables, depth: int) -> None:
        """Called when a sequence has computed its prompt, and before its blocks are released.

        The tier may copy its indexed blocks, now or later: to have them after a restart, or so that
        their eviction takes no time.

        Args:
            depth: Number of blocks after which another sequence may continue.
        """

    def store(self, node: PrefixNode, group: int, block: int) -> int:
        """Stores a block that is about to be evicted.

        No step in flight reads or writes the block. It may be reused as soon as this returns, so a
        tier must read it before the next step is launched. To make room, a tier may drop other
        content. If that removes `node` itself from the tree, nothing is stored.

        Args:
            node: The prefix that the block belongs to; `PrefixNode.path` has the tokens as keys.
            group: Number of the KV cache group.

        Returns:
            A key greater than 0 for the stored content, or 0 if it was dropped.
        """

    def forget(self, node: PrefixNode, group: int) -> None:
        """Called when the device drops or replaces a block without `store`.

        A copy that the tier made of it ahead of its eviction is useless now.
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

    is_empty = True

    def attach(self, owner: TierOwner) -> None:
        pass

    def look_up(self, query: PrefixQuery) -> LookUp | None:
        return None

    def num_worth_restoring(self, stored: StoredPrefix, first: int) -> int:
        return stored.num_blocks

    def on_refused(self) -> None:
        pass

    def settle(self, tables: BlockTables, depth: int) -> None:
        pass

    def store(self, node: PrefixNode, group: int, block: int) -> int:
        return 0

    def forget(self, node: PrefixNode, group: int) -> None:
        pass

    def drop(self, key: int) -> None:
        raise AssertionError(f"nothing is stored, and yet key {key} is dropped")

    pin = unpin = drop

    def check_integrity(self) -> None:
        pass
