"""ModelDrafter: a small model drafts, over the block tables of the large one.

The draft model is a second `ModelRunner`. Its pools have the block ids of the model's full
attention, so a sequence's table serves both. One call drafts for all sequences: the first *round*
computes the tokens that the draft model lacks (a prompt, or accepted tokens) and samples, each
further round computes the draft before, which stays on the device::

    known tokens   [a b c d]e        the model has computed a .. d
    round 1             c d e -> f   the draft model had a, b
    round 2                 f -> g
    round 3                 g -> h   drafts f g h; the keys and values of f, g are in the blocks

Drafts are sampled as the model samples: with the same parameters, and the noise of the same seed
and position. So a draft model that agrees with the model about the probabilities also draws the
same token.
"""

from __future__ import annotations

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
from mlx_paged.engine.sampling.logits_processors import LogitEdits
from mlx_paged.engine.sampling.masks import MaskKey, SequenceMasks
from mlx_paged.engine.sampling.sampler import SamplingMetadata
from mlx_paged.engine.sampling.sequence_sampler import SamplingRow
from mlx_paged.engine.speculation.acceptance import Draft, Source, kind_of
from mlx_paged.engine.speculation.contents import BlockContents, Followed
from mlx_paged.engine.speculation.costs import StepCosts
from mlx_paged.engine.speculation.drafter import DraftState, Wanted
from mlx_paged.engine.step_columns import edits_of

_GREEDY, _SAMPLED = kind_of(Source.MODEL, 1), kind_of(Source.MODEL, 2)


@dataclass
class _Member:
    """A sequence that is being drafted.

    Attributes:
        place: Its index in the call.
        begin: First position of the first round.
        end: Position after the last one. Below the number of known tokens, nothing is drafted.
        tables: Its block table.
        newest: Index of its newest draft among the tokens that the last round sampled.
        tokens: Drafts that the host knows.
    """

    place: int
    seq: CoreSequence
    followed: Followed
    max_drafts: int
    begin: int
    end: int
    tables: tuple[StepTable, ...]
    newest: int = -1
    tokens: list[int] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows of the first round."""
        return self.end - self.begin

    @property
    def samples(self) -> bool:
        """True if the first round computes the newest token."""
        return self.end == len(self.seq.tokens)


class ModelDrafter:
    """Drafts with a model.

    Args:
        runner: Runs the draft model. The drafter owns it from now on.
        masks: Makes the masks of grammars for its runner.
        max_rows: Maximum rows of a round; longer prompts are computed in chunks.
        max_model_len: Maximum tokens of a sequence that it drafts for; None: no limit.
        num_tokens: Tokens from here on are unknown to the draft model.

    Attributes:
        rounds: See `Price`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        masks: SequenceMasks,
        *,
        max_rows: int,
        max_model_len: int | None,
        num_tokens: int,
        rounds: StepCosts | None = None,
    ) -> None:
        self.runner = runner
        self.rounds = rounds
        self._masks = masks
        self._max_rows = max_rows
        self._max_model_len = max_model_len
        self._num_tokens = num_tokens
        self._contents = BlockContents(runner.block_size)
        self._copies: list[list[BlockCopy]] = []  # not made yet, step by step

    # The seam, see `Drafter` and `Price`.

    @property
    def price(self) -> ModelDrafter:
        """Itself."""
        return self

    def kind(self, seq: CoreSequence) -> int:
        """See `Price`."""
        return _GREEDY if seq.sampler.row.temperature == 0 else _SAMPLED

    def num_missing(self, seq: CoreSequence, state: DraftState) -> int:
        """See `Price`."""
        assert seq.tables is not None
        followed = self._followed(state)
        self._contents.follow(followed, seq.tokens, seq.tables)
        return len(seq.tokens) - followed.num_computed

    def launched(self, batch: StepBatch) -> None:
        """See `Drafter`. A block that the model copies is copied before the next draft."""
        self.copied(batch.block_copies[0])

    def finish(self, seq: CoreSequence) -> None:
        """See `Drafter`."""

    def reset(self) -> None:
        """See `Drafter`."""
        self.runner.reset()
        self._contents.clear()
        self._copies.clear()

    # The memory of the pools, which follow those of the model (`engine.pool_memory.Companion`).

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in its pools."""
        return self.runner.model.layout.bytes_per_token()

    def copied(self, copies: Iterable[BlockCopy]) -> None:
        """Notes copies of blocks that the model makes."""
        made = self._contents.copied(copies)
        if made:
            self._copies.append(made)

    def allocate(self, num_blocks: int) -> None:
        """Allocates its pools anew."""
        self._copies.clear()
        self._contents.clear()
        self.runner.allocate(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Changes the number of blocks; keeps the first ones."""
        self._make_copies()
        self._contents.cut(num_blocks)
        for group_spec in self.runner.model.layout.group_specs:
            self.runner.model.resize(num_blocks, group_spec)

    def discard_blocks(self, runs: Sequence[tuple[int, int]]) -> None:
        """Gives the memory of free blocks back to the system."""
        self._make_copies()
        self._contents.drop(runs)
        for group_spec in self.runner.model.layout.group_specs:
            self.runner.model.discard_blocks(runs, group_spec)

    def _make_copies(self) -> None:
        for copies in self._copies:
            [pairs] = ops.upload(np.array(copies, dtype=np.int32))
            self.runner.model.copy_blocks(pairs)
        if self._copies:
            # Another thread may run the next step, and must not wait for this one's operations.
            mx.eval(*self.runner.model.pools())
        self._copies.clear()

    # Drafting.

    def draft(self, wanted: Sequence[Wanted]) -> list[Draft | None]:
        """See `Drafter`."""
        self._make_copies()
        found: list[Draft | None] = [None] * len(wanted)
        members = self._members(wanted)
        if not members:
            return found
        drafting = [member for member in members if member.samples]
        for member in members:
            self._contents.record(member.followed, member.seq.tokens, member.begin, member.end)
        self._run_rounds(members, drafting)
        for member in drafting:
            tokens = self._usable(member)
            if tokens:
                seq = member.seq
                found[member.place] = Draft(len(seq.tokens), tokens, self.kind(seq))
        return found

    def _members(self, wanted: Sequence[Wanted]) -> list[_Member]:
        """Plans the first round: sequences with few rows first, then as many others as fit."""
        members = []
        for place, (seq, state, max_drafts) in enumerate(wanted):
            num_tokens = len(seq.tokens)
            if self._max_model_len is not None:
                max_drafts = min(max_drafts, self._max_model_len - num_tokens)
            if max_drafts < 1:
                continue
            assert seq.tables is not None
            begin = num_tokens - self.num_missing(seq, state)
            blocks = StepTable(tuple(seq.tables.blocks), 0)
            followed: Followed = state.own
            members.append(_Member(place, seq, followed, max_drafts, begin, num_tokens, (blocks,)))
        members.sort(key=lambda member: not self._is_like_drafts(member))
        left = self._max_rows
        for member in members:
            member.end = min(member.end, member.begin + left)
            left -= member.num_rows
        return [member for member in members if member.num_rows]

    def _is_like_drafts(self, member: _Member) -> bool:
        """True if the first round has few rows, which then have the bits of decodes."""
        return member.samples and member.num_rows <= 1 + member.max_drafts

    def _followed(self, state: DraftState) -> Followed:
        if state.own is None:
            state.own = Followed()
        followed: Followed = state.own
        return followed

    def _run_rounds(self, members: list[_Member], drafting: list[_Member]) -> None:
        """Runs all rounds, and reads the drafts.

        The edits of a draft's logits depend on the drafts before it. If there are any, the host
        reads each round before the next one.
        """
        is_read = any(member.seq.sampler.has_edits for member in drafting)
        if is_read:
            self._masks.watch(m.seq for m in drafting if m.seq.sampler.has_edits)
        rounds: list[tuple[LaunchedStep, list[_Member], list[int]]] = []
        previous: LaunchedStep | None = None
        while members:
            number = len(rounds)
            batch = self._batch(members, number, is_read=is_read)
            previous = self.runner.launch(batch, None if is_read else previous)
            ends = np.cumsum(batch.num_samples()).tolist()
            sampled = [member for member in members if number or member.samples]
            for member, end in zip(members, ends):
                member.newest = end - 1
            rounds.append((previous, sampled, [member.newest for member in sampled]))
            if is_read:
                _read(rounds[-1:])
            members = [
                member
                for member in drafting
                if member.max_drafts > number + 1 and (not is_read or member.tokens[-1] >= 0)
            ]
            for member in members:
                end = len(member.seq.tokens) + number + 1
                self._contents.overwritten(member.followed, end)
        if not is_read:
            _read(rounds)
        mx.eval(*self.runner.model.pools())
        for member in drafting:
            computed = member.tokens[:-1]
            member.followed.drafted = tuple(computed)
            member.followed.drafted_from = len(member.seq.tokens)

    def _batch(self, members: list[_Member], number: int, *, is_read: bool) -> StepBatch:
        """The batch of a round; rounds after the first compute the newest draft of each.

        Args:
            is_read: True if the host knows the drafts of the round before.
        """
        is_first, count = number == 0, len(members)
        is_known = is_first or is_read
        token_ids, starts, lens = array(TOKEN_TYPE), array("q"), array("q")
        num_drafts = array("i", bytes(4 * count))
        for index, member in enumerate(members):
            if is_first:
                token_ids += member.seq.tokens[member.begin : member.end]
                starts.append(member.begin)
                lens.append(member.num_rows)
                if self._is_like_drafts(member):
                    num_drafts[index] = member.num_rows - 1
            else:
                token_ids.append(member.tokens[-1] if is_read else 0)
                starts.append(len(member.seq.tokens) + number - 1)
                lens.append(1)
        samples = [member.samples for member in members] if is_first else [True] * count
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
            tables=[member.tables for member in members],
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

    def _sampling(self, batch: StepBatch, members: list[_Member], number: int) -> SamplingMetadata:
        """The settings of each sampled row: the model's own for that position.

        Rows before a sequence's last one are sampled in vain.
        """
        rows: list[SamplingRow] = []
        positions: list[int] = []
        edits: list[tuple[int, LogitEdits]] = []
        for member, count in zip(members, batch.num_samples()):
            sampler, position = member.seq.sampler, len(member.seq.tokens) + number
            rows += [sampler.row] * count
            positions += range(position - count + 1, position + 1)
            if count and sampler.has_edits:
                key = MaskKey(member.seq.seq_id, position, tuple(member.tokens))
                edit = edits_of(member.seq, key)
                if edit is not None:
                    edits.append((len(rows) - 1, edit))
        return replace(
            SamplingMetadata.of(rows),
            position=np.array(positions, dtype=np.uint32),
            edits=edits,
            logprobs=[],
            logprob_token_ids=[],
        )

    def _usable(self, member: _Member) -> tuple[int, ...]:
        """A sequence's drafts, up to one that could not be sampled or that ends the answer."""
        tokens = member.tokens
        for index, token in enumerate(tokens):
            if token < 0:
                return tuple(tokens[:index])
            if token in member.seq.end_token_ids:
                return tuple(tokens[: index + 1])
        return tuple(tokens)


def _read(rounds: Sequence[tuple[LaunchedStep, list[_Member], list[int]]]) -> None:
    """Waits for rounds, and gives each sequence its drafts."""
    mx.eval(*(launched.reported for launched, _, _ in rounds))
    for launched, members, places in rounds:
        reported = np.array(launched.reported)
        for member, place in zip(members, places):
            member.tokens.append(int(reported[place]))
