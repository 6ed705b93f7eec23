"""Runs the steps that the scheduler plans, on the device. Knows nothing of requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.core import IN_FLIGHT_TOKEN, Batch, GroupRows, ScheduledSequence
from mlx_paged.engine.faults import nan_rows
from mlx_paged.engine.sampler import SamplingRows, sample
from mlx_paged.engine.sampling.edits import apply_edits
from mlx_paged.engine.sampling.logprobs import LogprobArrays, PositionLogprobs, logprobs_of
from mlx_paged.engine.sampling.prompt_report import PromptTargets
from mlx_paged.engine.sampling.rows import InFlight
from mlx_paged.model.layout import Reach
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.plan import BlockTableCache, PaddedTables, StateSlots, StepInputs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device is working on, and where its tokens will be."""

    batch: Batch
    tokens: mx.array  # [num_samples] int32
    # The last pool it writes: a step without samples has nothing else to wait for.
    written: mx.array
    sample_index: dict[int, int]  # seq_id -> entry of `tokens`
    reported: mx.array  # [num_samples] int32, for the host: the tokens; -1: the logits hold a NaN
    pools_before: list[mx.array]  # handles of the pools, before it
    logprobs: Reported | None = None  # of sampled tokens, where some were asked for
    prompt_logprobs: Reported | None = None  # of prompt tokens, likewise

    @property
    def results(self) -> list[mx.array]:
        """All that the host reads of it."""
        reports = [r for r in (self.logprobs, self.prompt_logprobs) if r is not None]
        return [self.reported, *(a for r in reports for a in r.arrays.arrays)]


@dataclass(frozen=True)
class Reported:
    """Log-probabilities of some sequences of a step."""

    arrays: LogprobArrays
    num_positions: dict[int, int]  # seq_id -> how many of the positions, in order, are its

    def read(self) -> dict[int, list[PositionLogprobs]]:
        """The positions of each sequence, by seq_id."""
        positions = iter(self.arrays.read())
        return {
            seq_id: [next(positions) for _ in range(count)]
            for seq_id, count in self.num_positions.items()
        }


class ModelRunner:
    """A model on its pools, and the one way to run a step.

    Args:
        model: as `model.wrap.page` makes it; it belongs to this runner.
        windows: reaches whose layers have block tables of their own, in the order in which a
            batch names them; all others share one.
        num_blocks: blocks of the pools; None: `allocate` makes them later.
    """

    def __init__(
        self, model: PagedModel, *, windows: Sequence[Reach] = (), num_blocks: int | None = None
    ) -> None:
        self.model = model
        self._tables = BlockTableCache()
        self._windows = {reach: BlockTableCache() for reach in windows}
        if num_blocks is not None:
            self.allocate(num_blocks)

    @property
    def windows(self) -> tuple[Reach, ...]:
        """Reaches whose layers have block tables of their own."""
        return tuple(self._windows)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.model.block_size

    def allocate(self, num_blocks: int | Mapping[Reach, int], num_state_slots: int = 0) -> None:
        """Makes new pools; what the old ones held is lost."""
        self.model.allocate(num_blocks, num_state_slots)

    def launch(
        self,
        batch: Batch,
        sampling_rows: Callable[[list[ScheduledSequence]], SamplingRows],
        previous: LaunchedStep | None,
        prompt_targets: Callable[[ScheduledSequence], PromptTargets | None] | None = None,
    ) -> LaunchedStep:
        """Builds a step and sets the device to work on it; returns at once.

        (Unless a row has a token mask and its newest token is in flight: then it waits for that.)
        A step that raises leaves no trace: the pools' handles are those of before.

        Args:
            sampling_rows: how to choose the tokens of the sequences that are sampled in this step.
            previous: the step before, if its tokens have not been read yet.
            prompt_targets: which of a sequence's prompt tokens are to be reported; None: none are.
        """
        before = self.model.pools()
        try:
            return self._launch(batch, sampling_rows, previous, prompt_targets, before)
        except Exception:
            self.model.restore(before)
            raise

    @staticmethod
    def read(launched: LaunchedStep) -> dict[int, int]:
        """Waits for a step and returns the token of each sequence that was sampled, by seq_id.

        A row whose logits hold a NaN has no token.
        """
        mx.eval(*launched.results, launched.written)
        tokens = np.array(launched.reported).tolist()
        if min(tokens, default=0) >= 0:
            return {seq_id: tokens[i] for seq_id, i in launched.sample_index.items()}
        return {s: tokens[i] for s, i in launched.sample_index.items() if tokens[i] >= 0}

    def abandon(self, launched: LaunchedStep) -> None:
        """Gives up a step that failed, and all launched after it; waits for the device to rest."""
        try:
            mx.synchronize()
        except Exception:
            logger.debug("the device came to rest with an error", exc_info=True)
        # What a step wrote that did not succeed is written again before anybody reads it.
        self.model.restore(launched.pools_before)

    def _launch(
        self,
        batch: Batch,
        sampling_rows: Callable[[list[ScheduledSequence]], SamplingRows],
        previous: LaunchedStep | None,
        prompt_targets: Callable[[ScheduledSequence], PromptTargets | None] | None,
        pools_before: list[mx.array],
    ) -> LaunchedStep:
        self._copy_blocks(batch)
        sampled = [s for s in batch.sequences if s.samples]
        targets: dict[int, PromptTargets] = {}
        if prompt_targets is not None:
            # (A single token that is sampled from is the prompt's last, or follows it.)
            targets = {
                s.seq_id: t
                for s in batch.sequences
                if (len(s.token_ids) > 1 or not s.samples) and (t := prompt_targets(s))
            }
        logits = self._forward(batch, previous, targets)
        if sampled:
            rows = sampling_rows(sampled)
            raw = logits[: len(sampled)] if targets else logits
            tokens = sample(apply_edits(raw, rows, _newest(sampled, rows, previous)), rows)
            reported = ops.to_host(mx.where(nan_rows(raw), -1, tokens))
            logprobs = _report_samples(raw, tokens, sampled, rows)
        else:
            # Nothing to choose: the step's work is what it wrote to the pools.
            tokens, logprobs = mx.zeros((0,), dtype=mx.int32), None
            reported = tokens
        prompt_logprobs = _report_prompts(logits[len(sampled) :], targets) if targets else None
        pools = self.model.pools()
        launched = LaunchedStep(
            batch,
            tokens,
            pools[-1],
            dict(zip([s.seq_id for s in sampled], range(len(sampled)))),
            reported,
            pools_before,
            logprobs,
            prompt_logprobs,
        )
        mx.async_eval(*launched.results, *pools)  # type: ignore[no-untyped-call]
        return launched

    def _forward(
        self, batch: Batch, previous: LaunchedStep | None, targets: dict[int, PromptTargets]
    ) -> mx.array:
        """``[num_samples + num_targets, vocab_size]`` logits: of the rows that are sampled from,
        then of those that prompt tokens follow."""
        sequences = batch.sequences
        seq_ids, _, token_ids, starts, tables, dirty_from, samples, groups = zip(*sequences)
        full = self._tables.update(seq_ids, tables, dirty_from)
        num_rows = np.array([len(tokens) for tokens in token_ids])
        ends = np.cumsum(num_rows)
        wanted = (ends - 1)[np.array(samples)]
        if targets:
            first_row = {s.seq_id: end - s.num_tokens for s, end in zip(sequences, ends)}
            before = [first_row[i] + np.arange(len(t.token_ids)) for i, t in targets.items()]
            wanted = np.concatenate([wanted, *before])
        inputs = StepInputs(
            context_lens=np.array(starts) + num_rows,
            query_lens=num_rows,
            tables=self._by_reach(full, seq_ids, groups) if self._windows else full,
            logit_rows=wanted,
            state_slots=None if groups[0].state is None else _slots_of(groups),
        )
        return self.model.forward(_input_tokens(seq_ids, token_ids, previous), inputs)

    def _by_reach(
        self, full: PaddedTables, seq_ids: tuple[int, ...], groups: tuple[GroupRows, ...]
    ) -> Mapping[Reach, PaddedTables]:
        """The block tables of a step: those of each window group, and `full` for the rest."""
        tables = dict.fromkeys(self.model.layout.reaches, full)
        for i, (reach, cache) in enumerate(self._windows.items()):
            rows = [group.windows[i] for group in groups]
            tables[reach] = cache.update(
                seq_ids, [row.block_table for row in rows], [row.dirty_from for row in rows]
            )
        return tables

    def _copy_blocks(self, batch: Batch) -> None:
        """Copy-on-write, in the layers of each group."""
        if batch.block_copies:
            [pairs] = ops.upload(np.array(batch.block_copies, dtype=np.int32))
            for reach in self.model.layout.reaches:
                if reach not in self._windows:
                    self.model.copy_blocks(pairs, reach)
        for reach, copies in zip(self._windows, batch.window_copies):
            if copies:
                [pairs] = ops.upload(np.array(copies, dtype=np.int32))
                self.model.copy_blocks(pairs, reach)


def _slots_of(groups: tuple[GroupRows, ...]) -> StateSlots:
    moves = [group.state for group in groups if group.state is not None]
    return StateSlots([move.read for move in moves], [move.write for move in moves])


def _newest(
    sampled: list[ScheduledSequence], rows: SamplingRows, previous: LaunchedStep | None
) -> InFlight | None:
    """Where the newest tokens are, if an edit asks and any of them is in flight."""
    if previous is None or not any(sampled[i].awaits_token for i, _ in rows.edits):
        return None
    source = [previous.sample_index[s.seq_id] if s.awaits_token else -1 for s in sampled]
    return InFlight(previous.tokens, np.array(source, dtype=np.int32))


def _report_samples(
    logits: mx.array,
    tokens: mx.array,
    sampled: list[ScheduledSequence],
    rows: SamplingRows,
) -> Reported | None:
    asking = [i for i, _ in rows.logprobs]
    if not asking:
        return None
    if len(asking) < len(rows):
        at = mx.array(np.array(asking, dtype=np.int32))
        logits, tokens = logits[at], tokens[at]
    arrays = logprobs_of(logits, tokens, likeliest=any(count for _, count in rows.logprobs))
    return Reported(arrays, {sampled[i].seq_id: 1 for i in asking})


def _report_prompts(logits: mx.array, targets: dict[int, PromptTargets]) -> Reported:
    tokens = np.concatenate([np.array(t.token_ids, dtype=np.int32) for t in targets.values()])
    likeliest = any(t.likeliest for t in targets.values())
    arrays = logprobs_of(logits, mx.array(tokens), likeliest=likeliest)
    return Reported(arrays, {seq_id: len(t.token_ids) for seq_id, t in targets.items()})


def _input_tokens(
    seq_ids: tuple[int, ...],
    token_ids: tuple[tuple[int, ...], ...],
    previous: LaunchedStep | None,
) -> mx.array:
    """``[num_rows]`` int32. Tokens that the step before is still sampling never visit the host."""
    num_in_flight = token_ids.count((IN_FLIGHT_TOKEN,))
    if num_in_flight == 0:
        return ops.upload(np.fromiter(chain.from_iterable(token_ids), dtype=np.int32))[0]
    assert previous is not None, "a row awaits a token but no step is in flight"
    at = previous.sample_index
    if num_in_flight == len(seq_ids):
        if seq_ids == tuple(at):
            return previous.tokens  # the same sequences in the same order
        [places] = ops.upload(np.array([at[i] for i in seq_ids], dtype=np.int32))
        return previous.tokens[places]
    known = np.fromiter(chain.from_iterable(token_ids), dtype=np.int32)
    source = np.full(len(known), -1, dtype=np.int32)
    waiting = [i for i, tokens in zip(seq_ids, token_ids) if tokens[0] == IN_FLIGHT_TOKEN]
    source[known == IN_FLIGHT_TOKEN] = [at[i] for i in waiting]
    places, tokens = ops.upload(source, known)
    return mx.where(places < 0, tokens, previous.tokens[mx.maximum(places, 0)])
