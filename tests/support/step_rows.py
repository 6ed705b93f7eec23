"""A step as rows, one per sequence, which tests read more easily than the columns of a batch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

from mlx_paged.core import (
    BlockCopy,
    ScheduledMedia,
    SchedulerOutput,
    Sequence,
    StateMove,
    StepBatch,
    StepTable,
)
from mlx_paged.core.kv.tree import TOKEN_TYPE

#: Placeholder in `Row.token_ids` for a token that the previous step is still sampling.
IN_FLIGHT_TOKEN = -1


class Row(NamedTuple):
    """One sequence's part of a step."""

    sequence: Any  # None for a step without a scheduler
    seq_id: int
    token_ids: tuple[int, ...]
    start: int
    samples: bool
    input_from: int
    tables: tuple[StepTable, ...]
    state: StateMove | None = None
    name: str = ""
    sampling: Any = None  # a `SamplingRow` for a step without a scheduler
    num_drafts: int = 0

    @property
    def request_id(self) -> str:
        return self.name or self.sequence.request.request_id

    @property
    def block_table(self) -> tuple[int, ...]:
        return self.tables[0].blocks

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def context_len(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def awaits_token(self) -> bool:
        return self.input_from >= 0

    @property
    def media_items(self) -> range:
        media = self.sequence.request.prompt_media
        return range(0) if media is None else media.between(self.start, self.context_len)


class Rows(NamedTuple):
    """A whole step."""

    step: int
    sequences: tuple[Row, ...]
    block_copies: tuple[tuple[BlockCopy, ...], ...]
    media: ScheduledMedia | None = None
    output: SchedulerOutput | None = None

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.sequences)


def rows_of(batch: StepBatch, sequences: SequenceOf[Sequence | None] = ()) -> tuple[Row, ...]:
    """The rows of a batch."""
    rows = []
    for i, begin in enumerate(batch.query_starts()):
        token_ids = tuple(batch.token_ids[begin : begin + batch.query_lens[i]])
        if batch.input_from[i] >= 0:
            assert token_ids[0] == 0
            token_ids = (IN_FLIGHT_TOKEN, *token_ids[1:])
        rows.append(
            Row(
                sequence=sequences[i] if sequences else None,
                seq_id=batch.seq_ids[i],
                token_ids=token_ids,
                start=batch.starts[i],
                samples=batch.samples[i],
                input_from=batch.input_from[i],
                tables=batch.tables[i],
                state=batch.slots[i] if batch.slots else None,
                num_drafts=batch.num_drafts[i],
            )
        )
    return tuple(rows)


def as_rows(output: SchedulerOutput) -> Rows:
    """A scheduled step as rows."""
    batch = output.batch
    columns = batch.seq_ids, batch.starts, batch.query_lens, batch.samples, batch.input_from
    lengths = {len(c) for c in (*columns, batch.num_drafts, batch.adapter_ids, batch.tables)}
    assert lengths == {len(output.sequences)}, "columns of different lengths"
    assert len(batch.token_ids) == sum(batch.query_lens)
    rows = rows_of(batch, output.sequences)
    return Rows(batch.step, rows, batch.block_copies, batch.media, output)


def batch_of(
    rows: SequenceOf[Row],
    copies: tuple[tuple[BlockCopy, ...], ...] = ((),),
    *,
    step: int = 1,
    sampling: Any = None,
) -> StepBatch:
    """A batch built without a scheduler."""
    tokens = [token if token != IN_FLIGHT_TOKEN else 0 for row in rows for token in row.token_ids]
    return StepBatch(
        step=step,
        seq_ids=[row.seq_id for row in rows],
        token_ids=array(TOKEN_TYPE, tokens),
        starts=array("q", [row.start for row in rows]),
        query_lens=array("q", [row.num_tokens for row in rows]),
        samples=[row.samples for row in rows],
        is_decode=all(row.samples and row.num_tokens == 1 for row in rows),
        input_from=array("i", [row.input_from for row in rows]),
        num_drafts=array("i", [row.num_drafts for row in rows]),
        adapter_ids=array("i", [0] * len(rows)),
        tables=[row.tables for row in rows],
        slots=[row.state for row in rows if row.state is not None],
        block_copies=copies,
        sampling=sampling,
    )
