"""Builds the input tokens of a step. The device may still be computing some of them: the previous
step samples them, or a draft model does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.core import StepBatch


class StepTokens(Protocol):
    """A step whose tokens the next one may use.

    Attributes:
        tokens: ``[num_sampled]`` int32.
    """

    @property
    def tokens(self) -> mx.array: ...


@dataclass(frozen=True)
class KnownTokens:
    """Tokens of a step that has been read, as inputs of the next step.

    Attributes:
        tokens: ``[num_sampled]`` int32.
        reported: The same array; see `runner.Chosen`.
    """

    tokens: mx.array
    reported: mx.array


@dataclass(frozen=True)
class DraftsInFlight:
    """Drafts that the device is still computing, as inputs of the step that verifies them.

    Attributes:
        tokens: ``[num_drafts]`` int32, all of them tokens of the model.
        indices: By seq_id, the indices of a sequence's drafts in `tokens`, in order. A step may
            verify fewer.
    """

    tokens: mx.array
    indices: Mapping[int, Sequence[int]]

    def sources(self, batch: StepBatch) -> np.ndarray:
        """``[num_tokens]`` int32: the index in `tokens` of each row's token; -1 if it is known."""
        source = np.full(len(batch.token_ids), -1, dtype=np.int32)
        end = 0
        for seq_id, length, count in zip(batch.seq_ids, batch.query_lens, batch.num_drafts):
            end += length
            if count and seq_id in self.indices:
                source[end - count : end] = self.indices[seq_id][:count]
        return source

    def fill(self, batch: StepBatch) -> None:
        """Waits for the drafts, and writes them into the batch that verifies them."""
        source = self.sources(batch)
        rows = np.flatnonzero(source >= 0)
        batch.set_tokens(rows.tolist(), np.array(self.tokens)[source[rows]].tolist())
        batch.drafts_in_flight = None


def input_tokens(
    batch: StepBatch,
    query_starts: np.ndarray,
    previous: StepTokens | None,
    num_padding: int = 0,
    *,
    stays: bool = False,
) -> mx.array:
    """Returns the input tokens ``[num_rows]`` int32. Tokens in flight stay on the device.

    Args:
        query_starts: First row of each sequence.
        num_padding: Padding rows at the end.
        stays: See `ops.upload`; used if all tokens are known.
    """
    num_known, num_seqs = batch.input_from.count(-1), len(batch.seq_ids)
    if (
        previous is not None
        and previous.tokens.size == num_seqs + num_padding
        and batch.input_from.tolist() == list(range(num_seqs))
    ):
        return previous.tokens  # the same sequences in the same order, and any padding
    known = np.frombuffer(batch.token_ids, dtype=np.uint32).astype(np.int32)
    if num_padding:
        known = np.concatenate([known, np.zeros(num_padding, dtype=np.int32)])
    drafts: DraftsInFlight | None = batch.drafts_in_flight
    if drafts is not None:
        assert num_known == num_seqs, "drafts follow a token that is in flight"
        source = np.full(len(known), -1, dtype=np.int32)
        source[: len(batch.token_ids)] = drafts.sources(batch)
        return _merged(source, known, drafts.tokens)
    if num_known == num_seqs:
        return ops.upload(known, stays=stays)[0]
    assert previous is not None, "a sequence awaits a token but no step is in flight"
    input_from = np.frombuffer(batch.input_from, dtype=np.int32)
    if num_known == 0:
        padded = np.concatenate([input_from, np.zeros(num_padding, dtype=np.int32)])
        return ops.take_rows(previous.tokens, ops.upload(padded)[0])
    source = np.full(len(known), -1, dtype=np.int32)
    is_awaited = input_from >= 0
    source[query_starts[is_awaited]] = input_from[is_awaited]
    return _merged(source, known, previous.tokens)


def _merged(source: np.ndarray, known: np.ndarray, in_flight: mx.array) -> mx.array:
    """Takes the tokens at `source` in `in_flight`, and the known ones where that is -1."""
    indices, tokens = ops.upload(source, known)
    return mx.where(indices < 0, tokens, ops.take_rows(in_flight, mx.maximum(indices, 0)))
