"""The work of each op: its launches, its peers' launches, and the check of their results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, cycle

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged import ops, reference
from mlx_paged.bench.kernels.cases import DTYPE_BYTES, VOCAB_SIZE, Case
from mlx_paged.bench.kernels.data import (
    MAX_CHECKED,
    OURS,
    Checked,
    Pools,
    Variant,
    Work,
    require_close,
    require_same,
    to_float64,
    to_words,
)

DENSE, GATHER, MLX = "dense_sdpa", "gather_sdpa", "mlx"
_BASE, _EPS = 10000.0, 1e-5
# Angles are computed in float32; at large positions only their rounding error would show.
_MAX_POSITIONS = 64

Op = Callable[[mx.array], mx.array]
Prepare = Callable[[int], Callable[[], object]]


def chained(op: Op, x: mx.array) -> Prepare:
    """Builds launches that each depend on the previous result, so that they cannot overlap."""

    def prepare(launches: int) -> Callable[[], object]:
        out = x
        for _ in range(launches):
            out = op(out)
        return lambda: mx.eval(out)

    return prepare


# --- Attention, against MLX's on dense K/V and on gathered K/V ------------------------------------


def attention(case: Case, pools: Pools, past_cache: int, seed: int) -> Work:
    """The work of a `paged_attention` case.

    The result of each launch is the query of the next, as in a model's layers: launches cannot
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
        # Dense K and V are padded and read in full even with a window: fewer sets are enough.
        dense_bytes = case.batch * self.longest * case.token_bytes
        num_dense = max(1, min(len(self.plans), -(-past_cache // dense_bytes)))
        self.dense_kv = [self._gather(plan) for plan in self.plans[:num_dense]]
        mx.eval(self.queries, self.dense_queries, self.dense_kv)

    def _mask(self) -> mx.array | str | None:
        """The mask for padded K and V; None if every row sees all of them."""
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

    def chain(self, attend: Callable[[int, mx.array], mx.array], queries: mx.array) -> Prepare:
        """Launches that rotate through the sets."""
        turn = cycle(range(len(self.plans)))
        return chained(lambda queries: attend(next(turn), queries), queries)

    def check(self) -> Checked:
        """Whole sequences, longest first, up to `MAX_CHECKED` elements (at least one sequence)."""
        case = self.case
        lens, batch = case.lens, case.batch
        order = [(0, batch - 1), *((0, i) for i in range(batch - 1))]
        order += [(i, 0) for i in range(1, len(self.dense_kv))]
        chosen: list[tuple[int, int]] = []
        budget = MAX_CHECKED
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
        """Results by variant, ``[batch, rows, num_q_heads, dim]`` float64."""
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
        return reference.attention(queries, keys, values, scale=self.scale, window=self.case.window)


# --- Data movement, bounded by a copy of the same bytes -------------------------------------------


def write_kv(case: Case, pools: Pools, past_cache: int, seed: int) -> Work:
    """Writes all tokens of all contexts, like the prefill of a whole batch."""
    num_tokens = sum(case.lens)
    shape = (num_tokens, case.kv_heads, case.head_dim)
    keys, values = (pools.random(shape, mx.random.key(seed + i)) for i in (2, 3))
    per_set = [pools.slots_of(i) for i in range(pools.key.num_sets)]
    slots = [mx.array(s.astype(np.int32)) for s in per_set]
    mx.eval(keys, values, slots)

    def check() -> Checked:
        tokens = _sample(num_tokens, case)
        others = _sample_of(np.concatenate([np.arange(case.block_size or 1), *per_set[1:]]), case)
        before = [to_words(_tokens(pool, others)) for pool in pools.both]
        pools.write(keys, values, slots[0])
        for pool, rows, kept in zip(pools.both, (keys, values), before):
            written = to_words(_tokens(pool, per_set[0][tokens]))
            require_same(case, "tokens that it writes", written, to_words(rows[mx.array(tokens)]))
            require_same(case, "tokens that it leaves", to_words(_tokens(pool, others)), kept)
        return Checked(0.0, len(tokens), num_tokens, {})

    launch = partial(pools.write, keys, values)
    return _on_pools(2 * num_tokens * case.token_bytes, launch, slots, check, pools)


def copy_blocks(case: Case, pools: Pools, past_cache: int, seed: int) -> Work:
    """Copies the first half of each set's blocks over the second half."""
    all_pairs = []
    for tables in pools.tables:
        blocks = list(chain.from_iterable(tables))
        half = len(blocks) // 2
        all_pairs.append(np.array([blocks[:half], blocks[half : 2 * half]], dtype=np.int32).T)
    pairs = [mx.array(p) for p in all_pairs]
    mx.eval(pairs)

    def check() -> Checked:
        num_pairs = len(all_pairs[0])
        per_block = (case.block_size or 1) * case.kv_heads * case.head_dim
        chosen = all_pairs[0][_evenly(num_pairs, MAX_CHECKED // per_block)]
        before = [pools.words(pool, chosen[:, 0]) for pool in pools.both]
        pools.copy(pairs[0])
        for pool, source in zip(pools.both, before):
            copied = pools.words(pool, chosen[:, 1])
            require_same(case, "blocks that it copies", copied, source)
            kept = pools.words(pool, chosen[:, 0])
            require_same(case, "blocks that it copies from", kept, source)
        return Checked(0.0, len(chosen), num_pairs, {})

    moved = 2 * len(all_pairs[0]) * (case.block_size or 1) * case.token_bytes
    return _on_pools(moved, pools.copy, pairs, check, pools)


def gather_kv(case: Case, pools: Pools, past_cache: int, seed: int) -> Work:
    """Gathers whole contexts into dense K and V, padded to the longest."""
    longest = max(case.lens)
    plans = [pools.plan(i, 1, None) for i in range(pools.key.num_sets)]
    for plan in plans:
        mx.eval(plan.block_tables, plan.context_lens)
    turn = cycle(plans)

    def gather(plan: ops.AttentionPlan) -> tuple[mx.array, mx.array]:
        return ops.gather_kv(*pools.both, plan.block_tables, plan.context_lens, longest)

    def prepare(launches: int) -> Callable[[], object]:
        outs = [gather(next(turn)) for _ in range(launches)]
        return lambda: mx.eval(outs)

    def check() -> Checked:
        per_sequence = longest * case.kv_heads * case.head_dim
        chosen = _evenly(case.batch, max(1, MAX_CHECKED // per_sequence))
        for pool, dense in zip(pools.both, gather(plans[0])):
            for i in chosen:
                tokens = pools.words(pool, pools.tables[0][i])
                tokens = tokens.reshape(-1, *tokens.shape[2:])[: case.lens[i]]
                expected = np.zeros((longest, *tokens.shape[1:]), tokens.dtype)
                expected[: len(tokens)] = tokens
                actual = to_words(dense[int(i)]).swapaxes(0, 1)
                require_same(case, f"tokens of sequence {i}", actual, expected)
        return Checked(0.0, len(chosen), case.batch, {})

    written = case.batch * longest * case.token_bytes
    moved = sum(case.lens) * case.token_bytes + written
    return Work(moved, 0, (Variant(OURS, prepare, written, warmup=2),), check)


def _on_pools(
    moved: int,
    launch: Callable[[mx.array], object],
    arguments: list[mx.array],
    check: Callable[[], Checked],
    pools: Pools,
) -> Work:
    """The work of an op that writes to the pools, with its arguments for each set."""
    turn = cycle(arguments)

    def prepare(launches: int) -> Callable[[], object]:
        for _ in range(launches):
            launch(next(turn))
        return lambda: mx.eval(pools.both)

    return Work(moved, 0, (Variant(OURS, prepare, warmup=pools.key.num_sets),), check)


def _tokens(pool: mx.array, slots: np.ndarray) -> mx.array:
    return pool.reshape(-1, *pool.shape[2:])[mx.array(slots.astype(np.int32))]


def _evenly(count: int, most: int) -> np.ndarray:
    """At most `most` values of ``range(count)``, including the first and the last."""
    return np.unique(np.linspace(0, count - 1, max(1, min(count, most))).round().astype(np.int32))


def _sample(count: int, case: Case) -> np.ndarray:
    return _evenly(count, MAX_CHECKED // (case.kv_heads * case.head_dim))


def _sample_of(values: np.ndarray, case: Case) -> np.ndarray:
    return values[_sample(len(values), case)]


ON_POOLS = {
    "paged_attention": attention,
    "write_kv": write_kv,
    "copy_blocks": copy_blocks,
    "gather_kv": gather_kv,
}


# --- Layer operations other than products, against MLX's own; CPU only ----------------------------


def layer_op(case: Case, past_cache: int, seed: int) -> Work:
    """The work of a case of `cases.LAYER`.

    Rows stay in the CPU's caches, as in a model; `linear` rotates through several weights.
    """
    make = {
        "rope": _rope,
        "rms_norm": _rms_norm,
        "silu_mul": _silu_mul,
        "greedy_tokens": _greedy_tokens,
        "linear": _linear,
    }
    return make[case.op](case, past_cache, seed)


def _random(case: Case, *shape: int, seed: int) -> mx.array:
    made = mx.random.normal(shape, key=mx.random.key(seed)).astype(getattr(mx, case.dtype))
    mx.eval(made)
    return made


def _sizes(case: Case) -> tuple[int, int, int]:
    """Number of rows, row width, and bytes of all rows."""
    rows, width = case.batch * (case.rows or 1), case.num_q_heads * case.head_dim
    return rows, width, rows * width * DTYPE_BYTES[case.dtype]


def _chained(case: Case, x: mx.array, run: dict[str, Op], expected: np.ndarray, moved: int,
             flops: int = 0) -> Work:  # fmt: skip
    """Work for ops that preserve their input's shape: each launch takes the previous result."""

    def check() -> Checked:
        found = {name: to_float64(op(x)).reshape(expected.shape) for name, op in run.items()}
        error, peers = require_close(case, found, expected)
        return Checked(error, len(expected), len(expected), peers)

    variants = tuple(Variant(name, chained(op, x)) for name, op in run.items())
    return Work(moved, flops, variants, check)


def _rope(case: Case, past_cache: int, seed: int) -> Work:
    rows, _, num_bytes = _sizes(case)
    dim = case.head_dim
    x = _random(case, rows, case.num_q_heads, 1, dim, seed=seed)
    places = 1 + np.arange(rows) % _MAX_POSITIONS
    positions = mx.array(places.astype(np.int32))
    freqs = (_BASE ** (-np.arange(dim // 2) / (dim // 2))).astype(np.float32)
    rotations = ops.rope_rotations(positions, mx.array(freqs))
    mx.eval(positions, rotations)
    run: dict[str, Op] = {
        OURS: lambda x: ops.rope(x, rotations),
        MLX: lambda x: mx.fast.rope(
            x, dim, traditional=False, base=_BASE, scale=1.0, offset=positions
        ),
    }
    half = np.arange(dim // 2) / (dim // 2)
    angles = places[:, None, None] * _BASE**-half
    expected = reference.rope(to_float64(x)[:, :, 0], np.cos(angles), np.sin(angles))
    return _chained(case, x, run, expected, 2 * num_bytes + rotations.nbytes)


def _rms_norm(case: Case, past_cache: int, seed: int) -> Work:
    rows, width, num_bytes = _sizes(case)
    x, weight = _random(case, rows, width, seed=seed), _random(case, width, seed=seed + 1)
    run: dict[str, Op] = {
        OURS: lambda x: ops.rms_norm(x, weight, _EPS),
        MLX: lambda x: mx.fast.rms_norm(x, weight, _EPS),
    }
    expected = reference.rms_norm(to_float64(x), to_float64(weight), _EPS)
    return _chained(case, x, run, expected, 2 * num_bytes + weight.nbytes)


def _silu_mul(case: Case, past_cache: int, seed: int) -> Work:
    rows, width, num_bytes = _sizes(case)
    gate, x = (_random(case, rows, width, seed=seed + i) for i in range(2))
    run: dict[str, Op] = {
        OURS: lambda x: ops.silu_mul(gate, x),
        MLX: lambda x: nn.silu(gate) * x,
    }
    expected = reference.silu_mul(to_float64(gate), to_float64(x))
    return _chained(case, x, run, expected, 3 * num_bytes)


def _linear(case: Case, past_cache: int, seed: int) -> Work:
    rows, width, num_bytes = _sizes(case)
    x = _random(case, rows, width, seed=seed)
    weight_bytes = width * width * DTYPE_BYTES[case.dtype]
    count = max(1, min(16, -(-past_cache // weight_bytes)))
    weights = [_random(case, width, width, seed=seed + 1) / width**0.5 for _ in range(count)]
    mx.eval(weights)
    turns = {OURS: cycle(weights), MLX: cycle(weights)}
    run: dict[str, Op] = {
        OURS: lambda x: ops.linear(x, next(turns[OURS])),
        MLX: lambda x: x @ next(turns[MLX]).T,
    }
    expected = to_float64(x) @ to_float64(weights[0]).T
    moved = 2 * num_bytes + weight_bytes
    return _chained(case, x, run, expected, moved, 2 * rows * width * width)


def _greedy_tokens(case: Case, past_cache: int, seed: int) -> Work:
    rows, _, _ = _sizes(case)
    logits = _random(case, rows, VOCAB_SIZE, seed=seed)

    def ours(launches: int) -> Callable[[], object]:
        outs = [ops.greedy_tokens(logits) for _ in range(launches)]
        return lambda: mx.eval(outs)

    def mlx(launches: int) -> Callable[[], object]:
        outs = [(logits.argmax(-1), logits.max(-1)) for _ in range(launches)]
        return lambda: mx.eval(outs)

    def check() -> Checked:
        tokens, largest, _ = ops.greedy_tokens(logits)
        exact = to_float64(logits)
        expected = exact.argmax(axis=-1)
        require_same(case, "tokens", np.array(tokens), expected)
        require_same(case, "largest logits", np.array(largest), exact.max(axis=-1))
        require_same(case, "tokens of the peer mlx", np.array(logits.argmax(-1)), expected)
        return Checked(0.0, rows, rows, {MLX: 0.0})

    return Work(logits.nbytes, 0, (Variant(OURS, ours), Variant(MLX, mlx)), check)
