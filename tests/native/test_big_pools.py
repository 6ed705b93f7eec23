"""Pools whose bytes, 16-byte chunks and elements do not fit 32 bits, and blocks whose ids do not
fit 16: an index that is cut leads to another block, and the numbers there are others.

Such a pool costs nothing: only what is touched of it takes memory. (On a GPU it is allocated, so
there it has just more than 2^32 elements.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support import big_pools, reference
from support.big_pools import ALIASES, BLOCKS
from support.reference import ON_GPU, assert_close, bits, to_numpy
from support.simulated import needs_simulator, sim_ext, simulated

from mlx_paged import ops

pytestmark = pytest.mark.skipif(
    sim_ext is None and not ON_GPU,
    reason="mlx_paged._sim, which makes pools of virtual memory, is not built",
)


@pytest.fixture(params=["here", pytest.param("simulator", marks=needs_simulator)])
def backend(request) -> Callable:
    return simulated if request.param == "simulator" else nullcontext


@pytest.fixture
def pools() -> Iterator[list[mx.array]]:
    try:
        made = big_pools.make()
    except MemoryError:
        pytest.skip("this machine has no room for such a pool, not even virtual")
    yield made
    made.clear()


def random_rows(rng: np.random.Generator, num_tokens: int) -> list[mx.array]:
    shape = (num_tokens, big_pools.HEADS, big_pools.DIM)
    return [mx.array(rng.standard_normal(shape)).astype(mx.float16) for _ in range(2)]


def test_the_blocks_are_those_that_show_a_cut_index() -> None:
    block = big_pools.SIZE * big_pools.HEADS * big_pools.DIM  # elements
    for block_id, alias in zip(BLOCKS, ALIASES):
        assert block_id % 2**16 == alias
        assert block_id * block % 2**32 == alias * block
        assert ON_GPU or block_id * block * 2 // 16 % 2**32 == alias * block * 2 // 16
        assert (block_id * block * 2 // 16 >= 2**32) != ON_GPU


def test_write_kv(rng, backend, pools) -> None:
    first, second = random_rows(rng, 2), random_rows(rng, 2)
    size = big_pools.SIZE
    for rows, blocks in ((first, BLOCKS), (second, ALIASES)):
        slots = mx.array([blocks[0] * size + 3, blocks[1] * size], mx.int32)
        with backend():
            pools[:] = ops.write_kv(*pools, *rows, slots)
            mx.eval(pools)
    for rows, blocks in ((first, BLOCKS), (second, ALIASES)):
        for pool, row in zip(pools, rows):
            for i, (block, offset) in enumerate(zip(blocks, (3, 0))):
                np.testing.assert_array_equal(bits(pool[block, offset]), bits(row[i]))


def test_copy_blocks(rng, backend, pools) -> None:
    """To a high block, and from one."""
    source, other = random_rows(rng, 1), random_rows(rng, 1)
    size = big_pools.SIZE
    for rows, block in ((source, 4), (other, ALIASES[0]), (other, ALIASES[1])):
        pools[:] = ops.write_kv(*pools, *rows, mx.array([block * size + 7], mx.int32))
    for pair in ([4, BLOCKS[0]], [BLOCKS[0], 5], [BLOCKS[0], BLOCKS[1]]):
        with backend():
            pools[:] = ops.copy_blocks(pools, mx.array([pair], mx.int32))
            mx.eval(pools)
    for pool, row, old in zip(pools, source, other):
        for block in (5, *BLOCKS[:2]):
            np.testing.assert_array_equal(bits(pool[block, 7]), bits(row[0]))
        for block in ALIASES[:2]:
            np.testing.assert_array_equal(bits(pool[block, 7]), bits(old[0]))


def test_gather_kv(rng, backend, pools) -> None:
    batch, big = big_pools.fill(rng, pools, [70], [0])
    with backend():
        tables, lens = mx.array([big.tables[0]], mx.int32), mx.array([70], mx.int32)
        dense = ops.gather_kv(big.key_pool, big.value_pool, tables, lens, 70)
        mx.eval(dense)
    for out, pool in zip(dense, (batch.key_pool, batch.value_pool)):
        want = reference.gather_kv(to_numpy(pool), batch.tables, [70], 70)
        np.testing.assert_array_equal(to_numpy(out), want)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("rows", "group"), [(1, 1), (1, 6), (9, 1), (20, 1)], ids=["vector", "matrix", "tiles", "many"]
)
@pytest.mark.parametrize("split_tokens", [4096, 32])
def test_paged_attention(rng, backend, pools, rows, group, split_tokens) -> None:
    batch, big = big_pools.fill(rng, pools, [70], [rows], group)
    with backend():
        plan = big.plan(split_tokens=split_tokens)
        out = ops.paged_attention(
            big.queries, big.key_pool, big.value_pool, plan, scale=0.125, window=50
        )
        mx.eval(out)
    assert_close(out, batch.expected(scale=0.125, window=50))


def test_a_shape_whose_bytes_do_not_fit_64_bits_is_refused() -> None:
    for shape in ((2**30, 64, 2**24, 8), (2**31 - 1, 64, 2**31 - 1, 576), (1, 8, 2**31 - 1, 576)):
        with pytest.raises(ValueError, match=r"^\[allocate_pool\] num_\w+ of pool must be at most"):
            ops.allocate_pool(*shape, mx.float32)


def test_a_plan_of_high_blocks_checks_clean(rng, pools, monkeypatch) -> None:
    monkeypatch.setenv("MLX_PAGED_CHECK", "1")
    batch, big = big_pools.fill(rng, pools, [70], [1])
    out = ops.paged_attention(big.queries, big.key_pool, big.value_pool, big.plan(), scale=0.125)
    assert_close(out, batch.expected(scale=0.125))
    wrong = replace(big, tables=[[BLOCKS[0], big.key_pool.shape[0]]])
    with pytest.raises(IndexError, match=r"block_tables\[0, 1\] must be in"):
        mx.eval(
            ops.paged_attention(
                wrong.queries, wrong.key_pool, wrong.value_pool, wrong.plan(), scale=0.125
            )
        )
