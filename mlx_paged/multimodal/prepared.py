"""The media of a prompt: as the engine takes them, and as the device half uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_paged.core.media import MediaSpan, PromptMedia
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.media import MediaPrompt

IntArray = np.ndarray[Any, np.dtype[np.integer[Any]]]


@dataclass(frozen=True, eq=False)
class PreparedMedia:
    """The media of a prompt, ready for the engine.

    Attributes:
        prompt: Result of the model's processor: tokens, encoder inputs, positions.
        spans: Positions of the items, for the scheduler and the KV store.
        parts: Path of each span's item in the request, for errors.
    """

    prompt: MediaPrompt
    spans: tuple[MediaSpan, ...]
    parts: tuple[str, ...] = ()


class SequenceMedia:
    """The media of a prompt for the device half. All sequences of a request share them.

    Args:
        prompt: Result of the model's processor.
        media: The items for the state half.
        parts: Path of each item in the request.

    Attributes:
        keys: Keys of the items' features.
        inputs: Encoder inputs of each item.
        rows: Prompt positions of each item's rows, ascending.
        seen: Ranges (first, end) of positions that see each other: adjacent rows of an atomic item
            (a picture, or each frame of a clip), or all of its span if that is more than its rows.
        rope_positions: ``[3, num_prompt_tokens]`` int32 or float32, or None.
        rope_delta: A token after the prompt, at index i, has position ``i + rope_delta``.
    """

    def __init__(self, prompt: MediaPrompt, media: PromptMedia, parts: Sequence[str] = ()) -> None:
        self.media = media
        self._parts = parts
        self.keys = media.keys
        self.inputs = prompt.inputs
        self.rows = [np.asarray(span.rows, dtype=np.int64) for span in prompt.spans]
        self.seen = [
            seen
            for span, rows in zip(media.spans, self.rows)
            if span.is_atomic
            for seen in _seen(span, rows)
        ]
        self.num_prompt_tokens = len(prompt.token_ids)
        self.rope_positions = prompt.rope_positions
        self.rope_delta = prompt.rope_delta

    def part_of(self, key: bytes) -> str:
        """Returns the path of an item in the request, for errors."""
        found = (part for part, other in zip(self._parts, self.keys) if other == key)
        return next(found, "media")


def _seen(span: MediaSpan, rows: IntArray) -> list[tuple[int, int]]:
    if (span.offset, span.end) != (rows[0], rows[-1] + 1):
        return [(span.offset, span.end)]
    runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    return [(int(run[0]), int(run[-1]) + 1) for run in runs]


def check_prepared(media: Any, token_ids: Sequence[int], kinds: Sequence[str], rope: bool) -> None:
    """Rejects media that belong to another prompt, or that the model does not take.

    Args:
        token_ids: Tokens of the prompt.
        kinds: Kinds that the model takes.
        rope: True if its RoPE uses time, height and width.

    Raises:
        InvalidParameterError: Names the field that does not fit.
    """
    prompt, spans = getattr(media, "prompt", None), getattr(media, "spans", None)
    if not isinstance(prompt, MediaPrompt) or not isinstance(spans, tuple):
        raise InvalidParameterError("media", "None or what `prepare` returns", media)
    try:
        is_same = list(prompt.token_ids) == list(token_ids)
    except TypeError:
        raise InvalidParameterError("prompt_token_ids", "a list of tokens", token_ids) from None
    if not is_same:
        expected = "the media of this prompt, which has other tokens,"
        raise InvalidParameterError("media", expected, prompt)
    if not len(spans) == len(prompt.spans) == len(prompt.inputs):
        expected = f"{len(prompt.spans)} spans, one for each item of its prompt"
        raise InvalidParameterError("media.spans", expected, spans)
    for span, expected_span, inputs in zip(spans, prompt.spans, prompt.inputs):
        if not isinstance(span, MediaSpan):
            raise InvalidParameterError("media.spans", "a tuple of MediaSpan", span)
        if inputs.kind not in kinds:
            takes = " or ".join(kinds)
            raise InvalidParameterError("media", f"{takes}, which the model takes,", inputs.kind)
        rows = np.asarray(expected_span.rows)
        if (span.offset, span.length) != (expected_span.offset, expected_span.length):
            expected = (
                f"at {expected_span.offset}, of length {expected_span.length}, as in its prompt"
            )
            raise InvalidParameterError("media.spans", expected, span)
        ascending = len(rows) == 1 or bool((np.diff(rows) > 0).all())
        within = len(rows) > 0 and span.offset <= rows[0] and rows[-1] < span.end
        if not (ascending and within and len(rows) == inputs.num_rows == span.num_rows):
            expected = f"{inputs.num_rows} ascending rows within its span"
            raise InvalidParameterError("media.spans", expected, expected_span)
    shape = None if prompt.rope_positions is None else np.shape(prompt.rope_positions)
    if rope and shape is not None and shape != (3, len(token_ids)):
        expected = f"of shape (3, {len(token_ids)})"
        raise InvalidParameterError("media.prompt.rope_positions", expected, shape)
