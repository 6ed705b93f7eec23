"""Plans of decodes, made natively, against those that Python makes of any step."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import ops
from mlx_paged.model import plan
from mlx_paged.model.plan import PaddedTables, build_plan

CASES = 400


def arrays_of(made: ops.AttentionPlan) -> list[np.ndarray]:
    assert made.bounds is None
    parts = [getattr(made, name) for name in ops.AttentionPlan.__dataclass_fields__]
    return [np.array(part) for part in parts[:-1]]


def random_step(rng: np.random.Generator) -> tuple[PaddedTables, np.ndarray, int]:
    block_size = int(rng.choice([8, 16, 32, 64]))
    longest = int(rng.choice([40, 1000, 9000, 70000]))
    lens = rng.integers(1, longest, int(rng.integers(1, 40)))
    lens[rng.random(len(lens)) < 0.3] = lens[0]  # (equals keep their order)
    lengths = -(-lens // block_size) + rng.integers(0, 3, len(lens))
    tables = rng.integers(1, 1 << 20, (len(lens), int(lengths.max()) + int(rng.integers(0, 3))))
    return PaddedTables(tables.astype(np.int32), lengths), lens, block_size


@pytest.mark.parametrize("place", ["cpu", "gpu", "cuda"])
def test_it_is_what_python_plans(monkeypatch, place: str) -> None:
    rng = np.random.default_rng(7)
    monkeypatch.setattr(plan, "_on_gpu", lambda: place != "cpu")
    monkeypatch.setattr(plan.ops, "has_cuda", lambda: place == "cuda")
    native = plan.ops.plan_decodes
    num_split = 0
    for _ in range(CASES):
        tables, lens, block_size = random_step(rng)
        window = None if rng.random() < 0.6 else int(rng.integers(1, 5000))
        rows = np.ones(len(lens), np.int64)
        made = []
        for way in (native, lambda *args, **options: None):
            monkeypatch.setattr(plan.ops, "plan_decodes", way)
            made.append(build_plan(tables, lens, rows, block_size=block_size, window=window))
        for mine, theirs in zip(*map(arrays_of, made), strict=True):
            assert mine.dtype == np.int32
            np.testing.assert_array_equal(mine, theirs)
        num_split += made[0].merge_items.shape[0] > 0
    assert num_split > CASES // 10


def test_numbers_that_are_no_plan_are_named_by_python() -> None:
    tables = PaddedTables(np.ones((2, 3), np.int32), np.array([3, 1]))
    for lens, message in (
        ([24, 9], r"block_tables\[1\] must be at least 2 blocks"),
        ([24, 0], r"query_lens\[1\] must be at most its context length 0"),
        ([24, -3], r"context_lens\[1\] must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            build_plan(tables, lens, [1, 1], block_size=8)


def test_a_table_is_not_read_beyond_its_width() -> None:
    tables = PaddedTables(np.ones((1, 2), np.int32), np.array([5]))  # (as no cache makes it)
    options = {"block_size": 8, "window": None, "shortest_piece": 384}
    options |= {"most_pieces": 48, "most_half_pieces": 12}
    made = ops.plan_decodes(
        tables.blocks, tables.lengths, np.array([30]), pads=False, stays=False, **options
    )
    assert made is None


def test_plans_of_no_rows_have_no_items() -> None:
    made = build_plan([], [], [], block_size=16)
    assert made.work_items.shape == (0, 6) and made.positions.shape == (0,)
    assert made.query_starts.tolist() == [0]
    mx.eval(made.block_tables)
