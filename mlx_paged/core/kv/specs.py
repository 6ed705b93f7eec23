"""Records of the KV store: what groups of layers need, what a step is told, what a state is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from mlx_paged.errors import InvalidParameterError

#: Slots of a running sequence: one read and one written by the step that runs, and one more written
#: by the step launched while it runs.
SLOTS_PER_SEQUENCE = 3


@dataclass(frozen=True)
class WindowGroupSpec:
    """The needs of a group of windowed layers.

    Attributes:
        num_blocks: Blocks of its pool, block 0 included.
        span: Most tokens that a row sees, itself included.
        first_visible: The first position that a row at a given position, or any row after it, sees;
            it never decreases.
    """

    num_blocks: int
    span: int
    first_visible: Callable[[int], int]


@dataclass(frozen=True)
class StateGroupSpec:
    """The needs of the recurrent layers.

    Attributes:
        num_slots: Slots of the pool, slot 0 included.
        snapshot_interval: Blocks between two snapshots while tokens are generated.
    """

    num_slots: int
    snapshot_interval: int = 8

    def __post_init__(self) -> None:
        if self.num_slots < 3:
            raise InvalidParameterError(
                "num_slots", "at least 3 (slot 0 is the initial state)", self.num_slots
            )
        if self.snapshot_interval < 1:
            raise InvalidParameterError("snapshot_interval", "at least 1", self.snapshot_interval)


class StateMove(NamedTuple):
    """Slots of one sequence in one step: state before its rows, and after them."""

    read: int
    write: int


class BlockCopy(NamedTuple):
    """Copy-on-write: copy block `src` to `dst`, in every layer, before the step's first write."""

    src: int
    dst: int


class StepTable(NamedTuple):
    """A sequence's table in one attention group, for one step.

    Attributes:
        blocks: Physical blocks in order; block 0 where blocks slid out of a window.
        dirty_from: First entry that may differ from what the sequence's previous step was given
            (but for new zeros); `len(blocks)` where none does.
    """

    blocks: tuple[int, ...]
    dirty_from: int


class KeptState(NamedTuple):
    """A state that is kept until the step which read it is committed, so that it can be taken back.

    Attributes:
        slot: The state after `num_tokens` tokens.
        end: Tokens after the step that read it.
    """

    slot: int
    num_tokens: int
    end: int


@dataclass
class StateSlot:
    """A sequence's recurrent state.

    Attributes:
        slot: Newest state; 0 before the first token.
        due: Positions at which a snapshot is wanted, in tokens.
        num_scheduled: Tokens in `slot`.
        pending: (depth in blocks, slot) of snapshots written or being written, whose node is not
            there yet.
        kept: States before steps that may be taken back, the oldest first.
    """

    slot: int
    due: set[int]
    num_scheduled: int
    pending: list[tuple[int, int]] = field(default_factory=list)
    kept: list[KeptState] = field(default_factory=list)
