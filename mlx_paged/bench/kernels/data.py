"""Benchmark inputs (pools of random tokens) and `Work`, one case ready to be checked and timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged import ops, reference
from mlx_paged.bench.kernels.cases import VOCAB_SIZE, Case
from mlx_paged.errors import MlxPagedError
from mlx_paged.model.plan import build_plan

# Launches rotate through at most this many sets of sequences; each needs its own plan.
MAX_SETS = 128
# Tokens written per call while a pool is filled.
_FILL = 1 << 15


@dataclass(frozen=True)
class PoolKey:
    """Everything that determines the contents of a pool."""

    lens: tuple[int, ...]
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    num_sets: int
    seed: int


def key_of(case: Case, past_cache: int, seed: int) -> PoolKey:
    """Returns the key of pools large enough that launches read `past_cache` bytes before reuse."""
    assert case.block_size is not None
    read = max(1, case.seen_tokens * case.token_bytes)
    lens = tuple(case.lens)
    # A window reads only a small part of the context.
    most = min(MAX_SETS, 4 * past_cache // (sum(lens) * case.token_bytes))
    num_sets = max(1, min(most, -(-past_cache // read)))
    return PoolKey(lens, case.kv_heads, case.head_dim, case.block_size, case.dtype, num_sets, seed)


class Pools:
    """A key and a value pool with `num_sets` sets of sequences, whose blocks are in random order.

    Attributes:
        key_pool, value_pool: The handles that the last op returned.
        tables: ``[set][sequence]`` block tables.
    """

    def __init__(self, key: PoolKey) -> None:
        self.key = key
        self.dtype: mx.Dtype = getattr(mx, key.dtype)
        counts = [-(-n // key.block_size) for n in key.lens]
        rng = np.random.default_rng(key.seed)
        order = rng.permutation(sum(counts) * key.num_sets) + 1  # block 0 is never used
        ends = np.cumsum(counts * key.num_sets)[:-1]
        flat = [part.tolist() for part in np.split(order, ends)]
        batch = len(counts)
        self.tables = [flat[i * batch : (i + 1) * batch] for i in range(key.num_sets)]
        self._fill(len(order) + 1)

    def _fill(self, num_blocks: int) -> None:
        key = self.key
        shape = (num_blocks, key.block_size, key.kv_heads, key.head_dim)
        self.key_pool = ops.allocate_pool(*shape, self.dtype)
        self.value_pool = ops.allocate_pool(*shape, self.dtype)
        state = mx.random.key(key.seed)
        num_slots = num_blocks * key.block_size
        for begin in range(0, num_slots, _FILL):
            slots = mx.arange(begin, min(begin + _FILL, num_slots), dtype=mx.int32)
            rows = []
            for _ in range(2):
                state, key_now = mx.random.split(state)
                rows.append(self.random((len(slots), *shape[2:]), key_now))
            self.write(rows[0], rows[1], slots)
            mx.eval(self.key_pool, self.value_pool)

    def random(self, shape: tuple[int, ...], key: mx.array) -> mx.array:
        """Normally distributed values in the pool's dtype."""
        return mx.random.normal(shape, key=key).astype(self.dtype)

    @property
    def both(self) -> tuple[mx.array, mx.array]:
        """Key pool and value pool."""
        return self.key_pool, self.value_pool

    def write(self, keys: mx.array, values: mx.array, slots: mx.array) -> tuple[mx.array, mx.array]:
        """Calls `ops.write_kv` and keeps the pool handles that it returns."""
        self.key_pool, self.value_pool = ops.write_kv(*self.both, keys, values, slots)
        return self.both

    def copy(self, pairs: mx.array) -> tuple[mx.array, mx.array]:
        """Calls `ops.copy_blocks` and keeps the pool handles that it returns."""
        self.key_pool, self.value_pool = ops.copy_blocks(self.both, pairs)
        return self.both

    def plan(self, set_: int, rows: int, window: int | None) -> ops.AttentionPlan:
        """The plan of a step that has `rows` query rows for each sequence of a set."""
        lens = list(self.key.lens)
        return build_plan(
            self.tables[set_],
            lens,
            [rows] * len(lens),
            block_size=self.key.block_size,
            window=window,
        )

    def slots_of(self, set_: int) -> np.ndarray:
        """Slots of all tokens of a set, sequence by sequence, in order."""
        size = self.key.block_size
        return np.concatenate(
            [
                (np.array(table)[:, None] * size + np.arange(size)).reshape(-1)[:n]
                for table, n in zip(self.tables[set_], self.key.lens)
            ]
        )

    def words(self, pool: mx.array, blocks: Any) -> np.ndarray:
        """The bits of some blocks, ``[num, block_size, heads, dim]``, read with MLX alone."""
        return to_words(pool[mx.array(np.asarray(blocks, dtype=np.int32))])


class PoolCache:
    """Keeps the last pools: adjacent cases of a grid use the same ones."""

    def __init__(self) -> None:
        self._last: Pools | None = None

    def get(self, key: PoolKey) -> Pools:
        """Returns the pools for a key, and frees the previous ones first."""
        if self._last is None or self._last.key != key:
            self._last = None
            mx.clear_cache()
            self._last = Pools(key)
        return self._last


def to_words(a: mx.array) -> np.ndarray:
    """The raw bits, which tell -0.0 from 0.0 and one NaN from another."""
    return np.array(mx.contiguous(a).view(mx.uint32 if a.dtype.size == 4 else mx.uint16))


def to_float64(a: mx.array) -> np.ndarray:
    """As float32, which represents every value of the three dtypes exactly."""
    return np.array(a.astype(mx.float32)).astype(np.float64)


# --- Work -----------------------------------------------------------------------------------------


OURS = "ours"
# A peer may round more than we do, but a larger error than this means that its result is wrong.
PEER_TOLERANCE = 0.1
# For sums over long contexts; the reference's own tolerance covers a few hundred tokens.
TOLERANCE = {**reference.TOLERANCE, "float32": 2e-5}
# Maximum elements (of K, rows or words) that a check compares, to stay within seconds in float64.
MAX_CHECKED = 1 << 25


@dataclass(frozen=True)
class Variant:
    """One implementation of the work.

    Attributes:
        name: Its name in the results.
        prepare: Builds a number of launches, and returns a function that runs them.
        output_bytes: Bytes of the output of one launch.
        warmup: Launches before the first sample, which compile kernels and read plans.
    """

    name: str
    prepare: Callable[[int], Callable[[], object]]
    output_bytes: int = 0
    warmup: int = 1


@dataclass(frozen=True)
class Checked:
    """The result of a check.

    Attributes:
        max_relative_error: Our largest error over the checked rows; 0 if bits were compared.
        rows: Number of checked rows.
        of: Number of all rows.
        peers: The largest error of each peer, by name.
    """

    max_relative_error: float
    rows: int
    of: int
    peers: dict[str, float]


@dataclass(frozen=True)
class Work:
    """One case, ready to be checked and timed.

    Attributes:
        bytes: Bytes that one launch reads and writes (see `COUNTING`).
        flops: Floating-point operations of one launch; 0 if negligible.
        variants: Ours first, then peers that do the same work.
        check: Compares all of them with the reference.
    """

    bytes: int
    flops: int
    variants: Sequence[Variant]
    check: Callable[[], Checked]


COUNTING = {
    "paged_attention": "K and V of every token that some row sees, once for each sequence; "
    "queries read and results written. Partial results of split contexts are not counted",
    "write_kv": "K and V of all tokens of all contexts, read and written",
    "copy_blocks": "K and V of half of the blocks, read, and of the other half, written",
    "gather_kv": "K and V of all tokens read; dense K and V written, padding included",
    "rope": "rows of all query heads read and written, and their rotations read",
    "rms_norm": "rows read and written, and the weight read",
    "silu_mul": "two inputs read and one written",
    "greedy_tokens": f"logits read, {VOCAB_SIZE} a row",
    "linear": "the square weight, inputs and outputs, once each",
}


class WrongResultError(MlxPagedError, AssertionError):
    """An op returned a wrong result, so its time means nothing.

    Attributes:
        case: The op and its shape.
        reason: The difference and its size.
    """

    def __init__(self, case: object, reason: str) -> None:
        super().__init__(f"{case} gave a wrong result: {reason}")
        self.case = case
        self.reason = reason


def require_close(
    case: Case, found: dict[str, np.ndarray], expected: np.ndarray
) -> tuple[float, dict[str, float]]:
    """Returns our errors and the peers' errors, each ``[rows, ...]``; raises on a wrong result."""
    errors = {name: reference.relative_error(actual, expected) for name, actual in found.items()}
    for name, error in errors.items():
        limit = TOLERANCE[case.dtype] if name == OURS else PEER_TOLERANCE
        if not error <= limit:
            prefix = "" if name == OURS else f"the peer {name}: "
            raise WrongResultError(
                case, f"{prefix}a row is off by {error:.1e} of its norm, and {limit:.0e} is allowed"
            )
    return errors.pop(OURS), errors


def require_same(case: Case, what: str, actual: np.ndarray, expected: np.ndarray) -> None:
    """Checks that words are equal along the first axis."""
    if actual.shape != expected.shape:
        raise WrongResultError(case, f"{what} are of shape {actual.shape}, not {expected.shape}")
    differ = (actual != expected).reshape(len(expected), -1).any(axis=1)
    if differ.any():
        raise WrongResultError(
            case, f"{int(differ.sum())} of {len(expected)} {what} differ, first {differ.argmax()}"
        )
