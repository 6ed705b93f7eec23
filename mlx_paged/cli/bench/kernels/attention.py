"""`paged_attention` beside MLX's dense attention, on dense K/V and on K/V gathered first."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.cli.bench.kernels.cases import DTYPE_BYTES, Case
from mlx_paged.cli.bench.kernels.data import Pools, to_float64
from mlx_paged.cli.bench.kernels.reference import attention as reference
from mlx_paged.cli.bench.kernels.timing import Variant
from mlx_paged.cli.bench.kernels.work import MOST_CHECKED, OURS, Checked, Work, require_close

DENSE, GATHER = "dense_sdpa", "gather_sdpa"


def attention(case: Case, pools: Pools, past_cache: int, seed: int) -> Work:
    """The work of a case of `paged_attention`.

    Each launch's result is the next one's queries, as a layer follows a layer: launches cannot
    overlap.
    """
    made = _Attention(case, pools, past_cache, seed)
    num_rows = case.batch * (case.rows or 1)
    row_bytes = case.num_q_heads * case.head_dim * DTYPE_BYTES[case.dtype]
    return Work(
        bytes=case.seen_tokens * case.token_bytes + 2 * num_rows * row_bytes,
        flops=4 * case.scored_tokens * case.num_q_heads * case.head_dim,
        variants=(
            Variant(OURS, made.chain(made.paged, made.queries), warmup=pools.key.num_sets),
            Variant(DENSE, made.chain(made.dense, made.dense_queries)),
            Variant(GATHER, made.chain(made.gathered, made.dense_queries)),
        ),
        check=made.check,
    )


class _Attention:
    def __init__(self, case: Case, pools: Pools, past_cache: int, seed: int) -> None:
        self.case, self.pools = case, pools
        self.rows = case.rows or 1
        self.scale = case.head_dim**-0.5
        sets = range(pools.key.num_sets)
        self.plans = [pools.plan(i, self.rows, case.window) for i in sets]
        shape = (case.batch * self.rows, case.num_q_heads, case.head_dim)
        self.queries = pools.random(shape, mx.random.key(seed + 1))
        per_sequence = self.queries.reshape(case.batch, self.rows, *shape[1:])
        self.dense_queries = mx.contiguous(per_sequence.swapaxes(1, 2))
        self.longest = max(case.lens)
        self.mask = self._mask()
        for plan in self.plans:
            mx.eval(*vars(plan).values())
        # Dense K and V are padded, and read whole whatever the window: fewer sets are enough.
        dense_bytes = case.batch * self.longest * case.token_bytes
        num_dense = max(1, min(len(self.plans), -(-past_cache // dense_bytes)))
        self.dense_kv = [self._gather(plan) for plan in self.plans[:num_dense]]
        mx.eval(self.queries, self.dense_queries, self.dense_kv)

    def _mask(self) -> mx.array | str | None:
        """For padded K and V; none where every row sees all of them."""
        lens = self.case.lens
        if min(lens) == self.longest and self.case.window is None:
            return "causal" if self.rows > 1 else None
        first = np.array(lens)[:, None, None] - self.rows
        position = first + np.arange(self.rows)[:, None]
        token = np.arange(self.longest)
        seen = token <= position
        if self.case.window is not None:
            seen &= token > position - self.case.window
        mask = mx.array(seen[:, None])
        mx.eval(mask)
        return mask

    def _gather(self, plan: ops.AttentionPlan) -> tuple[mx.array, mx.array]:
        return ops.gather_kv(*self.pools.both, plan.block_tables, plan.context_lens, self.longest)

    def paged(self, set_: int, queries: mx.array) -> mx.array:
        return ops.paged_attention(
            queries,
            *self.pools.both,
            self.plans[set_],
            scale=self.scale,
            window=self.case.window,
        )

    def dense(self, set_: int, queries: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(
            queries, *self.dense_kv[set_ % len(self.dense_kv)], scale=self.scale, mask=self.mask
        )

    def gathered(self, set_: int, queries: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(
            queries, *self._gather(self.plans[set_]), scale=self.scale, mask=self.mask
        )

    def chain(
        self, attend: Callable[[int, mx.array], mx.array], queries: mx.array
    ) -> Callable[[int], Callable[[], object]]:
        """Launches over the sets in turn."""
        turn = cycle(range(len(self.plans)))

        def prepare(launches: int) -> Callable[[], object]:
            out = queries
            for _ in range(launches):
                out = attend(next(turn), out)
            return lambda: mx.eval(out)

        return prepare

    def check(self) -> Checked:
        """Whole sequences, the longest first, as many as `MOST_CHECKED` allows (at least one)."""
        case = self.case
        lens, batch = case.lens, case.batch
        order = [(0, batch - 1), *((0, i) for i in range(batch - 1))]
        order += [(i, 0) for i in range(1, len(self.dense_kv))]
        chosen: list[tuple[int, int]] = []
        budget = MOST_CHECKED
        for set_, sequence in order:
            budget -= lens[sequence] * case.kv_heads * case.head_dim
            if chosen and budget < 0:
                break
            chosen.append((set_, sequence))

        found: dict[str, list[np.ndarray]] = {OURS: [], DENSE: [], GATHER: []}
        expected = []
        for set_ in dict.fromkeys(set_ for set_, _ in chosen):
            outs = self._results(set_)
            for sequence in (i for s, i in chosen if s == set_):
                for name, out in outs.items():
                    found[name].append(out[sequence])
                expected.append(self._expected(set_, sequence))
        error, peers = require_close(
            case, {k: np.concatenate(v) for k, v in found.items()}, np.concatenate(expected)
        )
        return Checked(error, len(chosen) * self.rows, len(order) * self.rows, peers)

    def _results(self, set_: int) -> dict[str, np.ndarray]:
        """``[batch, rows, num_q_heads, dim]`` float64, by variant."""
        by_sequence = (self.case.batch, self.rows, self.case.num_q_heads, self.case.head_dim)
        return {
            OURS: to_float64(self.paged(set_, self.queries)).reshape(by_sequence),
            DENSE: to_float64(self.dense(set_, self.dense_queries)).swapaxes(1, 2),
            GATHER: to_float64(self.gathered(set_, self.dense_queries)).swapaxes(1, 2),
        }

    def _expected(self, set_: int, sequence: int) -> np.ndarray:
        context = self.case.lens[sequence]
        table = mx.array(self.pools.tables[set_][sequence], dtype=mx.int32)
        keys, values = (
            to_float64(pool[table]).reshape(-1, *pool.shape[2:])[:context]
            for pool in self.pools.both
        )
        rows = slice(sequence * self.rows, (sequence + 1) * self.rows)
        queries = to_float64(self.queries)[rows]
        return reference(queries, keys, values, scale=self.scale, window=self.case.window)
