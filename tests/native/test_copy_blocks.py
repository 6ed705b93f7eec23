"""`ops.copy_blocks`: whole blocks, in every pool, and nothing else."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import reference
from support.reference import DTYPES, bits, noncontiguous

from mlx_paged import ops

Pairs = list[tuple[int, int]]


def pair_array(pairs: Pairs) -> mx.array:
    return mx.array(np.array(pairs, np.int32).reshape(-1, 2))


def random_pool(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def check(pools: list[mx.array], pairs: Pairs, **options) -> None:
    expected = [reference.copy_blocks(bits(pool), pairs) for pool in pools]
    copied = ops.copy_blocks(pools, pair_array(pairs), **options)
    assert len(copied) == len(pools)
    for actual, wanted in zip(copied, expected):
        np.testing.assert_array_equal(bits(actual), wanted)


@given(st.data())
def test_any_pools_are_copied_bit_for_bit(data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_blocks = draw(st.integers(2, 12))
    pools = [
        random_pool(
            rng,
            (
                num_blocks,
                draw(st.sampled_from((8, 16, 32, 64))),
                draw(st.integers(1, 4)),
                8 * dim,
            ),
            draw(st.sampled_from(DTYPES)),
        )
        for dim in draw(st.lists(st.integers(1, 72), min_size=1, max_size=4))
    ]
    # Destinations are distinct and none is a source; a source may serve several.
    blocks = draw(st.permutations(range(num_blocks)))
    split = draw(st.integers(1, num_blocks))
    pairs = [(draw(st.sampled_from(blocks[:split])), dst) for dst in blocks[split:]]
    check(pools, pairs)


def test_no_pairs_leave_the_pools_as_they_are(rng) -> None:
    check([random_pool(rng, (4, 8, 2, 8), mx.float32)], [])


def test_one_source_for_many_destinations(rng) -> None:
    check([random_pool(rng, (6, 8, 2, 8), mx.float32)], [(3, 0), (3, 5), (3, 1)])


def test_many_large_blocks(rng) -> None:
    pools = [random_pool(rng, (60, 64, 4, 64), mx.float32) for _ in range(2)]
    check(pools, [(i, 59 - i) for i in range(30)])


def test_a_copy_of_a_copy(rng) -> None:
    pool = random_pool(rng, (4, 8, 2, 8), mx.float32)
    expected = reference.copy_blocks(reference.copy_blocks(bits(pool), [(1, 2)]), [(2, 3)])
    (pool,) = ops.copy_blocks([pool], pair_array([(1, 2)]))
    (pool,) = ops.copy_blocks([pool], pair_array([(2, 3)]))
    np.testing.assert_array_equal(bits(pool), expected)


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
def test_noncontiguous_pairs(rng, layout) -> None:
    pool = random_pool(rng, (6, 8, 2, 8), mx.float32)
    expected = reference.copy_blocks(bits(pool), [(0, 5), (1, 4), (0, 3)])
    pairs = noncontiguous(pair_array([(0, 5), (1, 4), (0, 3)]))[layout]
    np.testing.assert_array_equal(bits(ops.copy_blocks([pool], pairs)[0]), expected)


def test_inside_compile(rng) -> None:
    compiled = mx.compile(lambda a, b, pairs: ops.copy_blocks([a, b], pairs))
    for pairs in ([(0, 5), (1, 4)], [(2, 3), (2, 0)]):
        pools = [random_pool(rng, (6, 8, 2, d), mx.float32) for d in (8, 16)]
        expected = [reference.copy_blocks(bits(pool), pairs) for pool in pools]
        for actual, wanted in zip(compiled(*pools, pair_array(pairs)), expected):
            np.testing.assert_array_equal(bits(actual), wanted)


@pytest.mark.parametrize("make_stream", [lambda: mx.new_stream(mx.cpu), lambda: mx.cpu])
def test_on_an_explicit_stream(rng, make_stream) -> None:
    pool = random_pool(rng, (4, 8, 2, 8), mx.float32)
    mx.eval(pool)
    check([pool], [(0, 1)], stream=make_stream())
