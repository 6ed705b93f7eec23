"""The tokens a sequence has had: each once, with how often the answer has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_paged.engine.sampling.rows import IntArray


class TokenHistory:
    """Grows with its sequence; a step costs what is new, not what there is.

    Args:
        prompt: tokens that count as seen, though never generated.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        seen = np.unique(np.array(prompt, dtype=np.int32))
        self._entry = {int(token): i for i, token in enumerate(seen)}
        self._ids = np.resize(seen, 2 * len(seen) + 64) if len(seen) else np.zeros(64, np.int32)
        self._counts = np.zeros(len(self._ids), np.int32)
        self._num_generated = 0

    def update(self, tokens: Sequence[int], start: int) -> None:
        """Takes what is new of an answer, which is `tokens[start:]` so far."""
        for token in tokens[start + self._num_generated :]:
            entry = self._entry.setdefault(token, len(self._entry))
            if entry == len(self._ids):
                self._ids = np.resize(self._ids, 2 * entry)
                self._counts = np.concatenate([self._counts, np.zeros(entry, np.int32)])
            self._ids[entry] = token
            self._counts[entry] += 1
        self._num_generated = max(self._num_generated, len(tokens) - start)

    @property
    def ids(self) -> IntArray:
        """``[num_distinct]``; a view that the next `update` may change."""
        return self._ids[: len(self._entry)]

    @property
    def counts(self) -> IntArray:
        """``[num_distinct]``: times each of `ids` was generated; a view like `ids`."""
        return self._counts[: len(self._entry)]
