"""BlockDrafter: a head drafts all tokens of a block in one step.

A step's rows are the positions with new hidden states, and the block: the newest token, and a mask
token for each draft. All rows of a block see each other::

    position      2  3   4  5  6
    token               e  ?  ?          e is the newest token
    features     h2 h3                   the model's hidden states; keys and values are made of them
    drafts                 f  g

The block's keys and values are overwritten once the model has computed these positions. Some heads
start to draft at the newest token's row, with one mask less. In others, each draft depends on the
previous one: the step returns the block's states, and drafts are sampled from them one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.core import StepBatch
from mlx_paged.core.kv.tree import TOKEN_TYPE
from mlx_paged.engine.runner import LaunchedStep, ModelRunner
from mlx_paged.engine.sampling.logits_processors import LogitEdits
from mlx_paged.engine.sampling.masks import MaskKey, SequenceMasks
from mlx_paged.engine.sampling.sampler import SamplingMetadata, sample
from mlx_paged.engine.sampling.sequence_sampler import SamplingRow
from mlx_paged.engine.speculation.acceptance import Draft
from mlx_paged.engine.speculation.drafter import StartedDrafts, Wanted
from mlx_paged.engine.speculation.head_drafter import HeadDrafter
from mlx_paged.engine.speculation.launched_drafts import LaunchedDrafts
from mlx_paged.engine.speculation.rounds import Member, draft_settings, edited_logits
from mlx_paged.engine.step_columns import edits_of
from mlx_paged.model.draft_heads.chains import Chain
from mlx_paged.model.draft_heads.dflash import DFlashHead


class BlockDrafter(HeadDrafter):
    """Drafts with a head for blocks.

    Args:
        head: The head that `runner` runs.
        num_tokens: See `HeadDrafter`.
    """

    drafts_at_once = True

    def __init__(
        self,
        runner: ModelRunner,
        masks: SequenceMasks,
        *,
        max_model_len: int | None,
        num_tokens: int,
        head: DFlashHead,
    ) -> None:
        super().__init__(runner, masks, max_model_len=max_model_len, num_tokens=num_tokens)
        # Each row of a block sees the later ones.
        runner.splits_drafts = False
        self._masks = masks
        self._head = head

    def _compute(self, wanted: Sequence[Wanted]) -> StartedDrafts:
        """See `HeadDrafter`. If a grammar may shorten a block, the host reads it immediately."""
        rows, hidden = list(self._rows.values()), self._hidden
        self._rows, self._hidden = {}, None
        if hidden is None or not rows:
            return StartedDrafts(lambda: [None] * len(wanted))
        self._run.make_copies()
        members = self._members(rows, wanted)
        batch = self._batch(members)
        features = _features(batch, members, hidden, [each.first for each in rows])
        launched = self.runner.launch(batch, None, features, bounds=_bounds(batch, members))
        drafts = LaunchedDrafts()
        if not any(member.max_drafts for member in members):
            return StartedDrafts(lambda: [None] * len(wanted))
        if self._head.chain is None:
            sampled = [member for member in members for _ in range(member.max_drafts)]
            chosen = launched.chosen
            drafts.add(chosen.tokens, chosen.reported, sampled, range(len(sampled)))
        else:
            drafts = self._draw(self._head.chain, batch, members, launched)
        if any(each.seq.sampler.has_grammar for each in wanted):
            drafts.read()
            for member in members:
                if usable := member.usable:
                    usable = member.seq.sampler.legal(member.seq.tokens, usable)
                member.drafts = list(usable)

        def finish() -> list[Draft | None]:
            drafts.read()
            return self._found(members, wanted)

        return StartedDrafts(finish, drafts.in_flight())

    def _draw(
        self, chain: Chain, batch: StepBatch, members: Sequence[Member], launched: LaunchedStep
    ) -> LaunchedDrafts:
        """Draws the drafts of all blocks, one position after another."""
        assert launched.hidden is not None
        # Sequences with many drafts come first: a round has the first ones.
        drawing = [
            (member, end - member.max_drafts)
            for member, end in zip(members, np.cumsum(batch.query_lens).tolist())
            if member.max_drafts
        ]
        drawing.sort(key=lambda each: -each[0].max_drafts)
        settings = self._sampling([member for member, _ in drawing])
        firsts = np.cumsum([0, *(member.max_drafts for member, _ in drawing)])
        newest = [member.seq.tokens[-1] for member, _ in drawing]
        [before] = ops.upload(np.array(newest, dtype=np.int32))
        drafts = LaunchedDrafts()
        for number in range(drawing[0][0].max_drafts):
            now = [each for each in drawing if each[0].max_drafts > number]
            [rows] = ops.upload(np.array([row + number for _, row in now], dtype=np.int32))
            states = launched.hidden[rows]
            own = settings.take((firsts[: len(now)] + number).tolist())
            logits = chain.step(self._head.logits_of(states), states, before[: len(now)])
            logits = edited_logits(logits, own, self._masks)
            sampled = sample(logits, own, platform=self.runner.model.platform)
            before = sampled.tokens
            members = [member for member, _ in now]
            drafts.add(before, sampled.for_host(None), members, range(len(now)))
        return drafts

    def _batch(self, members: Sequence[Member]) -> StepBatch:
        count = len(members)
        token_ids, lens = array(TOKEN_TYPE), array("q")
        config = self._head.config
        for member in members:
            num_context, num_drafts = len(member.token_ids), member.max_drafts
            token_ids.extend([0] * num_context)
            num_masks = num_drafts - config.drafts_from_newest
            if num_drafts:
                token_ids.append(member.seq.tokens[-1])
                token_ids.extend([config.mask_token_id] * num_masks)
            lens.append(num_context + (1 + num_masks if num_drafts else 0))
        samples = [member.max_drafts > 0 and not config.chains for member in members]
        batch = StepBatch(
            seq_ids=[member.seq.seq_id for member in members],
            token_ids=token_ids,
            starts=array("q", [member.begin for member in members]),
            query_lens=lens,
            samples=samples,
            input_from=array("i", [-1]) * count,
            num_drafts=array("i", [max(0, member.max_drafts - 1) for member in members]),
            adapter_ids=array("i", bytes(4 * count)),
            tables=[(member.table,) for member in members],
            block_copies=((),),
        )
        if True in samples:
            batch.sampling = self._sampling(members)
        return batch

    def _sampling(self, members: Sequence[Member]) -> SamplingMetadata:
        """Returns the settings of each draft. Only the first one's edits are known: the others'
        edits depend on the drafts before them."""
        rows: list[SamplingRow] = []
        positions: list[int] = []
        edits: list[tuple[int, LogitEdits]] = []
        self._masks.watch(m.seq for m in members if m.max_drafts and m.seq.sampler.has_edits)
        for member in members:
            seq, begin = member.seq, len(member.seq.tokens)
            if member.max_drafts and seq.sampler.has_edits:
                edit = edits_of(seq, MaskKey(seq.seq_id, begin))
                if edit is not None:
                    edits.append((len(rows), edit))
            rows += [seq.sampler.row] * member.max_drafts
            positions += range(begin, begin + member.max_drafts)
        return draft_settings(SamplingMetadata.of(rows), positions, edits)


def _features(
    batch: StepBatch, members: Sequence[Member], hidden: mx.array, firsts: Sequence[int]
) -> mx.array:
    """``[num_tokens, width + 1]``, see `DFlashHead`.

    Args:
        firsts: Row of each sequence's first state in `hidden`.
    """
    num_states, width = hidden.shape
    source = np.full(len(batch.token_ids), num_states, dtype=np.int32)  # a row of zeros
    marks = np.empty((len(batch.token_ids), 1), dtype=np.float32)
    lens = batch.query_lens
    for begin, length, first, member in zip(batch.query_starts(), lens, firsts, members):
        count = len(member.token_ids)
        source[begin : begin + count] = np.arange(first, first + count)
        marks[begin : begin + count] = 1
        marks[begin + count : begin + length, 0] = -np.arange(length - count)
    table = mx.concatenate([hidden, mx.zeros((1, width), hidden.dtype)])
    rows, marked = ops.upload(source, marks)
    return mx.concatenate([table[rows], marked.astype(hidden.dtype)], axis=1)


def _bounds(batch: StepBatch, members: Sequence[Member]) -> np.ndarray:
    """``[2, num_tokens]`` int32: first and last position of the block of each row."""
    parts = []
    for start, length, member in zip(batch.starts, batch.query_lens, members):
        own = np.arange(start, start + length)
        first, last = own.copy(), own.copy()
        num_context = len(member.token_ids)
        first[num_context:] = start + num_context
        last[num_context:] = start + length - 1
        parts.append(np.stack([first, last]))
    return np.concatenate(parts, axis=1).astype(np.int32)
