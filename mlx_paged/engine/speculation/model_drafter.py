"""ModelDrafter: a small model drafts, over the block tables of the large one.

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

from mlx_paged.core import BlockCopy, StepBatch, StepTable
from mlx_paged.core import Sequence as CoreSequence
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.engine.sampling.masks import SequenceMasks
from mlx_paged.engine.speculation.acceptance import Draft, Source, kind_of
from mlx_paged.engine.speculation.contents import BlockContents, Followed
from mlx_paged.engine.speculation.costs import StepCosts
from mlx_paged.engine.speculation.drafter import Drafter, DraftState, Wanted
from mlx_paged.engine.speculation.rounds import DraftRounds, Member

_GREEDY, _SAMPLED = kind_of(Source.MODEL, 1), kind_of(Source.MODEL, 2)


def kind_of_model(seq: CoreSequence) -> int:
    """The kind of a model's drafts for a sequence."""
    return _GREEDY if seq.sampler.row.temperature == 0 else _SAMPLED


class ModelDrafter(Drafter):
    """Drafts with a model.

    Args:
        runner: Runs the draft model. The drafter owns it from now on.
        masks: Makes the masks of grammars for the runner.
        max_rows: Maximum rows of a round; longer prompts are computed in chunks.
        max_model_len: Maximum tokens of a sequence that it drafts for; None: no limit.
        num_tokens: Tokens from here on are unknown to the draft model.

    Attributes:
        rounds: See `Price`.
    """

    drafts_at_once = False

    def __init__(
        self,
        runner: ModelRunner,
        masks: SequenceMasks,
        *,
        max_rows: int,
        max_model_len: int | None,
        num_tokens: int,
    ) -> None:
        self.price = self
        self.runner = runner
        self.rounds: StepCosts | None = None
        self.max_model_len = max_model_len
        self._run = DraftRounds(runner, masks, num_tokens=num_tokens)
        self._max_rows = max_rows
        self._contents = BlockContents(runner.block_size)

    # The seam, see `Drafter` and `Price`.

    def kind(self, seq: CoreSequence) -> int:
        """See `Price`."""
        return kind_of_model(seq)

    def num_missing(self, seq: CoreSequence, state: DraftState) -> int:
        """See `Price`."""
        assert seq.tables is not None
        self._contents.follow(_followed(state), seq.tokens, seq.tables)
        return len(seq.tokens) - _followed(state).num_computed

    def launched(self, batch: StepBatch) -> None:
        """See `Drafter`. A block that the model copies is copied before the next draft."""
        self.copied(batch.block_copies[0])

    def reset(self) -> None:
        """See `Drafter`."""
        self._run.reset()
        self._contents.clear()

    # Its pools follow those of the model, see `engine.pool_memory.Companion`.

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in its pools."""
        return self.runner.model.layout.bytes_per_token()

    def copied(self, copies: Iterable[BlockCopy]) -> None:
        """Notes copies of blocks that the model makes."""
        self._run.copy_later(self._contents.copied(copies))

    def allocate(self, num_blocks: int) -> None:
        """Allocates its pools anew."""
        self.runner.allocate(num_blocks)
        self._contents.clear()

    def resize(self, num_blocks: int) -> None:
        """Changes the number of blocks; keeps the first ones."""
        self._run.make_copies()
        self._contents.cut(num_blocks)
        for group_spec in self.runner.model.layout.group_specs:
            self.runner.model.resize(num_blocks, group_spec)

    def discard_blocks(self, runs: Sequence[tuple[int, int]]) -> None:
        """Gives the memory of free blocks back to the system."""
        self._run.make_copies()
        self._contents.drop(runs)
        for group_spec in self.runner.model.layout.group_specs:
            self.runner.model.discard_blocks(runs, group_spec)

    # Drafting.

    def draft(self, wanted: Sequence[Wanted]) -> list[Draft | None]:
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
        for place, member in computed:
            followed = _followed(wanted[place].state)
            self._contents.record(followed, member.seq.tokens, member.begin, member.end)
            if member.max_drafts:
                self._contents.overwritten(followed, member.end + member.max_drafts - 1)
        self._run.run([member for _, member in computed])
        found: list[Draft | None] = [None] * len(wanted)
        for place, member in computed:
            if member.max_drafts:
                followed = _followed(wanted[place].state)
                followed.drafted, followed.drafted_from = tuple(member.drafts[:-1]), member.end
            if member.usable:
                found[place] = Draft(member.end, member.usable, self.kind(member.seq))
        return found

    def _first_round(self, members: Sequence[Member]) -> list[tuple[int, Member]]:
        """Chooses (index, sequence) of the first round: those with the fewest tokens, and of the
        others as many tokens as fit."""
        chosen, left = [], self._max_rows
        for place in sorted(range(len(members)), key=lambda i: len(members[i].token_ids)):
            member = members[place]
            if not member.max_drafts or not left:
                continue
            if len(member.token_ids) > left:
                member.token_ids, member.max_drafts = member.token_ids[:left], 0
            left -= len(member.token_ids)
            chosen.append((place, member))
        return chosen


def _followed(state: DraftState) -> Followed:
    if state.own is None:
        state.own = Followed()
    followed: Followed = state.own
    return followed
