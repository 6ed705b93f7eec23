"""The sampler's columns kept from step to step are those that would be made anew."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_paged.core import ScheduledSequence
from mlx_paged.engine.sampling.row_cache import RowCache
from mlx_paged.engine.sampling.rows import Edits, SamplingRow, SamplingRows


def row_of(row: ScheduledSequence) -> SamplingRow:
    """Sequences of many kinds; every fifth has edits, and asks for log-probabilities."""
    i = row.seq_id
    edits = Edits(mask=lambda newest: None) if i % 5 == 0 else None
    filters = (i % 3, 1 - i % 4 / 10, i % 2 / 10)
    return SamplingRow(
        i % 7 / 4, i - 2, row.context_len, *filters, edits, i % 4 if i % 5 == 0 else None
    )


def scheduled(seq_id: int, start: int, num_tokens: int = 1) -> ScheduledSequence:
    return ScheduledSequence(seq_id, str(seq_id), (1,) * num_tokens, start, (1,), 0, True)


def assert_same(got: SamplingRows, expected: SamplingRows) -> None:
    assert len(got) == len(expected)
    for name in ("temperature", "seed", "position", "top_k", "top_p", "min_p"):
        a, b = getattr(got, name), getattr(expected, name)
        assert a.dtype == b.dtype and a.tolist() == b.tolist(), name
    assert [i for i, _ in got.edits] == [i for i, _ in expected.edits]
    assert got.logprobs == expected.logprobs


def test_columns_are_those_of_fresh_rows_whoever_comes_and_goes() -> None:
    rng = np.random.default_rng(0)
    cache = RowCache(row_of)
    starts: dict[int, int] = {}
    for _ in range(300):
        if rng.random() < 0.5:  # (else the same sequences go on)
            starts = {i: start for i, start in starts.items() if rng.random() < 0.9}
            first = rng.integers(1000)
            starts.update({int(i): int(rng.integers(50)) for i in range(first, first + 3)})
        sampled = [scheduled(i, start) for i, start in starts.items()]
        assert_same(cache(sampled), SamplingRows.of([row_of(s) for s in sampled]))
        starts = {i: start + 1 for i, start in starts.items()}
    assert len(cache(sampled)) == len(cache._known), "forgets who is gone"


def test_plain_sequences_are_asked_once() -> None:
    asked: list[int] = []
    cache = RowCache(lambda row: (asked.append(row.seq_id), row_of(row))[1])
    for step in range(4):
        cache([scheduled(i, step) for i in range(1, 5)])
    assert asked == [1, 2, 3, 4]
    cache([scheduled(i, 9) for i in (2, 4, 6)])
    assert asked == [1, 2, 3, 4, 6]
    edited = RowCache(lambda row: (asked.append(row.start), row_of(row))[1])
    asked.clear()
    for step in range(3):
        edited([scheduled(5, step)])
    assert set(asked) == {0, 1, 2}, "edits are made anew for every step"


def test_a_sequence_that_ended_in_flight_has_no_edits_any_more() -> None:
    ended = False
    cache = RowCache(lambda row: SamplingRow(0, 0, 0) if ended else row_of(row))
    assert len(cache([scheduled(5, 3)]).edits) == 1
    ended = True
    assert cache([scheduled(5, 4)]).edits == []


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_some_of_the_rows(num_rows: int) -> None:
    rows = [row_of(scheduled(i, i)) for i in range(1, 5)]
    at = np.arange(num_rows)[::-1].astype(np.intp)
    assert_same(
        SamplingRows.of(rows).only(at),
        SamplingRows.of([rows[i]._replace(edits=None, logprobs=None) for i in at]),
    )
