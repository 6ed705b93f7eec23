"""`ops.write_kv`: the right bits in the right slots and nowhere else."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import reference
from support.reference import DTYPES, bits, noncontiguous

from mlx_paged import ops


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Any bit pattern: NaNs, infinities, subnormals and -0.0 among them."""
    word = np.uint32 if dtype.size == 4 else np.uint16
    return mx.array(rng.integers(0, 2 ** (8 * dtype.size), shape).astype(word)).view(dtype)


def int32(values: list[int]) -> mx.array:
    return mx.array(np.array(values, np.int32))


def check(key_pool: mx.array, value_pool: mx.array, keys: mx.array, values: mx.array,
          slots: list[int], **options) -> None:  # fmt: skip
    pools, rows = (key_pool, value_pool), (keys, values)
    expected = [reference.write_kv(bits(pool), bits(row), slots) for pool, row in zip(pools, rows)]
    written = ops.write_kv(key_pool, value_pool, keys, values, int32(slots), **options)
    for actual, wanted in zip(written, expected):
        np.testing.assert_array_equal(bits(actual), wanted)


@given(st.data())
def test_any_shape_is_written_bit_for_bit(data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(DTYPES))
    num_blocks, num_kv_heads = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    block_size = draw(st.sampled_from((8, 16, 32, 64)))
    dims = [8 * draw(st.integers(1, 72)) for _ in range(2)]
    slots = draw(
        st.lists(st.integers(0, num_blocks * block_size - 1), unique=True, max_size=40).flatmap(
            lambda real: st.permutations(real + [-1] * draw(st.integers(0, 3)))
        )
    )
    pools = [random_array(rng, (num_blocks, block_size, num_kv_heads, d), dtype) for d in dims]
    rows = [random_array(rng, (len(slots), num_kv_heads, d), dtype) for d in dims]
    check(*pools, *rows, list(slots))


def arrays(rng: np.random.Generator, num_tokens: int, dtype: mx.Dtype = mx.float32) -> tuple:
    pools = [random_array(rng, (4, 16, 2, d), dtype) for d in (24, 8)]
    rows = [random_array(rng, (num_tokens, 2, d), dtype) for d in (24, 8)]
    return (*pools, *rows)


def test_minus_one_writes_nothing(rng) -> None:
    check(*arrays(rng, 4), [-1, 5, -1, -1])


def test_no_tokens_leave_the_pools_as_they_are(rng) -> None:
    check(*arrays(rng, 0), [])


def test_first_and_last_slot(rng) -> None:
    check(*arrays(rng, 2), [63, 0])


def test_more_tokens_than_one_thread_takes(rng) -> None:
    pools = [random_array(rng, (40, 64, 4, 64), mx.float32) for _ in range(2)]
    rows = [random_array(rng, (2000, 4, 64), mx.float32) for _ in range(2)]
    check(*pools, *rows, rng.permutation(2560)[:2000].tolist())


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
@pytest.mark.parametrize("argument", ["keys", "values", "slot_mapping"])
def test_noncontiguous_arguments(rng, layout, argument) -> None:
    key_pool, value_pool, keys, values = arrays(rng, 3)
    slots = [40, 7, 22]
    named = {"keys": keys, "values": values, "slot_mapping": int32(slots)}
    expected = reference.write_kv(bits(key_pool), bits(keys), slots)
    expected_values = reference.write_kv(bits(value_pool), bits(values), slots)
    named[argument] = noncontiguous(named[argument])[layout]
    written = ops.write_kv(key_pool, value_pool, **named)
    np.testing.assert_array_equal(bits(written[0]), expected)
    np.testing.assert_array_equal(bits(written[1]), expected_values)


def test_broadcast_rows(rng) -> None:
    key_pool, value_pool, keys, values = arrays(rng, 3)
    check(
        key_pool,
        value_pool,
        mx.broadcast_to(keys[:1], keys.shape),
        mx.broadcast_to(values[:, :1], values.shape),
        [40, 7, 22],
    )


def test_rows_and_slots_still_in_the_graph() -> None:
    pools = [mx.zeros((4, 16, 2, 8)) for _ in range(2)]
    keys = mx.arange(48, dtype=mx.float32).reshape(8, 3, 2).transpose(1, 2, 0)
    slots = mx.array([3, 2, 1]) + 16
    written, _ = ops.write_kv(*pools, keys, keys + 1, slots)
    expected = reference.write_kv(np.zeros((4, 16, 2, 8)), np.array(keys), [19, 18, 17])
    np.testing.assert_array_equal(np.array(written), expected)


def test_later_writes_come_after_earlier_ones(rng) -> None:
    pools = [mx.zeros((1, 8, 1, 8)) for _ in range(2)]
    for i in range(20):
        rows = mx.full((1, 1, 8), float(i))
        pools = ops.write_kv(*pools, rows, rows, int32([3]))
    assert np.array(pools[0])[0, 3].tolist() == [[19.0] * 8]


def test_only_one_of_the_two_outputs_is_evaluated(rng) -> None:
    key_pool, value_pool, keys, values = arrays(rng, 2)
    expected = reference.write_kv(bits(value_pool), bits(values), [9, 8])
    _, written = ops.write_kv(key_pool, value_pool, keys, values, int32([9, 8]))
    np.testing.assert_array_equal(bits(written), expected)


def test_inside_compile(rng) -> None:
    compiled = mx.compile(lambda *a: ops.write_kv(a[0], a[1], a[2] + 1, a[3], a[4]))
    for slots in ([3, -1, 9], [60, 2, 1]):
        pools = [mx.zeros((4, 16, 2, 8)) for _ in range(2)]
        rows = mx.array(rng.standard_normal((3, 2, 8)).astype(np.float32))
        keys, values = compiled(*pools, rows, rows, int32(slots))
        expected = reference.write_kv(np.zeros((4, 16, 2, 8)), np.array(rows), slots)
        np.testing.assert_array_equal(np.array(values), expected.astype(np.float32))
        expected = reference.write_kv(np.zeros((4, 16, 2, 8)), np.array(rows + 1), slots)
        np.testing.assert_array_equal(np.array(keys), expected.astype(np.float32))


@pytest.mark.parametrize("make_stream", [lambda: mx.new_stream(mx.cpu), lambda: mx.cpu])
def test_on_an_explicit_stream(rng, make_stream) -> None:
    key_pool, value_pool, keys, values = arrays(rng, 2)
    mx.eval(key_pool, value_pool)
    check(key_pool, value_pool, keys, values, [9, 8], stream=make_stream())


def test_under_async_eval(rng) -> None:
    key_pool, value_pool, keys, values = arrays(rng, 2)
    expected = reference.write_kv(bits(key_pool), bits(keys), [9, 8])
    written = ops.write_kv(key_pool, value_pool, keys, values, int32([9, 8]))
    mx.async_eval(*written)
    np.testing.assert_array_equal(bits(written[0]), expected)
