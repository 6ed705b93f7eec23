"""DraftRounds: runs a draft model in rounds, for all sequences together.

The first round computes known tokens and samples; each further round computes the previous draft,
which stays on the device. A round is a step of a second `ModelRunner`, whose pools have the block
ids of the model's full attention. The model's own step can follow before any draft is read
(`LaunchedDrafts.in_flight`).

Drafts are sampled like the model's tokens: with the same parameters, and the noise of the same seed
and position. So a draft model with the model's probabilities also samples the same tokens.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.core import BlockCopy, StepBatch, StepTable
from mlx_paged.core import Sequence as CoreSequence
from mlx_paged.core.kv.tree import TOKEN_TYPE
from mlx_paged.engine.runner import LaunchedStep, ModelRunner
from mlx_paged.engine.sampling.logits_processors import LogitEdits, apply_edits
from mlx_paged.engine.sampling.masks import MaskKey, SequenceMasks
from mlx_paged.engine.sampling.sampler import SamplingMetadata
from mlx_paged.engine.sampling.sequence_sampler import SamplingRow
from mlx_paged.engine.speculation.launched_drafts import LaunchedDrafts
from mlx_paged.engine.step_columns import edits_of

_MAX_ORDERED_ROWS = 16  # of a sequence


@dataclass
class Member:
    """A sequence of the first round.

    Attributes:
        token_ids: Tokens that the first round computes.
        begin: Position of the first one in the blocks.
        table: Its block table, with room for the drafts.
        max_drafts: 0 if its tokens are only computed.
        before: Drafts of other models before its own.
        drafts: The result. A draft of -1 could not be sampled.
    """

    seq: CoreSequence
    token_ids: array[int]
    begin: int
    table: StepTable
    max_drafts: int
    before: tuple[int, ...] = ()
    drafts: list[int] = field(default_factory=list)
    newest: int = -1  # index of its newest draft among the tokens that the last round sampled

    @property
    def end(self) -> int:
        """Position after the first round."""
        return self.begin + len(self.token_ids)

    @property
    def usable(self) -> tuple[int, ...]:
        """See `usable_drafts`."""
        return usable_drafts(self.drafts, self.seq)


def usable_drafts(drafts: Sequence[int], seq: CoreSequence) -> tuple[int, ...]:
    """Returns drafts up to one that could not be sampled (-1) or that ends the answer."""
    for index, token in enumerate(drafts):
        if token < 0:
            return tuple(drafts[:index])
        if token in seq.end_token_ids:
            return tuple(drafts[: index + 1])
    return tuple(drafts)


class DraftRounds:
    """Runs rounds.

    Args:
        runner: Runs the draft model.
        masks: Makes the masks of grammars for the runner.
        num_tokens: Size of the draft model's vocabulary; it does not have larger token ids.
    """

    def __init__(self, runner: ModelRunner, masks: SequenceMasks, *, num_tokens: int) -> None:
        self.runner = runner
        self._masks = masks
        self._num_tokens = num_tokens
        self._copies: list[list[BlockCopy]] = []  # not made yet, step by step
        self._thread = threading.current_thread()  # the one that ran the last round
        self._rows: list[SamplingRow] = []  # sampled by the last round but the first
        self._columns = SamplingMetadata.of([])  # of them

    def reset(self) -> None:
        """Forgets a round that was interrupted, and all copies."""
        self.runner.reset()
        self._copies.clear()

    def copy_later(self, copies: Iterable[BlockCopy]) -> None:
        """Records copies of one step, to be made before the next round."""
        made = list(copies)
        if made:
            self._copies.append(made)

    def make_copies(self) -> None:
        """Makes the recorded copies.

        Waits for operations of another thread first, because operations of this thread must not.
        """
        thread = threading.current_thread()
        if thread is not self._thread:
            mx.eval(*self.runner.model.pools())
            self._thread = thread
        for copies in self._copies:
            [pairs] = ops.upload(np.array(copies, dtype=np.int32))
            self.runner.model.copy_blocks(pairs)
        self._copies.clear()

    def launch(self, members: Sequence[Member], features: mx.array | None = None) -> LaunchedDrafts:
        """Launches all rounds.

        The edits of a draft's logits depend on the drafts before it. If there are any, the host
        reads each round before the next one, and nothing is left to read.

        Args:
            members: Sequences with few tokens first.
            features: ``[num_tokens, ...]``, for the tokens of the first round in order. Further
                rounds use the states of the previous round, ``[num_tokens, hidden_size]``.
        """
        self.make_copies()
        drafting = [member for member in members if member.max_drafts]
        edited = [member.seq for member in drafting if member.seq.sampler.has_edits]
        self._masks.watch(edited)
        is_read = bool(edited)
        drafts, number = LaunchedDrafts(), 0
        previous: LaunchedStep | None = None
        members = list(members)
        while members:
            batch = self._batch(members, number, is_read=is_read)
            previous = self.runner.launch(batch, None if is_read else previous, features)
            sampled = [member for member in members if member.max_drafts]
            ends = np.cumsum([n for n in batch.num_samples() if n]).tolist()
            for member, end in zip(sampled, ends):
                member.newest = end - 1
            indices = [member.newest for member in sampled]
            chosen = previous.chosen
            drafts.add(chosen.tokens, chosen.reported, sampled, indices)
            if not number:
                drafts.hidden = previous.hidden
            if is_read:
                drafts.read()
            number += 1
            continuing = [
                member
                for member in sampled
                if member.max_drafts > number and (not is_read or member.drafts[-1] >= 0)
            ]
            if features is not None and continuing:
                features = _features_after(previous, members, continuing)
            members = continuing
        return drafts

    def _batch(self, members: list[Member], number: int, *, is_read: bool) -> StepBatch:
        """Returns the batch of a round.

        Args:
            is_read: True if the host knows the drafts of the previous round.
        """
        is_first, count = number == 0, len(members)
        is_known = is_first or is_read
        token_ids, starts, lens = array(TOKEN_TYPE), array("q"), array("q")
        num_drafts = array("i", bytes(4 * count))
        for index, member in enumerate(members):
            if is_first:
                token_ids += member.token_ids
                starts.append(member.begin)
                lens.append(len(member.token_ids))
                # A few rows are computed like drafts to verify, with the same bits as decodes.
                if member.max_drafts and len(member.token_ids) <= _MAX_ORDERED_ROWS:
                    num_drafts[index] = len(member.token_ids) - 1
            else:
                token_ids.append(member.drafts[-1] if is_read else 0)
                starts.append(member.end + number - 1)
                lens.append(1)
        samples = [member.max_drafts > 0 for member in members]
        batch = StepBatch(
            step=number,
            seq_ids=[member.seq.seq_id for member in members],
            token_ids=self._known(token_ids),
            starts=starts,
            query_lens=lens,
            samples=samples,
            is_decode=len(token_ids) == count and False not in samples,
            input_from=array("i", [-1 if is_known else member.newest for member in members]),
            num_drafts=num_drafts,
            adapter_ids=array("i", bytes(4 * count)),
            tables=[(member.table,) for member in members],
            block_copies=((),),
        )
        if True in samples:
            batch.sampling = self._sampling(batch, members, number)
        return batch

    def _known(self, token_ids: array[int]) -> array[int]:
        """Replaces tokens that the draft model does not have."""
        ids = np.frombuffer(token_ids, dtype=np.uint32)
        if ids.max(initial=0) < self._num_tokens:
            return token_ids
        return array(TOKEN_TYPE, np.where(ids < self._num_tokens, ids, 0).tobytes())

    def _sampling(self, batch: StepBatch, members: list[Member], number: int) -> SamplingMetadata:
        """Returns the settings of each sampled row: the model's own for that position.

        Samples of rows before a sequence's last one are not used.
        """
        rows: list[SamplingRow] = []
        positions: list[int] = []
        edits: list[tuple[int, LogitEdits]] = []
        for member, count in zip(members, batch.num_samples()):
            sampler, before = member.seq.sampler, member.before
            position = len(member.seq.tokens) + len(before) + number
            rows += [sampler.row] * count
            positions += range(position - count + 1, position + 1)
            if count and sampler.has_edits:
                key = MaskKey(member.seq.seq_id, position, (*before, *member.drafts))
                edit = edits_of(member.seq, key)
                if edit is not None:
                    edits.append((len(rows) - 1, edit))
        if number == 0:  # The first round has different rows in every step.
            return draft_settings(SamplingMetadata.of(rows), positions, edits)
        if rows != self._rows:
            self._rows, self._columns = rows, SamplingMetadata.of(rows)
        return draft_settings(self._columns, positions, edits)


def draft_settings(
    columns: SamplingMetadata, positions: list[int], edits: list[tuple[int, LogitEdits]]
) -> SamplingMetadata:
    """Returns the settings of sampled rows at other positions than the sequences' own, without
    reports.

    Args:
        columns: The sequences' own settings.
        edits: (row, what its request does to the logits).
    """
    return replace(
        columns,
        position=np.array(positions, dtype=np.uint32),
        edits=edits,
        logprobs=[],
        logprob_token_ids=[],
    )


def edited_logits(logits: mx.array, settings: SamplingMetadata, masks: SequenceMasks) -> mx.array:
    """Applies penalties, biases and grammars to the logits ``[num_rows, vocab_size]`` of drafts.

    Args:
        settings: See `draft_settings`.
        masks: The source of the grammars' masks.
    """
    return apply_edits(logits, settings.edits, None, masks).logits


def _features_after(
    launched: LaunchedStep, members: list[Member], continuing: list[Member]
) -> mx.array:
    """``[len(continuing), hidden_size]``: the states of each sequence's last row in a round."""
    assert launched.hidden is not None
    ends = np.cumsum(np.frombuffer(launched.batch.query_lens, dtype=np.int64))
    last = {id(member): end - 1 for member, end in zip(members, ends.tolist())}
    [rows] = ops.upload(np.array([last[id(member)] for member in continuing], dtype=np.int32))
    return launched.hidden[rows]
