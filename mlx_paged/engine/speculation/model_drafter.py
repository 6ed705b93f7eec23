"""ModelDrafter: drafts with a small model, over the block tables of the large one.

The draft model's pools have the block ids of the model's full attention, so a sequence's table
serves both. The first round of `DraftRounds` computes the tokens that the draft model lacks: a
prompt, or accepted tokens::

    known tokens   [a b c d]e        the model has computed a .. d
    round 1             c d e -> f   the draft model had a, b
    round 2                 f -> g
    round 3                 g -> h   drafts f g h; the keys and values of f, g are in the blocks
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlx_paged.core import BlockCopy, StepTable
from mlx_paged.core import Sequence as CoreSequence
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.engine.sampling.masks import SequenceMasks
from mlx_paged.engine.speculation.acceptance import Draft
from mlx_paged.engine.speculation.contents import BlockContents, DraftProgress
from mlx_paged.engine.speculation.drafter import DraftState, StartedDrafts, Wanted
from mlx_paged.engine.speculation.paged_drafter import PagedDrafter
from mlx_paged.engine.speculation.rounds import Member


class ModelDrafter(PagedDrafter):
    """Drafts with a model. See `PagedDrafter`.

    Args:
        max_rows: Maximum rows of a round; longer prompts are computed in chunks.
    """

    def __init__(
        self,
        runner: ModelRunner,
        masks: SequenceMasks,
        *,
        max_rows: int,
        max_model_len: int | None,
        num_tokens: int,
    ) -> None:
        super().__init__(runner, masks, max_model_len=max_model_len, num_tokens=num_tokens)
        self.price = self
        self._max_rows = max_rows
        self._contents = BlockContents(runner.block_size)

    # `Drafter` and `Price`.

    def num_missing(self, seq: CoreSequence, state: DraftState) -> int:
        """See `Price`."""
        assert seq.tables is not None
        self._contents.follow(_progress_of(state), seq.tokens, seq.tables)
        return len(seq.tokens) - _progress_of(state).num_computed

    def reset(self) -> None:
        """See `Drafter`."""
        super().reset()
        self._contents.clear()

    # Its pools.

    def copied(self, copies: Iterable[BlockCopy]) -> None:
        """See `PagedDrafter`."""
        super().copied(self._contents.copied(copies))

    def allocate(self, num_blocks: int) -> None:
        """See `PagedDrafter`."""
        super().allocate(num_blocks)
        self._contents.clear()

    def resize(self, num_blocks: int) -> None:
        """See `PagedDrafter`."""
        super().resize(num_blocks)
        self._contents.cut(num_blocks)

    def discard_blocks(self, runs: Sequence[tuple[int, int]]) -> None:
        """See `PagedDrafter`."""
        super().discard_blocks(runs)
        self._contents.drop(runs)

    # Drafting.

    def begin(self, wanted: Sequence[Wanted]) -> StartedDrafts:
        """See `Drafter`."""
        members: list[Member] = []
        for seq, state, max_drafts in wanted:
            num_tokens = len(seq.tokens)
            if self.max_model_len is not None:
                max_drafts = min(max_drafts, self.max_model_len - num_tokens)
            assert seq.tables is not None
            begin = num_tokens - self.num_missing(seq, state)
            table = StepTable(tuple(seq.tables.blocks), 0)
            members.append(Member(seq, seq.tokens[begin:], begin, table, max(0, max_drafts)))
        computed = self._first_round(members)
        for index, member in computed:
            progress = _progress_of(wanted[index].state)
            self._contents.record(progress, member.seq.tokens, member.begin, member.end)
            if member.max_drafts:
                self._contents.overwritten(progress, member.end + member.max_drafts - 1)
        rounds = self._run.launch([member for _, member in computed])

        def finish() -> list[Draft | None]:
            rounds.read()
            found: list[Draft | None] = [None] * len(wanted)
            for index, member in computed:
                if member.max_drafts:
                    progress = _progress_of(wanted[index].state)
                    progress.drafted, progress.drafted_from = tuple(member.drafts[:-1]), member.end
                if member.usable:
                    found[index] = Draft(member.end, member.usable, self.kind(member.seq))
            return found

        return StartedDrafts(finish, rounds.in_flight())

    def _first_round(self, members: Sequence[Member]) -> list[tuple[int, Member]]:
        """Chooses (index, sequence) of the first round: those with the fewest tokens, and of the
        others as many tokens as fit."""
        chosen, left = [], self._max_rows
        for index in sorted(range(len(members)), key=lambda i: len(members[i].token_ids)):
            member = members[index]
            if not member.max_drafts or not left:
                continue
            if len(member.token_ids) > left:
                member.token_ids, member.max_drafts = member.token_ids[:left], 0
            left -= len(member.token_ids)
            chosen.append((index, member))
        return chosen


def _progress_of(state: DraftState) -> DraftProgress:
    if state.own is None:
        state.own = DraftProgress()
    progress: DraftProgress = state.own
    return progress
