"""Builds the inputs of a step's rows besides tokens: features, RoPE positions, bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mlx_paged.core import StepBatch
from mlx_paged.model.media import MediaFeatures, MediaInputs, StepMedia
from mlx_paged.multimodal.feature_store import FeatureStore
from mlx_paged.multimodal.prepared import IntArray, SequenceMedia


class StepMediaBuilder:
    """Builds `StepMedia`, and encodes items.

    Args:
        encode: Runs the encoder of an item, lazily.
        uses_rope_positions: True if RoPE uses time, height and width.

    Attributes:
        store: The features.
    """

    def __init__(
        self, encode: Callable[[MediaInputs], MediaFeatures], *, uses_rope_positions: bool
    ) -> None:
        self.store = FeatureStore(encode)
        self._uses_rope_positions = uses_rope_positions
        # Cached from the previous step, because consecutive steps usually have the same sequences.
        self._seq_ids: list[int] = []
        self._media: list[SequenceMedia | None] = []
        self._prompt_lens = np.zeros(0, dtype=np.int64)  # [num_seqs]; 0 without media
        self._deltas = np.zeros(0)  # [num_seqs]; RoPE deltas
        self._has_fractions = False  # True if RoPE positions may be fractions

    def build(
        self,
        batch: StepBatch,
        context_lens: IntArray,
        num_rows: IntArray,
        *,
        overlaps: bool,
    ) -> StepMedia | None:
        """See `engine.media.StepMediaBuilder.build`."""
        self.store.begin(overlaps=overlaps)
        if batch.media is not None:
            self.store.drop(batch.media.evicted)
        if not batch.media_inputs:
            return None
        if batch.seq_ids != self._seq_ids:
            self._seq_ids = batch.seq_ids
            self._media = batch.media_inputs
            self._prompt_lens = np.array(
                [0 if m is None else m.num_prompt_tokens for m in self._media], dtype=np.int64
            )
            self._deltas = np.array([0 if m is None else m.rope_delta for m in self._media])
            given = [None if m is None else m.rope_positions for m in self._media]
            self._has_fractions = any(np.asarray(p).dtype.kind == "f" for p in given)
        has_items = batch.media is not None
        if not (has_items or self._uses_rope_positions) or not self._prompt_lens.any():
            return None
        starts = context_lens - num_rows
        ends = np.cumsum(num_rows)
        positions, deltas = starts, self._deltas
        if ends[-1] > len(num_rows):  # not only decodes
            positions = np.arange(ends[-1]) + np.repeat(starts - ends + num_rows, num_rows)
            deltas = np.repeat(deltas, num_rows)
        chunks = []
        for index in np.flatnonzero(starts < self._prompt_lens).tolist():
            media, start, count = self._media[index], int(starts[index]), int(num_rows[index])
            assert media is not None
            chunks.append(_Chunk(media, start, start + count, int(ends[index]) - count))
        rope = bounds = features = None
        if self._uses_rope_positions:
            rope = _rope_positions(positions + deltas, chunks, fractions=self._has_fractions)
        rows: IntArray = np.zeros(0, dtype=np.int32)
        if has_items:
            rows, features = self._features(chunks)
            bounds = _bounds(positions, chunks)
        return StepMedia(rows, features, rope, bounds)

    def _features(self, chunks: list[_Chunk]) -> tuple[IntArray, MediaFeatures | None]:
        rows: list[IntArray] = []
        parts: list[MediaFeatures] = []
        for media, start, end, row in chunks:
            for i in media.media.between(start, end):
                features = self.store.features(media.keys[i], media.inputs[i])
                first, after = np.searchsorted(media.rows[i], (start, end)).tolist()
                if first < after:
                    rows.append(media.rows[i][first:after] - start + row)
                    parts.append(_slice(features, first, after))
        if not rows:
            return np.zeros(0, dtype=np.int32), None
        return np.concatenate(rows).astype(np.int32), MediaFeatures.concatenate(parts)

    def forget(self) -> None:
        """Drops caches between steps, and all features."""
        self._seq_ids, self._media = [], []
        self.store.clear()


class _Chunk(NamedTuple):
    """A sequence's positions of its prompt in a step."""

    media: SequenceMedia
    start: int
    end: int  # may exceed the prompt, if the sequence lost its blocks and continues
    row: int  # of the first position


def _rope_positions(
    text_positions: np.ndarray, chunks: list[_Chunk], *, fractions: bool
) -> np.ndarray:
    """Returns positions ``[3, T]``: those of the prompt for its rows, `text_positions` for others.

    Args:
        text_positions: ``[T]``: the positions that all rows would have as text.
        fractions: True for float32 instead of int32.
    """
    rope = np.empty((3, len(text_positions)), dtype=np.float32 if fractions else np.int32)
    rope[:] = text_positions
    for media, start, end, row in chunks:
        end = min(end, media.num_prompt_tokens)
        given = media.rope_positions
        rope[:, row : row + end - start] = (
            np.arange(start, end) if given is None else given[:, start:end]
        )
    return rope


def _bounds(positions: IntArray, chunks: list[_Chunk]) -> IntArray | None:
    """Returns ``[2, T]``, the first and last position that each row sees as a whole: of its span if
    it sees later rows, else its own position; None if no row does."""
    bounds = None
    for media, start, end, row in chunks:
        for first, after in media.seen:
            if start < after and first < end:
                if bounds is None:
                    bounds = np.stack([positions, positions]).astype(np.int32)
                rows = slice(row + max(first, start) - start, row + min(after, end) - start)
                bounds[0, rows], bounds[1, rows] = first, after - 1
    return bounds


def _slice(features: MediaFeatures, begin: int, end: int) -> MediaFeatures:
    """The features of some rows of an item."""
    if begin == 0 and end == features.embeds.shape[0]:
        return features
    per_layer = features.per_layer_inputs
    return MediaFeatures(
        features.embeds[begin:end],
        tuple(array[begin:end] for array in features.deepstack),
        None if per_layer is None else per_layer[begin:end],
    )
