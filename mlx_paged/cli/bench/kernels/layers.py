"""What a layer does around its products, beside MLX's own. CPU only."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged import ops
from mlx_paged.cli.bench.kernels import reference
from mlx_paged.cli.bench.kernels.cases import DTYPE_BYTES, VOCAB_SIZE, Case
from mlx_paged.cli.bench.kernels.data import to_float64
from mlx_paged.cli.bench.kernels.timing import Variant
from mlx_paged.cli.bench.kernels.work import OURS, Checked, Work, require_close, require_same

MLX = "mlx"
_BASE, _EPS = 10000.0, 1e-5
# Angles are computed in float32: at large positions that would be all that differs.
_MOST_POSITIONS = 64

Op = Callable[[mx.array], mx.array]


def layer_op(case: Case, past_cache: int, seed: int) -> Work:
    """The work of a case of `cases.LAYER`.

    Rows stay where the caches have them, as in a model; the weights of `linear` are turned over.
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
    """Rows, width of a row, bytes of all rows."""
    rows, width = case.batch * (case.rows or 1), case.num_q_heads * case.head_dim
    return rows, width, rows * width * DTYPE_BYTES[case.dtype]


def _chained(case: Case, x: mx.array, run: dict[str, Op], expected: np.ndarray, moved: int,
             flops: int = 0) -> Work:  # fmt: skip
    """Ops whose result is as their input: a launch takes the one before."""

    def prepare(op: Op) -> Callable[[int], Callable[[], object]]:
        def build(launches: int) -> Callable[[], object]:
            out = x
            for _ in range(launches):
                out = op(out)
            return lambda: mx.eval(out)

        return build

    def check() -> Checked:
        found = {name: to_float64(op(x)).reshape(expected.shape) for name, op in run.items()}
        error, peers = require_close(case, found, expected)
        return Checked(error, len(expected), len(expected), peers)

    variants = tuple(Variant(name, prepare(op)) for name, op in run.items())
    return Work(moved, flops, variants, check)


def _rope(case: Case, past_cache: int, seed: int) -> Work:
    rows, _, num_bytes = _sizes(case)
    dim = case.head_dim
    x = _random(case, rows, case.num_q_heads, 1, dim, seed=seed)
    places = 1 + np.arange(rows) % _MOST_POSITIONS
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
    expected = reference.rope(to_float64(x)[:, :, 0], places.astype(np.float64), _BASE)
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
        outs = [(logits.argmax(-1), mx.isnan(logits).any(-1)) for _ in range(launches)]
        return lambda: mx.eval(outs)

    def check() -> Checked:
        tokens, has_nan = ops.greedy_tokens(logits)
        expected = to_float64(logits).argmax(axis=-1)
        require_same(case, "tokens", np.array(tokens), expected)
        require_same(case, "marks of NaN", np.array(has_nan), np.zeros(rows, dtype=bool))
        require_same(case, "tokens of the peer mlx", np.array(logits.argmax(-1)), expected)
        return Checked(0.0, rows, rows, {MLX: 0.0})

    return Work(logits.nbytes, 0, (Variant(OURS, ours), Variant(MLX, mlx)), check)
