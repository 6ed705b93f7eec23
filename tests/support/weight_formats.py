"""Weights in checkpoint formats, and their values in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

AFFINE = [(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FLOATS = [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
FORMATS = [("affine", bits, group) for bits, group in AFFINE] + FLOATS
SCALE_DTYPES = [mx.float32, mx.float16, mx.bfloat16]

Floats = npt.NDArray[np.float64]


def values_of(packed: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.int64]:
    """Unpacks the `bits`-bit numbers of each row, lowest bits first."""
    flat = np.unpackbits(packed.view(np.uint8), axis=-1, bitorder="little")
    flat = flat.reshape(packed.shape[0], -1, bits).astype(np.int64)
    return flat @ (1 << np.arange(bits))


def e2m1(x: npt.NDArray[np.int64]) -> Floats:
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return np.where(x & 8, -1.0, 1.0) * magnitudes[x & 7]


def e4m3(x: npt.NDArray[np.int64]) -> Floats:
    exponent, mantissa = (x >> 3) & 15, x & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return np.where(x & 128, -1.0, 1.0) * np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)


def dequantized(arrays: list[mx.array], mode: str, bits: int, group: int) -> Floats:
    """The dequantized values, computed from the formats' definitions."""
    q = values_of(np.array(arrays[0]), bits)
    if mode == "affine":
        scale, bias = (np.array(a.astype(mx.float32)).astype(np.float64) for a in arrays[1:])
        return q * np.repeat(scale, group, axis=1) + np.repeat(bias, group, axis=1)
    codes = np.array(arrays[1]).astype(np.int64)
    scale = e4m3(codes) if mode == "nvfp4" else 2.0 ** (codes - 127)
    return (e4m3(q) if mode == "mxfp8" else e2m1(q)) * np.repeat(scale, group, axis=1)


def quantized(
    rng: np.random.Generator, n: int, k: int, mode: str, bits: int, group: int, dtype: mx.Dtype
) -> list[mx.array]:
    """Random bits, with scales near one and some zero and denormal ones."""
    weight = mx.array(rng.integers(0, 2**32, (n, k * bits // 32), dtype=np.uint32))
    if mode == "affine":
        scales, biases = rng.standard_normal((2, n, k // group))
        least = 2.0**-24 if dtype == mx.float16 else 2.0**-133
        scales.flat[::7], scales.flat[3::11] = 0, least
        arrays = [weight, mx.array(scales).astype(dtype), mx.array(biases).astype(dtype)]
    else:
        if mode == "mxfp8":  # 0x7f and 0xff are NaN
            weight = weight & 0xF7F7F7F7
        codes = rng.integers(40, 56, (n, k // group), dtype=np.uint8)
        if mode != "nvfp4":
            codes += 80
        codes.flat[::7], codes.flat[3::11] = 0, 1
        arrays = [weight, mx.array(codes)]
    mx.eval(arrays)
    return arrays


def assert_near(got: mx.array, x: Floats, weight: Floats, bias: Floats | None = None) -> None:
    """Asserts that each result is within a few roundings of its largest terms."""
    expected = x @ weight.T + (0 if bias is None else bias)
    terms = np.abs(x) @ np.abs(weight.T) + (0 if bias is None else np.abs(bias))
    error = np.abs(np.array(got).astype(np.float64) - expected)
    # q * scale and bias may cancel, so the rounding error scales with the larger of the two.
    assert (error <= 4e-6 * terms + 1e-30).all(), (error / (terms + 1e-30)).max()
