"""The media of a step as columns of its message.

Only rank 0 runs encoders, and it holds a pipeline's first layers, which read the features. The
other ranks need only the positions and the rows that are not tokens of the vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.engine.ranks.messages import Message, MessageError
from mlx_paged.model.media import MediaFeatures, StepMedia

_ROWS, _ROPE, _BOUNDS = "media_rows", "rope_positions", "visible_bounds"


def media_columns(media: StepMedia | None) -> Mapping[str, array[Any]]:
    """Returns the columns of a step's media; none if it has no media."""
    if media is None:
        return {}
    columns = {_ROWS: array("i", media.rows.tolist())}
    if media.rope_positions is not None:
        kind = "f" if media.rope_positions.dtype.kind == "f" else "i"
        columns[_ROPE] = array(kind, media.rope_positions.ravel().tolist())
    if media.bounds is not None:
        columns[_BOUNDS] = array("i", media.bounds.ravel().tolist())
    return columns


def media_of(message: Message) -> StepMedia | None:
    """Parses the columns of `media_columns`. All features are zeros.

    Raises:
        MessageError: The columns have inconsistent lengths.
    """
    rows = message.columns.get(_ROWS)
    if rows is None:
        return None
    features = MediaFeatures(mx.zeros((len(rows), 1))) if rows else None
    try:
        rope, bounds = _matrix(message, _ROPE, 3), _matrix(message, _BOUNDS, 2)
        return StepMedia(np.array(rows, dtype=np.int32), features, rope, bounds)
    except ValueError as error:
        raise MessageError(f"the media of a step: {error}") from error


def _matrix(message: Message, name: str, height: int) -> np.ndarray | None:
    column = message.columns.get(name)
    return None if column is None else np.array(column).reshape(height, -1)
