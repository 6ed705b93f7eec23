"""ChainedHeadsDrafter: several heads with one draft each; each reads the previous head's states.

At position `p`, head `k` (from 0) reads the states of head `k - 1` at `p`, and the token at
`p + 1 + k`. Head 0 reads the model's states. So each head runs once for the new tokens of a step,
one position earlier than the previous head, and once more for every draft before its own::

    position            2      3      4      5
    model computes                    d      e         h4, h5 are new, and so is f
    head 0                         (e,h4) (f,h5) -> g
    head 1                  (e,a3) (f,a4) (g,a5) -> h    a: states of head 0; a3 is kept
    head 2           (e,b2) (f,b3) (g,b4) (h,b5) -> i    b: those of head 1; b2 is kept

Rows of known tokens are computed once; rows of drafts again with the tokens that were sampled. Rows
before a step may be in blocks that other sequences share; their last positions may have been
computed with other next tokens, see `head_drafter.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.core import Sequence as CoreSequence
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.engine.sampling.masks import SequenceMasks
from mlx_paged.engine.speculation.drafter import StartedDrafts, Wanted
from mlx_paged.engine.speculation.head_drafter import HeadDrafter
from mlx_paged.engine.speculation.rounds import DraftRounds, Member


class _Kept(NamedTuple):
    """The states of one head at one position of a sequence, for the next head's next row."""

    seq: CoreSequence
    position: int
    states: mx.array  # [num_kept, hidden_size], of a whole step
    row: int


@dataclass
class _Chain:
    """A sequence while the heads run one after another.

    Attributes:
        known: Its new tokens, and its drafts so far.
        first: Position of the first row of the previous head; initially of the model's new rows.
        row: That row's index in the states.
        num_rows: Rows of the previous head.
    """

    known: Member
    first: int
    row: int
    num_rows: int

    def drafts_with(self, number: int) -> bool:
        """True if a head makes a draft: all previous heads did, and no draft ends the answer."""
        drafts = self.known.drafts
        if self.known.max_drafts <= number or len(drafts) < number:
            return False
        return not drafts or (drafts[-1] >= 0 and drafts[-1] not in self.known.seq.end_token_ids)

    def member(self, number: int, begin: int) -> Member:
        """Returns the rows of a head from a position on."""
        known, drafts_on = self.known, self.drafts_with(number)
        tokens = known.token_ids[begin + number - known.begin :]
        if not drafts_on:
            return Member(known.seq, tokens, begin, known.table, 0)
        skipped = max(0, begin + number - known.end)
        tokens.extend(known.drafts[skipped:])
        before = tuple(known.drafts)
        return Member(known.seq, tokens, begin, known.table, 1, before=before)


class ChainedHeadsDrafter(HeadDrafter):
    """Drafts with several heads, at most one token with each.

    Args:
        runners: Run the heads, in order.
    """

    def __init__(
        self,
        runners: Sequence[ModelRunner],
        masks: SequenceMasks,
        *,
        max_model_len: int | None,
        num_tokens: int,
    ) -> None:
        first, *more = runners
        super().__init__(
            first, masks, max_model_len=max_model_len, num_tokens=num_tokens, more=more
        )
        #: For each head but the first, by seq_id.
        self._kept: list[dict[int, _Kept]] = [{} for _ in more]

    def reset(self) -> None:
        """See `Drafter`."""
        super().reset()
        for kept in self._kept:
            kept.clear()

    def _compute(self, wanted: Sequence[Wanted]) -> StartedDrafts:
        """See `HeadDrafter`. The host reads each draft, because two of the next head's rows may
        have tokens of different heads."""
        rows, states = list(self._rows.values()), self._hidden
        self._rows, self._hidden = {}, None
        members: list[Member] = []
        self._kept = [
            {seq_id: each for seq_id, each in kept.items() if not each.seq.is_finished}
            for kept in self._kept
        ]
        if states is not None:
            members = self._members(rows, wanted)
            chains = [
                _Chain(member, each.begin, each.first, len(each.token_ids))
                for member, each in zip(members, rows)
            ]
            for number, run in enumerate(self._runs):
                states = self._run_head(number, run, chains, states)
        return StartedDrafts(lambda: self._found(members, wanted))

    def _run_head(
        self, number: int, run: DraftRounds, chains: Sequence[_Chain], states: mx.array
    ) -> mx.array:
        """Runs a head, and adds its drafts. Returns its states.

        Args:
            states: States of the previous head, or of the model.
        """
        kept = self._kept[number - 1] if number else {}
        running: list[tuple[_Chain, Member, _Kept | None]] = []
        for chain in chains:
            found = kept.get(chain.known.seq.seq_id)
            if found is not None and found.position != chain.first - 1:
                found = None  # Cached tokens lie between.
            begin = chain.first - (found is not None)
            running.append((chain, chain.member(number, begin), found))
        if number:
            self._keep(number, chains, states)
        running = [each for each in running if each[1].token_ids]
        if not running:
            return states
        running.sort(key=lambda each: len(each[1].token_ids))
        features = _features(running, states)
        at = 0
        launched = run.launch([member for _, member, _ in running], features)
        launched.read()
        assert launched.hidden is not None
        for chain, member, _ in running:
            chain.first, chain.row, chain.num_rows = member.begin, at, len(member.token_ids)
            chain.known.drafts += member.drafts
            at += chain.num_rows
        return launched.hidden

    def _keep(self, number: int, chains: Sequence[_Chain], states: mx.array) -> None:
        """Keeps the states before the first row of a head's next step."""
        indices: list[int] = []
        found: list[tuple[CoreSequence, int]] = []  # with the position, in the order of `indices`
        for chain in chains:
            position = chain.known.end - number
            if position >= chain.first and not chain.known.seq.is_finished:
                found.append((chain.known.seq, position))
                indices.append(chain.row + position - chain.first)
        if not indices:
            return
        [rows] = ops.upload(np.array(indices, dtype=np.int32))
        own = states[rows]
        # Evaluated before the blocks that it was computed from change.
        mx.async_eval(own)  # type: ignore[no-untyped-call]
        for row, (seq, position) in enumerate(found):
            self._kept[number - 1][seq.seq_id] = _Kept(seq, position, own, row)


def _features(running: Sequence[tuple[_Chain, Member, _Kept | None]], states: mx.array) -> mx.array:
    """``[num_rows, hidden_size]``: the input states of a head's rows."""
    sources, offsets, num_states = [states], {}, len(states)
    indices: list[int] = []
    for chain, member, kept in running:
        if kept is not None:
            if id(kept.states) not in offsets:
                offsets[id(kept.states)] = num_states
                sources.append(kept.states)
                num_states += len(kept.states)
            indices.append(offsets[id(kept.states)] + kept.row)
        more = len(member.token_ids) - (kept is not None)
        indices += range(chain.row, chain.row + more)
    [rows] = ops.upload(np.array(indices, dtype=np.int32))
    return (states if len(sources) == 1 else mx.concatenate(sources))[rows]
