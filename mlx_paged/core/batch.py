"""What the scheduler hands to the device half: frozen, plain ints, valid for one step."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from mlx_paged.core.block_table import BlockCopy
from mlx_paged.core.side_groups import GroupRows

#: Stands in `ScheduledSequence.token_ids` for a token that is not known on the host yet: the one
#: that the step before this one, still in flight, samples for the same sequence. It is only ever
#: the sole token of a row.
IN_FLIGHT_TOKEN = -1


class FinishReason(StrEnum):
    """Why a sequence ended; the values are those of the OpenAI API where it has one."""

    STOP = "stop"  # end-of-text token, stop token or stop string
    LENGTH = "length"  # max_tokens, or no room for a longer sequence
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


class ScheduledSequence(NamedTuple):
    """The rows of one sequence in a step.

    The step computes positions `[start, start + num_tokens)`. `block_table[p // block_size]` holds
    position `p`; the table covers at least `context_len` positions and may cover more (blocks are
    reserved ahead of use).

    Attributes:
        seq_id: Key of the sequence: unique in the scheduler's life; `commit` takes sampled tokens
            under it.
        request_id: The request it belongs to.
        token_ids: Tokens to compute; `(IN_FLIGHT_TOKEN,)` when the only one is what the previous
            step is sampling.
        start: Position of the first of them. Everything before it is already in the sequence's
            blocks.
        block_table: Physical blocks of the sequence, in order.
        dirty_from: First entry of `block_table` that may differ from what this sequence's previous
            step was given; `len(block_table)` when none does, 0 when it was (re)admitted. For
            runners that keep tables on the device.
        samples: Whether the step samples a token after the last row: true when no known token is
            left to compute.
        groups: Its tables in the window groups and its state slots, where the model has such
            layers.
    """

    seq_id: int
    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    dirty_from: int
    samples: bool
    groups: GroupRows = GroupRows()

    @property
    def num_tokens(self) -> int:
        """Rows of this sequence in the step."""
        return len(self.token_ids)

    @property
    def context_len(self) -> int:
        """Tokens in the blocks after the step; the position that a sampled token will take."""
        return self.start + len(self.token_ids)

    @property
    def awaits_token(self) -> bool:
        """Whether the input token is still being sampled by the step before this one."""
        return self.token_ids[0] == IN_FLIGHT_TOKEN


class Batch(NamedTuple):
    """One step of the engine.

    Attributes:
        step: Number of the step; increases by one with every batch.
        sequences: Decodes first, then prefill chunks. Never empty.
        block_copies: Executed in order before anything else of the step. No block is both a source
            and a destination.
        window_copies: The same for each window group.
    """

    step: int
    sequences: tuple[ScheduledSequence, ...]
    block_copies: tuple[BlockCopy, ...]
    window_copies: tuple[tuple[BlockCopy, ...], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the whole step."""
        return sum(len(s.token_ids) for s in self.sequences)


class SequenceOutcome(NamedTuple):
    """What became of a sequence in a step.

    Attributes:
        request_id: The request.
        seq_id: The sequence.
        index: Which of the request's `n` sequences it is.
        token_id: The token it gained; None when it ended without one (timeout).
        finish_reason: Why it ended; None while it goes on.
    """

    request_id: str
    seq_id: int
    index: int  # type: ignore[assignment]  # (a tuple's method has the name)
    token_id: int | None
    finish_reason: FinishReason | None
