"""Products of rows with their experts, in every format that checkpoints have, against float64."""

from __future__ import annotations

from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from support.simd_processes import run_in_process_of
from support.weight_formats import FORMATS, SCALE_DTYPES, assert_near, dequantized, quantized

from mlx_paged import executables, ops

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.cpu, reason="GPUs multiply these with MLX's own kernels"
)

EXPERTS = 7
# Routing of rows to experts: (rows, experts per row) -> indices.
ROUTES: dict[str, Any] = {
    "one row": lambda rng: rng.permutation(EXPERTS)[None, :3],
    "few": lambda rng: np.stack([rng.permutation(EXPERTS)[:3] for _ in range(5)]),
    "some without rows": lambda rng: rng.choice([1, 4], (6, 1)),
    "one with all rows": lambda rng: np.full((9, 1), EXPERTS - 1),
    "one expert several times": lambda rng: np.array([[2, 2, 5], [2, 0, 0]]),
    "more rows than are taken at a time": lambda rng: rng.choice([0, 3], (150, 2), p=[0.9, 0.1]),
    "all of them": lambda rng: np.tile(np.arange(EXPERTS), (4, 1)),
}


def weights(
    rng: np.random.Generator, n: int, k: int, mode: str, bits: int, group: int, dtype: mx.Dtype
) -> tuple[list[mx.array], np.ndarray]:
    """Returns the quantized weights of all experts, and their values in float64."""
    arrays = quantized(rng, EXPERTS * n, k, mode, bits, group, dtype)
    exact = dequantized(arrays, mode, bits, group).reshape(EXPERTS, n, k)
    arrays = [a.reshape(EXPERTS, n, -1) for a in arrays]
    mx.eval(arrays)
    return arrays, exact


def assert_products(
    got: mx.array, x: np.ndarray, experts: np.ndarray, exact: np.ndarray, bias: Any = None
) -> None:
    """Args:
    got: ``[rows, per_row, 1, n]``.
    x: ``[rows, 1 or per_row, k]``.
    """
    rows, per_row = experts.shape
    assert got.shape == (rows, per_row, 1, exact.shape[1]) and got.dtype == mx.float32
    x = np.broadcast_to(x, (rows, per_row, x.shape[-1]))
    for row in range(rows):
        for i, expert in enumerate(experts[row]):
            b = None if bias is None else bias[expert]
            assert_near(got[row, i], x[row, i][None], exact[expert], b)


@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS)
def test_formats(rng, mode: str, bits: int, group: int) -> None:
    format_of = {"mode": mode, "bits": bits, "group_size": group}
    for dtype in SCALE_DTYPES if mode == "affine" else [mx.float32]:
        for n, groups in [(1, 1), (21, 5)]:
            k = groups * 128 + (group if group < 128 else 0)  # odd in groups
            arrays, exact = weights(rng, n, k, mode, bits, group, dtype)
            scales, biases = arrays[1], arrays[2] if mode == "affine" else None
            bias = rng.standard_normal((EXPERTS, n)).astype(np.float32)
            for shares_row in (True, False):
                experts = ROUTES["few"](rng)
                x = rng.standard_normal((5, 1 if shares_row else 3, k)).astype(np.float32)
                got = ops.expert_linear(
                    mx.array(x)[:, :, None], mx.array(experts.astype(np.uint32)), arrays[0],
                    scales, biases, mx.array(bias) if shares_row else None, **format_of,
                )  # fmt: skip
                assert_products(got, x, experts, exact, bias if shares_row else None)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", "4 bits", "mxfp8"])
def test_routes(rng, route: str, form: str) -> None:
    n, k = 37, 192
    format_of: dict[str, Any] = {}
    if form == "4 bits":
        format_of = {"mode": "affine", "bits": 4, "group_size": 64}
        arrays, exact = weights(rng, n, k, "affine", 4, 64, mx.bfloat16)
    elif form == "mxfp8":
        format_of = {"mode": "mxfp8", "bits": 8, "group_size": 32}
        arrays, exact = weights(rng, n, k, "mxfp8", 8, 32, mx.float32)
    else:
        weight = mx.array(rng.standard_normal((EXPERTS, n, k))).astype(getattr(mx, form))
        arrays, exact = [weight], np.array(weight.astype(mx.float32)).astype(np.float64)
    experts = ROUTES[route](rng)
    for width in (1, experts.shape[1]):
        x = rng.standard_normal((len(experts), width, k)).astype(np.float32)
        got = ops.expert_linear(
            mx.array(x)[:, :, None], mx.array(experts.astype(np.int32)), *arrays, **format_of
        )
        assert_products(got, x, experts, exact)


@pytest.mark.parametrize("k", [1, 17, 513, 1039])
def test_16_bit_experts_of_odd_sizes(rng, k: int) -> None:
    for n in (1, 5, 33):
        weight = mx.array(rng.standard_normal((EXPERTS, n, k))).astype(mx.bfloat16)
        exact = np.array(weight.astype(mx.float32)).astype(np.float64)
        experts = ROUTES["few"](rng)
        x = rng.standard_normal((5, 1, k)).astype(np.float32)
        got = ops.expert_linear(mx.array(x)[:, :, None], mx.array(experts.astype(np.int32)), weight)
        assert_products(got, x, experts, exact)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "affine"])
def test_a_row_does_not_depend_on_the_others(rng, form: str) -> None:
    rows, k = 200, 1152
    weight = mx.array(rng.standard_normal((EXPERTS, 40, k)).astype(np.float32))
    arrays, format_of = [weight], {}
    if form == "affine":
        format_of = {"group_size": 64, "bits": 4}
        arrays = list(mx.quantize(weight.astype(mx.bfloat16), **format_of))
    elif form == "bfloat16":
        arrays = [weight.astype(mx.bfloat16)]
    x = mx.array(rng.standard_normal((rows, 1, 1, k)).astype(np.float32))
    experts = mx.array(
        np.stack([rng.permutation(EXPERTS)[:3] for _ in range(rows)]).astype(np.uint32)
    )
    mx.eval(arrays, x, experts)
    whole = np.array(ops.expert_linear(x, experts, *arrays, **format_of))
    for part in (slice(0, 1), slice(3, 8), slice(50, 115), slice(199, 200)):
        alone = ops.expert_linear(x[part], experts[part], *arrays, **format_of)
        np.testing.assert_array_equal(np.array(alone), whole[part])


def test_scales_of_experts(rng) -> None:
    """nvfp4 may have a scale of each matrix; MLX takes it on GPUs only."""
    n, k = 21, 160
    weight = mx.array(rng.standard_normal((EXPERTS, n, k)).astype(np.float32)) * mx.arange(
        1.0, EXPERTS + 1
    ).reshape(-1, 1, 1)
    scales = mx.abs(weight).max(axis=(1, 2))
    packed = [
        mx.quantize(weight[e], 16, 4, "nvfp4", global_scale=scales[e]) for e in range(EXPERTS)
    ]
    exact = np.stack(
        [
            np.array(mx.dequantize(*packed[e], None, 16, 4, "nvfp4", global_scale=scales[e]))
            for e in range(EXPERTS)
        ]
    ).astype(np.float64)
    assert np.abs(exact - np.array(weight)).max() < 0.2 * np.abs(exact).max()
    arrays = [mx.stack([p[i] for p in packed]) for i in range(2)]
    bias = rng.standard_normal((EXPERTS, n)).astype(np.float32)
    experts = ROUTES["few"](rng)
    x = rng.standard_normal((5, 1, k)).astype(np.float32)
    got = ops.expert_linear(
        mx.array(x)[:, :, None], mx.array(experts.astype(np.uint32)), *arrays, None, mx.array(bias),
        scales, group_size=16, bits=4, mode="nvfp4",
    )  # fmt: skip
    assert_products(got, x, experts, exact, bias)
    with pytest.raises(ValueError, match="global_scale must be None except for nvfp4"):
        ops.expert_linear(
            mx.zeros((1, 1, k)), mx.array([0]), weight, global_scale=mx.ones((EXPERTS,))
        )


def test_rows_of_experts_that_are_none_are_nan(rng) -> None:
    weight = mx.array(rng.standard_normal((EXPERTS, 5, 8)).astype(np.float32))
    x = mx.ones((3, 1, 1, 8))
    experts = mx.array([[0, EXPERTS], [-1, 2], [1, 2**30]], dtype=mx.int32)
    got = np.array(ops.expert_linear(x, experts, weight))
    np.testing.assert_array_equal(
        np.isnan(got).all((2, 3)), [[False, True], [True, False], [False, True]]
    )


def test_rows_and_indices_are_broadcast(rng) -> None:
    weight = mx.array(rng.standard_normal((EXPERTS, 5, 8)).astype(np.float32))
    for x_axes, index_axes in [
        ((4,), (4,)),
        ((2, 1), (3,)),
        ((3,), (2, 3)),
        ((2, 3, 1), (1, 4)),
        ((1,), (1,)),
    ]:
        x = mx.array(rng.standard_normal((*x_axes, 1, 8)).astype(np.float32))
        experts = mx.array(rng.integers(0, EXPERTS, index_axes).astype(np.uint32))
        got = ops.expert_linear(x, experts, weight)
        expected = mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=experts)
        assert got.shape == expected.shape
        assert mx.allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_no_rows_have_no_products() -> None:
    out = ops.expert_linear(
        mx.zeros((0, 1, 1, 8)), mx.zeros((0, 2), dtype=mx.uint32), mx.zeros((4, 5, 8))
    )
    mx.eval(out)
    assert out.shape == (0, 2, 1, 5)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "x": ({"x": mx.zeros((2, 1, 1, 96))}, "last axes of x must be 1 and 128"),
    "several rows of x": ({"x": mx.zeros((2, 1, 2, 128))}, "last axes of x must be 1 and 128"),
    "dtype of x": ({"x": mx.zeros((2, 1, 1, 128), dtype=mx.bfloat16)}, "x must be float32"),
    "indices": ({"indices": mx.zeros((2, 3))}, "indices must be int32 or uint32"),
    "weight": ({"weight": mx.zeros((12, 16), dtype=mx.uint32)}, "weight"),
    "scales": ({"scales": mx.ones((4, 3, 3))}, "scales must be"),
    "biases": ({"biases": None}, "biases must be an array"),
    "bias": ({"bias": mx.ones((4, 4))}, "bias"),
    "mode": ({"bits": 7}, "7 bits in groups of 64"),
}


@pytest.mark.parametrize("name", BAD)
def test_operands_that_do_not_fit_are_refused(rng, name: str) -> None:
    arrays = [a.reshape(4, 3, -1) for a in quantized(rng, 12, 128, "affine", 4, 64, mx.float32)]
    fields, message = BAD[name]
    given: dict[str, Any] = {
        "x": mx.ones((2, 1, 1, 128)),
        "indices": mx.zeros((2, 3), dtype=mx.uint32),
        "weight": arrays[0],
        "scales": arrays[1],
        "biases": arrays[2],
        "group_size": 64,
        "bits": 4,
    } | fields
    with pytest.raises(ValueError, match=message):
        ops.expert_linear(**given)


# --- In step programs -----------------------------------------------------------------------------


@pytest.mark.skipif(executables.max_cpu_step_rows() == 0, reason="no step programs here")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_programs_give_what_the_operations_give(rng, rows: int, gated: bool) -> None:
    k, n = 64, 72
    matrices = [
        mx.quantize(mx.array(rng.standard_normal((EXPERTS, *shape)).astype(np.float32)), 8 * 4, 4)
        for shape in ((n, k), (n, k), (k, 96))
    ]
    bias = mx.array(rng.standard_normal((EXPERTS, n)).astype(np.float32))
    wide = mx.zeros((rows, 3, 96 - n))
    mx.eval(matrices, bias, wide)
    format_of = {"group_size": 32, "bits": 4}

    def graph(x: mx.array, experts: mx.array) -> mx.array:
        x = x[:, 4:][:, None, None]  # (rows apart)
        experts = experts[:, 2:]
        gate = ops.expert_linear(x, experts, *matrices[0], bias, **format_of)
        up = ops.expert_linear(x, experts, *matrices[1], **format_of)
        h = ops.silu_mul(gate, up) if gated else gate * up
        h = mx.concatenate([h.squeeze(-2), wide], axis=-1)
        out = ops.expert_linear(h[:, :, None], experts, *matrices[2], **format_of)
        return (out.squeeze(-2) * 2.0).sum(axis=-2)

    inputs = executables.placeholders(
        [mx.zeros((rows, k + 4)), mx.zeros((rows, 5), dtype=mx.uint32)]
    )
    program = executables.CpuExecutable(inputs, [graph(*inputs)])
    for _ in range(3):
        x = mx.array(rng.standard_normal((rows, k + 4)).astype(np.float32))
        experts = mx.array(rng.integers(0, EXPERTS, (rows, 5)).astype(np.uint32))
        np.testing.assert_array_equal(
            np.array(program([x, experts])[0]), np.array(graph(x, experts))
        )


@pytest.mark.skipif(executables.max_cpu_step_rows() == 0, reason="no step programs here")
@pytest.mark.parametrize("other", ["experts", "rows", "uses"])
def test_gates_that_are_no_gated_layer(rng, other: str) -> None:
    """Layers with other experts or rows than the rest, or with other readers."""
    matrices = [
        mx.array(rng.standard_normal((EXPERTS, 24, 32)).astype(np.float32)) for _ in range(2)
    ]
    mx.eval(matrices)

    def graph(x: mx.array, experts: mx.array) -> mx.array:
        x = x[:, None, None]
        others = experts[:, ::-1] * 1 if other == "experts" else experts
        gate = ops.expert_linear(x, experts, matrices[0])
        up = ops.expert_linear(x * 2.0 if other == "rows" else x, others, matrices[1])
        out = ops.silu_mul(gate, up)
        return (out + gate if other == "uses" else out).sum(axis=1)

    x = mx.array(rng.standard_normal((5, 32)).astype(np.float32))
    experts = mx.array(rng.integers(0, EXPERTS, (5, 3)).astype(np.uint32))
    inputs = executables.placeholders([x, experts])
    program = executables.CpuExecutable(inputs, [graph(*inputs)])
    np.testing.assert_array_equal(np.array(program([x, experts])[0]), np.array(graph(x, experts)))


@pytest.mark.parametrize("simd", [pytest.param("avx2", marks=pytest.mark.long), "baseline"])
def test_experts_in_a_process_of(simd: str) -> None:
    run_in_process_of(simd, 4, [__file__], "not in_a_process_of")


def test_a_part_of_a_program_does_not_run_by_itself(rng) -> None:
    """Other dtypes than float32 and GPUs' streams are for graphs that become device programs."""
    x, weight = mx.zeros((2, 1, 32), mx.float16), mx.zeros((3, 4, 32), mx.float16)
    indices = mx.zeros((2,), mx.uint32)
    with pytest.raises(ValueError, match=r"\[expert_linear\] x must be float32 but got float16"):
        ops.expert_linear(x, indices, weight)
    out = ops.expert_linear(x, indices, weight, for_program=True, stream=mx.cpu)
    assert out.dtype == mx.float16 and out.shape == (2, 1, 4)
    with pytest.raises(RuntimeError, match="must be float32 outside of an executable"):
        mx.eval(out)
    with pytest.raises(ValueError, match=r"\[expert_linear\] x must be"):
        ops.expert_linear(indices, indices, weight, for_program=True)


def test_products_of_sorted_rows_check_their_arguments() -> None:
    """On the CPU there is no kernel, whatever the arguments."""
    weights = ops.ExpertWeights(
        *mx.quantize(mx.zeros((4, 128, 256)), group_size=64, bits=4), None, 64, 4
    )
    down = ops.ExpertWeights(
        *mx.quantize(mx.zeros((4, 256, 128)), group_size=64, bits=4), None, 64, 4
    )
    x, experts = mx.zeros((8, 256)), mx.zeros((8, 2), mx.uint32)
    assert ops.sorted_expert_linear(x, experts[:, 0], weights) is None
    assert ops.expert_glu(x, experts, weights, weights, down) is None
    for given, message in (
        ((x[:, :64], experts, weights, weights, down), "x"),
        ((x, experts[:3], weights, weights, down), "experts"),
        ((x, experts.astype(mx.float32), weights, weights, down), "experts"),
        ((x, experts, weights, down, down), "up"),
        ((x, experts, weights, weights, weights), "down"),
        ((x, experts, weights._replace(biases=None), weights, down), "biases"),
        ((x, experts, weights._replace(bits=7), weights, down), "mode"),
        ((x, experts, weights._replace(bias=mx.zeros(3)), weights, down), "bias"),
    ):
        with pytest.raises(ValueError, match=rf"\[expert_glu\].*{message}"):
            ops.expert_glu(*given)
    with pytest.raises(ValueError, match=r"\[sorted_expert_linear\] experts"):
        ops.sorted_expert_linear(x, experts, weights)
