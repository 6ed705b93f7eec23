"""FeatureStore: the features of media items (encoder outputs) on the device.

`mlx_paged.core.encoder_cache.EncoderCache` decides which features are kept. If this store lacks
some anyway, because the step that computed them failed, it computes them again on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import mlx.core as mx

from mlx_paged.core.media import RejectedItem
from mlx_paged.model.media import MediaFeatures, MediaInputs
from mlx_paged.platform import is_out_of_memory


class FeatureStore:
    """Features by key.

    A step computes features lazily, in its own graph. Until the step has been read, they may turn
    out to be invalid; `abandon` drops those.

    Args:
        encode: Runs the encoder of an item, lazily.

    Attributes:
        num_encoded: Number of encoded items.
    """

    def __init__(self, encode: Callable[[MediaInputs], MediaFeatures]) -> None:
        self.num_encoded = 0
        self._encode = encode
        self._features: dict[bytes, MediaFeatures] = {}
        self._made: list[bytes] = []  # keys of features from the step launched last
        self._made_before: list[bytes] = []  # from the step before it, until that is read
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
        """Begins the launch of a step.

        Args:
            overlaps: True if the step before is unread; all earlier steps have been read.
        """
        self._made_before = self._made if overlaps else []
        self._made = []

    def features(self, key: bytes, inputs: MediaInputs) -> MediaFeatures:
        """Returns the features of an item; computes them, lazily, if they are missing.

        Raises:
            RejectedItem: The encoder rejects the item, and would do so in any later step.
        """
        found = self._features.get(key)
        if found is None:
            try:
                found = self._encode(inputs)
            except Exception as error:
                if is_out_of_memory(error):  # There may be more memory later.
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
        """Returns the arrays that the current step computes, for evaluation with it."""
        return [
            array
            for key in self._made
            if key in self._features
            for array in self._features[key].arrays()
        ]

    def take_sizes(self) -> list[tuple[bytes, int]]:
        """Returns (key, bytes) of features computed since the last call."""
        sizes, self._sizes = self._sizes, []
        return sizes

    def drop(self, keys: Iterable[bytes]) -> None:
        """Drops features. A step in flight that uses them keeps them as long as it needs."""
        for key in keys:
            self._features.pop(key, None)

    def abandon_launch(self) -> None:
        """Drops the features of a step whose launch failed."""
        self.drop(self._made)
        self._made = []

    def abandon(self) -> None:
        """Drops the features of a failed step in flight, and of the one launched after it."""
        self.drop(self._made_before)
        self._made_before = []
        self.abandon_launch()

    def clear(self) -> None:
        """Drops all features."""
        self._features.clear()
        self._made, self._made_before, self._sizes = [], [], []
