"""What the rows of a step bring besides tokens: features, RoPE positions, bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_paged.core import MediaSpan, PromptMedia, SchedulerOutput
from mlx_paged.core import Sequence as CoreSequence
from mlx_paged.engine.media.encoder_cache import FeatureStore
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.media import MediaFeatures, MediaInputs, MediaPrompt, StepMedia

IntArray = np.ndarray[Any, np.dtype[np.integer[Any]]]


class Prepared(Protocol):
    """A prompt with media, as `Engine.add_request` takes it."""

    @property
    def prompt(self) -> MediaPrompt:
        """Of the model's processor."""

    @property
    def spans(self) -> tuple[MediaSpan, ...]:
        """Its items, with the keys of their content."""


class SequenceMedia:
    """What the device half needs of a prompt's media; all sequences of a request share it.

    Args:
        prompt: of the model's processor.
        media: the items for the state half.

    Attributes:
        keys: Of the items' features.
        inputs: What the tower takes of each item.
        rows: Prompt positions of each item's rows, ascending.
        rope_positions: ``[3, num_prompt_tokens]`` int32, or None.
        rope_delta: A token after the prompt, at index i, has position ``i + rope_delta``.
    """

    def __init__(self, prompt: MediaPrompt, media: PromptMedia) -> None:
        self.media = media
        self.keys = media.keys
        self.inputs = prompt.inputs
        self.rows = [np.asarray(span.rows, dtype=np.int64) for span in prompt.spans]
        self.num_prompt_tokens = len(prompt.token_ids)
        self.rope_positions = prompt.rope_positions
        self.rope_delta = prompt.rope_delta


def check_prepared(media: Any, token_ids: Sequence[int], kinds: Sequence[str], rope: bool) -> None:
    """Refuses media that are not those of a prompt, or that the model does not take.

    Args:
        token_ids: of the prompt.
        kinds: what the model takes.
        rope: whether its RoPE turns by time, height and width.

    Raises:
        InvalidParameterError: it says what was expected.
    """
    prompt, spans = getattr(media, "prompt", None), getattr(media, "spans", None)
    if not isinstance(prompt, MediaPrompt) or not isinstance(spans, tuple):
        raise InvalidParameterError("media", "None or what `prepare` returns", media)
    try:
        is_same = list(prompt.token_ids) == list(token_ids)
    except TypeError:
        raise InvalidParameterError("prompt_token_ids", "a list of tokens", token_ids) from None
    if not is_same:
        expected = "the media of this very prompt, which has other tokens,"
        raise InvalidParameterError("media", expected, prompt)
    if not len(spans) == len(prompt.spans) == len(prompt.inputs):
        expected = f"{len(prompt.spans)} spans, one for each item of its prompt"
        raise InvalidParameterError("media.spans", expected, spans)
    for span, place, inputs in zip(spans, prompt.spans, prompt.inputs):
        if not isinstance(span, MediaSpan):
            raise InvalidParameterError("media.spans", "a tuple of MediaSpan", span)
        if inputs.kind not in kinds:
            takes = " or ".join(kinds)
            raise InvalidParameterError("media", f"{takes}, which the model takes,", inputs.kind)
        rows = np.asarray(place.rows)
        if (span.offset, span.length) != (place.offset, place.length):
            expected = f"at {place.offset}, of length {place.length}, as in its prompt"
            raise InvalidParameterError("media.spans", expected, span)
        ascending = len(rows) == 1 or bool((np.diff(rows) > 0).all())
        within = len(rows) > 0 and span.offset <= rows[0] and rows[-1] < span.end
        if not (ascending and within and len(rows) == inputs.num_rows == span.num_rows):
            expected = f"{inputs.num_rows} ascending rows within its span"
            raise InvalidParameterError("media.spans", expected, place)
    shape = None if prompt.rope_positions is None else np.shape(prompt.rope_positions)
    if rope and shape is not None and shape != (3, len(token_ids)):
        expected = f"of shape (3, {len(token_ids)})"
        raise InvalidParameterError("media.prompt.rope_positions", expected, shape)


class StepMediaBuilder:
    """Builds `StepMedia`, and has items encoded.

    Args:
        encode: runs the tower of an item, lazily.
        uses_rope_positions: whether RoPE turns by time, height and width.

    Attributes:
        store: The features.
    """

    def __init__(
        self, encode: Callable[[MediaInputs], MediaFeatures], *, uses_rope_positions: bool
    ) -> None:
        self.store = FeatureStore(encode)
        self._uses_rope_positions = uses_rope_positions
        self._owners: tuple[CoreSequence, ...] = ()  # of the step before,
        self._places: list[tuple[int, SequenceMedia]] = []  # those of them that have media,
        self._deltas = np.zeros(0, dtype=np.int64)  # [num_seqs], and their RoPE deltas

    def build(
        self,
        output: SchedulerOutput,
        owners: tuple[CoreSequence, ...],
        context_lens: IntArray,
        num_rows: IntArray,
        *,
        overlaps: bool,
    ) -> StepMedia | None:
        """What the rows of a step bring; None where that is nothing.

        Args:
            owners: the step's sequences.
            context_lens: ``[num_seqs]`` tokens of each after the step.
            num_rows: ``[num_seqs]`` tokens of each in the step.
            overlaps: the step before has not been read yet.
        """
        self.store.begin(overlaps=overlaps)
        if output.media is not None:
            self.store.drop(output.media.evicted)
        if owners != self._owners:
            self._owners = owners
            self._places = [(i, s.media) for i, s in enumerate(owners) if s.media is not None]
            self._deltas = np.zeros(len(owners), dtype=np.int64)
            for place, media in self._places:
                self._deltas[place] = media.rope_delta
        has_items = output.media is not None
        if not self._places or not (has_items or self._uses_rope_positions):
            return None
        starts = context_lens - num_rows
        first_rows = np.cumsum(num_rows) - num_rows
        rope = bounds = features = None
        if self._uses_rope_positions:
            rope = self._rope_positions(starts, num_rows, first_rows)
        rows: IntArray = np.zeros(0, dtype=np.int32)
        if has_items:
            rows, features = self._features(starts, num_rows, first_rows)
            bounds = self._bounds(starts, num_rows, first_rows)
        return StepMedia(rows, features, rope, bounds)

    def _features(
        self, starts: IntArray, num_rows: IntArray, first_rows: IntArray
    ) -> tuple[IntArray, MediaFeatures | None]:
        rows: list[IntArray] = []
        parts: list[MediaFeatures] = []
        for place, media in self._places:
            start, count = int(starts[place]), int(num_rows[place])
            for i in media.media.between(start, start + count):
                features = self.store.features(media.keys[i], media.inputs[i])
                begin, end = np.searchsorted(media.rows[i], (start, start + count)).tolist()
                if begin < end:
                    rows.append(media.rows[i][begin:end] - start + first_rows[place])
                    parts.append(_slice(features, begin, end))
        if not rows:
            return np.zeros(0, dtype=np.int32), None
        return np.concatenate(rows).astype(np.int32), joined(parts)

    def _positions(self, starts: IntArray, num_rows: IntArray, first_rows: IntArray) -> IntArray:
        """``[T]`` position of each row in its sequence."""
        total = int(num_rows.sum())
        return np.arange(total) + np.repeat(starts - first_rows, num_rows)

    def _rope_positions(
        self, starts: IntArray, num_rows: IntArray, first_rows: IntArray
    ) -> IntArray:
        positions = self._positions(starts, num_rows, first_rows)
        rope = np.empty((3, len(positions)), dtype=np.int32)
        rope[:] = positions + np.repeat(self._deltas, num_rows)
        for place, media in self._places:
            start, row = int(starts[place]), int(first_rows[place])
            end = min(start + int(num_rows[place]), media.num_prompt_tokens)
            if start < end:
                given = media.rope_positions
                rope[:, row : row + end - start] = (
                    np.arange(start, end) if given is None else given[:, start:end]
                )
        return rope

    def _bounds(
        self, starts: IntArray, num_rows: IntArray, first_rows: IntArray
    ) -> IntArray | None:
        """``[2, T]``: of a row in an atomic span that span's first and last position, of any other
        row its own; None where no row is in such a span."""
        bounds = None
        for place, media in self._places:
            start, row = int(starts[place]), int(first_rows[place])
            end = start + int(num_rows[place])
            for first, after in media.media.atomic:
                if start < after and first < end:
                    if bounds is None:
                        positions = self._positions(starts, num_rows, first_rows)
                        bounds = np.stack([positions, positions]).astype(np.int32)
                    rows = slice(row + max(first, start) - start, row + min(after, end) - start)
                    bounds[0, rows], bounds[1, rows] = first, after - 1
        return bounds

    def forget(self) -> None:
        """Drops what is kept from step to step, and all features."""
        self._owners, self._places = (), []
        self.store.clear()


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


def joined(parts: list[MediaFeatures]) -> MediaFeatures:
    """The rows of several items, one after another.

    A kind that adds nothing to the first layers' outputs (sounds beside pictures) adds zeros.
    """
    depth = max(len(part.deepstack) for part in parts)
    if any(len(part.deepstack) < depth for part in parts):
        parts = [
            part._replace(
                deepstack=part.deepstack
                + tuple(mx.zeros_like(part.embeds) for _ in range(depth - len(part.deepstack)))
            )
            for part in parts
        ]
    return MediaFeatures.concatenate(parts)
