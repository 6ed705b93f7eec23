"""`BatchGenerator` over the paged store: no padding, shared prefixes.

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
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_lm_cache

from mlx_paged.core import PrefixQuery
from mlx_paged.core.kv.tree import TOKEN_TYPE
from mlx_paged.drop_in.caches import import_dense, is_importable, prompt_cache, sequence_of
from mlx_paged.drop_in.locking import exclusive
from mlx_paged.drop_in.paged_store import PagedStore
from mlx_paged.drop_in.registry import store_for
from mlx_paged.drop_in.sequence import PagedSequence


class Choice(NamedTuple):
    """Sampling and stop settings of a sequence, in mlx-lm's types."""

    max_tokens: int
    sampler: Callable[[mx.array], mx.array]
    logits_processors: tuple[Any, ...]
    stop_sequences: Any


class BatchSequence:
    """One sequence, from its insertion to its last token.

    Attributes:
        tokens: Tokens in the cache from the caller's view: those it declared, plus all since. Does
            not include a token that is still being sampled.
        segments: The rest of the prompt. The batch stops at the end of each segment. The last
            segment is the last token alone, which starts generation.
        num_total: Number of prompt tokens.
        num_processed: Number of prompt tokens in the cache.
    """

    def __init__(
        self,
        uid: int,
        sequence: PagedSequence,
        tokens: Sequence[int],
        segments: list[list[int]],
        choice: Choice,
    ) -> None:
        self.uid = uid
        self.sequence = sequence
        self.tokens = list(tokens)
        self.segments = segments
        self.choice = choice
        self.num_total = sum(map(len, segments))
        self.num_processed = 0
        self.num_generated = 0
        self.matcher = choice.stop_sequences.matcher()
        self.is_alive = True
        self._context: mlx_lm_cache.TokenBuffer | None = None
        # Cached tokens plus the rest of the prompt. The caller's `tokens` are not verified against
        # the cache, so only tokens that the sequence itself knows are shared.
        self._text: array[int] | None = None
        self._query: PrefixQuery | None = None  # for the current segment
        if sequence.is_known:
            self._text = sequence.tokens + array(TOKEN_TYPE, [t for s in segments for t in s])
        # With recurrent state: other running prompts, and the number of tokens taken from each.
        self._shared: list[tuple[BatchSequence, int]] = []

    @property
    def is_at_last_token(self) -> bool:
        """True if generation can start."""
        return len(self.segments) == 1 and len(self.segments[0]) == 1

    def take_cached(self) -> int:
        """Takes stored tokens of the current segment, which need no step.

        Returns:
            Number of tokens taken.
        """
        if self._text is None:
            return 0
        before = self.sequence.offset
        end = before + len(self.segments[0])
        if self._query is None or self._query.num_tokens != end:
            self._query = PrefixQuery(self._text, limit=end)
        num_cached = self.sequence.adopt(self._text, self._query) - before
        if num_cached:
            self._take(num_cached)
        return num_cached

    def begin(self, others: Iterable[BatchSequence]) -> None:
        """Starts work on the sequence, beside `others`.

        A recurrent state exists only where a step ended. Sharing with running prompts is therefore
        planned now, so that their steps end at the right place.
        """
        if self._text is None:
            return
        self.sequence.plan_snapshots(self._text)
        if not self.sequence.store.has_states:
            return
        size = self.sequence.store.block_size
        for other in others:
            if other._text is None:
                continue
            num_tokens = _num_common(self._text[:-1], other._text[:-1]) // size * size
            if num_tokens > max(self.sequence.offset, other.sequence.offset):
                other.sequence.stop_at(num_tokens)
                self._shared.append((other, num_tokens))

    def must_wait_for(self, others: Iterable[BatchSequence]) -> bool:
        """True if one of `others` is computing the next block of this sequence."""
        if self._text is None or self._query is None:
            return False
        if self.sequence.store.has_states:
            # `_shared` holds only prompts that started earlier, so this cannot deadlock.
            self._shared = [
                (other, num_tokens)
                for other, num_tokens in self._shared
                if other.is_alive
                and self.sequence.offset < num_tokens
                and other.sequence.offset < num_tokens
            ]
            return bool(self._shared)
        found = self.sequence.store.computing_next_block(self._text, self._query)
        return found is not None and any(other.sequence.tables is found for other in others)

    def compute(self, num_tokens: int) -> list[int]:
        """Returns the next prompt tokens for the step to compute, all from one segment.

        Args:
            num_tokens: Maximum number of tokens.
        """
        if self._text is not None:
            self.sequence.announce(self._text)
        start = self.sequence.offset
        end = start + min(num_tokens, len(self.segments[0]))
        return self._take(self.sequence.next_stop(end) - start)

    def _take(self, num_tokens: int) -> list[int]:
        segment = self.segments[0]
        taken, self.segments[0] = segment[:num_tokens], segment[num_tokens:]
        if not self.segments[0]:
            self.segments.pop(0)
        self.tokens += taken
        self.num_processed += len(taken)
        return taken

    def add(self, token: int) -> str | None:
        """Adds the newest output token; returns the finish reason, or None."""
        self.tokens.append(token)
        self.num_generated += 1
        reason = "length" if self.num_generated >= self.choice.max_tokens else None
        if self.matcher.advance(token):
            reason = "stop"
        if reason is not None:
            self.is_alive = False
        if self._text is not None:
            # A step launched since then computes this token, so it is in the cache.
            self.sequence.tokens.append(token)
            if reason is not None or self.sequence.offset % self.sequence.store.block_size == 0:
                self.sequence.commit()
        if reason is not None:
            self.sequence.finish()
        return reason

    def context(self, newest: mx.array) -> mx.array:
        """All tokens through `newest`, for logits processors. `newest` is ``[1]`` and may be in
        flight."""
        if self._context is None:
            # The first call is for the last prompt token, which `tokens` already includes.
            self._context = mlx_lm_cache.TokenBuffer(self.tokens[:-1])
        return self._context.update_and_fetch(newest)


_Work = list[tuple[BatchSequence, list[int]]]  # (sequence, tokens to compute)


@dataclass
class PendingTokens:
    """Tokens that the device is sampling.

    Attributes:
        sequences: The sequences that get one.
        tokens: ``[len(sequences)]``.
        logprobs: ``[len(sequences), vocab_size]``.
    """

    sequences: list[BatchSequence]
    tokens: mx.array
    logprobs: mx.array

    def without_ended(self) -> PendingTokens | None:
        """Keeps only unfinished sequences; returns None if there are none."""
        alive = [i for i, seq in enumerate(self.sequences) if seq.is_alive]
        if len(alive) == len(self.sequences):
            return self
        at = mx.array(alive, dtype=mx.int32)
        sequences = [self.sequences[i] for i in alive]
        return PendingTokens(sequences, self.tokens[at], self.logprobs[at]) if alive else None


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
        self._prompt_response = prompt_response
        self._token_response = token_response
        self._counters = counters
        self._max_sequences = max_sequences
        self._max_prompts = max_prompts
        self._chunk_size = chunk_size
        self._waiting: deque[BatchSequence] = deque()
        self._prompts: list[BatchSequence] = []
        self._pending: PendingTokens | None = None

    # Sequences.

    def add(self, seq: BatchSequence) -> None:
        """Queues a sequence."""
        self.store.count(seq.num_total, 0)
        self._waiting.append(seq)

    def find(self, uids: Iterable[int]) -> dict[int, tuple[int, int]]:
        """(stage, index) by uid. Stages: 0 waiting, 1 in the prompt, 2 generating."""
        wanted = set(uids)
        return {
            seq.uid: (stage, i)
            for stage, sequences in enumerate(self._stages())
            for i, seq in enumerate(sequences)
            if seq.uid in wanted
        }

    def sequences(self, uids: Iterable[int]) -> list[BatchSequence]:
        """The sequences with these uids."""
        wanted = set(uids)
        return [seq for stage in self._stages() for seq in stage if seq.uid in wanted]

    def remove(self, uids: Iterable[int]) -> None:
        """Drops sequences at any stage."""
        for seq in self.sequences(uids):
            seq.is_alive = False
        self._waiting = deque(seq for seq in self._waiting if seq.is_alive)
        self._prompts = [seq for seq in self._prompts if seq.is_alive]
        if self._pending is not None:
            self._pending = self._pending.without_ended()

    @property
    def nbytes(self) -> int:
        """Memory of the sequences' blocks; a shared block counts once per sequence."""
        layers = range(len(self.store.flat.specs))
        sequences = [seq.sequence for stage in self._stages() for seq in stage]
        return sum(sequence.nbytes(layer) for sequence in sequences for layer in layers)

    def _stages(self) -> tuple[Sequence[BatchSequence], ...]:
        return self._waiting, self._prompts, self._generating

    @property
    def _generating(self) -> list[BatchSequence]:
        return [] if self._pending is None else self._pending.sequences

    # Steps.

    def next(self) -> tuple[list[Any], list[Any]]:
        """Runs a step; returns responses for prompt chunks and for the previous step's tokens.

        The step is launched before the previous step's tokens are read, so the device does not wait
        for the host.
        """
        tic = time.perf_counter()
        self._admit()
        starting, chunks, prompt_responses = self._plan_prompts()
        before = self._pending
        num_decoding = len(self._generating)
        num_prompt_tokens = len(starting) + sum(len(tokens) for _, tokens in chunks)
        if num_decoding + num_prompt_tokens:
            self._pending = self._launch(before, starting, chunks)
        self._commit([*starting, *chunks])
        token_responses = self._read(before) if before is not None else []
        if before is None and num_prompt_tokens:
            mx.eval(self.store.written())  # stay at most one step ahead of the device
        # Split the step's time by its tokens.
        seconds = time.perf_counter() - tic
        for_tokens = seconds * num_decoding / max(1, num_decoding + num_prompt_tokens)
        self._counters.decode_time += for_tokens
        self._counters.prompt_time += seconds - for_tokens
        self._counters.generation_tokens += len(token_responses)
        self._counters.generation_steps += before is not None
        return prompt_responses, token_responses

    def _admit(self) -> None:
        while (
            self._waiting
            and len(self._prompts) < self._max_prompts
            and len(self._prompts) + len(self._generating) < self._max_sequences
        ):
            seq = self._waiting.popleft()
            seq.begin(self._prompts)
            self._prompts.append(seq)

    @exclusive
    def _commit(self, work: _Work) -> None:
        for seq, _ in work:
            seq.sequence.commit()

    @exclusive
    def _plan_prompts(self) -> tuple[_Work, _Work, list[Any]]:
        """Splits sequences into those that start generating and those with more prompt.

        A sequence waits if another one computes its next block in this step. It then takes the
        block by reference.
        """
        starting: _Work = []
        chunks: _Work = []
        responses = []
        budget = self._chunk_size
        for seq in self._prompts:
            num_segments, num_processed = len(seq.segments), seq.num_processed
            if seq.is_at_last_token:
                starting.append((seq, seq.compute(1)))
                responses.append(self._prompt_response(seq.uid, (seq.num_total,) * 2, True, True))
                continue
            self.store.count(0, seq.take_cached())
            ended = len(seq.segments) < num_segments
            computing = (other for other, _ in [*starting, *chunks])
            if budget > 0 and not ended and not seq.must_wait_for(computing):
                tokens = seq.compute(budget)
                budget -= len(tokens)
                chunks.append((seq, tokens))
                ended = len(seq.segments) < num_segments
            if seq.num_processed > num_processed:
                self._counters.prompt_tokens += seq.num_processed - num_processed
                progress = (seq.num_processed, seq.num_total)
                responses.append(self._prompt_response(seq.uid, progress, ended, False))
        self._prompts = [seq for seq in self._prompts if seq.segments]
        return starting, chunks, responses

    def _launch(
        self, decoding: PendingTokens | None, starting: _Work, chunks: _Work
    ) -> PendingTokens | None:
        """Builds a step and starts it on the device; returns at once.

        Args:
            decoding: Sequences whose newest token is the step's input.
            starting: Sequences with the last token of their prompt.
            chunks: Sequences with earlier prompt tokens; nothing is sampled for these.

        Returns:
            The tokens of `decoding` and `starting`, in that order; None if there are none.
        """
        answering = [*(decoding.sequences if decoding else []), *(seq for seq, _ in starting)]
        sequences = [seq.sequence for seq in [*answering, *(seq for seq, _ in chunks)]]
        lengths = [1] * len(answering) + [len(tokens) for _, tokens in chunks]
        starts = [sequence.offset for sequence in sequences]
        for sequence, start, length in zip(sequences, starts, lengths):
            sequence.before_write(start, start + length)
        known = [token for _, tokens in [*starting, *chunks] for token in tokens]
        inputs = mx.array(np.array(known, dtype=np.int32))
        if decoding is not None:
            inputs = mx.concatenate([decoding.tokens.astype(mx.int32), inputs])
        leases = [sequence.leases[0] for sequence in sequences]
        store = self.store
        logits = store.forward(leases, starts, lengths, inputs, np.arange(len(answering)))
        for sequence, start, length in zip(sequences, starts, lengths):
            sequence.advance_to(start + length)
        if not answering:
            return None
        tokens, logprobs = _choose(answering, inputs, logits)
        mx.async_eval(tokens, logprobs)  # type: ignore[no-untyped-call]
        return PendingTokens(answering, tokens, logprobs)

    def _read(self, step: PendingTokens) -> list[Any]:
        """Waits for the tokens of a step; returns their responses.

        The next step, which computes their keys, must already be launched.
        """
        mx.eval(step.tokens, step.logprobs)
        responses = []
        tokens: list[int] = step.tokens.tolist()  # type: ignore[assignment]
        for seq, token, logprobs in zip(step.sequences, tokens, step.logprobs):
            reason = seq.add(token)
            ended = (None, None) if reason is None else (prompt_cache(seq.sequence), seq.tokens)
            responses.append(self._token_response(seq.uid, token, logprobs, reason, *ended))
        if self._pending is not None:
            self._pending = self._pending.without_ended()
        return responses


def _num_common(a: array[int], b: array[int]) -> int:
    """Number of leading tokens that two texts share."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(np.asarray(a[:length]) != np.asarray(b[:length]))
    return int(differs[0]) if len(differs) else length


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
                        self._paged.add(BatchSequence(uid, sequence, tokens, prompt, choice))
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
            found = {seq.uid: (prompt_cache(seq.sequence.fork()), seq.tokens) for seq in ours}
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
    if sequence is not None and sequence.store is store and len(sequence.leases) == 1:
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
