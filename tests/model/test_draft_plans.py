"""Drafts that share a pass over their sequence's context: which rows do, and what they read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.platforms import CUDA, platform_with

from mlx_paged.model.plan import build_plan
from mlx_paged.ops import AttentionPlan

PLATFORM = platform_with(**CUDA, plans_for_gpu=True)


def table_of(rng: np.random.Generator, longest: int, block_size: int) -> list[int]:
    return (1 + rng.permutation(-(-longest // block_size))).tolist()


def plan_of(
    tables: Sequence[Sequence[int]],
    context_lens: Sequence[int],
    *,
    shared_rows: int,
    block_size: int = 32,
    window: int | None = None,
) -> AttentionPlan:
    return build_plan(
        tables,
        context_lens,
        [1] * len(tables),
        block_size=block_size,
        window=window,
        shared_rows=shared_rows,
        platform=PLATFORM,
    )


def reads_of(plan: AttentionPlan) -> dict[int, list[list[int]]]:
    """The blocks of the pool that each row reads, one list for each piece."""
    tables = np.array(plan.block_tables)
    reads: dict[int, list[list[int]]] = {}
    for sequence, begin, end, first, last, _ in np.array(plan.work_items).tolist():
        for row in range(begin, end):
            reads.setdefault(row, []).append(tables[sequence, first:last].tolist())
    return reads


def rows_of_items(plan: AttentionPlan) -> list[tuple[int, int]]:
    items = np.array(plan.work_items)
    return sorted({(begin, end) for begin, end in items[:, 1:3].tolist() if end > begin})


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("window", [None, 100])
def test_a_row_reads_the_pieces_that_it_reads_alone(block_size: int, window: int | None) -> None:
    """So its partial results are the same, and are added in the same order."""
    rng = np.random.default_rng(5)
    for _ in range(60):
        tables, lens, num_runs = [], [], int(rng.integers(1, 5))
        for _ in range(num_runs):
            count, longest = int(rng.integers(1, 7)), int(rng.integers(7, 3000))
            table = table_of(rng, longest, block_size)
            tables += [table] * count
            lens += range(longest - count + 1, longest + 1)
        options = {"block_size": block_size, "window": window}
        alone = plan_of(tables, lens, shared_rows=1, **options)
        shared = plan_of(tables, lens, shared_rows=5, **options)
        assert reads_of(alone) == reads_of(shared)
        assert max(end - begin for begin, end in rows_of_items(shared)) <= 5
        for name in ("positions", "slot_mapping", "context_lens"):
            assert np.array_equal(getattr(alone, name), getattr(shared, name))


def test_five_rows_make_one_item_and_two_at_the_end_of_a_block() -> None:
    rng = np.random.default_rng(6)
    one, other = table_of(rng, 200, 32), [100 + i for i in range(7)]
    within, across = range(165, 170), range(190, 195)
    plan = plan_of([one] * 5 + [other] * 5, [*within, *across], shared_rows=8)
    assert rows_of_items(plan) == [(0, 5), (5, 8), (8, 10)]
    plan = plan_of([one] * 5, within, shared_rows=2)
    assert rows_of_items(plan) == [(0, 2), (2, 4), (4, 5)]


def test_tiles_of_a_window_are_not_cut_elsewhere() -> None:
    """Kernels take 16 or 32 tokens at a time, from the first that any row of an item sees."""
    tables = [table_of(np.random.default_rng(7), 200, 32)] * 5
    plan = plan_of(tables, range(165, 170), shared_rows=8, window=100)
    assert rows_of_items(plan) == [(0, 5)]  # the first row sees tokens from 65, the last from 69
    plan = plan_of(tables, range(178, 183), shared_rows=8, window=100)
    assert rows_of_items(plan) == [(0, 2), (2, 5)]  # from 78 and from 82


def test_other_sequences_share_nothing() -> None:
    """Forks share all full blocks, and may be one token apart."""
    before = [1, 2, 3]
    plan = plan_of([[*before, 4], [*before, 5]], [100, 101], shared_rows=8)
    assert rows_of_items(plan) == [(0, 1), (1, 2)]
    plan = plan_of([[1, 2, 3, 4], [9, 2, 3, 4]], [100, 101], shared_rows=8)
    assert rows_of_items(plan) == [(0, 1), (1, 2)]
