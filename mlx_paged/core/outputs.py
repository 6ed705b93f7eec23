"""SchedulerOutput: the scheduler's plan for one step, and its report on the new tokens."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from mlx_paged.core.encoder_cache import ScheduledMedia
from mlx_paged.core.kv.groups import BlockCopy, StateMove, StepTable
from mlx_paged.core.request import FinishReason, Sequence

#: Placeholder in `ScheduledSequence.token_ids` for a token not yet known on the host: the one
#: that the step before this one, still in flight, samples for the same sequence. It is only ever
#: a sequence's sole token in a step.
IN_FLIGHT_TOKEN = -1


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step; all that the device half needs to know about it.

    The step computes positions `[start, start + num_tokens)`. `block_table[p // block_size]` holds
    position `p`; the table covers at least `context_len` positions and may cover more (blocks are
    reserved ahead of use).

    Attributes:
        sequence: The sequence. Its `sampler` says how to choose the token, and its request what
            to report of the prompt; its numbers are the scheduler's and may be ahead of this step.
        token_ids: Tokens to compute, of a prompt an `array`; `(IN_FLIGHT_TOKEN,)` when the only
            one is what the previous step is sampling.
        start: Position of the first of them. Everything before it is already in the sequence's
            blocks.
        samples: Whether the step samples a token after the last one: true when no known token is
            left to compute.
        input_from: Entry of the tokens sampled by the previous step that is the input; -1: known.
        tables: Its block table in each attention group, full attention first. (`dirty_from` is 0
            when it was (re)admitted.)
        state: Its state slots; None where the model has no recurrent layers.
    """

    sequence: Sequence
    token_ids: SequenceOf[int]
    start: int
    samples: bool
    input_from: int
    tables: tuple[StepTable, ...]
    state: StateMove | None = None

    @property
    def seq_id(self) -> int:
        """Key of the sequence, unique in the scheduler's life."""
        return self.sequence.seq_id

    @property
    def request_id(self) -> str:
        """The request that the sequence belongs to."""
        return self.sequence.request.request_id

    @property
    def block_table(self) -> tuple[int, ...]:
        """Physical blocks of full attention, in order."""
        return self.tables[0].blocks

    @property
    def num_tokens(self) -> int:
        """Tokens of this sequence in the step."""
        return len(self.token_ids)

    @property
    def context_len(self) -> int:
        """Tokens in the blocks after the step; the position that a sampled token will take."""
        return self.start + len(self.token_ids)

    @property
    def awaits_token(self) -> bool:
        """True if the input token is still being sampled by the step before this one."""
        return self.input_from >= 0

    @property
    def media_items(self) -> range:
        """The items of its prompt whose features this part of the step needs."""
        media = self.sequence.request.prompt_media
        return range(0) if media is None else media.between(self.start, self.context_len)


class SchedulerOutput(NamedTuple):
    """One step of the engine.

    Attributes:
        step: Number of the step; increases by one with every step.
        sequences: Decodes first, then prefill chunks. Never empty.
        block_copies: For each attention group, full attention first; executed in order before
            anything else of the step. No block is both a source and a destination.
        media: Features that the step makes and gives up; None where it computes no media item.
    """

    step: int
    sequences: tuple[ScheduledSequence, ...]
    block_copies: tuple[tuple[BlockCopy, ...], ...]
    media: ScheduledMedia | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step."""
        return sum(len(s.token_ids) for s in self.sequences)


class SequenceOutcome(NamedTuple):
    """Result of a step for one sequence.

    Attributes:
        sequence: The sequence.
        token_id: The token it gained; None when it ended without one (timeout).
        finish_reason: Why it ended; None while it continues.
    """

    sequence: Sequence
    token_id: int | None
    finish_reason: FinishReason | None
