"""write_kv, copy_blocks and gather_kv on the simulated GPU, bit for bit against the oracle."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support import reference
from support.reference import DTYPES, address, bits
from support.simulated import launches, needs_simulator, simulated

from mlx_paged import ops

pytestmark = needs_simulator


def random_pool(rng, *shape: int, dtype: mx.Dtype) -> mx.array:
    """Random words: NaN, infinities and subnormals among them."""
    words = rng.integers(0, 2**16, (*shape[:-1], shape[-1] * dtype.size // 2), dtype=np.uint16)
    return mx.array(words).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), [(2, 64, 64), (1, 24, 40), (3, 576, 8)])
def test_write_kv(rng, dtype, heads, key_dim, value_dim) -> None:
    pools = [random_pool(rng, 5, 16, heads, d, dtype=dtype) for d in (key_dim, value_dim)]
    rows = [random_pool(rng, 7, heads, d, dtype=dtype) for d in (key_dim, value_dim)]
    slots = [3, -1, 79, 0, 16, -1, 41]
    expected = [reference.write_kv(bits(p), bits(r), slots) for p, r in zip(pools, rows)]
    before = [address(p) for p in pools]
    with simulated():
        written = ops.write_kv(*pools, *rows, mx.array(slots, mx.int32))
        mx.eval(written)
    assert [launch["kernel"] for launch in launches()] == ["write_kv"]
    for out, want in zip(written, expected):
        np.testing.assert_array_equal(bits(out), want)
    assert [address(p) for p in written] == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_blocks(rng, dtype) -> None:
    pools = [random_pool(rng, 6, 16, 2, d, dtype=dtype) for d in (64, 24, 192)]
    pairs = [(1, 4), (1, 2), (5, 0)]
    expected = [reference.copy_blocks(bits(p), pairs) for p in pools]
    before = [address(p) for p in pools]
    with simulated():
        copied = ops.copy_blocks(pools, mx.array(pairs, mx.int32))
        mx.eval(copied)
    assert [launch["kernel"] for launch in launches()] == ["copy_blocks"] * 3
    for out, want in zip(copied, expected):
        np.testing.assert_array_equal(bits(out), want)
    assert [address(p) for p in copied] == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [8, 64])
def test_gather_kv(rng, dtype, block_size) -> None:
    pools = [random_pool(rng, 9, block_size, 2, d, dtype=dtype) for d in (64, 24)]
    tables = [[3, 1, 7, 8], [2, 6, 0, 0], [5, 0, 0, 0]]
    lens, longest = [3 * block_size + 1, 2 * block_size, 0], 3 * block_size + 5
    expected = [reference.gather_kv(bits(p), tables, lens, longest) for p in pools]
    with simulated():
        dense = ops.gather_kv(*pools, mx.array(tables), mx.array(lens), longest)
        mx.eval(dense)
    for out, want in zip(dense, expected):
        np.testing.assert_array_equal(bits(out), want)


def test_nothing_to_do_launches_nothing(rng) -> None:
    pools = [random_pool(rng, 3, 16, 2, 64, dtype=mx.float16) for _ in range(2)]
    rows = mx.zeros((0, 2, 64), mx.float16)
    with simulated():
        mx.eval(ops.write_kv(*pools, rows, rows, mx.zeros(0, mx.int32)))
        mx.eval(ops.copy_blocks(pools, mx.zeros((0, 2), mx.int32)))
        mx.eval(ops.gather_kv(*pools, mx.zeros((0, 1), mx.int32), mx.zeros(0, mx.int32), 0))
    assert launches() == []


def test_movement_touches_each_byte_once(rng) -> None:
    pools = [random_pool(rng, 8, 32, 4, 128, dtype=mx.bfloat16) for _ in range(2)]
    block = pools[0].nbytes // 8
    rows = [random_pool(rng, 40, 4, 128, dtype=mx.bfloat16) for _ in range(2)]
    with simulated():
        mx.eval(ops.write_kv(*pools, *rows, mx.arange(40, dtype=mx.int32)))
        (write,) = launches()
        mx.eval(ops.copy_blocks(pools[:1], mx.array([[0, 3], [1, 5]])))
        (copy,) = launches()
    for buffer in (0, 1):
        assert write["traffic"][buffer] == (rows[0].nbytes, 0)
        assert write["traffic"][3 + buffer] == (0, rows[0].nbytes)
    assert copy["traffic"][1] == (2 * block, 2 * block)
