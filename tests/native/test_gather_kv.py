"""`ops.gather_kv`: paged sequences made dense."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import reference
from support.reference import DTYPES, PagedBatch, make_batch, noncontiguous, to_numpy

from mlx_paged import ops


def check(batch: PagedBatch, max_context_len: int | None = None, **options) -> None:
    plan = batch.plan()
    longest = max(batch.context_lens, default=0) if max_context_len is None else max_context_len
    pools = (batch.key_pool, batch.value_pool)
    gathered = ops.gather_kv(*pools, plan.block_tables, plan.context_lens, longest, **options)
    for actual, pool in zip(gathered, pools):
        assert actual.dtype == pool.dtype
        expected = reference.gather_kv(to_numpy(pool), batch.tables, batch.context_lens, longest)
        np.testing.assert_array_equal(to_numpy(actual), expected)


@given(st.data())
def test_any_ragged_batch_is_gathered_exactly(data: st.DataObject) -> None:
    draw = data.draw
    context_lens = draw(st.lists(st.integers(0, 150), min_size=1, max_size=5))
    batch = make_batch(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        context_lens,
        [0] * len(context_lens),
        num_kv_heads=draw(st.integers(1, 5)),
        num_q_heads=60,
        key_dim=8 * draw(st.integers(1, 72)),
        value_dim=8 * draw(st.integers(1, 72)),
        block_size=draw(st.sampled_from((8, 16, 32, 64))),
        dtype=draw(st.sampled_from(DTYPES)),
    )
    check(batch)


def test_zeros_follow_each_context_up_to_the_room_of_the_table(rng) -> None:
    check(make_batch(rng, [17, 5, 0], [0, 0, 0]), max_context_len=32)


def test_a_shorter_limit_cuts_contexts_off(rng) -> None:
    check(make_batch(rng, [17, 5, 40], [0, 0, 0]), max_context_len=9)
    check(make_batch(rng, [17, 5, 40], [0, 0, 0]), max_context_len=0)


def test_contexts_longer_than_one_thread_takes(rng) -> None:
    check(make_batch(rng, [700, 255, 256, 257, 0], [0] * 5))
    check(make_batch(rng, [513, 4000], [0, 0], block_size=64), max_context_len=4032)


def test_no_sequences(rng) -> None:
    check(make_batch(rng, [], []))


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
def test_noncontiguous_metadata(rng, layout) -> None:
    batch = make_batch(rng, [17, 5, 40], [0, 0, 0])
    plan = batch.plan()
    tables = noncontiguous(plan.block_tables)[layout]
    lens = noncontiguous(plan.context_lens)[layout]
    keys, _ = ops.gather_kv(batch.key_pool, batch.value_pool, tables, lens, 40)
    expected = reference.gather_kv(to_numpy(batch.key_pool), batch.tables, batch.context_lens, 40)
    np.testing.assert_array_equal(to_numpy(keys), expected)


def test_broadcast_context_lens(rng) -> None:
    batch = make_batch(rng, [20, 20, 20], [0, 0, 0])
    lens = mx.broadcast_to(mx.array([20]), (3,))
    pools = (batch.key_pool, batch.value_pool)
    keys, _ = ops.gather_kv(*pools, batch.plan().block_tables, lens, 20)
    expected = reference.gather_kv(to_numpy(batch.key_pool), batch.tables, batch.context_lens, 20)
    np.testing.assert_array_equal(to_numpy(keys), expected)


def test_inside_compile(rng) -> None:
    compiled = mx.compile(lambda *arrays: ops.gather_kv(*arrays, 40)[1] + 1)
    for context_lens in ([17, 40], [40, 32]):
        batch = make_batch(rng, context_lens, [0, 0], block_size=64)
        plan = batch.plan()
        out = compiled(batch.key_pool, batch.value_pool, plan.block_tables, plan.context_lens)
        values = to_numpy(batch.value_pool)
        expected = reference.gather_kv(values, batch.tables, context_lens, 40) + 1
        np.testing.assert_allclose(to_numpy(out), expected, rtol=1e-6)


@pytest.mark.parametrize("make_stream", [lambda: mx.new_stream(mx.cpu), lambda: mx.cpu])
def test_on_an_explicit_stream(rng, make_stream) -> None:
    batch = make_batch(rng, [17, 5], [0, 0])
    mx.eval(batch.key_pool, batch.value_pool)
    check(batch, stream=make_stream())


def test_dense_attention_over_the_gathered_agrees_with_paged_attention(rng) -> None:
    batch = make_batch(rng, [40], [1])
    plan = batch.plan()
    pools = (batch.key_pool, batch.value_pool)
    paged = ops.paged_attention(batch.queries, *pools, plan, scale=0.2)
    keys, values = ops.gather_kv(*pools, plan.block_tables, plan.context_lens, 40)
    queries = batch.queries[:, :, None]  # [1, num_q_heads, 1, key_dim]
    dense = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.2)
    np.testing.assert_allclose(np.array(dense[:, :, 0]), np.array(paged), rtol=1e-4, atol=1e-6)
