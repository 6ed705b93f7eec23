"""Pools of more than 2^32 16-byte chunks, where a truncated index leads to a wrong block."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from support.reference import ON_GPU, PagedBatch, make_batch
from support.simulated import sim_ext

SIZE, HEADS, DIM = 64, 8, 128  # 2^16 elements per block
# Each high block, and the block that its index becomes if bytes, chunks or elements are counted in
# 32 bits, or blocks in 16.
FIRST = 2**16 if ON_GPU else 2**19
ALIASES = (1, 2)
BLOCKS = (FIRST + 1, FIRST + 2)


def make() -> list[mx.array]:
    """Two pools of zeros in a CPU's virtual memory."""
    shape = (FIRST + 4, SIZE, HEADS, DIM)
    if ON_GPU:
        return [ops.allocate_pool(*shape, mx.float16) for _ in range(2)]
    return [sim_ext.virtual_pool(shape, mx.float16) for _ in range(2)]


def fill(
    rng: np.random.Generator,
    pools: list[mx.array],
    context_lens: list[int],
    query_lens: list[int],
    group: int = 1,
) -> tuple[PagedBatch, PagedBatch]:
    """A batch with one two-block sequence in small pools, and the same batch in `pools`.

    The blocks that a truncated index would lead to hold other numbers.
    """
    batch = make_batch(
        rng, context_lens, query_lens, num_q_heads=group * HEADS, num_kv_heads=HEADS, key_dim=DIM,
        block_size=SIZE, dtype=mx.float16,
    )  # fmt: skip
    (table,), (context_len,) = batch.tables, context_lens
    assert len(table) == len(BLOCKS)
    small = [pool[mx.array(table)].reshape(-1, HEADS, DIM)[:context_len]
             for pool in (batch.key_pool, batch.value_pool)]  # fmt: skip
    for blocks, sign in ((BLOCKS, 1), (ALIASES, -1)):
        slots = [blocks[p // SIZE] * SIZE + p % SIZE for p in range(context_len)]
        rows = [sign * tokens for tokens in small]
        pools[:] = ops.write_kv(*pools, *rows, mx.array(slots, mx.int32))
    mx.eval(pools)
    big = replace(batch, key_pool=pools[0], value_pool=pools[1], tables=[list(BLOCKS)])
    return batch, big
