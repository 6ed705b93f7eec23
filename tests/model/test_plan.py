"""`build_plan`: every query row reads every block it may see, exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_paged import executables, ops
from mlx_paged.model.plan import BlockTableCache, build_plan
from mlx_paged.ops import AttentionPlan

BLOCK_SIZE = 16


@pytest.fixture(scope="module", autouse=True)
def _no_strides() -> Iterator[None]:
    """On GPUs plans are padded; here they are as large as they need to be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "has_cuda", lambda: False)
        patch.setattr(executables, "max_gpu_step_rows", lambda: 0)
        yield


def test_strides_add_items_and_blocks_that_do_nothing(monkeypatch) -> None:
    lengths = [(n, 1) for n in (700, 3, 64)]
    exact = plan_of(lengths, split_tokens=64)
    monkeypatch.setattr(executables, "max_gpu_step_rows", lambda: 64)
    padded = plan_of(lengths, split_tokens=64)
    for name in ("block_tables", "work_items", "merge_items"):
        small, large = (np.array(getattr(plan, name)) for plan in (exact, padded))
        inside = tuple(slice(n) for n in small.shape)
        assert large[inside].tolist() == small.tolist()
        large[inside] = 0
        assert large.size > small.size and not large.any()


def plan_of(lengths: list[tuple[int, int]], **limits: int) -> AttentionPlan:
    next_block = iter(range(1, 10**6))
    tables = [[next(next_block) for _ in range(-(-n // BLOCK_SIZE))] for n, _ in lengths]
    return build_plan(
        tables,
        [context for context, _ in lengths],
        [rows for _, rows in lengths],
        block_size=BLOCK_SIZE,
        **limits,
    )


@pytest.mark.parametrize("rows", [1, 5])
def test_work_begins_in_the_block_of_the_oldest_token_that_is_seen(rows: int) -> None:
    for context in range(rows, 100):
        for window in (1, 2, 15, 16, 17, 40):
            items = np.array(plan_of([(context, rows)], window=window).work_items)
            oldest = max(0, context - rows - window + 1)
            assert items[:, 3].min() == oldest // BLOCK_SIZE, (context, window)
            assert items[:, 4].max() == -(-context // BLOCK_SIZE)


mixed = st.tuples(st.integers(0, 300), st.integers(0, 80)).map(lambda s: (s[0], min(s)))
decodes = st.tuples(st.integers(1, 300), st.just(1))  # (a step of nothing else is built apart)
lengths_strategy = st.lists(mixed, max_size=6) | st.lists(decodes, min_size=1, max_size=9)


@given(
    lengths_strategy,
    st.sampled_from((1, 16, 17, 64, 4096)),
    st.sampled_from((1, 3, 32)),
)
def test_rows_blocks_and_partials_are_covered_exactly_once(lengths, split_tokens, rows_per_item):
    plan = plan_of(lengths, split_tokens=split_tokens, rows_per_item=rows_per_item)
    positions = plan.positions.tolist()
    starts = plan.query_starts.tolist()
    tiles: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for sequence, begin, end, first, last, partial in plan.work_items.tolist():
        assert starts[sequence] <= begin < end <= starts[sequence + 1]
        assert end - begin <= rows_per_item
        assert first < last, "an item without blocks is work without result"
        tiles.setdefault((begin, end), []).append((first, last, partial))

    covered = sorted(row for begin, end in tiles for row in range(begin, end))
    assert covered == list(range(len(positions)))

    merges = {(m[0], m[1]): m[2:] for m in plan.merge_items.tolist()}
    used_partials: list[int] = []
    for (begin, end), pieces in tiles.items():
        pieces.sort()
        # One after the other from block 0 to the last that the tile's last row sees.
        assert pieces[0][0] == 0
        assert all(a[1] == b[0] for a, b in pairwise(pieces))
        assert pieces[-1][1] == positions[end - 1] // BLOCK_SIZE + 1
        num_tokens = positions[end - 1] + 1
        assert len(pieces) == min(-(-num_tokens // split_tokens), pieces[-1][1])
        if len(pieces) == 1:
            assert pieces[0][2] == -1 and (begin, end) not in merges
            continue
        first_partial, num_splits = merges.pop((begin, end))
        height = end - begin
        assert num_splits == len(pieces)
        assert [p[2] for p in pieces] == [first_partial + i * height for i in range(num_splits)]
        used_partials += range(first_partial, first_partial + num_splits * height)
        longest = max(last - first for first, last, _ in pieces)
        shortest = min(last - first for first, last, _ in pieces)
        assert longest - shortest <= 1, "splits are near equal"
    assert not merges
    assert sorted(used_partials) == list(range(len(used_partials)))


@given(lengths_strategy)
def test_positions_slots_and_starts(lengths) -> None:
    plan = plan_of(lengths)
    expected = [p for context, rows in lengths for p in range(context - rows, context)]
    assert plan.positions.tolist() == expected
    assert plan.context_lens.tolist() == [context for context, _ in lengths]
    assert plan.query_starts.tolist() == [sum(r for _, r in lengths[:i]) for i in
                                          range(len(lengths) + 1)]  # fmt: skip
    tables = plan.block_tables.tolist()
    owners = [i for i, (_, rows) in enumerate(lengths) for _ in range(rows)]
    assert plan.slot_mapping.tolist() == [
        tables[i][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for i, p in zip(owners, expected)
    ]


def test_every_field_is_int32_of_its_shape() -> None:
    plan = plan_of([(40, 3), (0, 0), (7, 1)])
    arrays = dict(vars(plan))
    assert arrays.pop("bounds") is None
    assert {name: array.shape for name, array in arrays.items()} == {
        "positions": (4,),
        "slot_mapping": (4,),
        "block_tables": (3, 3),
        "context_lens": (3,),
        "query_starts": (4,),
        "work_items": (2, 6),
        "merge_items": (0, 4),
    }
    assert {str(array.dtype) for array in arrays.values()} == {"mlx.core.int32"}


@pytest.mark.parametrize("lengths", [[], [(0, 0)], [(30, 0)]])
def test_a_step_without_rows_has_no_work(lengths) -> None:
    plan = plan_of(lengths)
    assert plan.positions.shape == (0,)
    assert plan.work_items.shape == (0, 6)
    assert plan.merge_items.shape == (0, 4)
    assert plan.block_tables.shape[0] == len(lengths)


def test_padding_points_at_block_zero() -> None:
    plan = build_plan([[5], [7, 8, 9]], [3, 40], [1, 1], block_size=16)
    assert plan.block_tables.tolist() == [[5, 0, 0], [7, 8, 9]]


def test_a_step_that_was_lost_is_made_up_for() -> None:
    """Its tables never came here, but those of the next step say what is new since."""
    cache = BlockTableCache()
    cache.update([7], [([1, 2, 3], 0)])
    found = cache.update([7, 8], [([1, 2, 3, 4, 5], 4), ([6], 0)])
    assert found.blocks.tolist() == [[1, 2, 3, 4, 5], [6, 0, 0, 0, 0]]
    assert found.lengths.tolist() == [5, 1]


@given(
    st.lists(st.tuples(st.permutations(range(4)), st.integers(1, 4), st.sets(st.integers(0, 3))))
)
def test_tables_are_those_of_each_step(steps) -> None:
    """Some sequences have more blocks in each; what was returned stays as it was."""
    cache, blocks, next_block = BlockTableCache(), {i: [i + 1] for i in range(4)}, 100
    given: dict[int, tuple[tuple[int, ...], int]] = {}
    returned = []
    for order, count, growing in steps:
        for i in growing:
            blocks[i].append(next_block)
            next_block += 1
        members = list(order[:count])
        for i in members:
            table = tuple(blocks[i])
            if i not in given or given[i][0] != table:
                given[i] = (table, 0)
            elif given[i][1] == 0:
                given[i] = (table, len(table))
        # (A sequence that was not in the step before may have lost its place.)
        tables = [given[i] for i in members]
        found = cache.update(members, tables)
        width = max(len(blocks[i]) for i in members)
        expected = [blocks[i] + [0] * (width - len(blocks[i])) for i in members]
        assert found.blocks.tolist() == expected
        assert found.lengths.tolist() == [len(blocks[i]) for i in members]
        with pytest.raises(ValueError):
            found.blocks[:] = 0
        returned.append((found, expected))
    for found, expected in returned:
        assert found.blocks.tolist() == expected


def test_tables_that_have_not_changed_are_not_put_together_again() -> None:
    cache, tables = BlockTableCache(), [((1, 2), 2), ((3,), 1)]
    cache.update([7, 8], [((1, 2), 0), ((3,), 0)])
    found = cache.update([7, 8], tables)
    assert cache.update([7, 8], tables) is found
    assert cache.update([7, 8], [((1, 2, 4), 2), tables[1]]) is not found


def test_longest_work_comes_first() -> None:
    items = plan_of([(20, 1), (300, 1), (90, 1)]).work_items.tolist()
    assert [item[0] for item in items] == [1, 2, 0]


def test_one_long_sequence_is_cut_to_the_size_of_many_short_ones() -> None:
    items = np.array(plan_of([(3200, 1)] + [(100, 1)] * 8, split_tokens=128).work_items)
    assert (items[:, 4] - items[:, 3]).max() * BLOCK_SIZE <= 128


def test_block_tables_are_not_changed_and_may_be_any_sequence() -> None:
    tables = [(1, 2), range(3, 6)]
    plan = build_plan(tables, [20, 40], [1, 1], block_size=16)
    assert plan.block_tables.tolist() == [[1, 2, 0], [3, 4, 5]]
    assert tables == [(1, 2), range(3, 6)]


@given(
    st.lists(decodes, min_size=1, max_size=9),
    st.sampled_from((16, 64, 4096)),
)
def test_a_step_of_decodes_is_planned_like_any_other(lengths, split_tokens) -> None:
    """A prompt at the end makes the step a mixed one; the decodes' part must not change."""
    alone = plan_of(lengths, split_tokens=split_tokens)
    mixed = plan_of([*lengths, (2, 2)], split_tokens=split_tokens)
    count = len(lengths)
    for name in ("positions", "slot_mapping", "context_lens", "query_starts"):
        expected = getattr(mixed, name).tolist()
        got = getattr(alone, name)
        assert got.tolist() == expected[: got.size], name
    width = alone.block_tables.shape[1]
    assert alone.block_tables.tolist() == mixed.block_tables[:count, :width].tolist()
    items = [item for item in mixed.work_items.tolist() if item[0] < count]
    assert alone.work_items.tolist() == items
    assert alone.merge_items.tolist() == mixed.merge_items.tolist()
