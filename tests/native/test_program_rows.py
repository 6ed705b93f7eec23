"""Tests operations by row that step programs compute themselves: the same bits as MLX's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from support.simd_processes import run_in_process_of

from mlx_paged import executables, ops

pytestmark = pytest.mark.skipif(
    executables.max_cpu_step_rows() == 0, reason="this processor has no product of few rows"
)


def assert_program_equals_graph(
    graph: Callable[..., mx.array], *arrays: mx.array, num_foreign: int = 0
) -> None:
    inputs = executables.placeholders(list(arrays))
    program = executables.CpuExecutable(inputs, [graph(*inputs)])
    assert len(program.foreign) == num_foreign
    np.testing.assert_array_equal(np.array(program(list(arrays))[0]), np.array(graph(*arrays)))


def edges(rng: np.random.Generator, rows: int, size: int) -> mx.array:
    """Random numbers; equal ones, infinities and a row with NaNs among them."""
    x = rng.standard_normal((rows, size)).astype(np.float32) * 4
    x[:, ::3] = np.round(x[:, ::3])  # (ties)
    if rows > 2:
        x[1, : size // 2] = np.inf
        x[2, size // 3] = np.nan
        x[2, -1] = -np.inf
    return mx.array(x)


SIZES = [(1, 2), (3, 5), (2, 8), (5, 33), (4, 128), (3, 512)]


@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_softmax(rng, rows: int, size: int) -> None:
    x = edges(rng, rows, size)
    assert_program_equals_graph(lambda x: mx.softmax(x, axis=-1, precise=True), x)
    assert_program_equals_graph(
        lambda x: mx.softmax(x.reshape(rows, 1, size)[..., size // 2 :], axis=-1), x
    )


@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_partitions_choose_the_same_in_the_same_order(rng, rows: int, size: int) -> None:
    for k in {1, 2, size // 2, size - 1, size}:
        for _ in range(20):
            x = edges(rng, rows, size)

            def best(x: mx.array, k: int = k) -> mx.array:
                chosen = mx.argpartition(x, kth=-k, axis=-1)[..., -k:]
                return mx.take_along_axis(x, mx.stop_gradient(chosen), axis=-1)

            def least(x: mx.array, k: int = k) -> mx.array:
                chosen = mx.argpartition(-x, kth=k - 1, axis=-1)[..., :k]
                return mx.take_along_axis(x, chosen, axis=-1) * 2.0

            assert_program_equals_graph(best, x)
            assert_program_equals_graph(least, x)


def test_groups_of_a_row(rng) -> None:
    x = edges(rng, 4, 48)

    def graph(x: mx.array) -> mx.array:
        groups = x.reshape(4, 1, 6, 8)
        chosen = mx.argpartition(groups, kth=-2, axis=-1)[..., -2:]
        return mx.take_along_axis(groups, chosen, axis=-1).sum(axis=-1, keepdims=True)

    assert_program_equals_graph(graph, x)


@pytest.mark.parametrize("axis", [1, 2, 3, -1])
@pytest.mark.parametrize("shape", [(3, 2, 5, 7), (1, 1, 8, 64), (2, 3, 1, 33), (4, 9, 2, 1)])
def test_sums(rng, shape: tuple[int, ...], axis: int) -> None:
    x = mx.array(rng.standard_normal(shape).astype(np.float32))
    assert_program_equals_graph(lambda x: x.sum(axis=axis), x)
    assert_program_equals_graph(lambda x: x.sum(axis=axis, keepdims=True), x)
    assert_program_equals_graph(lambda x: x.swapaxes(1, 2).sum(axis=axis), x)


FUNCTIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "abs": mx.abs,
    "erf": mx.erf,
    "exp": mx.exp,
    "negative": mx.negative,
    "rsqrt": lambda x: mx.rsqrt(mx.abs(x)),
    "sigmoid": mx.sigmoid,
    "sqrt": lambda x: mx.sqrt(mx.abs(x)),
    "square": mx.square,
    "tanh": mx.tanh,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_an_element(rng, name: str) -> None:
    for size in (1, 7, 64):
        assert_program_equals_graph(FUNCTIONS[name], edges(rng, 3, size))


OPERATORS: dict[str, Callable[[Any, Any], mx.array]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "maximum": mx.maximum,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_on_operands_that_lie_in_any_way(rng, name: str) -> None:
    combine = OPERATORS[name]
    a = edges(rng, 4, 24).reshape(4, 2, 3, 4)
    b = mx.array(rng.standard_normal((4, 2, 3, 4)).astype(np.float32))
    weight = mx.array(rng.standard_normal((3, 4)).astype(np.float32))
    mx.eval(weight)
    views: list[Callable[[mx.array], Any]] = [
        lambda b: b,
        lambda b: b[..., :1],  # one for the last axis
        lambda b: b[:, :, :1],
        lambda b: b[:, :1, :1, :1],  # one for a row
        lambda b: b.transpose(0, 2, 1, 3).reshape(4, 2, 3, 4),
        lambda b: b[:, :, :, ::2].reshape(4, 2, 3, 2)[..., :1],
        lambda b: mx.broadcast_to(b[..., 1:2], (4, 2, 3, 4)),
        lambda b: b.swapaxes(1, 2).swapaxes(1, 2),
        lambda b: weight,
        lambda b: mx.array(3.0),
    ]
    for seen in views:
        assert_program_equals_graph(lambda a, b, seen=seen: combine(a, seen(b)), a, b)
        assert_program_equals_graph(lambda a, b, seen=seen: combine(seen(b), a), a, b)


def test_sums_that_mlx_compiled(rng) -> None:
    """As gemma3 has them; no other function is read by its name."""
    a, b = edges(rng, 4, 24), edges(rng, 4, 24)
    assert_program_equals_graph(mx.compile(lambda a, b: a + b, shapeless=True), a, b)
    assert_program_equals_graph(mx.compile(lambda a, b: a + b), a, b)
    for other in (lambda a, b: (a + b) * b, lambda a, b: a + a * b):
        assert_program_equals_graph(mx.compile(other, shapeless=True), a, b, num_foreign=1)


@pytest.mark.parametrize("affine", ["", "weight", "bias", "weight and bias"])
def test_layer_norms(rng, affine: str) -> None:
    weight, bias = (mx.array(rng.standard_normal(40).astype(np.float32)) for _ in range(2))
    mx.eval(weight, bias)
    x = mx.array(rng.standard_normal((5, 3, 40)).astype(np.float32))
    assert_program_equals_graph(
        lambda x: ops.layer_norm(
            x * 2.0,
            weight if "weight" in affine else None,
            bias if "bias" in affine else None,
            1e-5,
        ),
        x,
    )


@pytest.mark.parametrize("name", ["none", "tanh", "fast", "clipped_swiglu"])
def test_activations(rng, name: str) -> None:
    x = edges(rng, 4, 66).reshape(4, 3, 22)
    if name == "clipped_swiglu":
        assert_program_equals_graph(
            lambda x: ops.clipped_swiglu(x[..., ::2], x[..., 1::2], alpha=1.5, limit=3.0), x
        )
    else:
        assert_program_equals_graph(lambda x: ops.gelu(x[:, 1:], name), x)


def test_a_router_of_each_kind(rng) -> None:
    """Mixtral's, Qwen's, OLMoE's."""
    x = mx.array(rng.standard_normal((5, 1, 32)).astype(np.float32))
    weight = mx.array(rng.standard_normal((16, 32)).astype(np.float32))
    mx.eval(weight)

    def mixtral(x: mx.array) -> mx.array:
        gates = ops.linear(x, weight)
        chosen = mx.stop_gradient(mx.argpartition(-gates, kth=3, axis=-1)[..., :4])
        return mx.softmax(mx.take_along_axis(gates, chosen, axis=-1), axis=-1, precise=True)

    def qwen(x: mx.array) -> mx.array:
        gates = mx.softmax(ops.linear(x, weight), axis=-1, precise=True)
        chosen = mx.stop_gradient(mx.argpartition(gates, kth=-4, axis=-1)[..., -4:])
        scores = mx.take_along_axis(gates, chosen, axis=-1)
        scores = scores / mx.sum(scores, axis=-1, keepdims=True)
        return (mx.broadcast_to(x[..., None, :], (5, 1, 4, 32)) * scores[..., None]).sum(axis=-2)

    def sigmoids(x: mx.array) -> mx.array:
        gates = mx.sigmoid(ops.linear(x, weight))
        chosen = mx.argpartition(gates + weight[:, 0], kth=-4, axis=-1)[..., -4:]
        scores = mx.take_along_axis(gates, chosen, axis=-1)
        return scores / (mx.sum(scores, axis=-1, keepdims=True) + 1e-6) * 2.5

    for router in (mixtral, qwen, sigmoids):
        assert_program_equals_graph(router, x)


def test_numbers_of_rows_that_no_row_has_read_nothing(rng) -> None:
    x, at = mx.ones((2, 4)), mx.array([[0, 4], [2**31, 3]], dtype=mx.uint32)
    inputs = executables.placeholders([x, at])
    program = executables.CpuExecutable(inputs, [mx.take_along_axis(*inputs, axis=-1) * 1.0])
    np.testing.assert_array_equal(np.array(program([x, at])[0]), [[1, np.nan], [np.nan, 1]])


@pytest.mark.parametrize("rows", [64, 1, 3])
def test_products_of_rows_with_large_activations(rng, rows: int) -> None:
    """Products with integer activations read these rows once more, as the original floats."""
    weights = [
        mx.quantize(mx.array(rng.standard_normal(shape).astype(np.float32)), group_size=64, bits=4)
        for shape in ((256, 128), (256, 128), (48, 256))
    ]
    mx.eval(weights)
    x = rng.standard_normal((rows, 128)).astype(np.float32)
    x[::2, 5] = 1e5

    def graph(x: mx.array) -> mx.array:
        gate, up, down = (
            lambda a, w=w: ops.quantized_linear(a, *w, group_size=64, bits=4) for w in weights
        )
        twice = x + x
        return down(ops.silu_mul(gate(twice), up(twice)))

    assert_program_equals_graph(graph, mx.array(x))


def test_products_in_a_process_of_avx2() -> None:
    run_in_process_of("avx2", 2, [__file__], "large_activations")
