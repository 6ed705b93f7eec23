"""`ops.paged_attention` against the oracle."""

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
    PagedBatch,
    alibi_slopes,
    assert_close,
    bits,
    make_batch,
    noncontiguous,
    to_numpy,
)
from support.simd_processes import run_in_process_of

from mlx_paged import ops
from mlx_paged.extension import build_info
from mlx_paged.ops import AttentionPlan


def attend(batch: PagedBatch, plan: AttentionPlan | None = None, **options) -> mx.array:
    options.setdefault("scale", 0.125)
    plan = plan or batch.plan()
    return ops.paged_attention(batch.queries, batch.key_pool, batch.value_pool, plan, **options)


def check(batch: PagedBatch, limits: dict[str, int] | None = None, **options) -> None:
    options.setdefault("scale", 0.125)
    plan = batch.plan(**(limits or {}))
    assert_close(attend(batch, plan, **options), batch.expected(**options))


# --- Ragged shapes --------------------------------------------------------------------------------


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
    softcap: float | None
    sinks: bool
    alibi: bool
    limits: dict[str, int]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    head_dim = st.integers(1, 72).map(lambda n: 8 * n)
    sequence = st.tuples(st.integers(0, 150), st.integers(0, 40)).map(lambda s: (s[0], min(s)))
    num_kv_heads, group = draw(
        st.one_of(
            st.tuples(st.integers(1, 4), st.integers(1, 16)),
            st.just((1, 32)),
        )
    )
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
        softcap=draw(st.sampled_from((None, None, 0.5, 30.0))),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        limits={
            "split_tokens": draw(st.sampled_from((8, 24, 64, 4096))),
            "rows_per_item": draw(st.sampled_from((1, 3, 8, 32))),
        },
    )


@given(shapes())
def test_any_ragged_batch_matches_the_oracle(shape: Shape) -> None:
    rng = np.random.default_rng(shape.seed)
    batch = make_batch(
        rng,
        [context for context, _ in shape.lengths],
        [rows for _, rows in shape.lengths],
        num_q_heads=shape.num_kv_heads * shape.group,
        num_kv_heads=shape.num_kv_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        block_size=shape.block_size,
        dtype=shape.dtype,
        window=shape.window,
    )
    sinks = None
    if shape.sinks:
        logits = rng.standard_normal(shape.num_kv_heads * shape.group)
        sinks = mx.array(logits.astype(np.float32)).astype(shape.dtype)
    check(
        batch,
        shape.limits,
        scale=float(np.float32(shape.key_dim**-0.5)),
        window=shape.window,
        softcap=shape.softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes(batch.queries.shape[1]) if shape.alibi else None,
    )


# --- Each feature by itself, so that a failure has a name -----------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_decode_of_every_dtype_and_block_size(rng, dtype, block_size) -> None:
    check(make_batch(rng, [1, 63, 64, 65, 200], [1] * 5, block_size=block_size, dtype=dtype))


@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 56, 64, 72, 80, 96, 128, 192, 256, 512, 576])
def test_head_dims_that_are_not_whole_vectors(rng, head_dim) -> None:
    check(make_batch(rng, [70], [1], key_dim=head_dim))
    check(make_batch(rng, [70], [20], key_dim=head_dim, dtype=mx.float16))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(576, 512), (192, 128), (8, 264), (264, 8)])
def test_key_and_value_head_dims_differ(rng, key_dim, value_dim) -> None:
    check(make_batch(rng, [70, 33], [1, 9], key_dim=key_dim, value_dim=value_dim))


@pytest.mark.parametrize("group", range(1, 17))
def test_every_ratio_of_query_to_kv_heads(rng, group) -> None:
    check(make_batch(rng, [90, 17], [1, 3], num_q_heads=2 * group, num_kv_heads=2))


def test_multi_query_attention(rng) -> None:
    check(make_batch(rng, [90, 17], [1, 17], num_q_heads=32, num_kv_heads=1))


@pytest.mark.parametrize("query_len", [2, 5, 31, 32, 33, 64, 100])
def test_rows_of_a_chunk_see_no_later_row(rng, query_len) -> None:
    check(make_batch(rng, [100], [query_len]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256, 512])
def test_more_pieces_than_are_merged_at_once(rng, dtype, head_dim) -> None:
    batch = make_batch(
        rng, [1100, 200, 390], [1, 2, 1], num_q_heads=6, key_dim=head_dim, dtype=dtype
    )
    sinks = mx.array(rng.standard_normal(6).astype(np.float32)).astype(dtype)
    check(batch, {"split_tokens": 16}, sinks=sinks)


@pytest.mark.parametrize("window", [1, 2, 3, 15, 16, 17, 63, 64, 65, 129, 130, 10**9, 2**31 - 1])
def test_window_edges(rng, window) -> None:
    batch = make_batch(rng, [130, 130, 3], [1, 40, 2], window=window)
    check(batch, window=window)
    check(batch, {"split_tokens": 16, "rows_per_item": 3}, window=window)
    # Work may begin where the window does, and then must not begin later.
    check(batch, {"window": window}, window=window)
    check(batch, {"window": window, "split_tokens": 16, "rows_per_item": 3}, window=window)


def test_blocks_before_the_window_may_be_gone(rng) -> None:
    batch = make_batch(rng, [130], [1], window=20)
    expected = batch.expected(scale=0.125, window=20)
    gone = [0] * 6 + batch.tables[0][6:]  # 130 - 20 = 110 tokens: six whole blocks of 16
    assert_close(attend(replace(batch, tables=[gone]), window=20), expected)


@pytest.mark.parametrize("softcap", [0.1, 1.0, 50.0])
def test_softcap(rng, softcap) -> None:
    check(make_batch(rng, [130, 40], [1, 20]), softcap=softcap, scale=1.0)


@pytest.mark.parametrize("sink_dtype", DTYPES, ids=str)
def test_sinks_take_their_share_of_the_softmax(rng, sink_dtype) -> None:
    sinks = mx.array([-3.0, 0.0, 2.0, 9.0]).astype(sink_dtype)
    batch = make_batch(rng, [130, 40], [1, 20])
    check(batch, sinks=sinks)
    check(batch, {"split_tokens": 16}, sinks=sinks)  # counted once, not once a split


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alibi(rng, dtype) -> None:
    slopes = mx.array([0.5, -0.05, 0.0, 2.0]).astype(dtype)
    batch = make_batch(rng, [130, 40, 700], [1, 20, 1])
    check(batch, alibi_slopes=slopes)
    check(batch, {"split_tokens": 16}, alibi_slopes=slopes)
    # A sink does not move with the position.
    sinks = mx.array([-3.0, 0.0, 2.0, 9.0])
    check(batch, {"split_tokens": 16}, alibi_slopes=slopes, sinks=sinks)


def test_alibi_far_from_the_first_token(rng) -> None:
    """The token's own score is exact, and those of the nearest are the ones that count."""
    batch = make_batch(rng, [40_000], [1], num_q_heads=2, key_dim=8, num_kv_heads=1)
    check(batch, alibi_slopes=mx.array([0.7, 0.003]))


@pytest.mark.parametrize("slope", [1e28, -1e28])
def test_the_steepest_slopes(rng, slope) -> None:
    check(make_batch(rng, [130, 40], [1, 20]), alibi_slopes=mx.full((4,), slope))


def test_all_options_at_once(rng) -> None:
    batch = make_batch(rng, [130, 40, 0], [1, 20, 0], window=33)
    options = {"sinks": mx.array([-3.0, 0.0, 2.0, 9.0]), "alibi_slopes": alibi_slopes(4)}
    check(batch, {"split_tokens": 16}, window=33, softcap=2.0, **options)


@pytest.mark.parametrize("split_tokens", [1, 16, 17, 100])
@pytest.mark.parametrize("query_len", [1, 5, 70])
def test_split_contexts_merge_to_the_same(rng, split_tokens, query_len) -> None:
    batch = make_batch(rng, [300, 90], [query_len, 1])
    plan = batch.plan(split_tokens=split_tokens, rows_per_item=8)
    assert plan.merge_items.shape[0] > 0
    assert_close(attend(batch, plan), batch.expected(scale=0.125))


def test_sequences_of_length_zero_take_part_and_get_nothing(rng) -> None:
    check(make_batch(rng, [0, 40, 0, 7, 0], [0, 1, 0, 2, 0]))


def test_sequences_without_query_rows_are_skipped(rng) -> None:
    check(make_batch(rng, [50, 40], [0, 1]))


def test_a_batch_of_no_rows_is_empty(rng) -> None:
    batch = make_batch(rng, [0, 30], [0, 0])
    assert attend(batch).shape == (0, 4, 32)


def test_shared_blocks_serve_every_sequence_that_names_them(rng) -> None:
    batch = make_batch(rng, [48, 48], [1, 1])
    shared = [batch.tables[0], batch.tables[0][:2] + batch.tables[1][2:]]
    check(replace(batch, tables=shared))


def test_tables_longer_than_the_context(rng) -> None:
    batch = make_batch(rng, [20, 70], [1, 3])
    check(replace(batch, tables=[[*table, 0, 0] for table in batch.tables]))


# --- How the arguments lie in memory --------------------------------------------------------------


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
def test_noncontiguous_queries(rng, layout) -> None:
    batch = make_batch(rng, [70, 20], [3, 2])
    check(replace(batch, queries=noncontiguous(batch.queries)[layout]))


def test_broadcast_queries(rng) -> None:
    batch = make_batch(rng, [70, 20], [3, 2])
    check(replace(batch, queries=mx.broadcast_to(batch.queries[:1, :1], batch.queries.shape)))


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
@pytest.mark.parametrize("field", ["positions", "block_tables", "work_items", "merge_items"])
def test_noncontiguous_plan(rng, layout, field) -> None:
    batch = make_batch(rng, [70, 50], [3, 2])
    plan = batch.plan(split_tokens=16)
    view = noncontiguous(getattr(plan, field))[layout]
    assert_close(attend(batch, replace(plan, **{field: view})), batch.expected(scale=0.125))


def test_noncontiguous_sinks(rng) -> None:
    sinks = mx.array([0.0, 7.0, 1.0, 7.0, 2.0, 7.0, 3.0, 7.0])[::2]
    check(make_batch(rng, [70], [3]), sinks=sinks)


# --- Ways to evaluate -----------------------------------------------------------------------------


def test_inside_compile_with_the_plan_as_arguments(rng) -> None:
    traces = []

    @mx.compile
    def compiled(queries, key_pool, value_pool, positions, tables, items, merges):
        traces.append(1)
        unused = mx.zeros(0, mx.int32)
        plan = AttentionPlan(positions, unused, tables, unused, unused, items, merges)
        out = ops.paged_attention(2 * queries, key_pool, value_pool, plan, scale=0.0625, window=50)
        return out + 1

    for context_lens in (
        [70, 20],
        [33, 100],
    ):  # same shapes, other numbers: one trace for both
        batch = make_batch(rng, context_lens, [1, 1], block_size=64)
        plan = batch.plan()
        arrays = (plan.positions, plan.block_tables, plan.work_items, plan.merge_items)
        out = compiled(batch.queries, batch.key_pool, batch.value_pool, *arrays)
        assert_close(out - 1, batch.expected(scale=0.125, window=50), 1e-4)
    assert len(traces) == 1


def test_under_async_eval(rng) -> None:
    batches = [make_batch(rng, [70 + i, 20], [3, 2]) for i in range(4)]
    outs = [attend(batch) for batch in batches]
    for out in outs:
        mx.async_eval(out)
    for batch, out in zip(batches, outs):
        assert_close(out, batch.expected(scale=0.125))


@pytest.mark.parametrize("make_stream", [lambda: mx.new_stream(mx.cpu), lambda: mx.cpu])
def test_on_an_explicit_stream(rng, make_stream) -> None:
    batch = make_batch(rng, [70, 20], [3, 2])
    mx.eval(batch.key_pool, batch.value_pool)
    assert_close(attend(batch, stream=make_stream()), batch.expected(scale=0.125))


def test_queries_still_in_the_graph(rng) -> None:
    batch = make_batch(rng, [70, 20], [3, 2])
    lazy = replace(batch, queries=(batch.queries.transpose(1, 0, 2) * 2).transpose(1, 0, 2))
    assert_close(attend(lazy), lazy.expected(scale=0.125))


def test_same_bits_every_time(rng) -> None:
    batch = make_batch(rng, [300, 90], [20, 1], dtype=mx.float16)
    plan = batch.plan(split_tokens=32)
    first = bits(attend(batch, plan))
    for _ in range(5):
        np.testing.assert_array_equal(bits(attend(batch, plan)), first)


def test_a_row_does_not_depend_on_its_batch(rng) -> None:
    batch = make_batch(rng, [90, 40, 70], [1, 1, 1])
    together = bits(attend(batch))
    for i in range(3):
        alone = PagedBatch(
            batch.queries[i : i + 1],
            batch.key_pool,
            batch.value_pool,
            [batch.tables[i]],
            [batch.context_lens[i]],
            [1],
        )
        np.testing.assert_array_equal(bits(attend(alone))[0], together[i])


# --- Numbers at the edge --------------------------------------------------------------------------


@pytest.mark.parametrize("dropped", [slice(0, 1), slice(1, 3)])
def test_rows_without_a_work_item_are_zero(rng, dropped) -> None:
    batch = make_batch(rng, [70, 20, 33], [3, 2, 1])
    plan = batch.plan()
    keep = [i for i in range(3) if i not in range(*dropped.indices(3))]
    items = plan.work_items[mx.array(keep)]
    expected = batch.expected(scale=0.125)
    for _, begin, end, *_ in plan.work_items[dropped].tolist():
        expected[begin:end] = 0
    assert_close(attend(batch, replace(plan, work_items=items)), expected)


def test_a_plan_without_work_gives_zeros(rng) -> None:
    batch = make_batch(rng, [70, 20], [3, 2])
    empty = replace(batch.plan(), work_items=mx.zeros((0, 6), mx.int32))
    np.testing.assert_array_equal(to_numpy(attend(batch, empty)), 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("magnitude", [200.0, 6e4])
def test_extreme_logits_pick_one_key_and_do_not_overflow(rng, dtype, magnitude) -> None:
    batch = make_batch(rng, [100], [3], num_q_heads=1, num_kv_heads=1, key_dim=8, dtype=dtype)
    for sign in (1.0, -1.0):
        queries = mx.zeros_like(batch.queries)
        queries[..., 0] = sign * magnitude
        keys = mx.zeros_like(batch.key_pool)
        spread = mx.array(np.linspace(-1, 1, 16), dtype)
        keys[..., 0] = magnitude * spread[None, :, None]
        extreme = replace(batch, queries=queries, key_pool=keys)
        check(extreme, scale=1.0)
        check(extreme, {"split_tokens": 16}, scale=1.0)
        check(extreme, scale=1.0, softcap=50.0)
        check(extreme, scale=1.0, sinks=mx.array([sign * 100.0]))


def test_a_sink_far_above_all_scores_leaves_zero(rng) -> None:
    out = attend(make_batch(rng, [100], [3]), sinks=mx.full((4,), 1e30))
    np.testing.assert_array_equal(to_numpy(out), 0)


def test_a_sink_far_below_all_scores_changes_nothing(rng) -> None:
    batch = make_batch(rng, [100], [3])
    for logit in (-1e30, -np.inf):
        sinks = mx.full((4,), logit)
        assert_close(attend(batch, sinks=sinks), batch.expected(scale=0.125))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_subnormals_are_numbers(rng, dtype) -> None:
    tiny = {mx.float16: 2.0**-24, mx.bfloat16: 2.0**-133}[dtype]
    batch = make_batch(rng, [40], [1], num_q_heads=1, num_kv_heads=1, key_dim=24, dtype=dtype)
    # All values are the same subnormal, so their mean is too, whatever the weights. AMX's products
    # count it as zero.
    has_tiles = build_info()["simd"] in ("amx", "amx_emulated")
    expected = 0 if has_tiles and dtype == mx.bfloat16 else 3 * tiny
    constant = replace(batch, value_pool=mx.full(batch.value_pool.shape, 3 * tiny, dtype=dtype))
    np.testing.assert_array_equal(to_numpy(attend(constant)), expected)
    # Subnormal keys count: a large query makes their scores differ by more than 1.
    if dtype == mx.float16:
        keys = mx.where(mx.arange(16)[None, :, None, None] % 2 == 0, 500 * tiny, 0.0).astype(dtype)
        keys = mx.broadcast_to(keys, batch.key_pool.shape)
        queries = mx.full(batch.queries.shape, 6e4, dtype=dtype)
        check(replace(batch, key_pool=mx.contiguous(keys), queries=queries), scale=1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_negative_zero_survives(rng, dtype) -> None:
    batch = make_batch(rng, [1], [1], dtype=dtype)
    zeros = replace(batch, value_pool=mx.full(batch.value_pool.shape, -0.0, dtype=dtype))
    np.testing.assert_array_equal(to_numpy(attend(zeros)), 0)
    queries = mx.full(batch.queries.shape, -0.0, dtype=dtype)
    check(replace(batch, queries=queries))


@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 5.0}, {"window": 9}, {"sinks": True}, {"alibi_slopes": True}],
    ids=str,
)
@pytest.mark.parametrize("split_tokens", [16, 4096])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [3, 2, 20]])
def test_nan_in_a_query_row_stays_in_that_row(rng, options, split_tokens, query_lens) -> None:
    batch = make_batch(rng, [70, 50, 40], query_lens)
    options = {**options, "scale": 0.125}
    if "sinks" in options:
        options["sinks"] = mx.zeros(4)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = alibi_slopes(4)
    poisoned = mx.array(batch.queries)
    poisoned[1, 2, 5] = float("nan")
    plan = batch.plan(split_tokens=split_tokens)
    clean = to_numpy(attend(batch, plan, **options))
    out = to_numpy(attend(replace(batch, queries=poisoned), plan, **options))
    assert np.isnan(out[1, 2]).all(), "a NaN must not turn into a plausible number"
    out[1, 2] = clean[1, 2]
    np.testing.assert_array_equal(out, clean)


# --- Instruction sets and threads -----------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("simd", "num_threads"),
    [
        ("avx512", 4),
        ("avx2", 4),
        ("baseline", 1),
        ("neon", 1),
        ("neon", 4),
    ],
)
def test_this_file_passes_in_a_process_of(simd, num_threads) -> None:
    run_in_process_of(simd, num_threads, [__file__], "not this_file")


@pytest.mark.skipif("EXPECTED_SIMD" not in os.environ, reason="runs in the processes started above")
def test_the_instruction_set_asked_for_is_in_use() -> None:
    assert build_info()["simd"] == os.environ["EXPECTED_SIMD"]
    assert build_info()["num_threads"] == os.environ["MLX_PAGED_NUM_THREADS"]
