"""Writers and readers of the same blocks, many in flight at once, against the oracle.

A GPU may run kernels side by side that no dependency orders. Here every round overwrites what the
round before was still reading, and several rounds make up one evaluation: were a write not made to
wait for earlier reads, or a read for earlier writes, the answers would be of another round.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support import reference
from support.reference import ON_GPU, assert_close, to_numpy

from mlx_paged import ops
from mlx_paged.model.plan import build_plan

ROUNDS = 1000 if ON_GPU else 60
NUM_SEQS, BLOCK_SIZE, CONTEXT = 4, 16, 512 if ON_GPU else 96
NUM_KV_HEADS, GROUP, HEAD_DIM = 2, 4, 64
MAX_ROUNDS_AT_ONCE = 6


class Rounds:
    """The pools, their shadow in NumPy, and what each round is expected to answer."""

    def __init__(self, seed: int, dtype: mx.Dtype) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype
        per_seq = CONTEXT // BLOCK_SIZE
        ids = 1 + self.rng.permutation(NUM_SEQS * per_seq)
        self.tables = ids.reshape(NUM_SEQS, per_seq)
        shape = (len(ids) + 1, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self.pools = [self.random(*shape) for _ in range(2)]
        mx.eval(self.pools)
        self.shadows = [to_numpy(pool) for pool in self.pools]
        self.plan = build_plan(
            self.tables.tolist(), [CONTEXT] * NUM_SEQS, [1] * NUM_SEQS, block_size=BLOCK_SIZE,
            split_tokens=128,
        )  # fmt: skip

    def random(self, *shape: int) -> mx.array:
        return mx.array(self.rng.standard_normal(shape).astype(np.float32)).astype(self.dtype)

    def read(self) -> tuple[mx.array, np.ndarray]:
        queries = self.random(NUM_SEQS, NUM_KV_HEADS * GROUP, HEAD_DIM)
        out = ops.paged_attention(queries, *self.pools, self.plan, scale=0.125)
        lens, ones = [CONTEXT] * NUM_SEQS, [1] * NUM_SEQS
        expected = reference.paged_attention(
            to_numpy(queries), *self.shadows, self.tables.tolist(), lens, ones, scale=0.125
        )
        return out, expected

    def gather(self) -> tuple[mx.array, np.ndarray]:
        plan = self.plan
        keys, _ = ops.gather_kv(*self.pools, plan.block_tables, plan.context_lens, CONTEXT)
        lens = [CONTEXT] * NUM_SEQS
        return keys, reference.gather_kv(self.shadows[0], self.tables.tolist(), lens, CONTEXT)

    def write(self, answers: list[mx.array]) -> None:
        """Overwrites a third of all tokens, after `answers` in MLX's order.

        `mx.depends` orders what MLX encodes and shares no buffer with the readers, so that nothing
        but the pool orders the kernels.
        """
        total = NUM_SEQS * CONTEXT
        tokens = self.rng.choice(total, total // 3, replace=False)
        blocks = self.tables.reshape(-1)
        slots = blocks[tokens // BLOCK_SIZE] * BLOCK_SIZE + tokens % BLOCK_SIZE
        rows = [self.random(len(slots), NUM_KV_HEADS, HEAD_DIM) for _ in range(2)]
        mapping = mx.array(slots.astype(np.int32))
        ordered = mx.depends(rows, answers)
        self.pools = list(ops.write_kv(*self.pools, *ordered, mapping))
        for shadow, row in zip(self.shadows, rows):
            shadow[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = to_numpy(row)

    def copy(self, answers: list[mx.array]) -> None:
        """Copies an eighth of the blocks over others, likewise."""
        blocks = self.rng.permutation(self.tables.reshape(-1))
        count = len(blocks) // 8
        pairs = blocks[: 2 * count].reshape(-1, 2)
        (ordered,) = mx.depends([mx.array(pairs.astype(np.int32))], answers)
        self.pools = ops.copy_blocks(self.pools, ordered)
        for shadow in self.shadows:
            shadow[pairs[:, 1]] = shadow[pairs[:, 0]]


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
def test_every_round_reads_its_own_writes(dtype) -> None:
    rounds = Rounds(0, dtype)
    pending: list[tuple[mx.array, np.ndarray]] = []
    before = ops.pool_copies()
    done = 0
    while done < ROUNDS:
        at_once: list[mx.array] = []
        for _ in range(int(rounds.rng.integers(1, MAX_ROUNDS_AT_ONCE + 1))):
            answers = [rounds.read()]
            if done % 3 == 0:
                answers.append(rounds.gather())
            pending += answers
            at_once += [out for out, _ in answers]
            change = rounds.copy if done % 4 == 0 else rounds.write
            change([out for out, _ in answers])
            at_once += rounds.pools
            done += 1
        mx.async_eval(at_once)
        # The evaluation before this one is compared while this one runs.
        while len(pending) > 2 * MAX_ROUNDS_AT_ONCE:
            assert_close(*pending.pop(0))
    for out, expected in pending:
        assert_close(out, expected)
    for pool, shadow in zip(rounds.pools, rounds.shadows):
        np.testing.assert_array_equal(to_numpy(pool), shadow)
    assert ops.pool_copies() == before
