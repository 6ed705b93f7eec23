"""The planner's columns are the fields of the structs that all kernels read.

metal/kernel_table.h declares WorkItem and MergeItem once, for Metal, CUDA, the CPU and the
simulator. The planner makes them as columns of NumPy arrays, in an order of its own writing.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from mlx_paged.model.plan import build_plan

HEADER = (Path(__file__).parents[2] / "metal/kernel_table.h").read_text()
BLOCK_SIZE = 16
LENS, ROWS = [200, 33, 100], [1, 3, 40]


def fields(struct: str) -> list[str]:
    """The fields of a struct of metal/kernel_table.h, in order; all are ints."""
    body = re.search(rf"struct {struct} {{\n(.*?)\n}};", HEADER, re.S)[1]
    return re.findall(r"^  int (\w+);", body, re.M)


def columns(array, struct: str) -> dict[str, np.ndarray]:
    names = fields(struct)
    assert array.shape[1] == len(names)
    return dict(zip(names, np.array(array).T))


@pytest.fixture(scope="module")
def plan():
    blocks = iter(range(1, 100))
    tables = [[next(blocks) for _ in range(-(-n // BLOCK_SIZE))] for n in LENS]
    return build_plan(tables, LENS, ROWS, block_size=BLOCK_SIZE, split_tokens=64, window=150)


def test_the_columns_of_work_items(plan) -> None:
    work = columns(plan.work_items, "WorkItem")
    starts = np.array(plan.query_starts)
    sequence = work["sequence"]
    assert set(sequence) == {0, 1, 2}
    assert (starts[sequence] <= work["row_begin"]).all()
    assert (work["row_begin"] < work["row_end"]).all()
    assert (work["row_end"] <= starts[sequence + 1]).all()
    assert (work["first_block"] < work["last_block"]).all()
    assert (work["last_block"] <= -(-np.array(LENS)[sequence] // BLOCK_SIZE)).all()
    whole = sequence == 1  # 33 tokens are one piece, 200 are several
    assert work["first_block"][sequence == 0].min() == (200 - 150) // BLOCK_SIZE
    assert (work["partial_begin"][whole] == -1).all() and (work["partial_begin"] >= 0).any()


def test_the_columns_of_merge_items(plan) -> None:
    work = columns(plan.work_items, "WorkItem")
    merge = columns(plan.merge_items, "MergeItem")
    for begin, end, first, splits in zip(
        merge["row_begin"], merge["row_end"], merge["partial_begin"], merge["num_splits"]
    ):
        pieces = (work["row_begin"] == begin) & (work["row_end"] == end)
        expected = first + np.arange(splits) * (end - begin)
        assert sorted(work["partial_begin"][pieces]) == expected.tolist()
