"""Runs the scheduler's steps on the device. Knows nothing about requests."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.core import IN_FLIGHT_TOKEN, ScheduledSequence, SchedulerOutput
from mlx_paged.engine.faults import NO_PERMITTED_TOKEN, POISONS, why_no_token
from mlx_paged.engine.grammar.worker import MaskWorker
from mlx_paged.engine.media.encoder_cache import RejectedItem
from mlx_paged.engine.media.step_media import StepMediaBuilder
from mlx_paged.engine.sampling.logits_processors import (
    GrammarMasks,
    InFlight,
    apply_edits,
    has_grammars,
    make_grammar_masks,
    only_masks,
)
from mlx_paged.engine.sampling.logprobs import (
    LogprobArrays,
    PositionLogprobs,
    PromptTargets,
    logprobs_of,
)
from mlx_paged.engine.sampling.sampler import (
    MetadataCache,
    Sampled,
    SamplingMetadata,
    largest_of,
    sample,
)
from mlx_paged.model.compiled import Greedy
from mlx_paged.model.layout import Reach
from mlx_paged.model.media import StepMedia
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.plan import BlockTableCache, PaddedTables, StateSlots, StepInputs
from mlx_paged.platform import Platform

logger = logging.getLogger(__name__)

# Places in `SchedulerOutput.sequences`, and how many positions are reported of each.
Places = list[tuple[int, int]]


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device is working on, and where its tokens will be."""

    output: SchedulerOutput
    tokens: mx.array  # [num_sampled] int32, in the order of the sequences that sample
    # The last pool it writes, to wait for in a step without samples.
    written: mx.array
    reported: mx.array  # [num_sampled] int32, for the host: the tokens; -1: see `why_none`
    pools_before: list[mx.array]  # handles of the pools, before it
    why_none: WhyNone | None = None  # None where nothing is sampled
    logprobs: Reported | None = None  # of sampled tokens, where some were asked for
    prompt_logprobs: Reported | None = None  # of prompt tokens, likewise

    @property
    def results(self) -> list[mx.array]:
        """All that the host reads of it."""
        reports = [r for r in (self.logprobs, self.prompt_logprobs) if r is not None]
        return [self.reported, *(a for r in reports for a in r.arrays.arrays)]


class WhyNone(NamedTuple):
    """Explains why a row could not be sampled. Evaluated only when one failed."""

    sampled: Sampled
    # [num_sampled], before edits; None where they leave what is not finite as it is.
    model_largest: mx.array | None
    is_masked: bool  # some row may be
    failed_masks: dict[int, str]  # by row

    def __call__(self, row: int) -> str:
        """One line for the caller."""
        if row in self.failed_masks:
            return self.failed_masks[row]
        largest = self.sampled.largest
        before = largest if self.model_largest is None else self.model_largest
        pair = mx.stack([before[row], largest[row]]).astype(mx.float32)
        model_largest, edited_largest = np.array(pair).tolist()
        if self.is_masked and self.model_largest is None and edited_largest == -math.inf:
            return NO_PERMITTED_TOKEN
        return why_no_token(model_largest, edited_largest)


@dataclass(frozen=True)
class Reported:
    """Log-probabilities of some sequences of a step."""

    arrays: LogprobArrays
    places: Places  # the sequences of the positions, in order

    def read(self) -> list[tuple[int, list[PositionLogprobs]]]:
        """(place, its positions) of each sequence."""
        positions = iter(self.arrays.read())
        return [(place, [next(positions) for _ in range(count)]) for place, count in self.places]


@dataclass
class ModelRunnerOutput:
    """Results of a step; places are those in `SchedulerOutput.sequences`.

    Attributes:
        sampled_token_ids: For each sequence its token; None where it does not sample, or failed.
        failures: (place, why there is no token, or the item that the tower rejects). These
            sequences cannot continue.
        logprobs: (place, log-probabilities of its token), where they were asked for.
        prompt_logprobs: (sequence's part of the step, those of the tokens after its first ones).
        pooled: (sequence's part of the step, ``[hidden_size]`` float32): see `PooledPrompt`.
    """

    sampled_token_ids: list[int | None]
    failures: list[tuple[int, str | RejectedItem]] = field(default_factory=list)
    logprobs: list[tuple[int, PositionLogprobs]] = field(default_factory=list)
    prompt_logprobs: list[tuple[ScheduledSequence, list[PositionLogprobs]]] = field(
        default_factory=list
    )
    pooled: list[tuple[ScheduledSequence, np.ndarray]] = field(default_factory=list)

    @property
    def poisoned(self) -> bool:
        """True if there were NaNs or infinities, so that the prefix cache cannot be trusted."""
        return any(reason in POISONS for _, reason in self.failures)


class ModelRunner:
    """A model and its pools; runs steps.

    Args:
        model: as `model.wrap.page` makes it; it belongs to this runner.
        windows: reaches whose layers have block tables of their own, in the order in which a
            step names them; all others share one.
        num_blocks: blocks of the pools; None: `allocate` makes them later.
        media: encodes media items, where the model takes any.
    """

    def __init__(
        self,
        model: PagedModel,
        *,
        windows: Sequence[Reach] = (),
        num_blocks: int | None = None,
        media: StepMediaBuilder | None = None,
    ) -> None:
        self.model = model
        self.media = media
        self._tables = BlockTableCache()
        self._windows = {reach: BlockTableCache() for reach in windows}
        self._metadata = MetadataCache()
        self._mask_worker = MaskWorker[GrammarMasks]()
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

    def launch(self, output: SchedulerOutput, previous: LaunchedStep | None) -> LaunchedStep:
        """Builds a step and starts it on the device; returns at once.

        (Unless a sequence has a token mask and its newest token is in flight: then it waits for
        that.) A step that raises leaves no trace: the pools' handles are those of before.

        Args:
            previous: the step before, if its tokens have not been read yet.
        """
        before = self.model.pools()
        try:
            return self._launch(output, previous, before)
        except Exception:
            self.model.restore(before)
            self._forget()
            if self.media is not None:
                self.media.store.abandon_launch()
            raise

    @staticmethod
    def read(launched: LaunchedStep) -> ModelRunnerOutput:
        """Waits for a step and returns its results.

        A sequence has no token where its logits hold a NaN, or permit none.
        """
        mx.eval(*launched.results, launched.written)
        sequences = launched.output.sequences
        sampled: list[int] = np.array(launched.reported).tolist()
        tokens: list[int | None] = list(sampled)
        if len(sampled) < len(sequences):
            rest = iter(sampled)
            tokens = [next(rest) if s.samples else None for s in sequences]
        result = ModelRunnerOutput(tokens)
        if min(sampled, default=0) < 0 and launched.why_none is not None:
            places = [place for place, s in enumerate(sequences) if s.samples]
            for row, (place, token) in enumerate(zip(places, sampled)):
                if token < 0:
                    tokens[place] = None
                    result.failures.append((place, launched.why_none(row)))
        if launched.logprobs is not None:
            result.logprobs = [(at, found[0]) for at, found in launched.logprobs.read()]
        if launched.prompt_logprobs is not None:
            found_of = launched.prompt_logprobs.read()
            result.prompt_logprobs = [(sequences[at], found) for at, found in found_of]
        return result

    def abandon(self, launched: LaunchedStep) -> None:
        """Drops a step that failed, and all launched after it; waits until the device is idle."""
        try:
            mx.synchronize()
        except Exception:
            logger.debug("the device reported an error after a failed step", exc_info=True)
        # Contents that a failed step wrote are overwritten before they are read.
        self.model.restore(launched.pools_before)
        if self.media is not None:
            self.media.store.abandon()

    @staticmethod
    def wait(launched: LaunchedStep) -> None:
        """Waits for a step that another thread launched, so that this one may build on it."""
        mx.eval(*launched.results, launched.tokens, launched.written)

    def reset(self) -> None:
        """Drops all steps, one that was given up while it was built included.

        What the pools hold stays as it is, and is not to be relied on. Waits until the device is
        idle.
        """
        try:
            mx.synchronize()
        except Exception:
            logger.debug("the device reported an error after a failed step", exc_info=True)
        self.model.reset()
        self._forget()
        if self.media is not None:
            self.media.forget()

    def _forget(self) -> None:
        """Empties what is kept from step to step, as an exception may have come in between."""
        self._mask_worker.wait()
        self._tables = BlockTableCache()
        self._windows = {reach: BlockTableCache() for reach in self._windows}
        self._metadata = MetadataCache()

    def _launch(
        self, output: SchedulerOutput, previous: LaunchedStep | None, pools_before: list[mx.array]
    ) -> LaunchedStep:
        self._copy_blocks(output)
        columns = tuple(zip(*output.sequences))
        _, token_ids, starts, samples, input_from, _, _ = columns
        count = len(token_ids)
        is_decode = False not in samples and sum(map(len, token_ids)) == count
        sampled: Sequence[ScheduledSequence]
        if is_decode:
            # (A single token that is sampled from is its prompt's last, or follows it.)
            sampled, targets = output.sequences, []
            num_rows, wanted = np.ones(count, dtype=np.int64), np.arange(count)
            positions = context_lens = np.fromiter(starts, dtype=np.int64, count=count) + 1
        else:
            sampled, targets = [s for s in output.sequences if s.samples], _prompt_targets(output)
            num_rows = np.fromiter(map(len, token_ids), dtype=np.int64, count=count)
            context_lens = np.fromiter(starts, dtype=np.int64, count=count) + num_rows
            ends = np.cumsum(num_rows)
            positions, wanted = context_lens, ends - 1
            if len(sampled) < count:
                is_sampled = np.array(samples)
                positions, wanted = positions[is_sampled], wanted[is_sampled]
            if targets:
                # Rows that are sampled from, then those that prompt tokens to report follow.
                reported = [ends[i] - num_rows[i] + np.arange(len(t.token_ids)) for i, t in targets]
                wanted = np.concatenate([wanted, *reported])
        metadata, newest, grammars = None, None, None
        if sampled and (is_decode or any(s.sequence.sampler.has_edits for s in sampled)):
            metadata = self._metadata(sampled, positions)
            if metadata.edits:
                newest = _newest(sampled, metadata, previous)
                if has_grammars(metadata.edits):
                    make = partial(make_grammar_masks, metadata.edits, newest)
                    grammars = self._mask_worker.start(make)
        media, made = None, []
        if self.media is not None:
            media = self.media.build(
                output, columns[0], context_lens, num_rows, overlaps=previous is not None
            )
            made = self.media.store.made()
        total = count if is_decode else int(num_rows.sum())
        wanted_rows = total
        if not is_decode and sampled and media is None:
            wanted_rows = self.model.rows_with_prompts(total)
        stays = self.model.reads_once(wanted_rows, is_decode=is_decode)
        logits = self.model.forward(
            _input_tokens(token_ids, input_from, previous, wanted_rows - total, stays=stays),
            self._inputs(columns, context_lens, num_rows, wanted, media),
        )
        greedy = None
        if sampled:
            if metadata is None:  # (for which the GPU need not have waited)
                metadata = self._metadata(sampled, positions)
            raw = logits[: len(sampled)] if targets else logits
            greedy = self.model.greedy_of(raw)
            why_none = _choose(raw, metadata, newest, grammars, greedy, self.model.platform)
            tokens = why_none.sampled.tokens
            for_host = why_none.sampled.for_host(why_none.model_largest)
            if greedy is None or for_host is not greedy.reported:  # (which is for the host)
                for_host = ops.to_host(for_host)
            logprobs = _report_samples(raw, tokens, output, metadata)
        else:
            # Nothing to choose: the step's work is what it wrote to the pools.
            tokens, logprobs, why_none = mx.zeros((0,), dtype=mx.int32), None, None
            for_host = tokens
        prompt_logprobs = _report_prompts(logits[len(sampled) :], targets) if targets else None
        pools = self.model.pools()
        launched = LaunchedStep(
            output, tokens, pools[-1], for_host, pools_before, why_none, logprobs, prompt_logprobs
        )
        # (What a device program found has been launched with it, and nothing but it is asked for.)
        results = launched.results
        if greedy is None or for_host is not greedy.reported or len(results) > 1 or made:
            mx.async_eval(*results, *pools, *made)  # type: ignore[no-untyped-call]
        return launched

    def _inputs(
        self,
        columns: tuple[Any, ...],
        context_lens: np.ndarray,
        num_rows: np.ndarray,
        wanted: np.ndarray,
        media: StepMedia | None = None,
    ) -> StepInputs:
        """Returns the model's inputs for a step.

        Args:
            columns: the fields of its scheduled sequences.
            context_lens: tokens of each sequence in its blocks, after the step.
            num_rows: tokens of each sequence in the step.
            wanted: rows whose results are asked for.
            media: what they bring besides tokens.
        """
        owners, _, _, _, _, tables, states = columns
        return StepInputs(
            context_lens=context_lens,
            query_lens=num_rows,
            tables=self._block_tables(tuple([s.seq_id for s in owners]), tables),
            logit_rows=wanted,
            state_slots=None if states[0] is None else StateSlots(*zip(*states)),
            media=media,
        )

    def _block_tables(
        self, seq_ids: tuple[int, ...], tables: tuple[tuple[Sequence[int], int], ...]
    ) -> PaddedTables | Mapping[Reach, PaddedTables]:
        """The block tables of a step: one for all layers, or those of each reach."""
        full, *windows = zip(*tables)
        shared = self._tables.update(seq_ids, full)
        if not windows:
            return shared
        by_reach = dict.fromkeys(self.model.layout.reaches, shared)
        for (reach, cache), own in zip(self._windows.items(), windows):
            by_reach[reach] = cache.update(seq_ids, own)
        return by_reach

    def _copy_blocks(self, output: SchedulerOutput) -> None:
        """Copy-on-write, in the layers of each group."""
        full, *windows = output.block_copies
        if full:
            [pairs] = ops.upload(np.array(full, dtype=np.int32))
            for reach in self.model.layout.reaches:
                if reach not in self._windows:
                    self.model.copy_blocks(pairs, reach)
        for reach, copies in zip(self._windows, windows):
            if copies:
                [pairs] = ops.upload(np.array(copies, dtype=np.int32))
                self.model.copy_blocks(pairs, reach)


def _prompt_targets(output: SchedulerOutput) -> list[tuple[int, PromptTargets]]:
    """(place, prompt tokens to report), where a sequence's request asks for any."""
    targets = []
    for place, s in enumerate(output.sequences):
        report = s.sequence.prompt_report
        if report is not None and (len(s.token_ids) > 1 or not s.samples):
            found = report.targets(s.start, s.context_len)
            if found is not None:
                targets.append((place, found))
    return targets


def _newest(
    sampled: Sequence[ScheduledSequence], metadata: SamplingMetadata, previous: LaunchedStep | None
) -> InFlight | None:
    """Where the newest tokens are, if an edit needs them and any of them is in flight."""
    if previous is None or not any(sampled[i].awaits_token for i, _ in metadata.edits):
        return None
    source = np.array([s.input_from for s in sampled], dtype=np.int32)
    return InFlight(previous.tokens, source, previous.reported)


def _choose(
    raw: mx.array,
    metadata: SamplingMetadata,
    newest: InFlight | None,
    grammars: Future[GrammarMasks] | None,
    greedy: Greedy | None,
    platform: Platform,
) -> WhyNone:
    """The tokens of a step, and what says why a row has none.

    Args:
        raw: ``[num_sampled, vocab_size]`` logits.
        greedy: greedy sampling of them, where the step has found it.
    """
    if not metadata.edits:
        return WhyNone(sample(raw, metadata, greedy, platform=platform), None, False, {})
    # (A mask hides nothing that is not finite.)
    model_largest = None
    if not only_masks(metadata.edits):
        model_largest = largest_of(raw, platform) if greedy is None else greedy.largest
    edited = apply_edits(raw, metadata.edits, newest, grammars)
    sampled = sample(edited.logits, metadata, platform=platform)
    return WhyNone(sampled, model_largest, True, edited.failed)


def _report_samples(
    logits: mx.array, tokens: mx.array, output: SchedulerOutput, metadata: SamplingMetadata
) -> Reported | None:
    asking = [i for i, _ in metadata.logprobs]
    if not asking:
        return None
    if len(asking) < len(metadata):
        at = mx.array(np.array(asking, dtype=np.int32))
        logits, tokens = logits[at], tokens[at]
    listed = dict(metadata.logprob_token_ids)
    arrays = logprobs_of(
        logits,
        tokens,
        likeliest=any(count for _, count in metadata.logprobs),
        listed=[listed.get(i, ()) for i in asking] if listed else (),
    )
    places = [place for place, s in enumerate(output.sequences) if s.samples]
    return Reported(arrays, [(places[i], 1) for i in asking])


def _report_prompts(logits: mx.array, targets: list[tuple[int, PromptTargets]]) -> Reported:
    tokens = np.concatenate([np.array(t.token_ids, dtype=np.int32) for _, t in targets])
    likeliest = any(t.likeliest for _, t in targets)
    arrays = logprobs_of(logits, mx.array(tokens), likeliest=likeliest)
    return Reported(arrays, [(place, len(t.token_ids)) for place, t in targets])


def _input_tokens(
    token_ids: Sequence[Sequence[int]],
    input_from: tuple[int, ...],
    previous: LaunchedStep | None,
    num_more: int = 0,
    *,
    stays: bool = False,
) -> mx.array:
    """``[num_rows]`` int32. Tokens that the step before is still sampling stay on the device.

    Args:
        num_more: rows of no sequence behind the others.
        stays: see `ops.upload`; of tokens that are all known.
    """
    num_known = input_from.count(-1)
    if num_known == len(input_from):
        return ops.upload(_flat(token_ids, num_more), stays=stays)[0]
    assert previous is not None, "a sequence awaits a token but no step is in flight"
    if num_known == 0:
        if input_from == tuple(range(previous.tokens.size)):
            return previous.tokens  # the same sequences in the same order
        return previous.tokens[ops.upload(np.array(input_from, dtype=np.int32))[0]]
    known = _flat(token_ids, num_more)
    source = np.full(len(known), -1, dtype=np.int32)
    source[known == IN_FLIGHT_TOKEN] = [place for place in input_from if place >= 0]
    places, tokens = ops.upload(source, known)
    return mx.where(places < 0, tokens, previous.tokens[mx.maximum(places, 0)])


def _flat(token_ids: Sequence[Sequence[int]], num_more: int) -> np.ndarray:
    """All of them side by side, int32, and so many zeros behind them."""
    total = sum(map(len, token_ids))
    if total == len(token_ids) and not num_more:
        return np.fromiter(chain.from_iterable(token_ids), dtype=np.int32, count=total)
    flat, at = np.zeros(total + num_more, dtype=np.int32), 0
    for ids in token_ids:
        end = at + len(ids)
        # (An array as a whole: number by number it would take longer than all else of a prompt.)
        flat[at:end] = ids[0] if len(ids) == 1 else ids
        at = end
    return flat
