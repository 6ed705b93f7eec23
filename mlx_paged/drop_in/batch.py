"""`BatchGenerator` over the paged store: nothing is padded, and prompts share what they can.

A step computes one token of every sequence that is being generated, and pieces of prompts besides,
so long prompts do not hold up those that are answered already.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlx_paged.drop_in.batch_rows import Choice, Row
from mlx_paged.drop_in.batch_step import LaunchedStep, launch
from mlx_paged.drop_in.caches import import_dense, is_importable, prompt_cache, sequence_of
from mlx_paged.drop_in.sequence import PagedSequence
from mlx_paged.drop_in.store import PagedStore


class PagedBatch:
    """The sequences of a `BatchGenerator` that are in a store.

    Args:
        prompt_response: makes mlx-lm's response for a piece of a prompt.
        token_response: makes mlx-lm's response for a token.
        counters: mlx-lm's counters of the generator.
        max_rows: most sequences at work at once.
        max_prompts: most of them that are in their prompt.
        chunk_size: most prompt tokens in a step.
    """

    def __init__(
        self,
        store: PagedStore,
        *,
        prompt_response: Any,
        token_response: Any,
        counters: Any,
        max_rows: int,
        max_prompts: int,
        chunk_size: int,
    ) -> None:
        self.store = store
        self._prompt_response = prompt_response
        self._token_response = token_response
        self._counters = counters
        self._max_rows = max_rows
        self._max_prompts = max_prompts
        self._chunk_size = chunk_size
        self._waiting: deque[Row] = deque()
        self._prompts: list[Row] = []
        self._launched: LaunchedStep | None = None

    # Sequences.

    def add(self, row: Row) -> None:
        """Puts a sequence in the queue."""
        self.store.num_prompt_tokens += row.num_total
        self._waiting.append(row)

    def find(self, uids: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Stage (0: waiting, 1: in its prompt, 2: answering) and place of each sequence here."""
        wanted = set(uids)
        return {
            row.uid: (stage, i)
            for stage, rows in enumerate(self._stages())
            for i, row in enumerate(rows)
            if row.uid in wanted
        }

    def rows(self, uids: Iterable[int]) -> list[Row]:
        """The sequences that are there."""
        wanted = set(uids)
        return [row for rows in self._stages() for row in rows if row.uid in wanted]

    def remove(self, uids: Iterable[int]) -> None:
        """Lets go of sequences, wherever they are."""
        for row in self.rows(uids):
            row.is_alive = False
        self._waiting = deque(row for row in self._waiting if row.is_alive)
        self._prompts = [row for row in self._prompts if row.is_alive]
        self._drop_ended()

    @property
    def nbytes(self) -> int:
        """Memory of the sequences' blocks; blocks that they share count for each."""
        layers = range(len(self.store.specs))
        rows = [row for rows in self._stages() for row in rows]
        return sum(row.sequence.nbytes(layer) for row in rows for layer in layers)

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._stages())

    def _stages(self) -> tuple[Sequence[Row], Sequence[Row], Sequence[Row]]:
        return self._waiting, self._prompts, self._generating

    @property
    def _generating(self) -> list[Row]:
        return self._launched.rows if self._launched is not None else []

    def _drop_ended(self) -> None:
        if self._launched is not None:
            launched = self._launched.without_ended()
            self._launched = launched if launched.rows else None

    # Steps.

    def next(self) -> tuple[list[Any], list[Any]]:
        """Runs a step; returns responses for pieces of prompts, and for tokens of the step before.

        The step is launched before the tokens of the one before it are read, so the device does not
        wait for the host.
        """
        tic = time.perf_counter()
        self._admit()
        starting, chunks, prompt_responses = self._plan_prompts()
        before = self._launched
        num_decoding = len(self._generating)
        num_prompt_rows = len(starting) + sum(len(tokens) for _, tokens in chunks)
        if num_decoding + num_prompt_rows:
            self._launched = launch(self.store, before, starting, chunks)
        for row, token in starting:
            row.tokens.append(token)
        for row, _ in [*starting, *chunks]:
            row.learn()
        token_responses = self._read(before) if before is not None else []
        if before is None and num_prompt_rows:
            mx.eval(self.store.pools())  # never more than a step ahead of the device
        # A step's time is shared out by its rows.
        seconds = time.perf_counter() - tic
        for_tokens = seconds * num_decoding / max(1, num_decoding + num_prompt_rows)
        self._counters.decode_time += for_tokens
        self._counters.prompt_time += seconds - for_tokens
        self._counters.generation_tokens += len(token_responses)
        self._counters.generation_steps += before is not None
        return prompt_responses, token_responses

    def _admit(self) -> None:
        while (
            self._waiting
            and len(self._prompts) < self._max_prompts
            and len(self._prompts) + len(self._generating) < self._max_rows
        ):
            self._prompts.append(self._waiting.popleft())

    def _plan_prompts(
        self,
    ) -> tuple[list[tuple[Row, int]], list[tuple[Row, list[int]]], list[Any]]:
        """Which rows start to answer, which go on with their prompt, and what to tell of them."""
        starting: list[tuple[Row, int]] = []
        chunks: list[tuple[Row, list[int]]] = []
        responses = []
        room = self._chunk_size
        for row in self._prompts:
            if row.is_at_last_token:
                starting.append((row, row.segments.pop()[0]))
                responses.append(self._prompt_response(row.uid, (row.num_total,) * 2, True, True))
                continue
            num_segments, num_processed = len(row.segments), row.num_processed
            self._take_cached(row)
            if (
                room > 0
                and len(row.segments) == num_segments
                and not any(self._is_computing(other, row) for other, _ in chunks)
            ):
                tokens = row.take(min(len(row.segments[0]), room))
                room -= len(tokens)
                chunks.append((row, tokens))
            if row.num_processed > num_processed:
                self._counters.prompt_tokens += row.num_processed - num_processed
                progress = (row.num_processed, row.num_total)
                ended = len(row.segments) < num_segments
                responses.append(self._prompt_response(row.uid, progress, ended, False))
        self._prompts = [row for row in self._prompts if row.segments]
        return starting, chunks, responses

    def _take_cached(self, row: Row) -> None:
        """Takes what the store has of the present segment: no step is needed for that."""
        prompt, before = row.prompt(), row.sequence.offset
        if prompt is None:
            return
        num_cached = row.sequence.adopt(prompt, before + len(row.segments[0])) - before
        if num_cached:
            row.take(num_cached)
            self.store.num_cached_tokens += num_cached

    def _is_computing(self, other: Row, row: Row) -> bool:
        """Whether `other` fills in this very step the block that `row` needs next.

        Then that row waits, and takes the block by reference.
        """
        theirs, ours = other.known(), row.prompt()
        if theirs is None or ours is None:
            return False
        size = self.store.block_size
        end = (row.sequence.offset // size + 1) * size
        return len(theirs) >= end and len(ours) > end and theirs[:end] == ours[:end]

    def _read(self, step: LaunchedStep) -> list[Any]:
        """Waits for a step and tells of its tokens. The step after it, which puts their keys in the
        caches, has been launched.
        """
        mx.eval(step.tokens, step.logprobs)
        responses = []
        tokens: list[int] = step.tokens.tolist()  # type: ignore[assignment]
        for row, token, logprobs in zip(step.rows, tokens, step.logprobs):
            row.tokens.append(token)
            row.num_generated += 1
            reason = "length" if row.num_generated >= row.choice.max_tokens else None
            if row.matcher.advance(token):
                reason = "stop"
            if reason is not None or row.sequence.offset % self.store.block_size == 0:
                row.learn()
            ended: tuple[Any, Any] = None, None
            if reason is not None:
                row.is_alive = False
                ended = prompt_cache(row.sequence), row.tokens
            responses.append(self._token_response(row.uid, token, logprobs, reason, *ended))
        self._drop_ended()
        return responses


def row_of(
    uid: int,
    segments: list[list[int]],
    caches: Sequence[Any] | None,
    all_tokens: Sequence[int],
    choice: Choice,
    store: PagedStore,
) -> Row | None:
    """A row for a sequence that mlx-lm's `insert_segments` has checked; None: not for the store."""
    if caches is None:
        return Row(uid, PagedSequence(store), [], segments, choice)
    sequence = sequence_of(caches)
    if sequence is not None and sequence.store is store and len(sequence.leases) == 1:
        return Row(uid, sequence.fork(), all_tokens, segments, choice)
    if is_importable(caches, store):
        return Row(uid, import_dense(caches, store), all_tokens, segments, choice)
    return None
