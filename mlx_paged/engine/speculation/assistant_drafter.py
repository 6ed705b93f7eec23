"""AssistantDrafter: Gemma 4's assistant drafts from the model's own keys and values.

It has no keys and values of its own and needs only the hidden state of a sequence's last computed
row, which every step returns, so it costs nothing while no drafts are made. A round is one row of
each sequence::

    known tokens   [a b c d]e        the model has computed a .. d, whose keys all rounds see
    round 1              (e, hd) -> f      at the position of e
    round 2              (f, s1) -> g      at the position of e, too; s1: the assistant's state
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.core import SchedulerOutput
from mlx_paged.core import Sequence as CoreSequence
from mlx_paged.engine.sampling.logits_processors import LogitEdits
from mlx_paged.engine.sampling.masks import MaskKey, SequenceMasks
from mlx_paged.engine.sampling.sampler import SamplingMetadata, sample
from mlx_paged.engine.speculation.acceptance import Draft
from mlx_paged.engine.speculation.costs import StepCosts
from mlx_paged.engine.speculation.drafter import Drafter, DraftState, StartedDrafts, Wanted
from mlx_paged.engine.speculation.launched_drafts import LaunchedDrafts
from mlx_paged.engine.speculation.paged_drafter import kind_of_model
from mlx_paged.engine.speculation.rounds import draft_settings, edited_logits, usable_drafts
from mlx_paged.engine.step_columns import edits_of
from mlx_paged.model.draft_heads.gemma4_assistant import Assistant, Target
from mlx_paged.model.layout import KVCacheGroupSpec
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.plan import PaddedTables, StepInputs

_REPEATS = 3


@dataclass
class _Member:
    """A sequence that gets drafts.

    Attributes:
        row: Index of its hidden state among those of the last step.
        begin: Position of the first draft.
        drafts: The result. A draft of -1 could not be sampled.
    """

    seq: CoreSequence
    row: int
    begin: int
    max_drafts: int
    drafts: list[int] = field(default_factory=list)


class AssistantDrafter(Drafter):
    """Drafts with an assistant.

    Args:
        paged: The model that it drafts for, whose final states are tapped.
        masks: Makes the masks of grammars.
        max_model_len: Maximum tokens of a sequence; None: no limit.

    Attributes:
        rounds: See `Price`.
        target: The parts of the model that it uses.
        windows: Groups of the model that have their own block tables, in their order.
    """

    drafts_at_once = False

    def __init__(
        self,
        assistant: Assistant,
        paged: PagedModel,
        masks: SequenceMasks,
        *,
        max_model_len: int | None,
    ) -> None:
        self.price = self
        self.rounds: StepCosts | None = None
        self.windows: tuple[KVCacheGroupSpec, ...] = ()
        self._assistant = assistant
        self._paged = paged
        self.target = Target(paged.model, lambda: paged.attention_caches)
        self._masks = masks
        self._max_model_len = max_model_len
        self._rows: dict[int, tuple[int, int]] = {}  # by seq_id: length of a sequence, and its row
        self._hidden: mx.array | None = None

    # `Drafter` and `Price`.

    def kind(self, seq: CoreSequence) -> int:
        """See `Price`."""
        return kind_of_model(seq)

    def num_missing(self, seq: CoreSequence, state: DraftState) -> int:
        """See `Price`."""
        return 1

    def observe(self, output: SchedulerOutput, hidden: mx.array | None) -> None:
        """See `Drafter`."""
        self._rows.clear()
        self._hidden = hidden
        batch, first = output.batch, 0
        for index, seq in enumerate(output.sequences):
            length, num_tokens = batch.query_lens[index], len(seq.tokens)
            # Rows after the one before the newest token are rejected drafts.
            row = num_tokens - 2 - batch.starts[index]
            if 0 <= row < length:
                self._rows[seq.seq_id] = num_tokens, first + row
            first += length

    def reset(self) -> None:
        """See `Drafter`."""
        self._rows.clear()
        self._hidden = None

    def measure(self) -> None:
        """Measures a round, in the model's pools."""
        table = np.ones((1, 1), dtype=np.int32)
        inputs = StepInputs(
            context_lens=np.ones(1, dtype=np.int64),
            query_lens=np.ones(1, dtype=np.int64),
            tables=PaddedTables(table, np.ones(1, dtype=np.int64)),
            logit_rows=np.zeros(1, dtype=np.int64),
        )
        step = self._paged.reading_step(inputs)
        width = self._assistant.config.backbone_hidden_size
        best = float("inf")
        for _ in range(_REPEATS):
            began = perf_counter()
            tokens, positions = mx.zeros((1,), mx.int32), mx.ones((1,), mx.int32)
            with self._paged.reading(step):
                embeds = self.target.embed(tokens)
                states = mx.zeros((1, width), embeds.dtype)
                found = self._assistant(embeds, states, positions, self.target.caches)
                mx.eval(*found)
            best = min(best, perf_counter() - began)
        self.rounds = StepCosts((1,), (best,), (best,))

    # Drafting.

    def draft(self, wanted: Sequence[Wanted]) -> list[Draft | None]:
        """See `Drafter`."""
        return self.begin(wanted).finish()

    def begin(self, wanted: Sequence[Wanted]) -> StartedDrafts:
        """See `Drafter`. A sequence that was not in the last step gets no drafts."""
        members = [self._member(each) for each in wanted]
        drawing = [each for each in members if each is not None and each.max_drafts > 0]
        launched = LaunchedDrafts()
        if drawing:
            launched = self._run(sorted(drawing, key=lambda each: -each.max_drafts))

        def finish() -> list[Draft | None]:
            launched.read()
            return [None if member is None else self._draft_of(member) for member in members]

        return StartedDrafts(finish, launched.in_flight())

    def _draft_of(self, member: _Member) -> Draft | None:
        drafts = usable_drafts(member.drafts, member.seq)
        return Draft(member.begin, drafts, self.kind(member.seq)) if drafts else None

    def _member(self, wanted: Wanted) -> _Member | None:
        seq, max_drafts = wanted.seq, wanted.max_drafts
        num_tokens, row = self._rows.get(seq.seq_id, (0, 0))
        if num_tokens != len(seq.tokens) or self._hidden is None:
            return None
        if self._max_model_len is not None:
            max_drafts = min(max_drafts, self._max_model_len - num_tokens)
        return _Member(seq, row, num_tokens, max_drafts)

    def _run(self, members: list[_Member]) -> LaunchedDrafts:
        """Drafts in rounds; sequences with many drafts come first. The host reads each round if the
        edits of the next one depend on it."""
        edited = [member.seq for member in members if member.seq.sampler.has_edits]
        self._masks.watch(edited)
        newest = [member.seq.tokens[-1] for member in members]
        lens = [len(member.seq.tokens) for member in members]
        rows = [member.row for member in members]
        tokens, positions, indices = ops.upload(
            *(np.array(each, dtype=np.int32) for each in (newest, lens, rows))
        )
        positions = positions - 1
        assert self._hidden is not None
        states = self._hidden[indices]
        launched = LaunchedDrafts()
        step, num_rows = None, 0
        for number in range(members[0].max_drafts):
            count = sum(member.max_drafts > number for member in members)
            now = members[:count]
            if step is None or count != num_rows:
                step, num_rows = self._paged.reading_step(self._inputs(now)), count
            with self._paged.reading(step):
                logits, states = self._assistant(
                    self.target.embed(tokens[:count]),
                    states[:count],
                    positions[:count],
                    self.target.caches,
                )
            settings = self._settings(now, number)
            logits = edited_logits(logits, settings, self._masks)
            sampled = sample(logits, settings, platform=self._paged.platform)
            tokens = sampled.tokens
            launched.add(tokens, sampled.for_host(None), now, range(count))
            if edited:
                launched.read()
        return launched

    def _inputs(self, members: Sequence[_Member]) -> StepInputs:
        """Rows at the last computed positions, which see all computed keys."""
        by_group: dict[KVCacheGroupSpec, PaddedTables] = {}
        tables = [member.seq.tables for member in members]
        for index, group_spec in enumerate((None, *self.windows)):
            blocks = [each.attention[index].blocks for each in tables if each is not None]
            padded = PaddedTables.of(blocks)
            if group_spec is None:
                by_group = dict.fromkeys(self._paged.layout.group_specs, padded)
            else:
                by_group[group_spec] = padded
        count = len(members)
        return StepInputs(
            context_lens=np.array([len(m.seq.tokens) - 1 for m in members], dtype=np.int64),
            query_lens=np.ones(count, dtype=np.int64),
            tables=by_group,
            logit_rows=np.arange(count),
        )

    @staticmethod
    def _settings(members: Sequence[_Member], number: int) -> SamplingMetadata:
        """Returns the settings of each sequence's next draft: the target's at that position."""
        edits: list[tuple[int, LogitEdits]] = []
        positions = [len(member.seq.tokens) + number for member in members]
        for index, (member, position) in enumerate(zip(members, positions)):
            if member.seq.sampler.has_edits:
                key = MaskKey(member.seq.seq_id, position, tuple(member.drafts))
                edit = edits_of(member.seq, key)
                if edit is not None:
                    edits.append((index, edit))
        rows = SamplingMetadata.of([member.seq.sampler.row for member in members])
        return draft_settings(rows, positions, edits)
