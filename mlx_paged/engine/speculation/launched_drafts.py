"""LaunchedDrafts: drafts on the device that the host has not read yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from mlx_paged.core import Sequence as CoreSequence
from mlx_paged.engine.input_tokens import DraftsInFlight


class Drafted(Protocol):
    """A sequence that gets drafts.

    Attributes:
        drafts: The result. A draft of -1 could not be sampled.
    """

    drafts: list[int]

    @property
    def seq(self) -> CoreSequence: ...


class _Part(NamedTuple):
    """Drafts of some sequences, sampled together. See `LaunchedDrafts.add`."""

    tokens: mx.array
    reported: mx.array
    members: Sequence[Drafted]
    indices: Sequence[int]


class LaunchedDrafts:
    """Launched drafts. The drafts of a sequence are added in order.

    Attributes:
        hidden: ``[num_tokens, width]``: the tapped states of the first round, if there are any.
    """

    def __init__(self) -> None:
        self.hidden: mx.array | None = None
        self._parts: list[_Part] = []

    def add(
        self,
        tokens: mx.array,
        reported: mx.array,
        members: Sequence[Drafted],
        indices: Sequence[int],
    ) -> None:
        """Adds drafts that are sampled together.

        Args:
            tokens: ``[num_sampled]`` int32, all valid tokens of the model.
            reported: The same for the host, -1 where none could be sampled.
            members: The sequence of each draft.
            indices: The index of each draft in both.
        """
        self._parts.append(_Part(tokens, reported, members, indices))

    def in_flight(self) -> DraftsInFlight | None:
        """Starts the drafts, and returns them as inputs of a step; None if there are none, or if
        they have been read."""
        found: dict[int, list[int]] = {}
        offset = 0
        for tokens, _, members, indices in self._parts:
            for member, index in zip(members, indices):
                found.setdefault(member.seq.seq_id, []).append(offset + index)
            offset += tokens.size
        if not found:
            return None
        # Otherwise, drafts that no runner has launched would start only with the step.
        mx.async_eval(*(part.reported for part in self._parts))  # type: ignore[no-untyped-call]
        return DraftsInFlight(mx.concatenate([part.tokens for part in self._parts]), found)

    def read(self) -> None:
        """Waits for the drafts, and appends them to their sequences' drafts."""
        parts, self._parts = [part for part in self._parts if part.members], []
        mx.eval(*(part.reported for part in parts))
        for _, reported, members, indices in parts:
            tokens = np.array(reported)
            for member, index in zip(members, indices):
                member.drafts.append(int(tokens[index]))
