"""Linear layers outside of whole steps on the simulated GPU, by kernels that calibration allows."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np
from sim import SimLibrary

from mlx_paged import kernels, ops
from mlx_paged.kernels import MAX_ROWS, AllowedProduct
from support.simulated import simulated_tensor_units
from support.weight_formats import dequantized, quantized


class Form(NamedTuple):
    """A format of weights; `bits` is 16 without quantization."""

    mode: str
    bits: int
    group: int

    def __str__(self) -> str:
        return "dense" if self == DENSE else f"{self.mode}-{self.bits}-{self.group}"


DENSE = Form("dense", 16, 1)
# One group size per mode and number of bits.
FORMS = [
    DENSE,
    *(Form("affine", b, g) for b, g in ((2, 128), (3, 32), (4, 64), (5, 128), (6, 32), (8, 64))),
    *(Form("mxfp4", 4, 32), Form("mxfp8", 8, 32), Form("nvfp4", 4, 16)),
]


def kernel_of(dtype: mx.Dtype, form: Form, tile: int) -> str:
    """The kernel whose tiles have this many rows of x."""
    function = "tensor_product" if tile > 16 else "product_rows"
    weight = "" if form == DENSE else f"_{form.mode}_{form.bits}"
    return f"{function}_{str(dtype).rpartition('.')[2]}{weight}_m{tile}"


class Layer:
    """A random linear layer; `exact` has the weight's values in float64."""

    def __init__(
        self, rng: np.random.Generator, form: Form, dtype: mx.Dtype, n: int, k: int, *, bias: bool
    ) -> None:
        self.form, self.dtype = form, dtype
        self.bias = normal(rng, n, dtype=dtype) if bias else None
        if form == DENSE:
            self.arrays = [normal(rng, n, k, dtype=dtype)]
            self.exact = numbers(self.arrays[0])
        else:
            self.arrays = quantized(rng, n, k, *form, dtype)
            self.exact = dequantized(self.arrays, *form)

    def __call__(self, x: mx.array) -> mx.array:
        weight, *others = self.arrays
        if self.form == DENSE:
            return ops.linear(x, weight, self.bias)
        scales, *biases = others
        mode, bits, group = self.form
        return ops.quantized_linear(
            x, weight, scales, *(biases or [None]), self.bias, group_size=group, bits=bits,
            mode=mode,
        )  # fmt: skip

    def expected(self, x: mx.array, *, rounds_weight: bool) -> np.ndarray:
        """The result in float64. Kernels for tensor units round the weight to their dtype."""
        weight = self.exact
        if rounds_weight:
            weight = numbers(mx.array(weight.astype(np.float32)).astype(self.dtype))
        out = numbers(x) @ weight.T
        return out if self.bias is None else out + numbers(self.bias)


def numbers(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def normal(rng: np.random.Generator, *shape: int, dtype: mx.Dtype) -> mx.array:
    made = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
    mx.eval(made)
    return made


def multiply(
    layer: Layer,
    x: mx.array,
    tile: int,
    library: SimLibrary | None = None,
    rows: tuple[int, int] = (1, MAX_ROWS),
) -> mx.array:
    """The layer's result on a GPU with tensor units, where calibration allows one kernel.

    Args:
        rows: The numbers of rows for which it does.
    """
    with simulated_tensor_units(library):
        kernels.allow_products([AllowedProduct(kernel_of(layer.dtype, layer.form, tile), *rows)])
        try:
            out = layer(x)
            mx.eval(out)
        finally:
            kernels.allow_products(())
    return out


# Largest error of a row, relative to its norm.
TOLERANCE = {mx.float16: 1e-3, mx.bfloat16: 8e-3}


def assert_close(out: mx.array, expected: np.ndarray) -> None:
    assert out.shape == expected.shape
    error = np.linalg.norm(numbers(out) - expected, axis=-1)
    most = TOLERANCE[out.dtype] * np.linalg.norm(expected, axis=-1)
    assert (error <= most).all(), (error / most).max()
