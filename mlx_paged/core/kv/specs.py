"""Records of the KV store: group specs, block tables and copies of a step, recurrent states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from mlx_paged.core.kv.tree import PrefixNode
from mlx_paged.errors import InvalidParameterError

#: Slots per running sequence: one read and one written by the running step, and one written by the
#: step launched during it.
SLOTS_PER_SEQUENCE = 3


@dataclass(frozen=True)
class WindowGroupSpec:
    """Describes a group of windowed layers.

    Attributes:
        num_blocks: Size of its pool, including block 0.
        span: Maximum tokens that a row sees, including itself.
        first_visible: Maps a position to the first position that its row or any later row sees.
            Never decreases.
    """

    num_blocks: int
    span: int
    first_visible: Callable[[int], int]


@dataclass(frozen=True)
class StateGroupSpec:
    """Describes the recurrent layers.

    Attributes:
        num_slots: Size of the pool, including slot 0.
        snapshot_interval: Blocks between two snapshots during generation.
        keeps_newest: True to also keep the newest snapshot of each output, for the next turn.
        on_free: Called with each slot that becomes free. If set, a slot is only the name of an
            immutable state that the caller keeps: the pool grows as needed, and a slot is free as
            soon as it is released, even while a step reads its state.
    """

    num_slots: int
    snapshot_interval: int = 8
    keeps_newest: bool = False
    on_free: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if self.num_slots < 3:
            raise InvalidParameterError(
                "num_slots", "at least 3 (slot 0 is the initial state)", self.num_slots
            )
        if self.snapshot_interval < 1:
            raise InvalidParameterError("snapshot_interval", "at least 1", self.snapshot_interval)


class StateMove(NamedTuple):
    """State slots of one sequence in one step: read before its rows, written after them."""

    read: int
    write: int


class BlockCopy(NamedTuple):
    """Copy-on-write: copy block `src` to `dst`, in every layer, before the step's first write."""

    src: int
    dst: int


class StepTable(NamedTuple):
    """A sequence's table in one attention group, for one step.

    Attributes:
        blocks: Physical blocks in order; block 0 for blocks that slid out of a window.
        dirty_from: First entry that may differ from the sequence's previous step, ignoring new
            zeros; `len(blocks)` if none does.
    """

    blocks: tuple[int, ...]
    dirty_from: int


class KeptState(NamedTuple):
    """A state kept for rollback until the step that read it is committed.

    Attributes:
        slot: The state after `num_tokens` tokens.
        end: Number of tokens after the step that read it.
    """

    slot: int
    num_tokens: int
    end: int


@dataclass
class StateSlot:
    """A sequence's recurrent state.

    Attributes:
        slot: Newest state; 0 before the first token.
        due: Token positions at which to take a snapshot.
        num_scheduled: Number of tokens that `slot` covers.
        output_from: Number of prompt tokens; None takes no snapshots.
        newest: Node of the newest snapshot of the output, to drop when there is a newer one.
        pending: (depth in blocks, slot) of snapshots that have no node in the prefix tree yet.
        kept: States before steps that may be rolled back, oldest first.
    """

    slot: int
    due: set[int]
    num_scheduled: int
    output_from: int | None = None
    newest: PrefixNode | None = None
    pending: list[tuple[int, int]] = field(default_factory=list)
    kept: list[KeptState] = field(default_factory=list)
