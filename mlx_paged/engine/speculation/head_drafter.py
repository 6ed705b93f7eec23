"""HeadDrafter: a draft head reads the model's hidden states, and has few layers of its own.

EAGLE-3 and MTP heads predict the token after the next one: at position `p` they read the hidden
states that the model had at `p`, and the token at `p + 1`. Their keys and values have the slot of
`p` in the model's own blocks::

    position            0  1  2  3 | 4  5
    model computes      a  b  c  d | e          hidden states h0 .. h3 are known
    head computes  (b,h0)(c,h1)(d,h2)(e,h3) -> f
                                       (f,g4) -> g    g4: the head's own states of the row before

Hidden states are not kept, so in each step the head computes the model's tokens right after the
model. Cached prefixes are then cached for the head, too. Their last position may have been computed
with another next token, which hardly matters.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.core import SchedulerOutput, StepTable
from mlx_paged.core import Sequence as CoreSequence
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.engine.sampling.masks import SequenceMasks
from mlx_paged.engine.speculation.acceptance import Draft
from mlx_paged.engine.speculation.drafter import DraftState, StartedDrafts, Wanted
from mlx_paged.engine.speculation.paged_drafter import PagedDrafter
from mlx_paged.engine.speculation.rounds import Member


@dataclass(frozen=True)
class _Rows:
    """Rows of a committed step that the head has not computed.

    Attributes:
        token_ids: The token after each row.
        begin: Position of the first one.
        first: Its row in the hidden states of the step.
        table: The blocks that the step wrote.
    """

    seq: CoreSequence
    token_ids: array[int]
    begin: int
    first: int
    table: StepTable


class HeadDrafter(PagedDrafter):
    """Drafts with a head of the model, whose runner takes features. See `PagedDrafter`.

    Args:
        num_features: Number of the model's states that a row's features join. The head then gets
            them apart, ``[num_rows, num_features, hidden_size]``, unlike states of its own. None if
            the head takes both alike.
    """

    def __init__(
        self,
        runner: ModelRunner,
        masks: SequenceMasks,
        *,
        max_model_len: int | None,
        num_tokens: int,
        num_features: int | None = None,
        more: Sequence[ModelRunner] = (),
    ) -> None:
        super().__init__(
            runner, masks, max_model_len=max_model_len, num_tokens=num_tokens, more=more
        )
        self.price = self
        self._num_features = num_features
        self._rows: dict[int, _Rows] = {}  # by seq_id
        self._hidden: mx.array | None = None  # of the step that these are from

    # `Drafter` and `Price`.

    def num_missing(self, seq: CoreSequence, state: DraftState) -> int:
        """See `Price`. At most the tokens of one step are missing."""
        return 1

    def observe(self, output: SchedulerOutput, hidden: mx.array | None) -> None:
        """See `Drafter`. Sequences that have ended are computed, too: their blocks are cached."""
        self.flush()
        if hidden is None:
            return
        batch, self._hidden = output.batch, hidden
        first = 0
        for index, seq in enumerate(output.sequences):
            begin, length = batch.starts[index], batch.query_lens[index]
            # Rows after the newest token are rejected drafts.
            end = min(begin + length, len(seq.tokens) - 1)
            if end > begin:
                tokens = seq.tokens[begin + 1 : end + 1]
                table = StepTable(batch.tables[index][0].blocks, 0)
                self._rows[seq.seq_id] = _Rows(seq, tokens, begin, first, table)
            first += length

    def flush(self) -> None:
        """See `Drafter`."""
        self._compute(())

    def reset(self) -> None:
        """See `Drafter`."""
        super().reset()
        self._rows.clear()
        self._hidden = None

    # Drafting.

    def begin(self, wanted: Sequence[Wanted]) -> StartedDrafts:
        """See `Drafter`. A sequence that was not in the last step gets no drafts."""
        return self._compute(wanted)

    def _compute(self, wanted: Sequence[Wanted]) -> StartedDrafts:
        """Computes the rows of the last step, and drafts for some of its sequences."""
        rows, hidden = list(self._rows.values()), self._hidden
        self._rows, self._hidden = {}, None
        if hidden is None or not rows:
            return StartedDrafts(lambda: [None] * len(wanted))
        rows.sort(key=lambda each: len(each.token_ids))
        members = self._members(rows, wanted)
        at = [np.arange(each.first, each.first + len(each.token_ids)) for each in rows]
        [indices] = ops.upload(np.concatenate(at).astype(np.int32))
        features = hidden[indices]
        if self._num_features is not None:
            features = features.reshape(len(features), self._num_features, -1)
        rounds = self._run.launch(members, features)

        def finish() -> list[Draft | None]:
            rounds.read()
            return self._found(members, wanted)

        return StartedDrafts(finish, rounds.in_flight())

    def _found(self, members: Sequence[Member], wanted: Sequence[Wanted]) -> list[Draft | None]:
        """Returns the drafts of the wanted sequences. The first follows the newest token, which no
        round of a head counts."""
        found = {
            member.seq.seq_id: Draft(member.end + 1, usable, self.kind(member.seq))
            for member in members
            if (usable := member.usable)
        }
        return [found.get(each.seq.seq_id) for each in wanted]

    def _members(self, rows: Sequence[_Rows], wanted: Sequence[Wanted]) -> list[Member]:
        by_id = {each.seq.seq_id: each for each in wanted}
        return [self._member(each, by_id.get(each.seq.seq_id)) for each in rows]

    def _member(self, rows: _Rows, wanted: Wanted | None) -> Member:
        seq, table, max_drafts = rows.seq, rows.table, 0
        if wanted is not None and rows.begin + len(rows.token_ids) == len(seq.tokens) - 1:
            max_drafts = wanted.max_drafts
            if self.max_model_len is not None:
                max_drafts = max(0, min(max_drafts, self.max_model_len - len(seq.tokens)))
            assert seq.tables is not None
            table = StepTable(tuple(seq.tables.blocks), 0)
        return Member(seq, rows.token_ids, rows.begin, table, max_drafts)
