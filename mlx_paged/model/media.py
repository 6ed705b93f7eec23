"""The inputs of a forward besides tokens: media, as plain values.

The *rows* of an item are the prompt positions whose input embeddings come from its encoder. Its
*span* goes from its first to its last row, and may contain text tokens in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.content import Kind


class MediaFeatures(NamedTuple):
    """The features of one item, or of several for the rows of a step.

    Attributes:
        embeds: ``[num_rows, hidden_size]`` input embeddings.
        deepstack: Each ``[num_rows, hidden_size]``: added to the outputs of the first layers.
        per_layer_inputs: ``[num_rows, num_layers, dim]``, for models with such inputs.
    """

    embeds: mx.array
    deepstack: tuple[mx.array, ...] = ()
    per_layer_inputs: mx.array | None = None

    def take(self, rows: mx.array) -> MediaFeatures:
        """Returns the features of some rows."""
        return self._each(lambda array: array[rows])

    def arrays(self) -> list[mx.array]:
        """Returns all arrays, to be evaluated and counted in bytes."""
        last = [] if self.per_layer_inputs is None else [self.per_layer_inputs]
        return [self.embeds, *self.deepstack, *last]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays())

    @staticmethod
    def concatenate(parts: list[MediaFeatures]) -> MediaFeatures:
        """Returns the rows of several features of one model, one after another."""
        if len(parts) == 1:
            return parts[0]
        # In some models only images have features that are added to layer outputs; audio has none.
        width = max(len(part.deepstack) for part in parts)
        deepstack = tuple(
            mx.concatenate(
                [p.deepstack[i] if p.deepstack else mx.zeros_like(p.embeds) for p in parts]
            )
            for i in range(width)
        )
        per_layer = [p.per_layer_inputs for p in parts if p.per_layer_inputs is not None]
        return MediaFeatures(
            mx.concatenate([part.embeds for part in parts]),
            deepstack,
            mx.concatenate(per_layer) if per_layer else None,
        )

    def _each(self, function: Any) -> MediaFeatures:
        per_layer = self.per_layer_inputs
        return MediaFeatures(
            function(self.embeds),
            tuple(function(array) for array in self.deepstack),
            None if per_layer is None else function(per_layer),
        )


class StepMedia(NamedTuple):
    """Inputs of a step's rows besides tokens.

    Attributes:
        rows: ``[m]`` int32, ascending: rows of the step whose embeddings come from `features`.
        features: Features of these rows, in order, or None.
        rope_positions: ``[3, T]`` int32 or float32: time, height and width, for a model whose RoPE
            uses these; None if all three are a row's position in its sequence.
        bounds: ``[2, T]`` int32: first and last visible position of each row; None: causal.
    """

    rows: np.ndarray
    features: MediaFeatures | None
    rope_positions: np.ndarray | None
    bounds: np.ndarray | None = None

    def check(self, num_rows: int) -> None:
        """Raises ValueError for arrays that do not belong to a step of `num_rows` rows."""
        rows = np.asarray(self.rows)
        if rows.ndim != 1 or (np.diff(rows) <= 0).any():
            raise ValueError("[step media] rows must be ascending and of one dimension")
        if len(rows) and not 0 <= rows[0] <= rows[-1] < num_rows:
            raise ValueError(
                f"[step media] rows must be rows of the step, in [0, {num_rows}), but got "
                f"{rows[0]} to {rows[-1]}"
            )
        found = 0 if self.features is None else self.features.embeds.shape[0]
        if found != len(rows):
            raise ValueError(
                f"[step media] features must be of {len(rows)} rows but are of {found}"
            )
        for name, array, first in (
            ("rope_positions", self.rope_positions, 3),
            ("bounds", self.bounds, 2),
        ):
            if array is not None and np.shape(array) != (first, num_rows):
                raise ValueError(
                    f"[step media] {name} must be of shape {(first, num_rows)} but got "
                    f"{np.shape(array)}"
                )


@dataclass(frozen=True)
class MediaRows:
    """`StepMedia` on the device, in the language model's form.

    Attributes:
        rows: ``[m]`` int32; None if no row has features.
        features: Features of these rows.
        rope_positions: ``[3, T, 1]`` int32 or float32, or None.
    """

    rows: mx.array | None
    features: MediaFeatures | None
    rope_positions: mx.array | None

    @classmethod
    def of(cls, media: StepMedia) -> MediaRows:
        """Uploads the host's arrays."""
        rows, positions = None, None
        if len(media.rows):
            rows = ops.upload(np.ascontiguousarray(media.rows, dtype=np.int32))[0]
        if media.rope_positions is not None:
            dtype = np.float32 if media.rope_positions.dtype.kind == "f" else np.int32
            found = np.ascontiguousarray(media.rope_positions[:, :, None], dtype=dtype)
            positions = ops.upload(found)[0]
        return cls(rows, media.features if rows is not None else None, positions)


@dataclass(frozen=True, eq=False)
class MediaInputs:
    """One processed item: the inputs of its encoder.

    Attributes:
        kind: Kind of the item.
        arrays: By mlx-vlm's names; read-only.
        token_ids: ``[num_tokens]`` int32: the processor's replacement of the item's placeholder.
        rows: ``[num_rows]`` int32: indices of rows among these tokens.
    """

    kind: Kind
    arrays: Mapping[str, Any]
    token_ids: np.ndarray
    rows: np.ndarray

    @property
    def num_rows(self) -> int:
        """Prompt positions that the tower writes."""
        return len(self.rows)


@dataclass(frozen=True)
class Span:
    """The position of an item in its prompt.

    Attributes:
        offset: First prompt position.
        length: Positions up to its last row.
        rows: ``[num_rows]`` int32 prompt positions.
        kind: Kind of the item.
        num_items: Number of items in it, which are encoded together.
    """

    offset: int
    length: int
    rows: np.ndarray
    kind: Kind
    num_items: int = 1


@dataclass(frozen=True, eq=False)
class MediaPrompt:
    """A prompt with its media, processed.

    Attributes:
        token_ids: Tokens of the whole prompt; rows of an item have the id of its placeholder.
        spans: One for each item, in the order of the prompt.
        inputs: One for each span.
        rope_positions: ``[3, len(token_ids)]`` int32, or float32 for a model whose frames may lie
            between two positions; None if RoPE's positions are the tokens'.
        rope_delta: A generated token at index i has position ``i + rope_delta``.
    """

    token_ids: list[int]
    spans: list[Span] = field(default_factory=list)
    inputs: list[MediaInputs] = field(default_factory=list)
    rope_positions: np.ndarray | None = None
    rope_delta: int | float = 0
