"""`BatchGenerator` over the paged store: the engine's scheduler, with mlx-lm's samplers.

A step computes one token of every generating sequence plus chunks of prompts, so long prompts do
not stall sequences that are already generating.
"""

from __future__ import annotations

import copy
import inspect
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_lm_cache

from mlx_paged import core
from mlx_paged.core import (
    FinishReason,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StopPolicy,
)
from mlx_paged.core.kv.tree import TOKEN_BYTES, TOKEN_TYPE
from mlx_paged.core.scheduler import MAX_STEPS_IN_FLIGHT
from mlx_paged.drop_in.caches import import_dense, is_importable, prompt_cache, sequence_of
from mlx_paged.drop_in.locking import exclusive
from mlx_paged.drop_in.paged_store import PagedStore, SequenceHandle
from mlx_paged.drop_in.registry import store_for
from mlx_paged.drop_in.sequence import PagedSequence
from mlx_paged.engine.input_tokens import KnownTokens, input_tokens


class Choice(NamedTuple):
    """Sampling and stop settings of a sequence, in mlx-lm's types."""

    max_tokens: int
    sampler: Callable[[mx.array], mx.array]
    logits_processors: tuple[Any, ...]
    stop_sequences: Any


class BatchSequence:
    """One sequence of a batch: mlx-lm's side of a sequence of the scheduler.

    Attributes:
        seq: The scheduler's sequence. Its prompt begins with what is in the cache that it continues
            from; the tokens there are 0 if they are unknown.
        sequence: The cache that it continues from, until it is admitted; its own once it has ended.
            None in between, and once that was handed over.
        handle: Its hold on its blocks, while it runs.
        num_prompt_tokens: Number of prompt tokens after those of the cache that it continues from.
        start: Number of tokens in the cache that it continues from.
        num_reported: Number of prompt tokens after these that were reported as computed.
    """

    seq: core.Sequence

    def __init__(
        self, uid: int, sequence: PagedSequence, tokens: Sequence[int], choice: Choice
    ) -> None:
        self.uid = uid
        self.sequence: PagedSequence | None = sequence
        self.choice = choice
        self.store = sequence.store
        self.start = sequence.offset
        self.is_known = sequence.is_known
        self.num_prompt_tokens = self.num_reported = 0
        self.handle: SequenceHandle | None = None
        self._declared = list(tokens)
        self._matcher = choice.stop_sequences.matcher()
        self._context: mlx_lm_cache.TokenBuffer | None = None

    def request(self, segments: list[list[int]]) -> Request:
        """Returns the scheduler's request.

        Args:
            segments: The prompt. A step ends at the end of each segment.
        """
        sequence, start = self.sequence, self.start
        assert sequence is not None
        head = sequence.tokens[:start]
        if not self.is_known:
            head = array(TOKEN_TYPE, bytes(TOKEN_BYTES * start))
        ends = [start + end for end in accumulate(map(len, segments))]
        self.num_prompt_tokens = ends[-1] - start
        return Request(
            str(self.uid),
            head + array(TOKEN_TYPE, chain.from_iterable(segments)),
            # One more than is generated: the step that computes the last token is launched before
            # it is read, and samples another one.
            StopPolicy(max_tokens=self.choice.max_tokens + 1),
            read_prefix_cache=self.is_known,
            boundaries=ends[:-1],
            parent=sequence.tables,
            num_parent_tokens=start,
        )

    @property
    def tokens(self) -> list[int]:
        """Tokens in the cache from the caller's view: those it declared, plus all since. Does not
        include a token that is still being sampled."""
        return [*self._declared, *self.seq.tokens[self.start : self.seq.num_scheduled_tokens]]

    def snapshot(self) -> PagedSequence:
        """Returns a sequence with the current content of the cache."""
        if self.handle is None:
            assert self.sequence is not None
            return self.sequence.fork()
        offset = self.seq.num_scheduled_tokens
        return PagedSequence.of(self.store, self.handle, offset, is_known=self.is_known)

    def release(self) -> None:
        """Lets go of all blocks, and of the scheduler's sequence's hold on this one."""
        self.sequence = self.handle = None
        self.seq.answer = self.seq.stop_checker = None

    def reason_to_stop(
        self, seq: core.Sequence, token: int, reason: FinishReason | None
    ) -> FinishReason | None:
        """Returns why the newest token ends the sequence, or None. Its step is launched."""
        reason = None
        if seq.num_output_tokens >= self.choice.max_tokens:
            reason = FinishReason.LENGTH
        if self._matcher.advance(token):
            reason = FinishReason.STOP
        if reason is not None:
            self.sequence, self.handle = self.snapshot(), None
        return reason

    def context(self, newest: mx.array) -> mx.array:
        """Returns all tokens through `newest`, for logits processors. `newest` is ``[1]`` and may
        be in flight."""
        if self._context is None:
            # The first call is for the last prompt token, which `tokens` already includes.
            self._context = mlx_lm_cache.TokenBuffer(self.tokens[:-1])
        return self._context.update_and_fetch(newest)


@dataclass
class PendingStep:
    """A step that the device is running.

    Attributes:
        sampling: The sequences that get a token.
        written: Evaluated once the step is; used if nothing is sampled.
        logits: ``[len(sampling), vocab_size]``.
        inputs: ``[len(sampling)]``: the token before each.
        tokens: ``[len(sampling)]`` int32.
        logprobs: ``[len(sampling), vocab_size]``.
    """

    output: SchedulerOutput
    sampling: list[BatchSequence]
    written: mx.array
    logits: mx.array
    inputs: mx.array
    tokens: mx.array | None = None
    logprobs: mx.array | None = None

    def sample(self) -> None:
        """Samples the tokens, unless they are, and starts all of it on the device."""
        if not self.sampling or self.tokens is not None:
            return
        tokens, self.logprobs = _choose(self.sampling, self.inputs, self.logits)
        self.tokens = tokens.astype(mx.int32)
        mx.async_eval(self.tokens, self.logprobs)  # type: ignore[no-untyped-call]


class PagedBatch:
    """The sequences of a `BatchGenerator` that live in a store.

    Args:
        prompt_response: Builds mlx-lm's response for a prompt chunk.
        token_response: Builds mlx-lm's response for a token.
        counters: The generator's mlx-lm counters.
        max_sequences: Maximum number of running sequences.
        max_prompts: Maximum number of these that are in their prompt.
        chunk_size: Maximum prompt tokens per step.
    """

    def __init__(
        self,
        store: PagedStore,
        *,
        prompt_response: Any,
        token_response: Any,
        counters: Any,
        max_sequences: int,
        max_prompts: int,
        chunk_size: int,
    ) -> None:
        self.store = store
        self._entries: dict[int, BatchSequence] = {}  # unfinished ones by uid
        self._prompt_response = prompt_response
        self._token_response = token_response
        self._counters = counters
        config = SchedulerConfig(
            max_num_seqs=max_sequences,
            max_num_batched_tokens=max_sequences + chunk_size,
            max_num_prompt_tokens=chunk_size,
            max_num_prefills=max_prompts,
            long_prefill_token_threshold=0,
            watermark=0,
        )
        self._scheduler = Scheduler(config, store.kv)
        # Steps that were not read, oldest first. No exception, such as one of a sampler, loses any.
        self._steps: deque[PendingStep] = deque()

    # Sequences.

    @exclusive
    def add(self, entry: BatchSequence, segments: list[list[int]]) -> None:
        """Queues a sequence with a prompt."""
        assert entry.sequence is not None
        tables, kv = entry.sequence.tables, self.store.kv
        if not entry.is_known:
            kv.unindex(tables)
        # A fork of it continues here.
        self.store.fill(entry.sequence.handles[0], entry.start)
        kv.commit(tables, entry.start)
        kv.move_state(tables, entry.start)
        [entry.seq] = self._scheduler.add(entry.request(segments))
        entry.seq.answer = entry
        entry.seq.stop_checker = entry.reason_to_stop
        self._entries[entry.uid] = entry
        self.store.count(entry.num_prompt_tokens, 0)

    def find(self, uids: Iterable[int]) -> dict[int, tuple[int, int]]:
        """(stage, index) by uid. Stages: 0 waiting, 1 in the prompt, 2 generating."""
        stages: tuple[list[int], ...] = ([], [], [])
        for uid, entry in self._entries.items():
            is_generating = entry.seq.num_scheduled_tokens >= entry.seq.request.num_prompt_tokens
            stages[entry.seq.is_running + is_generating].append(uid)
        wanted = set(uids)
        return {
            uid: (stage, i)
            for stage, found in enumerate(stages)
            for i, uid in enumerate(found)
            if uid in wanted
        }

    def sequences(self, uids: Iterable[int]) -> list[BatchSequence]:
        """Returns the sequences with these uids."""
        return [self._entries[uid] for uid in uids if uid in self._entries]

    @exclusive
    def remove(self, uids: Iterable[int]) -> None:
        """Drops sequences at any stage."""
        for entry in self.sequences(uids):
            self._scheduler.finish_sequence(entry.seq, FinishReason.ABORT)
            del self._entries[entry.uid]
            entry.release()

    def __del__(self) -> None:
        # Requests and their sequences refer to each other, so they wait for the garbage collector.
        for entry in self._entries.values():
            entry.release()

    @property
    def nbytes(self) -> int:
        """Memory of the sequences' blocks; a shared block counts once per sequence."""
        handles = [
            handle
            for entry in self._entries.values()
            for handle in ([entry.handle] if entry.sequence is None else entry.sequence.handles)
            if handle is not None
        ]
        return sum(self.store.nbytes(handles, i) for i in range(len(self.store.flat.specs)))

    # Steps.

    def next(self) -> tuple[list[Any], list[Any]]:
        """Runs a step; returns responses for prompt chunks and for the previous step's tokens.

        The step is launched before the previous step's tokens are read, so the device does not wait
        for the host. More steps are run as long as there is nothing to report.
        """
        prompts: list[Any] = []
        tokens: list[Any] = []
        is_idle = False
        while not (prompts or tokens or is_idle):
            tic = time.perf_counter()
            before = len(self._steps)
            self._sample()
            if before < MAX_STEPS_IN_FLIGHT:
                prompts = self._launch()
                self._sample()
            tokens = self._commit() if before else []
            is_idle = not before and not self._steps
            self._count(time.perf_counter() - tic, len(tokens))
        return prompts, tokens

    def _sample(self) -> None:
        for step in self._steps:
            step.sample()

    def _count(self, seconds: float, num_tokens: int) -> None:
        """Updates mlx-lm's counters; splits the time by the tokens of the newest step."""
        counters = self._counters
        num_rows = num_decodes = 0
        if self._steps:
            batch, sequences = self._steps[-1].output
            num_rows = batch.num_tokens
            num_decodes = sum(
                start >= seq.request.num_prompt_tokens
                for start, seq in zip(batch.starts, sequences)
            )
        for_tokens = seconds * num_decodes / max(1, num_rows)
        counters.decode_time += for_tokens
        counters.prompt_time += seconds - for_tokens
        counters.generation_tokens += num_tokens
        counters.generation_steps += num_tokens > 0

    @exclusive
    def _launch(self) -> list[Any]:
        """Builds a step, if anything can run now, and starts it on the device, up to the logits.

        Returns:
            The responses for prompts.
        """
        self.store.collect()
        output = self._scheduler.schedule()
        for seq in self._scheduler.running:
            self._hold(seq.answer)
        responses = self._report(output)
        if output is None:
            return responses
        batch = output.batch
        entries: list[BatchSequence] = [seq.answer for seq in output.sequences]
        ends = np.cumsum(np.frombuffer(batch.query_lens, dtype=np.int64))
        wanted = (ends - 1)[np.array(batch.samples)]
        previous = None
        if self._steps and (tokens := self._steps[-1].tokens) is not None:
            previous = KnownTokens(tokens, tokens)
        inputs = input_tokens(batch, ends - batch.query_lens, previous)
        handles = [entry.handle for entry in entries if entry.handle is not None]
        assert len(handles) == len(entries)
        logits = self.store.run(batch, handles, inputs, wanted)
        if len(wanted) < len(inputs):
            inputs = inputs[mx.array(wanted)]
        sampling = [*compress(entries, batch.samples)]
        written = logits if sampling else self.store.written()
        self._steps.append(PendingStep(output, sampling, written, logits, inputs))
        return responses

    def _hold(self, entry: BatchSequence) -> None:
        """Takes hold of the blocks of a sequence that was admitted in this step."""
        if entry.sequence is None:
            return
        tables = entry.seq.tables
        assert tables is not None and tables.num_cached_tokens >= entry.start
        entry.handle = self.store.hold(tables, entry.sequence.handles[0].state, entry.start)
        entry.sequence = None
        if not entry.is_known:
            self.store.kv.unindex(tables)

    def _report(self, output: SchedulerOutput | None) -> list[Any]:
        """Returns the responses for prompts that have advanced."""
        lengths: dict[int, int] = {}
        if output is not None:
            lengths = dict(zip(output.batch.seq_ids, output.batch.query_lens))
        responses = []
        for seq in self._scheduler.running:
            entry: BatchSequence = seq.answer
            total = entry.num_prompt_tokens
            gained = seq.num_scheduled_tokens - entry.start - entry.num_reported
            if entry.num_reported == total or not gained:
                continue
            entry.num_reported += gained
            is_last = entry.num_reported == total
            self.store.count(0, gained - lengths.get(seq.seq_id, 0))
            self._counters.prompt_tokens += 0 if is_last else gained
            is_end = is_last or seq.num_scheduled_tokens in seq.request.boundaries
            progress = entry.num_reported, total
            responses.append(self._prompt_response(entry.uid, progress, is_end, is_last))
        return responses

    def _commit(self) -> list[Any]:
        """Waits for the oldest step; returns the responses for its tokens.

        The next step, which computes their keys, must already be launched.
        """
        step = self._steps[0]
        batch = step.output.batch
        if step.tokens is None or step.logprobs is None:
            mx.eval(step.written)  # stay at most one step ahead of the device
            self._update([[] for _ in batch.samples])
            return []
        mx.eval(step.tokens, step.logprobs)
        tokens: list[int] = step.tokens.tolist()  # type: ignore[assignment]
        rest = iter(tokens)
        gained = [[next(rest)] if samples else [] for samples in batch.samples]
        self._update(gained)
        responses = []
        found = compress(gained, batch.samples)
        for entry, gain, logprobs in zip(step.sampling, found, step.logprobs):
            if not gain:
                continue  # removed since
            ended: tuple[Any, ...] = (None, None, None)
            if entry.seq.is_finished:
                assert entry.seq.finish_reason is not None and entry.sequence is not None
                del self._entries[entry.uid]
                reason = entry.seq.finish_reason.value
                ended = (reason, prompt_cache(entry.sequence), entry.tokens)
                entry.release()
            responses.append(self._token_response(entry.uid, gain[0], logprobs, *ended))
        return responses

    @exclusive
    def _update(self, gained: list[list[int]]) -> None:
        self._scheduler.update_from_output(self._steps.popleft().output, gained)


def _choose(
    sequences: list[BatchSequence], inputs: mx.array, logits: mx.array
) -> tuple[mx.array, mx.array]:
    """Processes logits and samples, like mlx-lm's `GenerationBatch`."""
    if any(seq.choice.logits_processors for seq in sequences):
        processed = []
        for i, seq in enumerate(sequences):
            own = logits[i : i + 1]
            if seq.choice.logits_processors:
                context = seq.context(inputs[i : i + 1])
                for processor in seq.choice.logits_processors:
                    own = processor(context, own)
            processed.append(own)
        logits = mx.concatenate(processed, axis=0)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    samplers = [seq.choice.sampler for seq in sequences]
    if all(sampler is samplers[0] for sampler in samplers):
        return samplers[0](logprobs), logprobs
    chosen = [sampler(logprobs[i : i + 1]) for i, sampler in enumerate(samplers)]
    return mx.concatenate(chosen, axis=0), logprobs


def batch_generator(original: Any) -> Any:
    """Replaces `mlx_lm.generate.BatchGenerator`.

    Sequences that the model's store can take run in a `PagedBatch`. Sequences with other caches,
    and models without a store, run in mlx-lm's own code, in the same generator.
    """
    from mlx_lm.generate import GenerationBatch, PromptProcessingBatch

    class BatchGenerator(original):  # type: ignore[misc]
        def __init__(self, model: Any, **options: Any) -> None:
            super().__init__(model, **options)
            own_caches = inspect.unwrap(mlx_lm_cache.make_prompt_cache)(model, self.max_kv_size)
            store = store_for(model, own_caches)
            self._paged: PagedBatch | None = None
            if store is not None:
                self._paged = PagedBatch(
                    store,
                    prompt_response=PromptProcessingBatch.Response,
                    token_response=GenerationBatch.Response,
                    counters=self._counters,
                    max_sequences=self.completion_batch_size,
                    max_prompts=self.prefill_batch_size,
                    chunk_size=self.prefill_step_size,
                )

        def insert_segments(
            self,
            segments: list[list[list[int]]],
            max_tokens: list[int] | None = None,
            caches: list[Any] | None = None,
            all_tokens: list[list[int]] | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> list[int]:
            segments, caches, all_tokens = _with_last_tokens(segments, caches, all_tokens)
            if self._paged is not None and caches is None and len(segments) > 1:
                caches = self._new_caches(len(segments))
            uids: list[int] = super().insert_segments(
                segments, max_tokens, caches, all_tokens, *args, **kwargs
            )
            if self._paged is not None:
                queue = self._unprocessed_sequences
                for entry in [queue.pop() for _ in uids][::-1]:
                    uid, prompt, limit, cache, tokens, sampler, processors, stops = entry
                    choice = Choice(limit, sampler, processors, stops)
                    sequence, tokens = _stored(cache, tokens, self._paged.store)
                    if sequence is None:
                        queue.append(entry)
                    else:
                        self._paged.add(BatchSequence(uid, sequence, tokens, choice), prompt)
            return uids

        def _new_caches(self, count: int) -> list[Any]:
            """Returns a prompt cache for each new sequence; None means that mlx-lm creates it.

            Checks only once that the weights are unchanged.
            """
            first = mlx_lm_cache.make_prompt_cache(self.model, self.max_kv_size)
            sequence = sequence_of(first)
            if sequence is None:
                return [first, *[None] * (count - 1)]
            store = sequence.store
            return [first, *(prompt_cache(PagedSequence(store)) for _ in range(count - 1))]

        def _next(self) -> tuple[list[Any], list[Any]]:
            if self._paged is None:
                return super()._next()
            prompts, tokens = self._paged.next()
            if self._unprocessed_sequences or self._prompt_batch or self._generation_batch:
                more_prompts, more_tokens = super()._next()
                return prompts + more_prompts, tokens + more_tokens
            return prompts, tokens

        def _find_uids(self, uids: Iterable[int]) -> dict[int, tuple[int, int]]:
            found = super()._find_uids(uids)
            return {**found, **self._paged.find(uids)} if self._paged is not None else found

        def extract_cache(self, uids: Iterable[int]) -> dict[int, Any]:
            ours = self._paged.sequences(uids) if self._paged is not None else []
            found = {entry.uid: (prompt_cache(entry.snapshot()), entry.tokens) for entry in ours}
            return {**super().extract_cache(set(uids) - set(found)), **found}

        def remove(self, uids: Iterable[int], return_prompt_caches: bool = False) -> Any:
            uids = set(uids)
            caches = self.extract_cache(uids) if return_prompt_caches else {}
            if self._paged is not None:
                ours = self._paged.find(uids)
                self._paged.remove(ours)
                uids -= ours.keys()
            super().remove(uids)
            return caches

        @property
        def prompt_cache_nbytes(self) -> int:
            nbytes = super().prompt_cache_nbytes
            return nbytes + (self._paged.nbytes if self._paged is not None else 0)

    BatchGenerator.__doc__ = original.__doc__
    BatchGenerator.__qualname__ = original.__qualname__
    return BatchGenerator


def _stored(
    caches: Sequence[Any] | None, tokens: Sequence[int], store: PagedStore
) -> tuple[PagedSequence | None, Sequence[int]]:
    """Returns a store sequence that continues the caches given to mlx-lm, and its tokens.

    The sequence is None if the store cannot take the caches.
    """
    if caches is None:
        return PagedSequence(store), []
    sequence = sequence_of(caches)
    if sequence is not None and sequence.store is store and len(sequence.handles) == 1:
        return sequence.fork(), tokens
    return (import_dense(caches, store) if is_importable(caches, store) else None), tokens


def _with_last_tokens(
    segments: list[list[list[int]]],
    caches: list[Any] | None,
    all_tokens: list[list[int]] | None,
) -> tuple[list[list[list[int]]], list[Any] | None, list[list[int]] | None]:
    """Shortens the caches of sequences that have no prompt tokens left to compute.

    Their last token is recomputed, to get its logits.
    """
    if caches is None or len(caches) != len(segments):
        return segments, caches, all_tokens
    if all_tokens is not None and len(all_tokens) != len(segments):
        return segments, caches, all_tokens
    segments, caches = list(segments), list(caches)
    texts = [[] for _ in segments] if all_tokens is None else list(all_tokens)
    for i, (segment, cache) in enumerate(zip(segments, caches)):
        sequence = sequence_of(cache) if cache else None
        is_empty = all(c.empty() for c in cache or ()) if sequence is None else sequence.is_empty
        if any(segment) or is_empty:
            continue
        if sequence is not None and sequence.is_known and sequence.can_trim_all(1):
            shorter = sequence.fork()
            segments[i], texts[i] = [[shorter.tokens[-1]]], texts[i][:-1]
            shorter.trim_all(1)
            caches[i] = prompt_cache(shorter)
            continue
        last = list(texts[i][-1:])
        if last and mlx_lm_cache.can_trim_prompt_cache(cache):
            caches[i] = copy.deepcopy(cache)
            mlx_lm_cache.trim_prompt_cache(caches[i], 1)
            segments[i], texts[i] = [last], texts[i][:-1]
        elif texts[i]:  # not trimmable: recompute everything
            segments[i], caches[i], texts[i] = [texts[i]], None, []
    return segments, caches, texts
