"""ModelRunner: runs the batches of steps on the device. It knows nothing about requests."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.core import PromptLogprobs, StepBatch, StepResult, StepTable
from mlx_paged.engine.faults import NO_PERMITTED_TOKEN, POISONS, why_no_token
from mlx_paged.engine.input_tokens import KnownTokens, input_tokens
from mlx_paged.engine.media import StepMediaBuilder
from mlx_paged.engine.sampling.logits_processors import (
    InFlight,
    apply_edits,
    awaits_masks,
    only_masks,
)
from mlx_paged.engine.sampling.logprobs import (
    LogprobArrays,
    PositionLogprobs,
    PromptTargets,
    logprobs_of,
)
from mlx_paged.engine.sampling.masks import MaskSource
from mlx_paged.engine.sampling.sampler import (
    Sampled,
    SamplingMetadata,
    largest_of,
    sample,
)
from mlx_paged.model.layout import KVCacheGroupSpec
from mlx_paged.model.lora_slots import LowRank
from mlx_paged.model.media import StepMedia
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.plan import BlockTableCache, PaddedTables, StateSlots, StepInputs
from mlx_paged.model.step_output import Greedy, StepOutput

logger = logging.getLogger(__name__)

_MAX_ORDERED_ROWS = 64

# (index into the batch, number of reported positions) of each sequence
PositionCounts = list[tuple[int, int]]


class Chosen(NamedTuple):
    """The tokens of a step, while the device chooses them."""

    # [num_sampled] int32, in the order of the sequences that sample; then those of padding, if any.
    tokens: mx.array
    reported: mx.array  # like `tokens`, int32, for the host; -1: see `sample_failure`
    sample_failure: SampleFailure | None = None  # None if nothing is sampled
    logprobs: Reported | None = None  # of sampled tokens, if requested

    @property
    def results(self) -> list[mx.array]:
        """All that the host reads of them."""
        return [self.reported, *([] if self.logprobs is None else self.logprobs.arrays.arrays)]


@dataclass(eq=False)
class LaunchedStep:
    """A step that is running on the device, with the arrays of its results.

    If its tokens need masks, only its forward pass has been launched. Its tokens are sampled when
    `chosen` is first read, which must be before the next step is launched. Until then, the host can
    commit the previous step, whose tokens determine the masks.
    """

    batch: StepBatch
    written: mx.array  # the last pool it writes, to wait for in a step without samples
    pools_before: list[mx.array]  # handles of the pools, before it
    choose: Callable[[], Chosen] | None = None  # None: `chosen` is set
    prompt_logprobs: Reported | None = None  # of prompt tokens, if requested
    hidden: mx.array | None = None  # [num_tokens, width]: the tapped states of its rows

    @cached_property
    def chosen(self) -> Chosen:
        """Its tokens. Launches the sampler when it is first read, unless it has been set."""
        assert self.choose is not None
        chosen = self.choose()
        mx.async_eval(chosen.tokens, *chosen.results)  # type: ignore[no-untyped-call]
        self.choose = None
        return chosen

    @property
    def results(self) -> list[mx.array]:
        """All that the host reads of it."""
        chosen = self.chosen
        reports = [r for r in (chosen.logprobs, self.prompt_logprobs) if r is not None]
        return [chosen.reported, *(a for r in reports for a in r.arrays.arrays)]


class StepRows(NamedTuple):
    """The rows of each sequence of a step."""

    query_lens: np.ndarray  # [num_seqs] int64
    context_lens: np.ndarray  # [num_seqs] int64: tokens in the blocks after the step
    query_starts: np.ndarray  # [num_seqs]: first row of each sequence
    # Rows whose logits are needed: first those sampled, then those before reported prompt tokens.
    wanted: np.ndarray
    num_sampled: int
    num_ordered: int  # see `StepInputs.num_ordered_rows`


class SampleFailure(NamedTuple):
    """Explains why a row could not be sampled. Evaluated only when one failed."""

    sampled: Sampled
    # [num_sampled], before edits; None if the edits keep every value that is not finite.
    model_largest: mx.array | None
    is_masked: bool  # True if any row may be
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
    counts: PositionCounts  # in the order of the positions

    def read(self) -> list[tuple[int, list[PositionLogprobs]]]:
        """(index, its positions) of each sequence."""
        positions = iter(self.arrays.read())
        return [(index, [next(positions) for _ in range(count)]) for index, count in self.counts]


class ModelRunner:
    """Runs steps of a model in its pools.

    Args:
        model: From `model.wrap.convert_to_paged`; the runner owns it from now on.
        windows: Groups whose layers have their own block tables, in the order of a step's tables;
            all other layers share one table.
        num_blocks: Blocks of the pools; None if `allocate` makes them later.
        media: Encodes media items, if the model takes any.
        masks: Makes the masks that batches name, if any.
        orders_all: On the CPU, give the rows of all decodes the same bits in any batch. False does
            so for up to 64 rows, because a BLAS multiplies more rows faster.
        to_vocabulary: Maps logits to those of another model's vocabulary before sampling, because
            noise depends on their width.

    Attributes:
        share_tokens: On rank 0 of several, sends a step's tokens to the others; None on a single
            rank.
    """

    def __init__(
        self,
        model: PagedModel,
        *,
        windows: Sequence[KVCacheGroupSpec] = (),
        num_blocks: int | None = None,
        media: StepMediaBuilder | None = None,
        masks: MaskSource | None = None,
        orders_all: bool = False,
        to_vocabulary: Callable[[mx.array], mx.array] | None = None,
    ) -> None:
        self.share_tokens: Callable[[mx.array], mx.array] | None = None
        self._orders_all = orders_all
        self._to_vocabulary = to_vocabulary
        # On a GPU, kernels for one row of a sequence and for several sum in different orders.
        self.splits_drafts = not (model.platform.on_cpu or model.layout.has_states)
        self.model = model
        model.runs_in_order = True
        self.media = media
        self._masks = masks
        self._tables = BlockTableCache()
        self._windows = {group_spec: BlockTableCache() for group_spec in windows}
        self._loaded: dict[int, Any] = {}  # the adapter in each slot of the device
        if num_blocks is not None:
            self.allocate(num_blocks)

    @property
    def windows(self) -> tuple[KVCacheGroupSpec, ...]:
        """Groups whose layers have their own block tables."""
        return tuple(self._windows)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.model.block_size

    def allocate(
        self, num_blocks: int | Mapping[KVCacheGroupSpec, int], num_state_slots: int = 0
    ) -> None:
        """Allocates new pools. The contents of the old ones are lost."""
        self.model.allocate(num_blocks, num_state_slots)

    def load_adapter(self, slot: int, layers: Mapping[str, LowRank]) -> None:
        """Writes an adapter to a slot; see `PagedModel.load_adapter`."""
        self.model.load_adapter(slot, layers)

    def launch(
        self,
        batch: StepBatch,
        previous: LaunchedStep | KnownTokens | None,
        features: mx.array | None = None,
        bounds: np.ndarray | None = None,
    ) -> LaunchedStep:
        """Builds a step, starts it on the device, and returns immediately.

        Masks wait until the tokens of the step are read, see `LaunchedStep`. A step that raises
        leaves no trace: the handles of the pools stay the same.

        Args:
            previous: The step before, or its tokens, if the batch uses any of them.
            features, bounds: See `StepInputs`.

        Raises:
            ValueError: The batch lacks one of its adapters, or names a slot that the model does not
                have.
        """
        before = self.model.pools()
        try:
            self._load_adapters(batch)
            return self._launch(batch, previous, before, features, bounds)
        except Exception:
            self.model.restore(before)
            self._forget()
            if self.media is not None:
                self.media.store.abandon_launch()
            raise

    def _load_adapters(self, batch: StepBatch) -> None:
        """Loads the adapters of a step into their slots, unless they are there.

        A step in flight may use the adapter that was in the slot: the device writes after it.
        """
        unknown = set(batch.adapter_ids) - {0, *batch.adapters}
        num_slots = self.model.num_adapter_slots
        if unknown or any(not 0 < slot <= num_slots for slot in batch.adapters):
            raise ValueError(
                f"[step] adapter_ids must be 0 or slots of adapters, of which there are "
                f"{num_slots}, but got {sorted({*unknown, *batch.adapters})}"
            )
        for slot, adapter in batch.adapters.items():
            if self._loaded.get(slot) != adapter:
                self._loaded.pop(slot, None)  # An interrupted write leaves parts of both.
                self.load_adapter(slot, adapter.layers)
                self._loaded[slot] = adapter

    @staticmethod
    def read(launched: LaunchedStep) -> StepResult:
        """Waits for a step and returns its results.

        A sequence has no token if its logits contain a NaN or permit no token. A draft is accepted
        if it equals the token that was sampled in its place; then the token after it counts, too.
        """
        mx.eval(*launched.results, launched.written)
        batch, chosen = launched.batch, launched.chosen
        if batch.drafts_in_flight is not None:
            batch.drafts_in_flight.fill(batch)
        counts = None if batch.is_decode else batch.num_samples()
        num_sampled = len(batch.seq_ids) if counts is None else sum(counts)
        sampled: list[int] = np.array(chosen.reported)[:num_sampled].tolist()
        if counts is None:
            tokens = [[token] for token in sampled]
        else:
            ends = accumulate(counts)
            tokens = [sampled[end - count : end] for end, count in zip(ends, counts)]
        result = StepResult(tokens, hidden=launched.hidden)
        if min(sampled, default=0) < 0 and chosen.sample_failure is not None:
            row = 0
            for index, count in enumerate(batch.num_samples()):
                if count and tokens[index][0] < 0:
                    tokens[index] = []
                    reason = chosen.sample_failure(row)
                    result.failures.append((index, reason))
                    result.is_poisoned |= reason in POISONS
                row += count
        if batch.has_drafts:
            _reject_drafts(batch, tokens)
        if chosen.logprobs is not None:
            result.logprobs = [
                (index, found[: len(tokens[index])]) for index, found in chosen.logprobs.read()
            ]
        if launched.prompt_logprobs is not None:
            result.prompt_logprobs = [
                PromptLogprobs(index, batch.starts[index], found)
                for index, found in launched.prompt_logprobs.read()
            ]
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
        """Waits for a step, for example so that another thread may build on it."""
        mx.eval(launched.written)  # This thread may only choose its tokens after that.
        mx.eval(*launched.results, launched.chosen.tokens)

    def reset(self) -> None:
        """Drops all steps, including one that was interrupted while it was built.

        The pools keep their contents, which callers must not rely on. Waits until the device is
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
        """Clears caches between steps, because an exception may have interrupted an update."""
        self._tables = BlockTableCache()
        self._windows = {group_spec: BlockTableCache() for group_spec in self._windows}

    def _launch(
        self,
        batch: StepBatch,
        previous: LaunchedStep | KnownTokens | None,
        pools_before: list[mx.array],
        features: mx.array | None,
        bounds: np.ndarray | None,
    ) -> LaunchedStep:
        self._copy_blocks(batch)
        before = previous.chosen if isinstance(previous, LaunchedStep) else previous
        targets = batch.prompt_targets
        rows = self._step_rows(batch)
        num_sampled = rows.num_sampled
        metadata: SamplingMetadata = batch.sampling
        newest = None
        if num_sampled and metadata.edits:
            newest = _newest(batch, metadata, before)
        media, extra = None, []
        if self.media is not None:
            overlaps = isinstance(previous, LaunchedStep)
            media = self.media.build(batch, rows.context_lens, rows.query_lens, overlaps=overlaps)
            extra = self.media.store.made()
        logits, pools, greedy, taps = self._forward(
            batch, rows, before, media=media, features=features, bounds=bounds
        )
        hidden = _joined(taps, len(batch.token_ids)) if taps else None
        if self._to_vocabulary is not None:
            mapped = self._to_vocabulary(logits)
            logits, greedy = mapped, greedy if mapped is logits else None
        is_chosen = greedy is not None and _is_greedy(metadata)
        if logits.shape[0] > len(rows.wanted) and not is_chosen:
            # The host ignores greedy tokens of padding; nothing else is computed for it.
            logits = logits[: len(rows.wanted)]
            greedy = None if greedy is None else Greedy(*(a[: len(rows.wanted)] for a in greedy))
        if hidden is not None:
            extra = [*extra, hidden]
        prompt_logprobs = None
        if targets:
            prompt_logprobs = _report_prompts(logits[num_sampled : len(rows.wanted)], targets)
            extra = [*extra, *prompt_logprobs.arrays.arrays]
        launched = LaunchedStep(batch, pools[-1], pools_before, None, prompt_logprobs, hidden)
        if not num_sampled:
            # Nothing to choose: the step only writes to the pools.
            nothing = mx.zeros((0,), dtype=mx.int32)
            launched.chosen, greedy = Chosen(nothing, nothing), None
        else:
            raw = logits
            if targets:
                raw, greedy = logits[:num_sampled], None
            if metadata.edits and awaits_masks(metadata.edits):
                launched.choose = partial(self._choose, raw, batch, newest, greedy)
                if extra or greedy is None:  # A device program was launched when it was built.
                    mx.async_eval(logits, *pools, *extra)  # type: ignore[no-untyped-call]
                return launched
            launched.chosen = self._choose(raw, batch, newest, greedy)
            if self.share_tokens is not None:
                extra = [*extra, launched.chosen.tokens]
        # A device program's results were launched with it, and nothing else is requested.
        results, reported = launched.results, launched.chosen.reported
        is_program = greedy is not None and reported is greedy.reported and len(results) == 1
        if extra or not is_program:
            mx.async_eval(*results, *pools, *extra)  # type: ignore[no-untyped-call]
        return launched

    def _choose(
        self, raw: mx.array, batch: StepBatch, newest: InFlight | None, greedy: Greedy | None
    ) -> Chosen:
        """Chooses the tokens of a step, and determines why a row has none.

        Args:
            raw: ``[num_sampled, vocab_size]`` logits.
            newest: See `_newest`.
            greedy: The greedy choice, if the step has computed it.
        """
        metadata: SamplingMetadata = batch.sampling
        platform = self.model.platform
        if not metadata.edits:
            sampled = sample(raw, metadata, greedy, platform=platform)
            failure = SampleFailure(sampled, None, False, {})
        else:
            # A mask hides only finite values.
            model_largest = None
            if not only_masks(metadata.edits):
                model_largest = largest_of(raw, platform) if greedy is None else greedy.largest
            edited = apply_edits(raw, metadata.edits, newest, self._masks)
            sampled = sample(edited.logits, metadata, platform=platform)
            failure = SampleFailure(sampled, model_largest, True, edited.failed)
        for_host = sampled.for_host(failure.model_largest)
        if greedy is None or for_host is not greedy.reported:  # which is for the host
            for_host = ops.to_host(for_host)
        tokens = sampled.tokens
        logprobs = _report_samples(raw, tokens, batch, metadata)
        if self.share_tokens is not None:
            tokens = self.share_tokens(tokens[: sum(batch.num_samples())])
        return Chosen(tokens, for_host, failure, logprobs)

    def _forward(
        self,
        batch: StepBatch,
        rows: StepRows,
        previous: Chosen | KnownTokens | None,
        *,
        media: StepMedia | None = None,
        features: mx.array | None = None,
        bounds: np.ndarray | None = None,
    ) -> StepOutput:
        """Builds the model's part of a step: the same graph and collectives on every rank.

        Args:
            previous: The tokens of the step before, if the batch uses any of them.
            features, bounds: See `launch`.
            media: Inputs of media items.
        """
        inputs = self._inputs(
            batch, rows.context_lens, rows.query_lens, rows.wanted, media, rows.num_ordered
        )
        if features is not None:
            inputs = replace(inputs, features=features, bounds=bounds)
        repetition = self.model.repetition_of(inputs)
        num_padding = repetition.num_rows - len(batch.token_ids)
        tokens = input_tokens(
            batch, rows.query_starts, previous, num_padding, stays=repetition.reads_once
        )
        return self.model.run(tokens, inputs, repetition)

    def _inputs(
        self,
        batch: StepBatch,
        context_lens: np.ndarray,
        num_rows: np.ndarray,
        wanted: np.ndarray,
        media: StepMedia | None = None,
        num_ordered_rows: int = 0,
    ) -> StepInputs:
        """Returns the model's inputs for a step.

        Args:
            context_lens: Tokens of each sequence in its blocks, after the step.
            num_rows: Tokens of each sequence in the step.
            wanted: Rows whose results are needed.
            media: Inputs of media items.
            num_ordered_rows: See `StepInputs`.
        """
        slots, adapters = batch.slots, None
        if batch.adapters:
            adapters = np.repeat(np.frombuffer(batch.adapter_ids, dtype=np.int32), num_rows)
        tables = self._block_tables(tuple(batch.seq_ids), batch.tables)
        splits_drafts = self.splits_drafts and batch.has_drafts
        if splits_drafts:
            context_lens, num_rows, tables = _split_drafts(batch, context_lens, num_rows, tables)
        return StepInputs(
            context_lens=context_lens,
            query_lens=num_rows,
            tables=tables,
            logit_rows=wanted,
            state_slots=StateSlots(
                reads=[slot.read for slot in slots], writes=[slot.write for slot in slots]
            )
            if slots
            else None,
            media=media,
            num_ordered_rows=num_ordered_rows,
            adapters=adapters,
            may_pad=True,
            splits_drafts=splits_drafts,
        )

    def _step_rows(self, batch: StepBatch) -> StepRows:
        query_lens = np.frombuffer(batch.query_lens, dtype=np.int64)
        context_lens = np.frombuffer(batch.starts, dtype=np.int64) + query_lens
        if batch.is_decode:
            # A single sampled token is the last one of its prompt, or follows it.
            query_starts = wanted = np.arange(len(batch.seq_ids))
        else:
            ends = np.cumsum(query_lens)
            query_starts, wanted = ends - query_lens, ends - 1
            if False in batch.samples:
                wanted = wanted[np.array(batch.samples)]
            if batch.has_drafts:
                num_samples = np.array(batch.num_samples(), dtype=np.int64)
                if np.array_equal(num_samples, query_lens):
                    wanted = np.arange(len(batch.token_ids))
                else:
                    num_following = _num_following_rows(query_lens)
                    wanted = np.flatnonzero(num_following < num_samples.repeat(query_lens))
        num_sampled = len(wanted)
        if batch.prompt_targets:
            reported = [
                query_starts[i] + np.arange(len(t.token_ids)) for i, t in batch.prompt_targets
            ]
            wanted = np.concatenate([wanted, *reported])
        num_ordered = self._num_ordered(batch, query_lens) if self.model.platform.on_cpu else 0
        return StepRows(query_lens, context_lens, query_starts, wanted, num_sampled, num_ordered)

    def _num_ordered(self, batch: StepBatch, query_lens: np.ndarray) -> int:
        num_ordered = len(query_lens)
        if not batch.is_decode:
            # The leading rows belong to decodes and their drafts, or to the last token of a prompt.
            is_decode = query_lens == 1 + np.frombuffer(batch.num_drafts, dtype=np.int32)
            num_decodes = len(is_decode) if is_decode.all() else int(is_decode.argmin())
            num_ordered = int(query_lens[:num_decodes].sum())
        return num_ordered if self._orders_all or num_ordered <= _MAX_ORDERED_ROWS else 0

    def _block_tables(
        self, seq_ids: tuple[int, ...], tables: Sequence[tuple[StepTable, ...]]
    ) -> PaddedTables | Mapping[KVCacheGroupSpec, PaddedTables]:
        """Returns the block tables of a step: one for all layers, or one for each group."""
        full, *windows = zip(*tables)
        shared = self._tables.update(seq_ids, full)
        if not windows:
            return shared
        by_group = dict.fromkeys(self.model.layout.group_specs, shared)
        for (group_spec, cache), own in zip(self._windows.items(), windows):
            by_group[group_spec] = cache.update(seq_ids, own)
        return by_group

    def _copy_blocks(self, batch: StepBatch) -> None:
        """Copy-on-write, in the layers of each group."""
        full, *windows = batch.block_copies
        if full:
            [pairs] = ops.upload(np.array(full, dtype=np.int32))
            for group_spec in self.model.layout.group_specs:
                if group_spec not in self._windows:
                    self.model.copy_blocks(pairs, group_spec)
        for group_spec, copies in zip(self._windows, windows):
            if copies:
                [pairs] = ops.upload(np.array(copies, dtype=np.int32))
                self.model.copy_blocks(pairs, group_spec)


def _split_drafts(
    batch: StepBatch,
    context_lens: np.ndarray,
    query_lens: np.ndarray,
    tables: PaddedTables | Mapping[KVCacheGroupSpec, PaddedTables],
) -> tuple[np.ndarray, np.ndarray, PaddedTables | Mapping[KVCacheGroupSpec, PaddedTables]]:
    """Makes each row of a sequence with drafts a separate sequence over the same blocks.

    Every layer writes the keys and values of all rows before it reads any, so a row finds those of
    the drafts before it. Then verification has the kernels, the graphs and the bits of decodes.
    """
    num_drafts = np.frombuffer(batch.num_drafts, dtype=np.int32)
    if len(batch.token_ids) == len(num_drafts) + num_drafts.sum():  # no prompts
        counts, lens = query_lens, np.ones(len(batch.token_ids), dtype=np.int64)
        sequence = np.repeat(np.arange(len(counts)), counts)
    else:
        counts = np.where(num_drafts > 0, query_lens, 1)
        sequence = np.repeat(np.arange(len(counts)), counts)
        lens = np.where(num_drafts > 0, 1, query_lens)[sequence]

    def split(padded: PaddedTables) -> PaddedTables:
        blocks = padded.blocks.take(sequence, axis=0)
        return PaddedTables(blocks, padded.lengths.take(sequence))

    if isinstance(tables, PaddedTables):
        by_row: PaddedTables | Mapping[KVCacheGroupSpec, PaddedTables] = split(tables)
    else:
        # Groups that share tables must keep sharing them.
        done = {id(each): split(each) for each in tables.values()}
        by_row = {group_spec: done[id(each)] for group_spec, each in tables.items()}
    row = np.arange(1, len(sequence) + 1)
    return (context_lens - counts.cumsum()).take(sequence) + row, lens, by_row


def _num_following_rows(counts: np.ndarray) -> np.ndarray:
    """For each row, the number of later rows of its sequence. `counts`: rows of each sequence."""
    return np.cumsum(counts).repeat(counts) - np.arange(1, counts.sum() + 1)


def _joined(taps: Sequence[mx.array], num_rows: int) -> mx.array:
    """``[num_rows, total width]``: a copy, because the next step may reuse the memory of taps."""
    joined = mx.concatenate(list(taps), axis=-1) if len(taps) > 1 else taps[0] + 0
    return joined[:num_rows]


def _is_greedy(metadata: SamplingMetadata) -> bool:
    """True if all tokens are greedy and nothing else is requested of the logits."""
    return not (metadata.edits or metadata.logprobs or len(metadata.drawn))


def _newest(
    batch: StepBatch, metadata: SamplingMetadata, previous: Chosen | KnownTokens | None
) -> InFlight | None:
    """Returns where the newest tokens are, if an edit needs them and any is in flight."""
    if previous is None:
        return None
    source = np.frombuffer(batch.input_from, dtype=np.int32)
    if False in batch.samples:
        source = source[np.array(batch.samples)]
    if batch.has_drafts:  # The newest token of a sequence with drafts is known.
        source = np.repeat(source, [n for n in batch.num_samples() if n])
    if not any(source[i] >= 0 for i, _ in metadata.edits):
        return None
    return InFlight(previous.tokens, source, previous.reported)


def _report_samples(
    logits: mx.array, tokens: mx.array, batch: StepBatch, metadata: SamplingMetadata
) -> Reported | None:
    asking = [i for i, _ in metadata.logprobs]
    if not asking:
        return None
    if len(asking) < len(metadata):
        [at] = ops.upload(np.array(asking, dtype=np.int32))
        logits, tokens = ops.take_rows(logits, at), ops.take_rows(tokens, at)
    listed = dict(metadata.logprob_token_ids)
    arrays = logprobs_of(
        logits,
        tokens,
        likeliest=any(count for _, count in metadata.logprobs),
        listed=[listed.get(i, ()) for i in asking] if listed else (),
    )
    indices = [index for index, count in enumerate(batch.num_samples()) for _ in range(count)]
    return Reported(arrays, list(Counter(indices[i] for i in asking).items()))


def _reject_drafts(batch: StepBatch, tokens: list[list[int]]) -> None:
    """Drops the tokens of each sequence that follow a draft which was not sampled.

    A row after accepted drafts that has no token (-1) is dropped, too: the next step begins there,
    and fails if the row does so again.
    """
    for drafts, sampled in zip(batch.drafts(), tokens):
        if drafts and sampled:
            accepted = 0
            while accepted < len(drafts) and sampled[accepted] == drafts[accepted]:
                accepted += 1
            del sampled[accepted + 1 :]
            if sampled[-1] < 0:
                sampled.pop()


def _report_prompts(logits: mx.array, targets: list[tuple[int, PromptTargets]]) -> Reported:
    tokens = np.concatenate([np.array(t.token_ids, dtype=np.int32) for _, t in targets])
    likeliest = any(t.likeliest for _, t in targets)
    arrays = logprobs_of(logits, mx.array(tokens), likeliest=likeliest)
    return Reported(arrays, [(index, len(t.token_ids)) for index, t in targets])
