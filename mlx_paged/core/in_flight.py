"""A step between its schedule and its commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from mlx_paged.core.batch import Batch, ScheduledSequence
from mlx_paged.core.request import Sequence
from mlx_paged.errors import InvalidParameterError

_seq_id = attrgetter("seq_id")


class LaunchedStep(NamedTuple):
    """A batch, and the sequence of each of its rows."""

    batch: Batch
    owners: list[Sequence]

    def rows(self) -> Iterator[tuple[ScheduledSequence, Sequence]]:
        return zip(self.batch.sequences, self.owners, strict=True)

    def check_sampled(self, sampled: Mapping[int, int]) -> None:
        """Raises `InvalidParameterError` where a live row that samples has no token."""
        if all(map(sampled.__contains__, map(_seq_id, self.batch.sequences))):
            return
        missing = [
            row.seq_id
            for row, seq in self.rows()
            if row.seq_id not in sampled and row.samples and not seq.is_finished
        ]
        if missing:
            expected = f"a token for each sequence that samples (none for {missing})"
            raise InvalidParameterError("sampled", expected, dict(sampled))
