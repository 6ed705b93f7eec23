"""Chooses the next token of every row of logits in one vectorized computation.

top-k, top-p and min-p each keep the tokens above a threshold, so the largest threshold replaces all
three. Tokens with equal logits are kept or dropped together. Half-precision models have many of
them, and breaking ties would make a row's choice depend on the order of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged import ops
from mlx_paged.engine.sampling.logits_processors import FloatArray, LogitEdits
from mlx_paged.engine.sampling.sequence_sampler import SamplingRow
from mlx_paged.model.step_output import Greedy
from mlx_paged.platform import Platform

# A lower temperature is greedy, as in vLLM: dividing by it may overflow, and makes no difference
# otherwise.
_GREEDY_BELOW = 1e-5
_MIN_TOP_P = np.finfo(np.float32).tiny

UIntArray = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class SamplingMetadata:
    """Sampling settings of a step, one column per setting; n is the number of rows of logits."""

    temperature: FloatArray  # [n] float32
    key: UIntArray  # [n, 2], of their seeds
    position: UIntArray  # [n]
    top_k: npt.NDArray[np.int64]  # [n]
    top_p: FloatArray  # [n] float32, above 0
    min_p: FloatArray  # [n] float32
    edits: list[tuple[int, LogitEdits]]  # (row, edits) of rows with edits
    logprobs: list[tuple[int, int]]  # (row, number of alternatives) of rows with logprobs
    logprob_token_ids: list[tuple[int, tuple[int, ...]]]  # (row, ids) of rows with listed tokens
    drawn: npt.NDArray[np.intp]  # rows that are not greedy

    @classmethod
    def of(cls, rows: Sequence[SamplingRow] | SamplingMetadata) -> SamplingMetadata:
        """Columns from rows."""
        if isinstance(rows, SamplingMetadata):
            return rows
        temperature = np.array([row.temperature for row in rows], dtype=np.float32)
        top_p = np.array([row.top_p for row in rows], dtype=np.float32)
        return cls(
            temperature=temperature,
            key=keys_of([row.seed for row in rows]),
            position=np.array([row.position for row in rows], dtype=np.uint32),
            top_k=np.array([row.top_k for row in rows], dtype=np.int64),
            # A tiny value must not become 0, which would keep no token, or all of them.
            top_p=np.maximum(top_p, _MIN_TOP_P),
            min_p=np.array([row.min_p for row in rows], dtype=np.float32),
            edits=[(i, row.edits) for i, row in enumerate(rows) if row.edits is not None],
            logprobs=[(i, row.logprobs) for i, row in enumerate(rows) if row.logprobs is not None],
            logprob_token_ids=[
                (i, row.logprob_token_ids) for i, row in enumerate(rows) if row.logprob_token_ids
            ],
            drawn=np.flatnonzero(temperature.astype(np.float64) >= _GREEDY_BELOW),
        )

    def __len__(self) -> int:
        return len(self.temperature)

    def drawn_temperature(self) -> FloatArray:
        """Returns the temperatures ``[n]``, 0 for greedy rows."""
        drawn = np.zeros_like(self.temperature)
        drawn[self.drawn] = self.temperature[self.drawn]
        return drawn

    def only(self, at: npt.NDArray[np.intp]) -> SamplingMetadata:
        """Returns the settings of some rows that drawing needs: without edits and reports."""
        return SamplingMetadata(
            temperature=self.temperature[at],
            key=self.key[at],
            position=self.position[at],
            top_k=self.top_k[at],
            top_p=self.top_p[at],
            min_p=self.min_p[at],
            edits=[],
            logprobs=[],
            logprob_token_ids=[],
            drawn=np.flatnonzero(np.isin(at, self.drawn)),
        )

    def take(self, at: Sequence[int]) -> SamplingMetadata:
        """Returns all settings of some rows, in that order."""
        new_row = {row: i for i, row in enumerate(at)}
        return replace(
            self.only(np.array(at, dtype=np.intp)),
            edits=sorted((new_row[i], edit) for i, edit in self.edits if i in new_row),
            logprobs=sorted((new_row[i], n) for i, n in self.logprobs if i in new_row),
            logprob_token_ids=sorted(
                (new_row[i], ids) for i, ids in self.logprob_token_ids if i in new_row
            ),
        )


def keys_of(seeds: Sequence[int]) -> UIntArray:
    """Returns keys ``[n, 2]`` for a random generator that use all 64 bits of each seed.

    Different seeds have different keys. The second word is combined with a position later, so the
    seed's upper 32 bits go into both words, mixed by the end of MurmurHash3, a bijection. The first
    word alone distinguishes most seeds. Below 2**32, the key is (seed, 0).
    """
    wide = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    low, mixed = wide & np.uint64(0xFFFFFFFF), wide >> np.uint64(32)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed = (mixed ^ mixed >> np.uint64(33)) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(33)
    words = low ^ mixed >> np.uint64(32), mixed & np.uint64(0xFFFFFFFF)
    return np.stack(words, axis=1).astype(np.uint32)


class Sampled(NamedTuple):
    """The tokens of a step, and their validity.

    A row's token is meaningless if its largest logit is not finite: the row contains a NaN, or no
    token may follow (-inf). It is always a token of the model, because the next step may already
    use it.
    """

    tokens: mx.array  # [num_rows] int32
    largest: mx.array  # [num_rows], of the edited logits
    # [num_rows] int32: the result of `for_host`, if it is known already.
    reported: mx.array | None = None

    def for_host(self, model_largest: mx.array | None) -> mx.array:
        """Returns the tokens ``[num_rows]`` int32, or -1 for a row without one.

        Args:
            model_largest: ``[num_rows]``, the largest logits before edits, which must be finite,
                too, because a ban may hide an inf; None if edits keep values that are not finite.
        """
        if model_largest is None and self.reported is not None:
            return self.reported
        largest = self.largest
        if model_largest is not None:
            largest = largest + 0 * model_largest  # 0 times infinity is NaN.
        return mx.where(mx.abs(largest) < mx.inf, self.tokens, -1)


def sample(
    logits: mx.array,
    rows: Sequence[SamplingRow] | SamplingMetadata,
    greedy: Greedy | None = None,
    *,
    platform: Platform | None = None,
) -> Sampled:
    """Chooses a token for each row: temperature, min-p, top-k, top-p, then the draw.

    Greedy rows cost an argmax; only the others are scaled, filtered and drawn.

    Args:
        logits: ``[num_rows, vocab_size]``, edited (`logits_processors`).
        rows: One for each row of `logits`.
        greedy: The greedy choice from these logits, if it is known already.
        platform: The device; None means MLX's default device.
    """
    platform = platform or Platform.current()
    rows = SamplingMetadata.of(rows)
    found = _greedy(logits, platform) if greedy is None else Sampled(*greedy)
    if not len(rows.drawn):
        return found
    return Sampled(_draw(logits, found, rows), found.largest)


def largest_of(logits: mx.array, platform: Platform) -> mx.array:
    """``[num_rows]``: the largest of each row of ``[num_rows, vocab_size]`` logits, or NaN."""
    return _greedy(logits, platform).largest


def _greedy(logits: mx.array, platform: Platform) -> Sampled:
    # MLX's own logsumexp is a scalar loop on a CPU, and several kernels on a GPU.
    if platform.on_cpu or platform.has_cuda:
        return Sampled(*ops.greedy_tokens(logits))
    return Sampled(mx.argmax(logits, axis=-1).astype(mx.int32), logits.max(axis=-1))


def _draw(logits: mx.array, greedy: Sampled, rows: SamplingMetadata) -> mx.array:
    keys = rows.key.copy()
    keys[:, 1] ^= rows.position
    temperature, on_device, thresholds, *filters = ops.upload(
        rows.drawn_temperature(),
        keys,
        np.full(len(rows), -np.inf, np.float32),
        *filters_of(rows, logits.shape[1]),
    )
    largest = greedy.largest.astype(mx.float32)
    if filters:
        thresholds = ops.sampling_thresholds(logits, largest, temperature, *filters)
    return ops.draw_tokens(logits, greedy.tokens, largest, temperature, on_device, thresholds)


def filters_of(rows: SamplingMetadata, vocab_size: int) -> tuple[npt.NDArray[Any], ...]:
    """Returns the floors, top_k and top_p of `ops.sampling_thresholds`; nothing if none filters.

    Greedy rows have no filters.
    """
    is_drawn = rows.drawn_temperature() > 0
    top_k = np.where(is_drawn & (rows.top_k < vocab_size), np.maximum(rows.top_k, 0), 0)
    top_p, min_p = np.where(is_drawn, rows.top_p, 1), np.where(is_drawn, rows.min_p, 0)
    if not (top_k.any() or (top_p < 1).any() or min_p.any()):
        return ()
    with np.errstate(divide="ignore"):
        floors = np.log(min_p.astype(np.float32))
    return floors, top_k.astype(np.int32), top_p.astype(np.float32)
