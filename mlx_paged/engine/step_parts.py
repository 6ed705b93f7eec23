"""Cuts a batch into parts that are run one after another, and joins their results."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from itertools import accumulate
from typing import Any, NamedTuple

from mlx_paged.core import ScheduledMedia, StateMove, StepBatch, StepResult, StepTable
from mlx_paged.core.media import outside


class Piece(NamedTuple):
    """Tokens ``[begin, end)`` of one sequence in a batch.

    Attributes:
        seq_index: Index of the sequence in the batch.
        is_last: True if the tokens end where the batch's tokens of this sequence end, so that it
            samples if the batch does.
    """

    seq_index: int
    begin: int
    end: int
    is_last: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens of the piece."""
        return self.end - self.begin


#: Pieces of different sequences, in the order of the batch.
Part = tuple[Piece, ...]


def whole(batch: StepBatch, left_out: Collection[int] = ()) -> Part:
    """Returns a batch without some sequences."""
    return tuple(
        Piece(seq_index, 0, length)
        for seq_index, length in enumerate(batch.query_lens)
        if seq_index not in left_out
    )


def halves(batch: StepBatch, part: Part) -> list[Part]:
    """Returns two parts to run in this order, cut between sequences or within the only one.

    A part that cannot be cut is returned whole: one token, drafts with the token before them, or a
    media item whose positions see each other.
    """
    if len(part) > 1:
        middle = len(part) // 2
        return [part[:middle], part[middle:]]
    [piece] = part
    middle = _middle(batch, piece)
    if middle == 0:
        return [part]
    head = piece._replace(end=piece.begin + middle, is_last=False)
    return [(head,), (piece._replace(begin=piece.begin + middle),)]


def _middle(batch: StepBatch, piece: Piece) -> int:
    """Returns the number of a piece's tokens in the first half; 0 if it cannot be cut."""
    middle = piece.num_tokens // 2
    if batch.num_drafts[piece.seq_index]:
        return 0
    media = batch.media_inputs[piece.seq_index] if batch.media_inputs else None
    atomic = () if media is None else media.media.atomic
    if not atomic:
        return middle
    start = batch.starts[piece.seq_index] + piece.begin
    before = outside(atomic, start + middle)
    if before > start:
        return before - start
    after = next((end for _, end in atomic if start + middle < end), start)
    return after - start if after < start + piece.num_tokens else 0


def is_state_spent(batch: StepBatch, piece: Piece) -> bool:
    """Returns True for a second piece, whose initial state may be overwritten."""
    return bool(batch.slots) and piece.begin > 0


def cut(batch: StepBatch, part: Part, block_size: int) -> StepBatch:
    """Returns a part as a separate batch, which may run regardless of what ran before."""
    indices = [piece.seq_index for piece in part]
    query_starts = batch.query_starts()
    samples = [piece.is_last and batch.samples[piece.seq_index] for piece in part]
    used = {batch.adapter_ids[i] for i in indices}
    token_ids = array(batch.token_ids.typecode)
    for piece in part:
        at = query_starts[piece.seq_index]
        token_ids += batch.token_ids[at + piece.begin : at + piece.end]
    return StepBatch(
        step=batch.step,
        seq_ids=[batch.seq_ids[i] for i in indices],
        token_ids=token_ids,
        starts=array("q", [batch.starts[p.seq_index] + p.begin for p in part]),
        query_lens=array("q", [p.num_tokens for p in part]),
        samples=samples,
        is_decode=len(token_ids) == len(part) and False not in samples,
        input_from=array("i", [batch.input_from[i] for i in indices]),
        num_drafts=array("i", [batch.num_drafts[i] for i in indices]),
        adapter_ids=array("i", [batch.adapter_ids[i] for i in indices]),
        adapters={slot: each for slot, each in batch.adapters.items() if slot in used},
        tables=[tuple(StepTable(t.blocks, 0) for t in batch.tables[i]) for i in indices],
        slots=[_slots(batch, piece) for piece in part] if batch.slots else [],
        block_copies=_copies(batch, part, block_size),
        # The blocks that the step gave up are gone by now.
        media=None if batch.media is None else ScheduledMedia((), batch.media.encoded),
        sampling=_sampling(batch, [p.seq_index for p, sampled in zip(part, samples) if sampled]),
        prompt_targets=_targets(batch, part),
        media_inputs=[batch.media_inputs[i] for i in indices] if batch.media_inputs else [],
    )


def _slots(batch: StepBatch, piece: Piece) -> StateMove:
    slots = batch.slots[piece.seq_index]
    # A second piece begins where the first one ends.
    return slots if piece.begin == 0 else StateMove(slots.write, slots.write)


def _copies(batch: StepBatch, part: Part, block_size: int) -> tuple[tuple[Any, ...], ...]:
    """Returns the copies, per attention group, into blocks that the part's sequences continue.

    A sequence that is cut makes its copies with its first piece; later, they would overwrite what
    it has written.
    """
    at_start = [p.seq_index for p in part if p.begin == 0]
    copies_by_group = []
    for group, copies in enumerate(batch.block_copies):
        targets = {batch.tables[i][group].blocks[batch.starts[i] // block_size] for i in at_start}
        copies_by_group.append(tuple(copy for copy in copies if copy.dst in targets))
    return tuple(copies_by_group)


def _sampling(batch: StepBatch, indices: list[int]) -> Any:
    if batch.sampling is None or not indices:
        return None
    counts = batch.num_samples()
    ends = list(accumulate(counts))
    rows = [row for index in indices for row in range(ends[index] - counts[index], ends[index])]
    return batch.sampling.take(rows)


def _targets(batch: StepBatch, part: Part) -> list[tuple[int, Any]]:
    wanted = dict(batch.prompt_targets)
    targets = []
    for index, piece in enumerate(part):
        found = wanted.get(piece.seq_index)
        found = None if found is None else found.between(piece.begin, piece.end)
        if found is not None:
            targets.append((index, found))
    return targets


def add_results(result: StepResult, part: Part, found: StepResult) -> None:
    """Adds the results of a part to those of the step."""
    for piece, token_ids in zip(part, found.token_ids):
        if token_ids:
            result.token_ids[piece.seq_index] = token_ids
    result.failures += [(part[i].seq_index, reason) for i, reason in found.failures]
    result.logprobs += [(part[i].seq_index, positions) for i, positions in found.logprobs]
    result.prompt_logprobs += [
        p._replace(seq_index=part[p.seq_index].seq_index) for p in found.prompt_logprobs
    ]
    result.pooled += [p._replace(seq_index=part[p.seq_index].seq_index) for p in found.pooled]
    result.is_poisoned |= found.is_poisoned
