"""Plans as C++ makes them, against those that NumPy makes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.plan_reference import reference_plan
from support.platforms import platform_with

from mlx_paged import ops
from mlx_paged.model.plan import PaddedTables, build_plan

CASES = 1500


def arrays_of(made: ops.AttentionPlan) -> list[np.ndarray]:
    parts = [getattr(made, name) for name in ops.AttentionPlan.__dataclass_fields__]
    return [np.array(part) for part in parts if part is not None]


class Steps:
    """Random steps of one kind.

    Args:
        kind: "decodes", "prompts" or "few": those of few rows, which get some more.
    """

    def __init__(self, kind: str, *, has_bounds: bool) -> None:
        self.kind, self.has_bounds = kind, has_bounds
        self.rng = np.random.default_rng(7)

    def chance(self, of: float) -> bool:
        return bool(self.rng.random() < of)

    def any_of(self, *values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def query_lens(self) -> np.ndarray:
        count = int(self.rng.integers(0, 40))
        if self.kind == "decodes":
            return np.ones(count, np.int64)
        longest = self.any_of(2, 9, 33, 200, 1100)
        if self.kind == "few":
            count, longest = min(count, 4), self.any_of(2, 9, 17)
        return self.rng.integers(0, longest, count)

    def bounds(self, lens: np.ndarray, rows: np.ndarray) -> np.ndarray:
        parts = [np.empty((2, 0), np.int32)]
        for n, count in zip(lens, rows):
            own = np.arange(n - count, n)
            first, last = own.copy(), own.copy()
            for _ in range(2):
                begin, end = np.sort(self.rng.integers(0, n + 1, 2))
                inside = (own >= begin) & (own < end)
                first[inside], last[inside] = begin, end - 1
            parts.append(np.stack([first, last]))
        return np.concatenate(parts, axis=1)

    def next(self) -> tuple[tuple[PaddedTables, np.ndarray, np.ndarray], dict[str, Any]]:
        """The arguments of `build_plan`."""
        rows = self.query_lens()
        block_size = self.any_of(8, 16, 32, 64)
        longest = self.any_of(40, 1000, 9000, 70_000)
        lens = self.rng.integers(0, longest, len(rows)) + rows
        if len(lens):
            lens[(self.rng.random(len(lens)) < 0.3) & (lens[0] >= rows)] = lens[0]
            # (equals keep their order)
        lengths = -(-lens // block_size) + self.rng.integers(0, 3, len(lens))
        width = int(lengths.max(initial=1)) + int(self.rng.integers(0, 3))
        tables = self.rng.integers(1, 1 << 20, (len(lens), width)).astype(np.int32)
        options: dict[str, Any] = {"block_size": block_size}
        if self.chance(0.4):
            options["window"] = int(self.rng.integers(1, 5000))
        if self.chance(0.2):
            options["split_tokens"] = self.any_of(1, 17, 64, 500)
        if self.chance(0.2):
            options["rows_per_item"] = self.any_of(1, 3, 8, 9, 64)
        if self.has_bounds:
            options["bounds"] = self.bounds(lens, rows)
            options["num_rows"] = self.any_of(None, int(rows.sum()) or None)
        elif self.kind == "few":
            options["num_rows"] = -(-max(1, int(rows.sum())) // 16) * 16
        return (PaddedTables(tables, lengths), lens, rows), options


@pytest.mark.one_in(6)
@pytest.mark.parametrize("place", ["cpu", "gpu", "cuda"])
@pytest.mark.parametrize(
    ("kind", "has_bounds"),
    [("decodes", False), ("prompts", False), ("few", False), ("prompts", True)],
)
def test_it_is_what_numpy_plans(place: str, kind: str, has_bounds: bool) -> None:
    platform = platform_with(
        plans_for_gpu=place != "cpu", has_cuda=place == "cuda", max_gpu_step_rows=0
    )
    steps = Steps(kind, has_bounds=has_bounds)
    num_split = num_bounded = 0
    for _ in range(CASES // (1 if kind == "few" else 4)):
        args, options = steps.next()
        made = arrays_of(build_plan(*args, **options, platform=platform))
        options.setdefault("rows_per_item", 128 if place == "cuda" else 32)
        expected = reference_plan(*args, **options, on_gpu=place != "cpu", pads=place == "cuda")
        for mine, theirs in zip(made, expected, strict=True):
            assert mine.dtype == np.int32
            np.testing.assert_array_equal(mine, theirs)
        num_split += len(made[6]) > 0
        num_bounded += len(made) == 8
    assert num_split > 30
    assert num_bounded > 30 or not has_bounds


def test_numbers_that_are_no_plan_are_named() -> None:
    tables = PaddedTables(np.ones((2, 3), np.int32), np.array([3, 1]))
    for lens, message in (
        ([24, 9], r"block_tables\[1\] must be at least 2 blocks"),
        ([24, 0], r"query_lens\[1\] must be at most its context length 0"),
        ([24, -3], r"context_lens\[1\] must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            build_plan(tables, lens, [1, 1], block_size=8)
    with pytest.raises(ValueError, match="num_rows must be at least those of the sequences"):
        build_plan(tables, [24, 8], [9, 8], block_size=8, num_rows=16)
    with pytest.raises(ValueError, match="num_rows must be at least those of the sequences"):
        bounds = np.array([[20, 20, 7], [23, 23, 7]])
        build_plan(tables, [24, 8], [2, 1], block_size=8, num_rows=16, bounds=bounds)


def test_a_table_is_not_read_beyond_its_width() -> None:
    tables = PaddedTables(np.ones((1, 2), np.int32), np.array([5]))  # (as no cache makes it)
    with pytest.raises(ValueError, match=r"block_tables must be 5 blocks wide but got 2"):
        build_plan(tables, [30], [1], block_size=8)


def test_a_context_is_not_longer_than_int32() -> None:
    lens = np.array([1 << 31])
    tables = PaddedTables(np.ones((1, 2), np.int32), lens)
    with pytest.raises(ValueError, match=r"context_lens\[0\] must be below 2147483648"):
        build_plan(tables, lens, [1], block_size=8)


def test_plans_of_no_rows_have_no_items() -> None:
    made = build_plan([], [], [], block_size=16)
    assert made.work_items.shape == (0, 6) and made.positions.shape == (0,)
    assert made.query_starts.tolist() == [0]
    mx.eval(made.block_tables)
