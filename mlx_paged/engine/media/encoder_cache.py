"""FeatureStore: the arrays of the features that the device holds.

Which are held, and which go, is decided by `mlx_paged.core.encoder_cache.EncoderCache`. What this
store lacks all the same (a step that made it failed) is made again where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import mlx.core as mx

from mlx_paged.engine.faults import is_out_of_memory
from mlx_paged.model.media import MediaFeatures, MediaInputs


class RejectedItem(Exception):
    """The tower does not take an item; its text says why.

    Args:
        key: of the item's features.
        reason: for whoever sent the item.
    """

    def __init__(self, key: bytes, reason: str) -> None:
        super().__init__(reason)
        self.key = key


class FeatureStore:
    """Features by key.

    A step makes features lazily, in its own graph. Until it has been read they may turn out to be
    worthless: `abandon` drops those.

    Args:
        encode: runs the tower of an item, lazily.

    Attributes:
        num_encoded: Items given to the tower.
    """

    def __init__(self, encode: Callable[[MediaInputs], MediaFeatures]) -> None:
        self.num_encoded = 0
        self._encode = encode
        self._features: dict[bytes, MediaFeatures] = {}
        self._made: list[bytes] = []  # by the step launched last,
        self._made_before: list[bytes] = []  # and by the one before it, where it is not read yet
        self._sizes: list[tuple[bytes, int]] = []

    def __len__(self) -> int:
        return len(self._features)

    def __contains__(self, key: bytes) -> bool:
        return key in self._features

    @property
    def num_bytes(self) -> int:
        """Bytes of all features."""
        return sum(features.nbytes for features in self._features.values())

    def begin(self, *, overlaps: bool) -> None:
        """A step is being launched.

        Args:
            overlaps: the one before has not been read yet; all others have.
        """
        self._made_before = self._made if overlaps else []
        self._made = []

    def features(self, key: bytes, inputs: MediaInputs) -> MediaFeatures:
        """The features of an item, made if they are not there.

        Raises:
            RejectedItem: the tower does not take it, so that no later step can make them either.
        """
        found = self._features.get(key)
        if found is None:
            try:
                found = self._encode(inputs)
            except Exception as error:
                if is_out_of_memory(error):  # (there may be more at another time)
                    raise
                lines = str(error).strip().splitlines()
                reason = lines[0][:200] if lines else type(error).__name__
                message = f"the model's tower does not take this {inputs.kind}: {reason}"
                raise RejectedItem(key, message) from error
            self.num_encoded += 1
            self._features[key] = found
            self._made.append(key)
            self._sizes.append((key, found.nbytes))
        return found

    def made(self) -> list[mx.array]:
        """Features made by the step being launched, for evaluation with it."""
        return [
            array
            for key in self._made
            if key in self._features
            for array in self._features[key].arrays()
        ]

    def take_sizes(self) -> list[tuple[bytes, int]]:
        """(key, bytes) of what was made since the last call."""
        sizes, self._sizes = self._sizes, []
        return sizes

    def drop(self, keys: Iterable[bytes]) -> None:
        """Gives up features; a step in flight that uses them keeps them as long as it needs."""
        for key in keys:
            self._features.pop(key, None)

    def abandon_launch(self) -> None:
        """The step being launched failed."""
        self.drop(self._made)
        self._made = []

    def abandon(self) -> None:
        """A step in flight failed, and so did the one launched after it."""
        self.drop(self._made_before)
        self._made_before = []
        self.abandon_launch()

    def clear(self) -> None:
        """Gives up all features."""
        self._features.clear()
        self._made, self._made_before, self._sizes = [], [], []
