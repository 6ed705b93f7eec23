"""Restoration: brings the stored part of a sequence's prefix back to the device.

The sequence already has the blocks, and waits. All groups are restored together, so that full
attention, windows and recurrent state are of one point; then the blocks are indexed as if a step
had computed them::

      tokens          0         32        64        96       128
      full attention  [ device ][ device ][ stored ][ stored ]
      window          [   -    ][   -    ][   -    ][ stored ]
      state                                                  [ stored ]
                                |                            |
                                indexed and shared already   the sequence continues here
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mlx_paged.core.kv.tables import BlockTables


class BlockRead(NamedTuple):
    """Content to write to a block, or a state slot, of a group."""

    group: int
    block: int
    key: int  # of the tier


@dataclass(eq=False)
class Restoration:
    """Blocks that are read from a tier before their sequence can run.

    Attributes:
        tables: Tables of the sequence. Their blocks receive the contents.
        num_tokens: Tokens of the sequence that need no computation afterwards.
        num_restored_tokens: Tokens among these that full attention did not have on the device.
        reads: What to write where. The order does not matter.
        num_done: Number of leading `reads` that have been written.
        has_failed: True if some content could not be read. The tier no longer has that.
    """

    tables: BlockTables
    num_tokens: int
    num_restored_tokens: int
    reads: list[BlockRead] = field(default_factory=list)
    num_done: int = 0
    has_failed: bool = False

    @property
    def is_done(self) -> bool:
        """True if everything has been written."""
        return self.num_done == len(self.reads)
