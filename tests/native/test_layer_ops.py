"""Linear layers, RoPE, RMSNorm and SwiGLU against float64, and what they refuse."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.simd_processes import run_in_process_of

from mlx_paged import build_info, ops, reference

# Largest error of a row, relative to the row's norm.
TOLERANCE = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}
DTYPES = tuple(TOLERANCE)


def values_of(rng: np.random.Generator, *shape: int, dtype: mx.Dtype) -> tuple[mx.array, Any]:
    """An array and, in float64, exactly what it holds."""
    array = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
    return array, np.array(array.astype(mx.float32)).astype(np.float64)


def assert_close(got: mx.array, expected: np.ndarray, tolerance: float) -> None:
    assert got.shape == expected.shape
    error = np.array(got.astype(mx.float32)).astype(np.float64) - expected
    norm = np.linalg.norm(expected, axis=-1) + 1e-30
    assert (np.linalg.norm(error, axis=-1) <= tolerance * norm).all()


def rotated(x: np.ndarray, angles: np.ndarray, traditional: bool) -> np.ndarray:
    """The oracle: pairs as complex numbers, turned.

    Args:
        x: ``[rows, heads, 1, dim]``.
        angles: ``[rows, half]``.
    """
    half = angles.shape[1]
    first = slice(0, 2 * half, 2) if traditional else slice(0, half)
    second = slice(1, 2 * half, 2) if traditional else slice(half, 2 * half)
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)[:, None, None]
    out = x.copy()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


# --- Against float64 ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "dims"),
    [(1, 1, 8, 8), (5, 6, 64, 64), (3, 2, 80, 80), (4, 3, 96, 24), (2, 2, 7, 2), (300, 4, 128, 64)],
)
def test_rope(
    rng, dtype, traditional: bool, rows: int, heads: int, head_dim: int, dims: int
) -> None:
    x, exact = values_of(rng, rows, heads, 1, head_dim, dtype=dtype)
    positions = rng.integers(0, 5000, rows).astype(np.int32)
    inv_freqs = (10000.0 ** (-np.arange(dims // 2) / (dims // 2))).astype(np.float32)
    rotations = ops.rope_rotations(mx.array(positions), mx.array(inv_freqs), scale=0.5)
    # Angles are products in float32, as in MLX.
    angles = (positions.astype(np.float32) * np.float32(0.5))[:, None] * inv_freqs
    angles = angles.astype(np.float64)
    assert np.allclose(rotations[:, 0], np.cos(angles), rtol=0, atol=1e-7)
    assert np.allclose(rotations[:, 1], np.sin(angles), rtol=0, atol=1e-7)
    got = ops.rope(x, rotations, traditional=traditional)
    assert got.dtype == dtype
    assert_close(got, rotated(exact, angles, traditional), TOLERANCE[dtype])


VIEWS: dict[str, Callable[[Any], Any]] = {
    "some dims": lambda x: x[..., 8:40],
    "heads first": lambda x: x.swapaxes(0, 1)[:6],
    "every other head": lambda x: x[:, ::2],
    "every other dim": lambda x: x[..., ::2],
    "dims backwards": lambda x: x[..., ::-1],
    "dims far apart": lambda x: x.swapaxes(1, 3)[..., :16],
    "one head for all": lambda x: x[:, :1],
}


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_rope_takes_any_strides(rng, name: str, traditional: bool) -> None:
    x, exact = values_of(rng, 6, 48, 1, 48, dtype=mx.float32)
    rotations = ops.rope_rotations(mx.arange(6), mx.arange(1, 9) / 10)
    angles = np.arange(6)[:, None] * (np.arange(1, 9) / 10).astype(np.float32)
    got = ops.rope(VIEWS[name](x), rotations, traditional=traditional)
    assert_close(got, rotated(VIEWS[name](exact), angles, traditional), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 1, 384), (2, 3, 5, 64), (700, 100), (2, 1), (37,)])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(rng, dtype, shape, weighted: bool) -> None:
    x, exact = values_of(rng, *shape, dtype=dtype)
    weight, exact_weight = values_of(rng, shape[-1], dtype=dtype)
    expected = reference.rms_norm(exact, exact_weight if weighted else np.ones(1), 1e-5)
    got = ops.rms_norm(x, weight if weighted else None, 1e-5)
    assert got.dtype == dtype
    assert_close(got, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 1, 960), (2, 17), (300, 1000)])
def test_silu_mul(rng, dtype, shape) -> None:
    gate, exact_gate = values_of(rng, *shape, dtype=dtype)
    x, exact = values_of(rng, *shape, dtype=dtype)
    assert_close(ops.silu_mul(gate, x), reference.silu_mul(exact_gate, exact), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 1, 960), (2, 17), (2, 3, 129), (300, 1000)])
@pytest.mark.parametrize("affine", ["", "weight", "bias", "weight and bias"])
def test_layer_norm(rng, dtype, shape, affine: str) -> None:
    x, _ = values_of(rng, *shape, dtype=mx.float32)
    x = (3 + x).astype(dtype)
    exact = np.array(x.astype(mx.float32)).astype(np.float64)
    weight, exact_weight = values_of(rng, shape[-1], dtype=dtype)
    bias, exact_bias = values_of(rng, shape[-1], dtype=dtype)
    expected = reference.layer_norm(
        exact,
        exact_weight if "weight" in affine else np.ones(1),
        exact_bias if "bias" in affine else np.zeros(1),
        1e-5,
    )
    got = ops.layer_norm(
        x, weight if "weight" in affine else None, bias if "bias" in affine else None, 1e-5
    )
    assert got.dtype == dtype
    assert_close(got, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["none", "tanh", "fast"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu(rng, dtype, kind: str) -> None:
    for shape in [(1,), (3, 1, 960), (2, 17)]:
        x, exact = values_of(rng, *shape, dtype=dtype)
        got = ops.gelu(x, kind)
        assert got.dtype == dtype
        assert_close(got, reference.gelu(exact, kind), TOLERANCE[dtype])
    x = mx.linspace(-12, 12, 4001)
    error = np.abs(
        np.array(ops.gelu(x, kind)) - reference.gelu(np.array(x).astype(np.float64), kind)
    )
    assert (error <= 2e-7 * np.maximum(np.abs(np.array(x)), 1e-3)).all(), error.max()
    far = np.array(ops.gelu(mx.array([-1e30, -200.0, 200.0, 1e12, float("nan")]), kind))
    np.testing.assert_array_equal(far[:4], np.array([0, 0, 200, 1e12], dtype=np.float32))
    assert np.isnan(far[4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 1, 960), (2, 17)])
def test_clipped_swiglu(rng, dtype, shape) -> None:
    gate, exact_gate = values_of(rng, *shape, dtype=dtype)
    x, exact = values_of(rng, *shape, dtype=dtype)
    gate, exact_gate = 4 * gate, 4 * exact_gate
    x, exact = 4 * x, 4 * exact
    expected = reference.clipped_swiglu(exact_gate, exact, alpha=1.5, limit=6.5)
    got = ops.clipped_swiglu(gate, x, alpha=1.5, limit=6.5)
    assert_close(got, expected, TOLERANCE[dtype])
    edges = mx.array([float("nan"), 1.0, float("inf"), -1e30])
    got = np.array(ops.clipped_swiglu(edges, edges[::-1], alpha=1.702, limit=7.0))
    np.testing.assert_array_equal(np.isfinite(got), [False, True, True, False])


@pytest.mark.parametrize("shape", [(1, 8), (5, 1, 384), (2, 3, 70), (300, 16), (0, 8), (33,)])
@pytest.mark.parametrize("n", [1, 48, 500])
@pytest.mark.parametrize("biased", [True, False])
def test_linear(rng, shape, n: int, biased: bool) -> None:
    x, exact = values_of(rng, *shape, dtype=mx.float32)
    weight, exact_weight = values_of(rng, n, shape[-1], dtype=mx.float32)
    bias, exact_bias = values_of(rng, n, dtype=mx.float32)
    mx.eval(weight, bias)
    got = ops.linear(x, weight, bias if biased else None)
    # The relative error of a single output has no bound, so all are compared together.
    expected = exact @ exact_weight.T + (exact_bias if biased else 0)
    assert got.dtype == mx.float32
    assert_close(got.reshape(1, -1), expected.reshape(1, -1), 1e-6)


@pytest.mark.parametrize("k", [1, 15, 16, 70, 384])
@pytest.mark.parametrize("n", [3, 17, 960])
def test_a_row_of_a_linear_layer_does_not_depend_on_the_others(rng, n: int, k: int) -> None:
    """Whoever serves MLX's BLAS: the engine's tokens do not depend on the batch."""
    most = {"avx5": 64, "avx2": 16}.get(build_info()["simd"][:4])
    if most is None or mx.default_device() != mx.cpu:
        pytest.skip("the products are another library's here")
    x, exact = values_of(rng, most, k, dtype=mx.float32)
    weight, exact_weight = values_of(rng, n, k, dtype=mx.float32)
    mx.eval(x, weight)
    whole = np.array(ops.linear(x, weight))
    for rows in {*range(1, 21), most - 1} & {*range(1, most)}:
        assert np.array_equal(np.array(ops.linear(x[:rows], weight)), whole[:rows]), rows
    expected = exact @ exact_weight.T
    assert np.linalg.norm(whole - expected) <= 1e-6 * np.linalg.norm(expected)


def test_a_nan_in_a_row_of_a_linear_layer_stays_in_it(rng) -> None:
    x, _ = values_of(rng, 6, 40, dtype=mx.float32)
    weight, _ = values_of(rng, 10, 40, dtype=mx.float32)
    mx.eval(weight)
    clean = np.array(ops.linear(x, weight))
    x[1, 7] = float("nan")
    got = np.array(ops.linear(x, weight))
    assert np.isnan(got[1]).all()
    np.testing.assert_array_equal(np.delete(got, 1, axis=0), np.delete(clean, 1, axis=0))


@pytest.mark.parametrize("simd", ["avx2", pytest.param("baseline", marks=pytest.mark.long)])
def test_linear_layers_in_a_process_of(simd: str) -> None:
    run_in_process_of(simd, 4, [__file__], "linear and not in_a_process_of")


LINEAR_OPERANDS: dict[str, Callable[[mx.array, mx.array, mx.array], Any]] = {
    "half precision": lambda x, w, b: (x.astype(mx.float16), w.astype(mx.float16), None),
    "mixed": lambda x, w, b: (x, w.astype(mx.float16), b),
    "transposed weights": lambda x, w, b: (x, mx.array(np.array(w.T)).T, b),
    "weights not evaluated": lambda x, w, b: (x, w * 1, b),
    "strided x": lambda x, w, b: (mx.repeat(x, 2, axis=0)[::2], w, b),
}


@pytest.mark.parametrize("name", LINEAR_OPERANDS)
def test_linear_of_other_operands_equals_mlx(rng, name: str) -> None:
    x, weight, bias = (
        values_of(rng, *s, dtype=mx.float32)[0] for s in ((6, 1, 32), (24, 32), (24,))
    )
    mx.eval(x, weight, bias)
    x, weight, bias = LINEAR_OPERANDS[name](x, weight, bias)
    expected = x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)
    got = ops.linear(x, weight, bias)
    assert got.dtype == expected.dtype
    expected = np.array(expected.astype(mx.float32)).astype(np.float64)
    assert_close(got, expected, TOLERANCE[got.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 16), (5, 100), (40, 4097), (0, 9)])
def test_greedy_tokens(rng, dtype, shape) -> None:
    logits, exact = values_of(rng, *shape, dtype=dtype)
    tokens, largest, reported = ops.greedy_tokens(logits)
    assert tokens.dtype == mx.int32 and largest.dtype == mx.float32
    assert np.array_equal(np.array(tokens), exact.argmax(axis=-1))
    assert np.array_equal(np.array(largest), exact.max(axis=-1))
    assert np.array_equal(np.array(reported), np.array(tokens))


@pytest.mark.parametrize("size", [5, 16, 37, 500])
def test_greedy_tokens_takes_the_first_of_equals_and_finds_every_nan(rng, size: int) -> None:
    values = rng.integers(0, 3, (200, size)).astype(np.float32)
    values[0] = -np.inf
    values[1, size // 2] = np.inf
    values[2, :] = -np.inf
    values[2, -1] = -1e30
    tokens, largest, reported = ops.greedy_tokens(mx.array(values))
    finite = np.isfinite(values.max(axis=-1))
    assert not finite[:2].any() and finite[2:].all()
    assert np.array_equal(np.array(reported), np.where(finite, np.array(tokens), -1))
    assert np.array_equal(np.array(tokens), values.argmax(axis=-1))
    assert np.array_equal(np.array(largest), values.max(axis=-1))
    for column in range(size):
        values[column % 200, column] = np.nan
    values[3, 1] = -np.nan
    tokens, largest, reported = map(np.array, ops.greedy_tokens(mx.array(values)))
    assert np.array_equal(largest, values.max(axis=-1), equal_nan=True)
    assert np.array_equal(reported, np.where(np.isfinite(largest), tokens, -1))
    assert ((tokens >= 0) & (tokens < size)).all()


def test_silu_mul_far_from_zero() -> None:
    gate = mx.array([-1e30, -200.0, -87.0, 0.0, 50.0, 1e30, float("nan")])
    got = np.array(ops.silu_mul(gate, mx.ones(7)))
    assert np.allclose(got[:6], [0, 0, 0, 0, 50, 1e30], atol=1e-30)
    assert np.isnan(got[6])


def test_nan_and_infinity_come_through() -> None:
    x = mx.ones((2, 32))
    x[0, 5] = float("nan")
    norm = np.array(ops.rms_norm(x, None, 1e-5))
    assert np.isnan(norm[0]).all() and np.isfinite(norm[1]).all()


def test_empty_inputs() -> None:
    rotations = ops.rope_rotations(mx.zeros((0,), mx.int32), mx.ones((4,)))
    assert ops.rope(mx.zeros((0, 2, 1, 8)), rotations).shape == (0, 2, 1, 8)
    assert ops.rms_norm(mx.zeros((0, 8)), None, 1e-5).shape == (0, 8)
    assert ops.silu_mul(mx.zeros((0, 8)), mx.zeros((0, 8))).shape == (0, 8)


def test_an_input_that_is_still_needed_is_left_alone(rng) -> None:
    """Buffers are reused where nobody holds the input."""
    x, exact = values_of(rng, 4, 2, 1, 16, dtype=mx.float32)
    rotations = ops.rope_rotations(mx.arange(4), mx.ones((8,)))
    held = x + 0
    outputs = [ops.rope(held, rotations), ops.rms_norm(held, None, 0.0), ops.silu_mul(held, held)]
    mx.eval(held, *outputs)
    assert np.array_equal(np.array(held), exact.astype(np.float32))
    again = [ops.rope(x, rotations), ops.rms_norm(x, None, 0.0), ops.silu_mul(x, x)]
    for a, b in zip(outputs, again):
        assert np.array_equal(np.array(a), np.array(b))


# --- Refusals -------------------------------------------------------------------------------------

ROTATIONS = ops.rope_rotations(mx.arange(3), mx.ones((8,)), stream=mx.cpu)


def thresholds(logits: mx.array | None = None, **given: mx.array) -> mx.array:
    """Valid arguments, except for the given ones."""
    columns = {name: mx.zeros(3) for name in ("largest", "temperature", "floors", "top_p")}
    columns["top_k"] = mx.zeros(3, mx.int32)
    logits = mx.zeros((3, 8)) if logits is None else logits
    return ops.sampling_thresholds(logits, **{**columns, **given})


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "layer_norm's weight": (
        lambda: ops.layer_norm(mx.zeros((2, 8)), mx.ones((7,)), None, 1e-5),
        "[layer_norm] weight must be of shape (8) but got (7)",
    ),
    "layer_norm's bias": (
        lambda: ops.layer_norm(mx.zeros((2, 8)), None, mx.ones((8,), mx.float16), 1e-5),
        "[layer_norm] bias must be float32 like x but got float16",
    ),
    "gelu's approximation": (
        lambda: ops.gelu(mx.zeros((2, 8)), "precise"),
        "[gelu] approximation must be 'none', 'tanh' or 'fast' but got precise",
    ),
    "clipped_swiglu's limit": (
        lambda: ops.clipped_swiglu(mx.zeros((8,)), mx.zeros((8,)), alpha=1.0, limit=0.0),
        "[clipped_swiglu] limit must be above 0 but got 0",
    ),
    "positions' dtype": (
        lambda: ops.rope_rotations(mx.zeros((3,)), mx.ones((8,))),
        "[rope_rotations] positions must be int32 but got float32",
    ),
    "positions' shape": (
        lambda: ops.rope_rotations(mx.array(3), mx.ones((8,))),
        "[rope_rotations] positions must be of shape (*) but got ()",
    ),
    "inv_freqs' dtype": (
        lambda: ops.rope_rotations(mx.arange(3), mx.ones((8,), mx.float16)),
        "[rope_rotations] inv_freqs must be float32 but got float16",
    ),
    "scale": (
        lambda: ops.rope_rotations(mx.arange(3), mx.ones((8,)), scale=float("inf")),
        "[rope_rotations] scale must be finite but got inf",
    ),
    "x's shape": (
        lambda: ops.rope(mx.zeros((3, 2, 2, 16)), ROTATIONS),
        "[rope] x must be of shape (*,*,1,*) but got (3,2,2,16)",
    ),
    "x's dtype": (
        lambda: ops.rope(mx.zeros((3, 2, 1, 16), mx.int32), ROTATIONS),
        "[rope] x must be float32, float16 or bfloat16 but got int32",
    ),
    "rows": (
        lambda: ops.rope(mx.zeros((4, 2, 1, 16)), ROTATIONS),
        "[rope] rotations must be of shape (4,2,*) but got (3,2,8)",
    ),
    "head_dim": (
        lambda: ops.rope(mx.zeros((3, 2, 1, 14)), ROTATIONS),
        "[rope] head_dim must be at least the 16 rotated dims but got 14",
    ),
    "a scalar": (
        lambda: ops.rms_norm(mx.array(1.0), None, 1e-5),
        "[rms_norm] x must be an array with at least one axis but got a scalar",
    ),
    "weight's shape": (
        lambda: ops.rms_norm(mx.zeros((3, 8)), mx.ones((4,)), 1e-5),
        "[rms_norm] weight must be of shape (8) but got (4)",
    ),
    "weight's dtype": (
        lambda: ops.rms_norm(mx.zeros((3, 8)), mx.ones((8,), mx.float16), 1e-5),
        "[rms_norm] weight must be float32 like x but got float16",
    ),
    "eps": (
        lambda: ops.rms_norm(mx.zeros((3, 8)), None, -1.0),
        "[rms_norm] eps must be finite and at least 0 but got -1",
    ),
    "logits' shape": (
        lambda: ops.greedy_tokens(mx.zeros((8,))),
        "[greedy_tokens] logits must be of shape (*,*) but got (8)",
    ),
    "vocab_size": (
        lambda: ops.greedy_tokens(mx.zeros((3, 0))),
        "[greedy_tokens] vocab_size must be at least 1 but got 0",
    ),
    "logits' dtype": (
        lambda: ops.greedy_tokens(mx.zeros((3, 8), mx.int32)),
        "[greedy_tokens] logits must be float32, float16 or bfloat16 but got int32",
    ),
    "scaled logits": (
        lambda: thresholds(logits=mx.zeros((3, 8), mx.int32)),
        "[sampling_thresholds] logits must be float32, float16 or bfloat16 but got int32",
    ),
    "no vocabulary": (
        lambda: thresholds(logits=mx.zeros((3, 0))),
        "[sampling_thresholds] vocab_size must be in [1, 8388608] but got 0",
    ),
    "largest": (
        lambda: thresholds(largest=mx.zeros(3, mx.float16)),
        "[sampling_thresholds] largest must be float32 but got float16",
    ),
    "temperature": (
        lambda: thresholds(temperature=mx.zeros((3, 1))),
        "[sampling_thresholds] temperature must be of shape (3) but got (3,1)",
    ),
    "floors": (
        lambda: thresholds(floors=mx.zeros(2)),
        "[sampling_thresholds] floors must be of shape (3) but got (2)",
    ),
    "top_k": (
        lambda: thresholds(top_k=mx.zeros(3)),
        "[sampling_thresholds] top_k must be int32 but got float32",
    ),
    "top_p": (
        lambda: thresholds(top_p=mx.zeros(3, mx.float16)),
        "[sampling_thresholds] top_p must be float32 but got float16",
    ),
    "k": (
        lambda: ops.linear(mx.zeros((3, 7)), mx.zeros((4, 8))),
        "[linear] the last axis of x must be 8 like weight's but got 7",
    ),
    "a matrix": (
        lambda: ops.linear(mx.zeros((3, 8)), mx.zeros((8,))),
        "[linear] weight must be of shape (*,*) but got (8)",
    ),
    "bias": (
        lambda: ops.linear(mx.zeros((3, 8)), mx.zeros((4, 8)), mx.zeros((8,))),
        "[linear] bias must be of shape (4) but got (8)",
    ),
    "gate's shape": (
        lambda: ops.silu_mul(mx.zeros((3, 8)), mx.zeros((3, 1))),
        "[silu_mul] x must be of shape (3,8) like gate but got (3,1)",
    ),
    "gate's dtype": (
        lambda: ops.silu_mul(mx.zeros((3,), mx.int32), mx.zeros((3,), mx.int32)),
        "[silu_mul] gate must be float32, float16 or bfloat16 but got int32",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    call, message = REFUSALS[name]
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        call()
