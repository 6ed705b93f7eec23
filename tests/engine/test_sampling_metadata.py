"""The sampler's columns kept from step to step are those that would be made anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mlx_paged.core import Request
from mlx_paged.core import Sequence as CoreSequence
from mlx_paged.engine.sampling.logits_processors import LogitEdits
from mlx_paged.engine.sampling.masks import MaskKey, SequenceMasks
from mlx_paged.engine.sampling.sampler import SamplingMetadata
from mlx_paged.engine.sampling.sequence_sampler import SamplingRow
from mlx_paged.engine.step_columns import MetadataCache


class Sampler:
    """Samplers of many kinds; every fifth has edits, and asks for log-probabilities."""

    def __init__(self, i: int) -> None:
        filters = (i % 3, 1 - i % 4 / 10, i % 2 / 10)
        self.row = SamplingRow(i % 7 / 4, i - 2, 0, *filters, None, i % 4 if i % 5 == 0 else None)
        self.has_edits = i % 5 == 0
        self.asked: list[int] = []

    def edits(self, tokens: Sequence[int], key: MaskKey) -> LogitEdits:
        self.asked.append(key.position)
        return LogitEdits(mask=key)

    def whole_row(self, position: int) -> SamplingRow:
        edits = LogitEdits(mask=MaskKey(1, position)) if self.has_edits else None
        return self.row._replace(position=position, edits=edits)


def sequence(sampler: Any, num_tokens: int) -> CoreSequence:
    found = CoreSequence(1, Request("r", (1,) * num_tokens), 0, ((False, 0), 0, 0))
    found.sampler = sampler
    return found


def metadata_of(cache: MetadataCache, sampled: list[CoreSequence]) -> SamplingMetadata:
    return cache(sampled, np.array([len(s.tokens) for s in sampled], dtype=np.int64))


def assert_same(got: SamplingMetadata, expected: SamplingMetadata) -> None:
    assert len(got) == len(expected)
    for name in ("temperature", "key", "position", "top_k", "top_p", "min_p"):
        a, b = getattr(got, name), getattr(expected, name)
        assert a.dtype == b.dtype and a.tolist() == b.tolist(), name
    assert [i for i, _ in got.edits] == [i for i, _ in expected.edits]
    assert got.logprobs == expected.logprobs


def test_columns_are_those_of_fresh_rows_whoever_comes_and_goes() -> None:
    rng = np.random.default_rng(0)
    cache = MetadataCache(SequenceMasks())
    samplers = [Sampler(i) for i in range(1003)]
    starts: dict[int, int] = {}
    for _ in range(300):
        if rng.random() < 0.5:  # (else the same sequences go on)
            starts = {i: start for i, start in starts.items() if rng.random() < 0.9}
            first = rng.integers(1000)
            starts.update({int(i): int(rng.integers(50)) for i in range(first, first + 3)})
        sampled = [sequence(samplers[i], start + 1) for i, start in starts.items()]
        fresh = [samplers[i].whole_row(start + 1) for i, start in starts.items()]
        assert_same(metadata_of(cache, sampled), SamplingMetadata.of(fresh))
        starts = {i: start + 1 for i, start in starts.items()}


def test_edits_are_made_anew_for_every_step_and_only_where_there_are_any() -> None:
    cache, plain, edited = MetadataCache(SequenceMasks()), Sampler(1), Sampler(5)
    for step in range(3):
        metadata_of(cache, [sequence(plain, step + 1), sequence(edited, step + 1)])
    assert plain.asked == [] and edited.asked == [1, 2, 3]


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_some_of_the_rows(num_rows: int) -> None:
    rows = [Sampler(i).whole_row(i) for i in range(1, 5)]
    at = np.arange(num_rows)[::-1].astype(np.intp)
    assert_same(
        SamplingMetadata.of(rows).only(at),
        SamplingMetadata.of([rows[i]._replace(edits=None, logprobs=None) for i in at]),
    )
