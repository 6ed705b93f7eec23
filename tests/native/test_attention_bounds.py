"""Rows that see more than their position lets them: the spans of a plan's bounds."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reference import (
    DTYPES,
    ON_GPU,
    PagedBatch,
    alibi_slopes,
    assert_close,
    bits,
    make_batch,
    spans_of,
    to_numpy,
)
from support.simd_processes import run_in_process_of

from mlx_paged import ops
from mlx_paged.model.plan import build_plan


def attend(batch: PagedBatch, plan: ops.AttentionPlan | None = None, **options) -> mx.array:
    options.setdefault("scale", 0.125)
    plan = plan or batch.plan()
    return ops.paged_attention(batch.queries, batch.key_pool, batch.value_pool, plan, **options)


def check(batch: PagedBatch, limits: dict[str, int] | None = None, **options) -> None:
    options.setdefault("scale", 0.125)
    plan = batch.plan(**(limits or {}))
    assert plan.bounds is not None
    assert_close(attend(batch, plan, **options), batch.expected(**options))


def batch_of(rng, lens: list[int], rows: list[int], spans, **shape) -> PagedBatch:
    return make_batch(rng, lens, rows, bounds=spans_of(lens, rows, spans), **shape)


# --- Any spans ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    seed: int
    lengths: list[tuple[int, int]]  # (context, query rows) of each sequence
    num_kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    block_size: int
    dtype: mx.Dtype
    window: int | None
    planned_window: bool  # whether work begins where the window does
    softcap: float | None
    sinks: bool
    alibi: bool
    spans: str
    limits: dict[str, int]

    def bounds(self, rng: np.random.Generator) -> np.ndarray:
        """Spans side by side, a prefix, or for every row something else."""
        lens, rows = zip(*self.lengths)
        if self.spans == "prefix":
            ends = [int(rng.integers(n + 1)) for n in lens]
            return spans_of(lens, rows, [[(0, end - 1)] if end else [] for end in ends])
        if self.spans == "pictures":
            spans = []
            for n in lens:
                cuts = np.unique(rng.integers(0, n + 1, 6))
                spans.append([(int(a), int(b) - 1) for a, b in zip(cuts[::2], cuts[1::2])])
            return spans_of(lens, rows, spans)
        at = np.concatenate([np.arange(n - k, n) for n, k in self.lengths])
        ends = np.repeat(lens, rows)
        return np.stack([rng.integers(0, at + 1), rng.integers(at, ends)])


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    head_dim = st.integers(1, 20).map(lambda n: 8 * n)
    sequence = st.tuples(st.integers(0, 150), st.integers(0, 70)).map(lambda s: (s[0], min(s)))
    num_kv_heads, group = draw(st.tuples(st.integers(1, 3), st.integers(1, 8)))
    key_dim = draw(head_dim)
    return Shape(
        seed=draw(st.integers(0, 2**32 - 1)),
        lengths=draw(st.lists(sequence, min_size=1, max_size=4)),
        num_kv_heads=num_kv_heads,
        group=group,
        key_dim=key_dim,
        value_dim=draw(st.one_of(st.just(key_dim), head_dim)),
        block_size=draw(st.sampled_from((8, 16, 32, 64))),
        dtype=draw(st.sampled_from(DTYPES)),
        window=draw(st.one_of(st.none(), st.integers(1, 160))),
        planned_window=draw(st.booleans()),
        softcap=draw(st.sampled_from((None, None, 0.5, 30.0))),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        spans=draw(st.sampled_from(("pictures", "prefix", "any"))),
        limits={
            "split_tokens": draw(st.sampled_from((8, 24, 64, 4096))),
            "rows_per_item": draw(st.sampled_from((1, 3, 8, 32))),
        },
    )


@given(shapes())
def test_any_spans_match_the_oracle(shape: Shape) -> None:
    rng = np.random.default_rng(shape.seed)
    heads = shape.num_kv_heads * shape.group
    batch = make_batch(
        rng,
        [context for context, _ in shape.lengths],
        [rows for _, rows in shape.lengths],
        num_q_heads=heads,
        num_kv_heads=shape.num_kv_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        block_size=shape.block_size,
        dtype=shape.dtype,
        window=shape.window,
        bounds=shape.bounds(rng),
    )
    sinks = mx.array(rng.standard_normal(heads).astype(np.float32)) if shape.sinks else None
    options = {
        "scale": float(np.float32(shape.key_dim**-0.5)),
        "window": shape.window,
        "softcap": shape.softcap,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes(heads) if shape.alibi else None,
    }
    window = {"window": shape.window} if shape.planned_window else {}
    plan = batch.plan(**shape.limits, **window)
    assert_close(attend(batch, plan, **options), batch.expected(**options))


# --- Each feature by itself -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_a_picture_within_a_chunk(rng, dtype, block_size) -> None:
    batch = batch_of(rng, [100], [90], [[(20, 83)]], block_size=block_size, dtype=dtype)
    check(batch)
    causal = replace(batch, bounds=None).expected(scale=0.125)
    changed = np.abs(causal - batch.expected(scale=0.125)).max(axis=(1, 2)) > 0
    assert np.flatnonzero(changed).tolist() == list(range(10, 73)), "the last one sees the same"


@pytest.mark.parametrize("split_tokens", [16, 40, 4096])
@pytest.mark.parametrize("rows_per_item", [1, 3, 32])
def test_two_pictures_and_a_prefix_beside_decodes(rng, split_tokens, rows_per_item) -> None:
    lens, rows = [70, 130, 90, 40], [1, 100, 60, 1]
    spans = [[], [(30, 60), (61, 99)], [(0, 70)], []]
    batch = batch_of(rng, lens, rows, spans)
    check(batch, {"split_tokens": split_tokens, "rows_per_item": rows_per_item})


@pytest.mark.parametrize("window", [1, 2, 16, 33, 100, 2**31 - 1])
def test_in_the_window_or_in_the_same_picture(rng, window) -> None:
    lens, rows = [130, 130], [1, 100]
    batch = batch_of(rng, lens, rows, [[], [(40, 103)]], window=window)
    for limits in ({}, {"split_tokens": 16, "rows_per_item": 3}):
        check(batch, limits, window=window)
        check(batch, {**limits, "window": window}, window=window)


def test_a_span_that_began_before_the_chunk(rng) -> None:
    """Tokens outside the window are attended to if they belong to the same span."""
    batch = batch_of(rng, [100], [30], [[(20, 85)]], window=8)
    check(batch, window=8)
    check(batch, {"window": 8, "split_tokens": 16}, window=8)


@pytest.mark.parametrize("group", [1, 3, 5, 16])
def test_heads_share_the_bounds_of_a_row(rng, group) -> None:
    shape = {"num_q_heads": 2 * group, "num_kv_heads": 2}
    check(batch_of(rng, [90, 17], [40, 3], [[(55, 80)], [(15, 16)]], **shape))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(24, 24), (256, 256), (576, 512), (192, 128)])
def test_head_dims(rng, key_dim, value_dim) -> None:
    shape = {"key_dim": key_dim, "value_dim": value_dim}
    check(batch_of(rng, [70, 20], [40, 2], [[(35, 66)], [(18, 19)]], **shape))


def test_all_options_at_once(rng) -> None:
    batch = batch_of(rng, [130, 40, 0], [90, 20, 0], [[(60, 110)], [], []], window=33)
    sinks = mx.array([-3.0, 0.0, 2.0, 9.0])
    check(batch, {"split_tokens": 16}, window=33, softcap=2.0, sinks=sinks)


# --- Rows without a span --------------------------------------------------------------------------


def test_bounds_that_add_nothing_make_the_plan_of_none(rng) -> None:
    lens, rows = [70, 130], [1, 100]
    batch = make_batch(rng, lens, rows)
    none = batch.plan()
    plan = replace(batch, bounds=spans_of(lens, rows, [[], []])).plan()
    assert plan.bounds is None and none.bounds is None
    for field in ("positions", "slot_mapping", "block_tables", "work_items", "merge_items"):
        np.testing.assert_array_equal(*(np.array(getattr(p, field)) for p in (plan, none)))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_beside_a_picture_keep_their_bits(rng, dtype, window) -> None:
    if ON_GPU and dtype == mx.float32:
        pytest.skip("NVIDIA's portable kernels have larger tiles in steps with bounds")
    lens, rows = [70, 90, 300, 40], [1, 60, 2, 30]
    bounds = spans_of(lens, rows, [[], [(35, 80)], [], []])
    batch = make_batch(rng, lens, rows, bounds=bounds, key_dim=64, dtype=dtype, window=window)
    options = {"window": window} if window else {}
    limits = {"split_tokens": 64, **options}
    beside = bits(attend(batch, batch.plan(**limits), **options))
    without = replace(batch, bounds=None)
    alone = bits(attend(without, without.plan(**limits), **options))
    text = np.r_[0:1, 61:93]
    np.testing.assert_array_equal(beside[text], alone[text])
    assert (beside[1:61] != alone[1:61]).any()


def test_a_picture_does_not_depend_on_its_company(rng) -> None:
    lens, rows, spans = [70, 90, 33], [1, 60, 5], [[], [(35, 80)], []]
    batch = batch_of(rng, lens, rows, spans)
    alone = replace(
        batch,
        queries=batch.queries[1:61],
        tables=batch.tables[1:2],
        context_lens=[90],
        query_lens=[60],
        bounds=batch.bounds[:, 1:61],
    )
    np.testing.assert_array_equal(bits(attend(alone)), bits(attend(batch))[1:61])


def test_the_positions_stay_those_of_the_tokens(rng) -> None:
    plan = batch_of(rng, [40], [30], [[(15, 30)]]).plan()
    assert np.array(plan.positions).tolist() == list(range(10, 40))
    assert plan.bounds.shape == (3, 30)


def test_blocks_that_nothing_sees_may_be_gone(rng) -> None:
    batch = batch_of(rng, [130], [40], [[(70, 120)]], window=10)
    expected = batch.expected(scale=0.125, window=10)
    gone = replace(batch, tables=[[0] * 4 + batch.tables[0][4:]])  # 70 tokens: four whole blocks
    for limits in ({}, {"window": 10}):
        assert_close(attend(gone, gone.plan(**limits), window=10), expected)


@pytest.mark.parametrize("dropped", ["work_items", "rows"])
def test_rows_without_work_are_zero(rng, dropped) -> None:
    batch = batch_of(rng, [40], [30], [[(15, 30)]])
    if dropped == "rows":
        plan = replace(batch, query_lens=[0], queries=batch.queries[:0], bounds=None).plan()
        assert attend(replace(batch, queries=batch.queries[:0]), plan).shape == (0, 4, 32)
        return
    empty = replace(batch.plan(), work_items=mx.zeros((0, 6), mx.int32))
    np.testing.assert_array_equal(to_numpy(attend(batch, empty)), 0)


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (np.zeros((2, 3), np.int32), r"bounds must be of shape \(2, 4\) but got \(2, 3\)"),
        (np.zeros(4, np.int32), r"bounds must be of shape \(2, 4\) but got \(4,\)"),
        (np.zeros((2, 4)), "bounds must be integers but got float64"),
        ([[6, 7, 8, 9], [6, 7, 8, 10]], r"bounds\[:, 3\] must be around position 9 and in \[0, 10"),
        ([[7, 7, 8, 9], [7, 7, 8, 9]], r"bounds\[:, 0\] must be around position 6 .* got 7 and 7"),
        ([[6, 7, 8, 9], [6, 6, 8, 9]], r"bounds\[:, 1\] must be around position 7 .* got 7 and 6"),
        ([[6, 7, -1, 9], [6, 7, 8, 9]], r"bounds\[:, 2\] must be .* but got -1 and 8"),
    ],
)
def test_bounds_that_cannot_be(bounds, message) -> None:
    with pytest.raises(ValueError, match=r"\[paged_attention\] " + message):
        build_plan([[1, 2]], [10], [4], block_size=8, bounds=np.asarray(bounds))


@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (3, 5), (3, 4, 1), ()])
def test_bounds_of_another_shape_are_refused_by_the_op(rng, shape) -> None:
    batch = batch_of(rng, [10], [4], [[(6, 9)]])
    plan = replace(batch.plan(), bounds=mx.zeros(shape, mx.int32))
    with pytest.raises(ValueError, match=r"\[paged_attention\] (positions|queries) must be"):
        attend(batch, plan)


# --- Instruction sets -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("simd", "num_threads"),
    [("avx2", 2), pytest.param("baseline", 2, marks=pytest.mark.long), ("neon", 2)],
)
def test_other_instruction_sets_in_this_file(simd, num_threads) -> None:
    run_in_process_of(simd, num_threads, [__file__], "any_spans or options or asked_for")


@pytest.mark.skipif("EXPECTED_SIMD" not in os.environ, reason="runs in the processes started above")
def test_the_instruction_set_asked_for_is_in_use() -> None:
    from mlx_paged.extension import build_info

    assert build_info()["simd"] == os.environ["EXPECTED_SIMD"]
