"""Products with weights in the formats that checkpoints have, against float64.

``MLX_PAGED_TEST_PRODUCTS=all`` runs every format with every shape and number of rows.
"""

from __future__ import annotations

import os
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.simd_processes import run_in_process_of
from support.weight_formats import (
    FLOATS,
    FORMATS,
    SCALE_DTYPES,
    assert_near,
    dequantized,
    quantized,
)

from mlx_paged import ops

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.cpu, reason="GPUs multiply these with MLX's own kernels"
)

EVERYTHING = os.environ.get("MLX_PAGED_TEST_PRODUCTS") == "all"
# Rows on both sides of the borders between ways to multiply.
ROWS = [*range(1, 66), 200] if EVERYTHING else [1, 3, 6, 65]
# k: shorter than a part of the kernel's, exactly parts, and parts with some more.
SHAPES = [(1, 1), (5, 4), (33, 5), (18, 9)] if EVERYTHING else [(5, 4), (18, 9)]  # n, groups of 128


@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS)
def test_quantized_products(rng, mode: str, bits: int, group: int) -> None:
    for dtype in SCALE_DTYPES if mode == "affine" else [mx.float32]:
        for n, groups in SHAPES:
            k = groups * 128 + (group if group < 128 else 0)  # odd in groups
            arrays = quantized(rng, n, k, mode, bits, group, dtype)
            exact = dequantized(arrays, mode, bits, group)
            biases = arrays[2] if mode == "affine" else None
            for rows in ROWS:
                x = rng.standard_normal((rows, k)).astype(np.float32)
                bias = rng.standard_normal(n).astype(np.float32) if rows % 2 else None
                got = ops.quantized_linear(
                    mx.array(x), arrays[0], arrays[1], biases,
                    None if bias is None else mx.array(bias),
                    group_size=group, bits=bits, mode=mode,
                )  # fmt: skip
                assert got.dtype == mx.float32
                assert_near(got, x, exact, bias)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_products_of_16_bit_weights(rng, dtype: mx.Dtype) -> None:
    for n, k in [(1, 1), (5, 17), (18, 512), (33, 513), (9, 1039)]:
        weight = mx.array(rng.standard_normal((n, k))).astype(dtype)
        mx.eval(weight)
        exact = np.array(weight.astype(mx.float32)).astype(np.float64)
        for rows in [*ROWS, 0]:
            x = rng.standard_normal((rows, k)).astype(np.float32)
            assert_near(ops.linear(mx.array(x), weight), x, exact)


def test_a_product_of_many_rows_is_whole_where_its_weights_are_unpacked_in_parts(rng) -> None:
    arrays = quantized(rng, 300, 8192, "affine", 4, 64, mx.bfloat16)  # parts of 4 MiB
    x = rng.standard_normal((70, 8192)).astype(np.float32)
    got = ops.quantized_linear(mx.array(x), *arrays, group_size=64, bits=4)
    assert_near(got, x, dequantized(arrays, "affine", 4, 64))


@pytest.mark.parametrize(("mode", "bits", "group"), [("affine", 4, 64), ("affine", 5, 32), *FLOATS])
def test_a_row_does_not_depend_on_the_others(rng, mode: str, bits: int, group: int) -> None:
    arrays = quantized(rng, 19, 1152, mode, bits, group, mx.bfloat16)
    x = mx.array(rng.standard_normal((16, 1152)).astype(np.float32))
    biases = arrays[2] if mode == "affine" else None

    def multiply(x: mx.array) -> Any:
        return np.array(
            ops.quantized_linear(
                x, *arrays[:2], biases, group_size=group, bits=bits, mode=mode
            )
        )  # fmt: skip

    whole = multiply(x)
    for rows in range(1, 16):
        assert np.array_equal(multiply(x[:rows]), whole[:rows]), rows


OPERANDS: dict[str, Any] = {
    "strided rows": lambda x, w, s, b: (mx.repeat(x, 2, axis=0)[::2], w, s, b),
    "transposed rows": lambda x, w, s, b: (mx.array(np.array(x.T)).T, w, s, b),
    "three axes": lambda x, w, s, b: (x.reshape(3, 2, -1), w, s, b),
    "a vector": lambda x, w, s, b: (x[0], w, s, b),
    "half precision": lambda x, w, s, b: (x.astype(mx.bfloat16), w, s, b),
    "weights not evaluated": lambda x, w, s, b: (x, w + 0, s, b),
    "strided weights": lambda x, w, s, b: (x, mx.repeat(w, 2, axis=0)[::2], s, b),
    "scales of another dtype than the biases": lambda x, w, s, b: (x, w, s.astype(mx.float16), b),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_other_operands_equal_mlx(rng, name: str) -> None:
    arrays = quantized(rng, 10, 128, "affine", 4, 64, mx.bfloat16)
    x = mx.array(rng.standard_normal((6, 128)).astype(np.float32))
    operands = OPERANDS[name](x, *arrays)
    mx.eval(list(operands[2:]))
    got = ops.quantized_linear(*operands, group_size=64, bits=4)
    expected = mx.quantized_matmul(*operands, True, 64, 4)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    # (MLX sums in bfloat16.)
    exact = mx.quantized_matmul(operands[0].astype(mx.float32), *operands[1:], True, 64, 4)
    assert mx.allclose(got, exact, rtol=2**-8 if got.dtype == mx.bfloat16 else 1e-4, atol=1e-4)


def test_a_quantized_product_of_no_rows_has_none(rng) -> None:  # (MLX's own crashes)
    arrays = quantized(rng, 10, 128, "affine", 4, 64, mx.bfloat16)
    got = ops.quantized_linear(mx.zeros((0, 128)), *arrays, group_size=64, bits=4)
    mx.eval(got)
    assert (got.shape, got.dtype) == ((0, 10), mx.float32)


def test_a_gradient_passes_a_quantized_product_and_a_map_does(rng) -> None:
    layer = nn.QuantizedLinear(64, 32, group_size=32)
    x = mx.array(rng.standard_normal((4, 3, 64)).astype(np.float32))
    mx.eval(layer.parameters(), x)

    def ours(x: mx.array, bias: mx.array) -> mx.array:
        return ops.quantized_linear(
            x, layer.weight, layer.scales, layer.biases, bias, group_size=32, bits=4
        )

    def theirs(x: mx.array, bias: mx.array) -> mx.array:
        product = mx.quantized_matmul(x, layer.weight, layer.scales, layer.biases, True, 32, 4)
        return product + bias

    bias = mx.array(rng.standard_normal(32).astype(np.float32))
    gradients = [
        mx.grad(lambda x, b, f=f: (f(x, b) ** 2).sum(), argnums=(0, 1))(x, bias)
        for f in (ours, theirs)
    ]
    for got, expected in zip(*gradients):
        assert mx.allclose(got, expected, rtol=1e-4, atol=1e-3)
    for axis in range(2):
        mapped = mx.vmap(lambda x: ours(x, bias), in_axes=axis)(x)
        assert mx.allclose(mapped, mx.moveaxis(theirs(x, bias), axis, 0), rtol=1e-4, atol=1e-3)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "k": ({"x": mx.ones((2, 96))}, "last axis of x must be 128"),
    "scales": ({"scales": mx.ones((10, 3))}, "scales"),
    "bias": ({"bias": mx.ones((9,))}, "bias"),
}


@pytest.mark.parametrize("name", BAD)
def test_operands_that_do_not_fit_are_refused(rng, name: str) -> None:
    weight, scales, biases = quantized(rng, 10, 128, "affine", 4, 64, mx.float32)
    fields, message = BAD[name]
    given = {"x": mx.ones((2, 128)), "weight": weight, "scales": scales, "biases": biases}
    given |= fields
    mx.eval(given)
    with pytest.raises(ValueError, match=message):
        ops.quantized_linear(**given, group_size=64, bits=4)


@pytest.mark.parametrize("simd", [pytest.param("avx2", marks=pytest.mark.long), "baseline"])
def test_formats_in_a_process_of(simd: str) -> None:
    run_in_process_of(simd, 4, [__file__], "not in_a_process_of")
