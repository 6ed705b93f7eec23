"""The sampler's columns of running sequences, kept from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mlx_paged.core import ScheduledSequence
from mlx_paged.engine.sampling.rows import SamplingRow, SamplingRows


class RowCache:
    """Makes a step's `SamplingRows`; asks only of sequences that are new, or whose logits change.

    Of a sequence's rows only position and edits differ from step to step, and one that has no edits
    never gets any.

    Args:
        row_of: how to choose the token after a row.
    """

    def __init__(self, row_of: Callable[[ScheduledSequence], SamplingRow]) -> None:
        self._row_of = row_of
        self._known: dict[int, SamplingRow] = {}  # by seq_id, of the step before
        self._seq_ids: list[int] = []
        self._columns = SamplingRows.of([])

    def __call__(self, sampled: Sequence[ScheduledSequence]) -> SamplingRows:
        seq_ids = [s.seq_id for s in sampled]
        if seq_ids != self._seq_ids:
            known = self._known
            rows = [known.get(s.seq_id) or self._row_of(s) for s in sampled]
            self._columns = SamplingRows.of(rows)
            self._known, self._seq_ids = dict(zip(seq_ids, rows)), seq_ids
        edits = []
        for i, _ in self._columns.edits:
            edit = self._row_of(sampled[i]).edits
            if edit is not None:  # (a sequence that ended in flight has none any more)
                edits.append((i, edit))
        positions = [s.start + len(s.token_ids) for s in sampled]
        return replace(self._columns, position=np.array(positions, dtype=np.uint32), edits=edits)
