"""One forward over many sequences: tokens being generated and pieces of prompts together."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_paged.drop_in.batch_rows import Row
from mlx_paged.drop_in.store import PagedStore


@dataclass
class LaunchedStep:
    """Tokens that the device is choosing.

    Attributes:
        rows: Who gets one.
        tokens: ``[len(rows)]``.
        logprobs: ``[len(rows), vocab_size]``.
    """

    rows: list[Row]
    tokens: mx.array
    logprobs: mx.array

    def without_ended(self) -> LaunchedStep:
        """Only the rows that go on."""
        alive = [i for i, row in enumerate(self.rows) if row.is_alive]
        if len(alive) == len(self.rows):
            return self
        at = mx.array(alive, dtype=mx.int32)
        return LaunchedStep([self.rows[i] for i in alive], self.tokens[at], self.logprobs[at])


def launch(
    store: PagedStore,
    decoding: LaunchedStep | None,
    starting: list[tuple[Row, int]],
    chunks: list[tuple[Row, list[int]]],
) -> LaunchedStep | None:
    """Builds a step and sets the device to work on it; returns at once.

    Args:
        decoding: rows whose newest token is the step's input.
        starting: rows with the last token of their prompt.
        chunks: rows with tokens of their prompt from which nothing is chosen.

    Returns:
        The tokens of `decoding` and `starting`, in that order; None where there are none.
    """
    answering = [*(decoding.rows if decoding else []), *(row for row, _ in starting)]
    rows = [*answering, *(row for row, _ in chunks)]
    lengths = [1] * len(answering) + [len(tokens) for _, tokens in chunks]
    starts = [row.sequence.offset for row in rows]
    for row, start, length in zip(rows, starts, lengths):
        row.sequence.before_write(start, start + length)
    known = [token for _, token in starting] + [t for _, tokens in chunks for t in tokens]
    inputs = mx.array(np.array(known, dtype=np.int32))
    if decoding is not None:
        inputs = mx.concatenate([decoding.tokens.astype(mx.int32), inputs])
    leases = [row.sequence.leases[0] for row in rows]
    logits = store.forward(leases, starts, lengths, inputs, np.arange(len(answering)))
    for row, start, length in zip(rows, starts, lengths):
        row.sequence.move_to(start + length)
    if not answering:
        mx.async_eval(store.pools())  # type: ignore[no-untyped-call]
        return None
    tokens, logprobs = _choose(answering, inputs, logits)
    mx.async_eval(tokens, logprobs, store.pools())  # type: ignore[no-untyped-call]
    return LaunchedStep(answering, tokens, logprobs)


def _choose(rows: list[Row], inputs: mx.array, logits: mx.array) -> tuple[mx.array, mx.array]:
    """Processes logits and samples, as mlx-lm's `GenerationBatch` does."""
    if any(row.choice.logits_processors for row in rows):
        processed = []
        for i, row in enumerate(rows):
            own = logits[i : i + 1]
            if row.choice.logits_processors:
                context = row.context(inputs[i : i + 1])
                for processor in row.choice.logits_processors:
                    own = processor(context, own)
            processed.append(own)
        logits = mx.concatenate(processed, axis=0)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    samplers = [row.choice.sampler for row in rows]
    if all(sampler is samplers[0] for sampler in samplers):
        return samplers[0](logprobs), logprobs
    chosen = [sampler(logprobs[i : i + 1]) for i, sampler in enumerate(samplers)]
    return mx.concatenate(chosen, axis=0), logprobs
