"""The pool is written in place, unconditionally: no copies, however steps overlap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from support import reference
from support.reference import DTYPES, address, assert_close, make_batch, noncontiguous, to_numpy

from mlx_paged import ops
from mlx_paged.model.plan import build_plan


def zeros(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    pool = mx.zeros(shape, dtype)
    mx.eval(pool)
    return pool


def slots_of(*slots: int) -> mx.array:
    return mx.array(np.array(slots, np.int32))


@pytest.fixture
def no_copies():
    before = ops.pool_copies()
    yield
    assert ops.pool_copies() == before


# --- Same buffer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_kv_returns_the_buffers_it_was_given(no_copies, dtype) -> None:
    keys, values = zeros(4, 8, 2, 16, dtype=dtype), zeros(4, 8, 2, 8, dtype=dtype)
    before = address(keys), address(values)
    ones = mx.ones((1, 2, 16), dtype)
    written = ops.write_kv(keys, values, ones, ones[..., :8], slots_of(9))
    assert (address(written[0]), address(written[1])) == before


def test_copy_blocks_returns_the_buffers_it_was_given(no_copies) -> None:
    pools = [zeros(4, 8, 2, 16), zeros(4, 16, 1, 8)]
    before = [address(pool) for pool in pools]
    copied = ops.copy_blocks(pools, mx.array([[1, 2]], mx.int32))
    assert [address(pool) for pool in copied] == before


def test_writes_are_seen_through_every_holder_of_the_buffer(no_copies) -> None:
    keys, values = zeros(4, 8, 1, 8), zeros(4, 8, 1, 8)
    view = np.array(keys, copy=False)
    ones = mx.ones((1, 1, 8))
    mx.eval(ops.write_kv(keys, values, ones, ones, slots_of(9)))
    assert view[1, 1, 0].tolist() == [1.0] * 8
    assert np.array(keys)[1, 1, 0].tolist() == [1.0] * 8


def test_a_slice_of_blocks_is_written_where_it_lies(no_copies) -> None:
    whole, values = zeros(8, 8, 1, 8), zeros(4, 8, 1, 8)
    part = whole[2:6]
    ones = mx.ones((1, 1, 8))
    mx.eval(ops.write_kv(part, values, ones, ones, slots_of(9)))
    assert np.argwhere(np.array(whole)[..., 0, 0]).tolist() == [[3, 1]]


def test_compiled_steps_write_in_place_too(no_copies) -> None:
    @mx.compile
    def step(keys, values, rows, slots):
        keys, values = ops.write_kv(keys, values, rows * 2, rows, slots)
        return ops.copy_blocks([keys, values], mx.array([[1, 2]], mx.int32))

    pools = [zeros(4, 8, 1, 8), zeros(4, 8, 1, 8)]
    before = [address(pool) for pool in pools]
    for i in range(8):
        pools = step(*pools, mx.full((1, 1, 8), i + 1.0), slots_of(8 + i))
    assert [address(pool) for pool in pools] == before
    assert np.array(pools[1])[2, :, 0, 0].tolist() == [
        1.0,
        2.0,
        3.0,
        4.0,
        5.0,
        6.0,
        7.0,
        8.0,
    ]


def test_an_allocated_pool_is_written_in_place_like_any_other(no_copies) -> None:
    pool = ops.allocate_pool(64, 32, 2, 16, mx.bfloat16)
    assert pool.shape == (64, 32, 2, 16) and pool.dtype == mx.bfloat16
    before = address(pool)
    ones = mx.ones((1, 2, 16), mx.bfloat16)
    pool, _ = ops.write_kv(pool, zeros(64, 32, 2, 16, dtype=mx.bfloat16), ones, ones, slots_of(33))
    assert address(pool) == before
    assert to_numpy(pool[1, 1]).tolist() == [[1.0] * 16] * 2


def test_a_pool_larger_than_memory_is_refused() -> None:
    num_blocks = (2**31 - 1) // 64
    num_bytes = num_blocks * 64 * 1024 * 576 * 4  # more than a process can address
    mx.synchronize()  # (what a GPU still held was dropped before)
    active = mx.get_active_memory()
    with pytest.raises(MemoryError, match=rf"\[allocate_pool\] cannot allocate {num_bytes} bytes"):
        ops.allocate_pool(num_blocks, 64, 1024, 576, mx.float32)
    # (What pools get is reckoned from it: an engine that is made afterwards had no memory left.)
    assert mx.get_active_memory() == active


# --- Pools that cannot be written in place --------------------------------------------------------


@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_a_strided_pool_is_copied_counted_and_right(rng, layout) -> None:
    dense = mx.array(rng.standard_normal((4, 8, 2, 16)).astype(np.float32))
    rows = mx.array(rng.standard_normal((2, 2, 16)).astype(np.float32))
    expected = reference.write_kv(np.array(dense), np.array(rows), [3, 30])
    pool = noncontiguous(dense)[layout]
    original = np.array(pool)
    before = ops.pool_copies()
    written, _ = ops.write_kv(pool, zeros(4, 8, 2, 16), rows, rows, slots_of(3, 30))
    np.testing.assert_array_equal(np.array(written), expected)
    assert ops.pool_copies() == before + 1
    np.testing.assert_array_equal(np.array(pool), original)

    (copied,) = ops.copy_blocks([pool], mx.array([[1, 2]], mx.int32))
    np.testing.assert_array_equal(np.array(copied), reference.copy_blocks(original, [(1, 2)]))
    assert ops.pool_copies() == before + 2


def test_a_broadcast_pool_is_copied_not_written_through(rng) -> None:
    block = mx.array(rng.standard_normal((1, 8, 2, 16)).astype(np.float32))
    pool = mx.broadcast_to(block, (4, 8, 2, 16))
    mx.eval(pool)
    original = np.array(pool)
    before = ops.pool_copies()
    ones = mx.ones((1, 2, 16))
    written, _ = ops.write_kv(pool, zeros(4, 8, 2, 16), ones, ones, slots_of(9))
    expected = reference.write_kv(original, np.array(ones), [9])
    np.testing.assert_array_equal(np.array(written), expected)
    np.testing.assert_array_equal(np.array(block), original[:1])
    assert ops.pool_copies() == before + 1


@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_reading_a_strided_pool_is_counted_and_right(rng, layout) -> None:
    batch = make_batch(rng, [70, 20], [3, 2])
    plan = batch.plan()
    keys = noncontiguous(batch.key_pool)[layout]
    before = ops.pool_copies()
    out = ops.paged_attention(batch.queries, keys, batch.value_pool, plan, scale=0.125)
    assert_close(out, batch.expected(scale=0.125))
    assert ops.pool_copies() == before + 1
    gathered, _ = ops.gather_kv(keys, batch.value_pool, plan.block_tables, plan.context_lens, 70)
    expected = reference.gather_kv(to_numpy(keys), batch.tables, batch.context_lens, 70)
    np.testing.assert_array_equal(to_numpy(gathered), expected)
    assert ops.pool_copies() == before + 2


# --- Overlapping steps ----------------------------------------------------------------------------


@dataclass
class DecodeLoop:
    """Sequences that grow by a token a step, with a NumPy shadow of their pools."""

    num_seqs: int = 4
    max_len: int = 512
    num_heads: int = 2
    head_dim: int = 64
    block_size: int = 32

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(1)
        per_seq = self.max_len // self.block_size
        ids = 1 + self.rng.permutation(self.num_seqs * per_seq)
        self.tables = ids.reshape(self.num_seqs, per_seq).tolist()
        shape = (len(ids) + 1, self.block_size, self.num_heads, self.head_dim)
        self.pools = [mx.zeros(shape), mx.zeros(shape)]
        mx.eval(*self.pools)
        self.shadows = [np.zeros(shape, np.float32), np.zeros(shape, np.float32)]
        self.pool_bytes = self.shadows[0].nbytes
        self.steps = 0

    def launch(self, run: Callable) -> tuple[np.ndarray, mx.array]:
        """Builds and starts one step; returns its queries and its unread output."""
        self.steps += 1
        lens = [self.steps] * self.num_seqs
        ones = [1] * self.num_seqs
        plan = build_plan(self.tables, lens, ones, block_size=self.block_size, split_tokens=128)
        shape = (3, self.num_seqs, self.num_heads, self.head_dim)
        queries, *rows = self.rng.standard_normal(shape).astype(np.float32)
        slots = [
            table[(self.steps - 1) // self.block_size] * self.block_size
            + (self.steps - 1) % self.block_size
            for table in self.tables
        ]
        assert plan.slot_mapping.tolist() == slots
        self.shadows = [self._shadow(i, rows[i], slots) for i in range(2)]
        arrays = (plan.positions, plan.slot_mapping, plan.block_tables, plan.context_lens,
                  plan.query_starts, plan.work_items, plan.merge_items)  # fmt: skip
        *self.pools, out = run(*self.pools, *map(mx.array, (queries, *rows)), *arrays)
        return queries, out

    def _shadow(self, i: int, rows: np.ndarray, slots: list[int]) -> np.ndarray:
        for row, slot in zip(rows, slots):
            self.shadows[i][slot // self.block_size, slot % self.block_size] = row
        return self.shadows[i]

    def expected(self, queries: np.ndarray) -> np.ndarray:
        lens, ones = [self.steps] * self.num_seqs, [1] * self.num_seqs
        return reference.paged_attention(
            queries, *self.shadows, self.tables, lens, ones, scale=0.125
        )


def step(keys, values, queries, new_keys, new_values, *arrays):
    plan = ops.AttentionPlan(*arrays)
    keys, values = ops.write_kv(keys, values, new_keys, new_values, plan.slot_mapping)
    return keys, values, ops.paged_attention(queries, keys, values, plan, scale=0.125)


@pytest.mark.parametrize("run", [step, mx.compile(step)], ids=["eager", "compiled"])
def test_500_overlapping_decode_steps_keep_memory_flat_and_copy_nothing(no_copies, run) -> None:
    loop = DecodeLoop()
    addresses = [address(pool) for pool in loop.pools]
    in_flight: list[mx.array] = []
    readers: list[mx.array] = []  # what still holds pools of earlier steps
    for number in range(500):
        queries, out = loop.launch(run)
        # A step ahead: this one is under way before the output of the last is read.
        mx.async_eval(out)
        in_flight.append(out)
        readers = [*readers[-1:], loop.pools[0]]
        if len(in_flight) > 1:
            assert np.isfinite(np.array(in_flight.pop(0))).all()
        if number == 50:
            mx.synchronize()
            baseline = mx.get_active_memory()
            mx.reset_peak_memory()
    np.testing.assert_allclose(np.array(out), loop.expected(queries), rtol=1e-4, atol=1e-6)
    for pool, shadow in zip(loop.pools, loop.shadows):
        np.testing.assert_array_equal(np.array(pool), shadow)
    assert [address(pool) for pool in loop.pools] == addresses
    # One copy of one pool would show four times over.
    assert mx.get_peak_memory() - baseline < loop.pool_bytes / 4


def test_a_pool_that_a_reader_in_flight_holds_is_not_copied(no_copies) -> None:
    loop = DecodeLoop()
    before = address(loop.pools[0])
    _, out = loop.launch(step)
    reader = mx.sum(loop.pools[0], axis=-1)  # MLX's own op, retaining the buffer
    mx.async_eval(out, reader)
    for _ in range(10):
        _, out = loop.launch(step)
        mx.async_eval(out)
    mx.eval(out)
    assert address(loop.pools[0]) == before
    np.testing.assert_array_equal(np.array(loop.pools[0]), loop.shadows[0])
