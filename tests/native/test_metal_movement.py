"""write_kv, copy_blocks and gather_kv on the simulated GPU, bit for bit against the oracle."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support import reference
from support.reference import DTYPES, address, assert_close, bits, make_batch
from support.simulated import launches, needs_simulator, sim_ext, simulated

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


# --- Where pools begin ----------------------------------------------------------------------------


def shifted(pool: mx.array, elements: int) -> mx.array:
    """The same numbers, beginning so many elements past the start of their buffer."""
    flat = mx.concatenate([mx.zeros(elements, pool.dtype), pool.reshape(-1)])
    mx.eval(flat)
    view = flat[elements:].reshape(pool.shape)
    mx.eval(view)
    return view


@pytest.mark.parametrize(("elements", "copies"), [(1, 1), (4, 1), (7, 1), (8, 0), (24, 0)])
def test_a_pool_is_used_where_it_lies_if_16_bytes_can_be_read_there(rng, elements, copies) -> None:
    dense = [random_pool(rng, 5, 16, 2, 64, dtype=mx.float16) for _ in range(2)]
    rows = [random_pool(rng, 2, 2, 64, dtype=mx.float16) for _ in range(2)]
    pools = [shifted(dense[0], elements), dense[1]]
    original = [bits(pool) for pool in pools]
    written = [reference.write_kv(p, bits(r), [3, 79]) for p, r in zip(original, rows)]
    copied = [reference.copy_blocks(p, [(0, 1)]) for p in original]
    before, where = sim_ext.pool_copies(), address(pools[0])
    with simulated():
        out = ops.write_kv(*pools, *rows, mx.array([3, 79], mx.int32))
        mx.eval(out)
    assert sim_ext.pool_copies() - before == copies
    assert (address(out[0]) == where) == (copies == 0)
    np.testing.assert_array_equal(bits(out[0]), written[0])
    pools = [shifted(dense[0], elements), mx.array(dense[1])]
    np.testing.assert_array_equal(bits(pools[0]), original[0])
    with simulated():
        out = ops.copy_blocks(pools, mx.array([[0, 1]], mx.int32))
        mx.eval(out)
    assert sim_ext.pool_copies() - before == 2 * copies
    np.testing.assert_array_equal(bits(out[0]), copied[0])
    pools[0] = shifted(dense[0], elements)
    with simulated():
        keys, _ = ops.gather_kv(*pools, mx.array([[2, 1]]), mx.array([20]), 20)
        mx.eval(keys)
    assert sim_ext.pool_copies() - before == 3 * copies
    np.testing.assert_array_equal(bits(keys), reference.gather_kv(original[0], [[2, 1]], [20], 20))


def test_rows_and_tables_may_begin_anywhere(rng) -> None:
    pools = [random_pool(rng, 5, 16, 2, 64, dtype=mx.float16) for _ in range(2)]
    rows = [random_pool(rng, 3, 2, 64, dtype=mx.float16) for _ in range(2)]
    expected = reference.write_kv(bits(pools[0]), bits(rows[0]), [3, 79, 20])
    with simulated():
        slots = shifted(mx.array([3, 79, 20], mx.int32), 1)
        out = ops.write_kv(*pools, shifted(rows[0], 1), shifted(rows[1], 3), slots)
        mx.eval(out)
    np.testing.assert_array_equal(bits(out[0]), expected)


# --- What is kept of earlier plans ----------------------------------------------------------------


def test_a_plan_whose_buffer_was_donated_is_read_anew(rng) -> None:
    """MLX lets `items + changes` write to the buffer of `items`, which nothing else has."""
    one, two = (make_batch(rng, [40, 40], [n, n], key_dim=64) for n in (1, 5))
    items = mx.array(np.array(one.plan().work_items))
    merges = mx.zeros((1, 4), mx.int32)  # one of no rows, which does nothing
    mx.eval(items, merges)
    changes = two.plan().work_items - items
    mx.eval(changes)
    with simulated():
        for batch in (one, two):
            if batch is two:
                before = address(items)
                items = items + changes
                assert address(items) == before, "MLX has not donated the buffer"
            plan = replace(batch.plan(), work_items=items, merge_items=merges)
            pools = (batch.key_pool, batch.value_pool)
            out = ops.paged_attention(batch.queries, *pools, plan, scale=0.125)
            mx.eval(out)
            del plan
            assert_close(out, batch.expected(scale=0.125))
            del out


def test_a_buffer_whose_numbers_the_host_knows_is_not_donated() -> None:
    kept = mx.array(np.arange(1000, dtype=np.int32))
    sim_ext.remember_host_copy(kept)
    assert sim_ext.has_host_copy(kept)
    changed = kept + 1
    del kept
    mx.eval(changed)
    assert not sim_ext.has_host_copy(changed)


def test_host_copies_go_with_their_buffers() -> None:
    """One that only the list still has is dropped with the next that is remembered."""
    mx.synchronize()
    sim_ext.remember_host_copy(mx.array([1]))
    before = mx.get_active_memory()
    for _ in range(3):
        sim_ext.remember_host_copy(mx.array(np.zeros(1 << 20, np.int32)))
        sim_ext.remember_host_copy(mx.array([1]))
    assert mx.get_active_memory() - before < 1 << 20
