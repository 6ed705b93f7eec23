"""Products of activations as integers (int8, or three digits), or rounded to bfloat16, against
float64.

``MLX_PAGED_TEST_PRODUCTS=all`` runs every shape with every number of rows.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from support.simd_processes import run_in_process_of
from support.weight_formats import Floats, assert_near, dequantized, quantized

from mlx_paged import ops
from mlx_paged.extension import build_info

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.cpu, reason="only the CPU multiplies integers"
)

EVERYTHING = os.environ.get("MLX_PAGED_TEST_PRODUCTS") == "all"
FORMATS = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]
ROUNDED = 32  # int8 activations that share a scale
# Rows on both sides of the borders between ways to multiply, and more than are rounded at once.
ROWS = [*range(1, 66), 257] if EVERYTHING else [1, 2, 3, 7, 23, 25, 36, 257]
# n, and k in groups of weights: a part of what is rounded together, and more scales than are read
# at once.
SHAPES = [(1, 1), (5, 3), (33, 4), (70, 17)] if not EVERYTHING else [
    (n, groups) for n in (1, 3, 4, 5, 16, 17, 32, 33, 70) for groups in (1, 2, 3, 4, 5, 16, 17, 35)
]  # fmt: skip


def multiply(x: Floats | mx.array, arrays: list[mx.array], bits: int, group: int) -> Any:
    given = x if isinstance(x, mx.array) else mx.array(x.astype(np.float32))
    return ops.quantized_linear(
        given, *arrays, group_size=group, bits=bits, activations="int8"
    )  # fmt: skip


def exact_rows(rng: np.random.Generator, rows: int, k: int) -> Floats:
    """Activations that rounding does not change: whole numbers up to 127, and their scales."""
    codes = rng.integers(-127, 128, (rows, k // ROUNDED, ROUNDED)).astype(np.float64)
    largest = rng.integers(0, ROUNDED, (rows, k // ROUNDED, 1))
    np.put_along_axis(codes, largest, rng.choice([-127.0, 127.0], largest.shape), axis=-1)
    scales = 2.0 ** rng.integers(-12, 12, (rows, k // ROUNDED, 1))
    return (codes * scales).reshape(rows, k)


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_products_of_what_rounding_does_not_change(rng, bits: int, group: int) -> None:
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        for n, groups in SHAPES:
            k = groups * group
            arrays = quantized(rng, n, k, "affine", bits, group, dtype)
            weight = dequantized(arrays, "affine", bits, group)
            for rows in ROWS:
                x = exact_rows(rng, rows, k)
                assert_near(multiply(x, arrays, bits, group), x, weight)


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_rounding_is_to_the_nearest_of_255_steps_of_each_group(rng, bits: int, group: int) -> None:
    n, k = 21, 2 * group + (group if group < 128 else 0)
    arrays = quantized(rng, n, k, "affine", bits, group, mx.bfloat16)
    weight = dequantized(arrays, "affine", bits, group)
    for rows in (1, 5, 40):
        x = rng.standard_normal((rows, k)) * 2.0 ** rng.integers(-20, 20, (rows, 1))
        x = x.astype(np.float32).astype(np.float64)
        groups = x.reshape(rows, -1, ROUNDED)
        steps = np.abs(groups).max(axis=-1, keepdims=True) / 127
        most = np.broadcast_to(steps / 2, groups.shape).reshape(rows, k)
        error = np.abs(np.array(multiply(x, arrays, bits, group)) - x @ weight.T)
        assert (error <= (most * (1 + 1e-5) + np.abs(x) * 1e-5) @ np.abs(weight).T).all()
        # Rounding is there, and as small as that of the nearest step would be.
        typical = np.sqrt((most**2 / 3) @ (weight**2).T)
        assert 0.5 < np.sqrt((error**2).sum() / (typical**2).sum()) < 1.5


@pytest.mark.parametrize(("bits", "group"), FORMATS)
@pytest.mark.parametrize("rows", [1, 3, 4, 40])
def test_the_largest_sums_are_exact(bits: int, group: int, rows: int) -> None:
    n, k = 35, 128
    most = 2**bits - 1
    for codes, sign in ((most, 1), (most, -1), (1, -1), (0, 1)):
        packed = np.packbits(
            np.unpackbits(
                np.full((n, k, 1), codes, np.uint8), axis=-1, bitorder="little"
            )[..., :bits].reshape(n, -1),
            axis=-1, bitorder="little",
        )  # fmt: skip
        arrays = [
            mx.array(packed.view(np.uint32)),
            mx.ones((n, k // group)),
            mx.full((n, k // group), 2.0),
        ]
        got = np.array(multiply(np.full((rows, k), 127.0 * sign), arrays, bits, group))
        assert (got == sign * 127.0 * k * (codes + 2)).all()  # (below 2^24)


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_a_row_does_not_depend_on_the_others(rng, bits: int, group: int) -> None:
    k = 1152 - (0 if group == 128 else group)
    arrays = quantized(rng, 37, k, "affine", bits, group, mx.bfloat16)
    x = mx.array(rng.standard_normal((300, k)).astype(np.float32))
    whole = np.array(multiply(x, arrays, bits, group))
    for rows in (1, 2, 3, 4, 5, 8, 13, 23, 24, 27, 31, 64, 65, 256, 299):
        assert np.array_equal(np.array(multiply(x[:rows], arrays, bits, group)), whole[:rows]), rows


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [2, 30])
def test_numbers_at_the_ends_of_their_range(rng, bits: int, rows: int) -> None:
    arrays = quantized(rng, 9, 256, "affine", bits, 64, mx.float32)
    weight = dequantized(arrays, "affine", bits, 64)
    clean = rng.standard_normal((rows, 256)).astype(np.float32)
    expected = np.array(multiply(clean, arrays, bits, 64))
    for value in (np.nan, np.inf, -np.inf):
        x = clean.copy()
        x[1, 100] = value
        got = np.array(multiply(x, arrays, bits, 64))
        assert np.isnan(got[1]).all()
        np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(expected, 1, 0))
    # Groups of zeros, and of denormal and other tiny numbers, which count as zeros.
    for value in (0.0, 1e-45, 2.0**-101):
        x = clean.copy()
        x[:, 32:64] = value
        without = x.copy()
        without[:, 32:64] = 0
        np.testing.assert_array_equal(
            np.array(multiply(x, arrays, bits, 64)), np.array(multiply(without, arrays, bits, 64))
        )
        assert np.isfinite(np.array(multiply(x, arrays, bits, 64))).all()
        assert (np.array(multiply(np.full((rows, 256), value), arrays, bits, 64)) == 0).all()
    for value in (2.0**-87, 2.0**87):  # (groups of 127 * 2^-12 to 2^12 of these)
        x = exact_rows(rng, rows, 256) * value
        assert_near(multiply(x, arrays, bits, 64), x, weight)


OTHERS = [("affine", 2, 64), ("affine", 3, 32), ("affine", 6, 128), ("mxfp4", 4, 32),
          ("mxfp8", 8, 32), ("nvfp4", 4, 16)]  # fmt: skip


@pytest.mark.parametrize(("mode", "bits", "group"), OTHERS)
def test_other_formats_keep_their_activations(rng, mode: str, bits: int, group: int) -> None:
    arrays = quantized(rng, 9, 256, mode, bits, group, mx.bfloat16)
    x = mx.array(rng.standard_normal((3, 256)).astype(np.float32))
    given = {"group_size": group, "bits": bits, "mode": mode}
    got, expected = (
        ops.quantized_linear(x, *arrays, activations=name, **given) for name in ("int8", "float32")
    )
    assert mx.array_equal(got, expected)


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_bias_axes_and_strides(rng, bits: int, group: int) -> None:
    arrays = quantized(rng, 12, 256, "affine", bits, group, mx.float16)
    x = mx.array(rng.standard_normal((6, 256)).astype(np.float32))
    bias = mx.array(rng.standard_normal(12).astype(np.float32))
    plain = multiply(x, arrays, bits, group)
    given = {"group_size": group, "bits": bits, "activations": "int8"}
    assert mx.array_equal(ops.quantized_linear(x, *arrays, bias, **given), plain + bias)
    assert mx.array_equal(
        multiply(x.reshape(2, 3, 256), arrays, bits, group), plain.reshape(2, 3, 12)
    )
    assert mx.array_equal(multiply(mx.array(np.array(x.T)).T, arrays, bits, group), plain)
    assert multiply(x[:0], arrays, bits, group).shape == (0, 12)
    mapped = mx.vmap(lambda row: multiply(row, arrays, bits, group))(x)
    assert mx.array_equal(mapped, plain)
    gradient = mx.grad(lambda x: multiply(x, arrays, bits, group).sum())(x)
    weight = dequantized(arrays, "affine", bits, group)
    assert np.allclose(np.array(gradient), weight.sum(axis=0), rtol=1e-3, atol=1e-2)


# --- Three digits ---------------------------------------------------------------------------------

SIMD = build_info()["simd"]
HAS_DIGITS = SIMD in ("avx512vnni", "avx512bf16", "amx_emulated", "amx", "avx2")
WIDE_BITS = [4] if SIMD == "avx2" else [4, 8]  # of weights
needs_digits = pytest.mark.skipif(
    not HAS_DIGITS, reason="products of float activations are in float32 with these kernels"
)


def shared(group: int) -> int:
    """Float activations that share a scale, if that many weights do."""
    return 32 if group == 32 else 64


def largest(bits: int, group: int) -> int:
    """The largest integer whose sums of products with weights fit 32 bits."""
    return 2**21 if bits == 4 and group > 32 else 2**22


def multiply_floats(
    x: Floats | mx.array, arrays: list[mx.array], bits: int, group: int
) -> mx.array:
    given = x if isinstance(x, mx.array) else mx.array(x.astype(np.float32))
    return ops.quantized_linear(given, *arrays, group_size=group, bits=bits, by_rows=True)


@needs_digits
@pytest.mark.parametrize("bits", WIDE_BITS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_integers_of_all_digits_are_multiplied_as_they_are(rng, bits: int, group: int) -> None:
    """Against sums of integers: what is left are roundings of whole groups' results."""
    most, together = largest(bits, group), shared(group)
    for n, groups in SHAPES:
        k = groups * group
        arrays = quantized(rng, n, k, "affine", bits, group, mx.float32)
        arrays[1] = mx.ones_like(arrays[1])
        arrays[2] = mx.zeros_like(arrays[2])
        codes = dequantized(arrays, "affine", bits, group)
        for rows in ROWS:
            integers = rng.integers(-most + 1, most, (rows, k)).astype(np.float64)
            scales = np.repeat(2.0 ** rng.integers(-3, 4, (rows, k // together)), together, axis=1)
            got = np.array(multiply_floats(integers * scales, arrays, bits, group)).astype(
                np.float64
            )
            sums = (integers * scales).reshape(rows, 1, -1, together) * codes.reshape(
                1, n, -1, together
            )
            allowed = np.abs(sums.sum(axis=-1)).sum(axis=-1) * 4e-7
            assert (np.abs(got - sums.sum(axis=(-1, -2))) <= allowed).all()


def codes_of(arrays: list[mx.array], bits: int, group: int) -> np.ndarray:
    """The integers of affine weights, ``[n, k]``."""
    ones, zeros = mx.ones_like(arrays[1]), mx.zeros_like(arrays[2])
    return dequantized([arrays[0], ones, zeros], "affine", bits, group).astype(np.int64)


# Both sides of each border between ways to multiply.
FEW_AND_MORE = [*range(1, 65)] if EVERYTHING else [1, 2, 3, 4, 5, 7, 8, 11, 12, 16, 17, 33, 64]


@pytest.mark.parametrize("activations", ["int8", pytest.param("float32", marks=needs_digits)])
@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_each_group_has_its_own_scale_and_bias(
    rng, activations: str, bits: int, group: int
) -> None:
    """Against sums of integers, with scales that differ up to 2000 times between groups."""
    if activations == "float32" and bits not in WIDE_BITS:
        pytest.skip("products of float activations are in float32 with these kernels")
    is_int8 = activations == "int8"
    together = ROUNDED if is_int8 else shared(group)
    most = 127 if is_int8 else largest(bits, group) - 1
    for dtype, (n, groups) in zip(
        itertools.cycle((mx.float32, mx.float16, mx.bfloat16)),
        [(1, 1), (3, 2), (5, 3), (33, 4), (70, 17), (37, 9), (66, 5)],
    ):
        k = groups * group
        arrays = quantized(rng, n, k, "affine", bits, group, dtype)
        for i in (1, 2):
            factors = 2.0 ** rng.integers(-5, 7, (n, groups)) * rng.choice([-1, 1], (n, groups))
            arrays[i] = mx.array(factors * rng.uniform(1, 2, (n, groups))).astype(dtype)
        codes = codes_of(arrays, bits, group).reshape(n, -1, together)
        scale, bias = (
            np.repeat(np.array(a.astype(mx.float32)).astype(np.float64), group // together, axis=1)
            for a in arrays[1:]
        )
        for rows in FEW_AND_MORE:
            integers = rng.integers(-most, most + 1, (rows, k // together, together))
            integers[:, :, rng.integers(together)] = most  # rounding leaves them as they are
            steps = 2.0 ** rng.integers(-3, 4, (rows, k // together))
            x = (integers * steps[:, :, None]).reshape(rows, k)
            products = np.einsum("rgi,ngi->rng", integers, codes) * steps[:, None]
            sums = (integers.sum(axis=-1) * steps)[:, None]
            got = (multiply if is_int8 else multiply_floats)(x, arrays, bits, group)
            error = np.abs(np.array(got) - (products * scale + sums * bias).sum(axis=-1))
            allowed = 4e-7 * (np.abs(products * scale) + np.abs(sums * bias)).sum(axis=-1)
            assert (error <= allowed).all(), (dtype, n, groups, rows)


@needs_digits
@pytest.mark.parametrize("bits", WIDE_BITS)
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("rows", [1, 3, 4, 40])
def test_the_largest_sums_of_all_digits_fit(bits: int, group: int, rows: int) -> None:
    n, k, most = 35, 128, largest(bits, group)
    arrays = [
        mx.full((n, k * bits // 32), 0xFFFFFFFF, mx.uint32),
        mx.ones((n, k // group)),
        mx.full((n, k // group), 2.0),
    ]
    half = most // 2
    # (The first is rounded up, to the largest integer that there is.)
    for value in (most - 0.25, most - 1, -most + 0.25, half, -half, 128 - most, most - 2**15):
        got = np.array(multiply_floats(np.full((rows, k), float(value)), arrays, bits, group))
        np.testing.assert_allclose(got, value * k * (2**bits + 1), rtol=3e-7)


@needs_digits
@pytest.mark.parametrize("bits", WIDE_BITS)
def test_errors_are_like_those_of_float32(rng, bits: int) -> None:
    for k, spread in ((576, 0), (2048, 0), (2048, 8), (8192, 4)):
        arrays = quantized(rng, 40, k, "affine", bits, 64, mx.bfloat16)
        weight = dequantized(arrays, "affine", bits, 64)
        x = rng.standard_normal((36, k)) * 2.0 ** rng.integers(-spread, spread + 1, (36, k))
        x = x.astype(np.float32).astype(np.float64)
        error = np.array(multiply_floats(x, arrays, bits, 64)).astype(np.float64) - x @ weight.T
        # float32 sums have 1e-7 to 4e-7, int8 5e-3.
        assert np.sqrt((error**2).mean()) < 1.5e-6 * np.sqrt(((x @ weight.T) ** 2).mean())


@needs_digits
@pytest.mark.parametrize("bits", WIDE_BITS)
@pytest.mark.parametrize("every", [2048, 32], ids=["one", "in_every_group"])
def test_large_activations_take_no_digits_from_the_others(rng, bits: int, every: int) -> None:
    """Weights are small where they are, as where a model has learned to live with them."""
    k, others = 2048, rng.standard_normal((70, 2048))
    is_large = np.arange(k) % every == 3
    # Weights that float32 holds as they are, with or without FMA.
    codes = np.where(is_large, 8, rng.integers(0, 16, (40, k))).astype(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words = (codes.reshape(40, -1, len(shifts)) << shifts).sum(axis=-1)
    groups = (40, k // 64)
    arrays = [mx.array(words.astype(np.uint32)), mx.full(groups, 1 / 32), mx.full(groups, -8 / 32)]
    mx.eval(arrays)
    exact = (codes.astype(np.float64) - 8) / 32
    for large in (1.0, 30.0, 200.0, 1e3, 1e5, 1e6):
        # Other rows of the step have none.
        x = np.where(is_large & (np.arange(70)[:, None] % 3 < 2), large, others)
        x = x.astype(np.float32).astype(np.float64)
        whole = np.array(multiply_floats(x, arrays, bits, 64))
        error, expected = whole - x @ exact.T, x @ exact.T
        worst = np.sqrt((error**2).mean(axis=1) / (expected**2).mean(axis=1)).max()
        # A row of 64 activations that share a scale loses a bit more than one of 32, for speed
        # (integers.h). Rounding them to bfloat16 would cost up to 2^-9: 40 times the larger bound.
        assert worst < (1e-5 if every == k else 5e-5), (large, worst)
        if large >= 1e3:  # in float32
            assert worst < 1e-6, (large, worst)
        for rows in (1, 2, 3, 5, 8, 9, 31, 33, 64):
            for first in (0, 70 - rows):
                part = x[first : first + rows]
                got = np.array(multiply_floats(part, arrays, bits, 64))
                assert np.array_equal(got, whole[first : first + rows]), (large, rows)


@needs_digits
@pytest.mark.parametrize("bits", WIDE_BITS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_row_of_digits_does_not_depend_on_the_others(rng, bits: int, group: int) -> None:
    k = 1152 - (0 if group == 128 else group)
    arrays = quantized(rng, 37, k, "affine", bits, group, mx.bfloat16)
    x = mx.array(rng.standard_normal((300, k)).astype(np.float32))
    whole = np.array(multiply_floats(x, arrays, bits, group))
    for rows in (1, 2, 3, 4, 5, 8, 13, 31, 32, 33, 35, 64, 65, 256, 299):
        assert np.array_equal(
            np.array(multiply_floats(x[:rows], arrays, bits, group)), whole[:rows]
        )


@needs_digits
@pytest.mark.parametrize("bits", WIDE_BITS)
@pytest.mark.parametrize("rows", [2, 40])
def test_digits_of_numbers_at_the_ends_of_their_range(rng, bits: int, rows: int) -> None:
    arrays = quantized(rng, 9, 256, "affine", bits, 64, mx.float32)
    weight = dequantized(arrays, "affine", bits, 64)
    clean = rng.standard_normal((rows, 256)).astype(np.float32)
    expected = np.array(multiply_floats(clean, arrays, bits, 64))
    for value in (np.nan, np.inf, -np.inf):
        x = clean.copy()
        x[1, 100] = value
        got = np.array(multiply_floats(x, arrays, bits, 64))
        assert np.isnan(got[1]).all()
        np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(expected, 1, 0))
    for value in (0.0, 1e-45, 2.0**-101):
        x = np.full((rows, 256), value)
        assert (np.array(multiply_floats(x, arrays, bits, 64)) == 0).all()
    for value in (2.0**-98, 2.0**90):
        x = (clean * value).astype(np.float32).astype(np.float64)
        x[:, ::32] = value * 4  # no group is below 2^-100
        assert_near(multiply_floats(x, arrays, bits, 64), x, weight)


# --- bfloat16 -------------------------------------------------------------------------------------

needs_bfloat16 = pytest.mark.skipif(
    "bfloat16" not in ops.activations(), reason="the kernels in use have no such product"
)
FEW = 64  # rows, which are not rounded


def exact(a: mx.array) -> Floats:
    return np.array(a.astype(mx.float32)).astype(np.float64)


@needs_bfloat16
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (5, 17), (31, 31), (32, 32), (33, 1025), (70, 2047), (3, 2080)]
)
def test_products_of_many_rows_of_bfloat16(rng, n: int, k: int) -> None:
    weight = mx.array(rng.standard_normal((n, k))).astype(mx.bfloat16)
    mx.eval(weight)
    for rows in [*range(FEW + 1, FEW + 9), 300] if EVERYTHING else [65, 71, 76, 131]:
        x = mx.array(rng.standard_normal((rows, k)).astype(np.float32))
        bias = mx.array(rng.standard_normal(n).astype(np.float32)) if rows % 2 else None
        got = ops.linear(x, weight, bias, activations="bfloat16")
        assert_near(
            got, exact(x.astype(mx.bfloat16)), exact(weight), None if bias is None else exact(bias)
        )
        if k > 1000:  # rounding is there
            assert not mx.array_equal(got, ops.linear(x, weight, bias))


@needs_bfloat16
def test_what_is_not_rounded_to_bfloat16(rng) -> None:
    x = mx.array(rng.standard_normal((80, 96)).astype(np.float32))
    weight = mx.array(rng.standard_normal((20, 96)).astype(np.float32))
    for dtype, rows in ((mx.float32, 80), (mx.float16, 80), (mx.bfloat16, FEW), (mx.bfloat16, 1)):
        given = weight.astype(dtype)
        mx.eval(given)
        got = ops.linear(x[:rows], given, activations="bfloat16")
        assert mx.array_equal(got, ops.linear(x[:rows], given))
    given = weight.astype(mx.bfloat16)
    mx.eval(given)
    got = ops.linear(x, given, activations="int8")
    assert mx.array_equal(got, ops.linear(x, given))


@needs_bfloat16
def test_a_row_of_bfloat16_that_is_no_number_stays_alone(rng) -> None:
    x = rng.standard_normal((80, 96)).astype(np.float32)
    weight = mx.array(rng.standard_normal((20, 96))).astype(mx.bfloat16)
    mx.eval(weight)
    clean = np.array(ops.linear(mx.array(x), weight, activations="bfloat16"))
    for value in (np.nan, np.inf):
        x[7, 50] = value
        got = np.array(ops.linear(mx.array(x), weight, activations="bfloat16"))
        assert not np.isfinite(got[7]).any()
        np.testing.assert_array_equal(np.delete(got, 7, 0), np.delete(clean, 7, 0))


@needs_bfloat16
@pytest.mark.parametrize("k", [1, 47, 1025])
def test_a_column_of_bfloat16_that_is_no_number_stays_alone(rng, k: int) -> None:
    """Vectors read as many elements as they have, also where a column of weights ends."""
    x = mx.array(rng.standard_normal((70, k)).astype(np.float32))
    rows = rng.standard_normal((20, k)).astype(np.float32)
    clean = mx.array(rows).astype(mx.bfloat16)
    rows[1::2] = np.inf
    weight = mx.array(rows).astype(mx.bfloat16)
    mx.eval(clean, weight)
    got, expected = (np.array(ops.linear(x, w, activations="bfloat16")) for w in (weight, clean))
    assert not np.isfinite(got[:, 1::2]).any()
    np.testing.assert_array_equal(got[:, ::2], expected[:, ::2])


# --- bfloat16 weights with float activations, in three parts --------------------------------------

needs_parts = pytest.mark.skipif(
    build_info()["simd"] not in ("amx", "amx_emulated"), reason="these kernels multiply in float32"
)


@needs_parts
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 17), (33, 1025), (70, 2048)])
def test_activations_in_parts_lose_no_bit(rng, n: int, k: int) -> None:
    weight = mx.array(rng.standard_normal((n, k))).astype(mx.bfloat16)
    mx.eval(weight)
    for rows in (65, 80, 97, 300):
        x = rng.standard_normal((rows, k)) * 2.0 ** rng.integers(-12, 12, (rows, k))
        x = x.astype(np.float32)
        got = np.array(ops.linear(mx.array(x), weight)).astype(np.float64)
        expected = x.astype(np.float64) @ exact(weight).T
        allowed = np.abs(x).astype(np.float64) @ np.abs(exact(weight)).T
        # A missing third part would take 4e-6.
        assert (np.abs(got - expected) <= 1e-6 * allowed).all()


@needs_parts
def test_a_row_in_parts_does_not_depend_on_the_others(rng) -> None:
    weight = mx.array(rng.standard_normal((37, 1030))).astype(mx.bfloat16)
    mx.eval(weight)
    x = rng.standard_normal((300, 1030)).astype(np.float32)
    whole = np.array(ops.linear(mx.array(x), weight))
    for rows in (65, 79, 96, 256, 299):
        for first in (0, 300 - rows):
            got = np.array(ops.linear(mx.array(x[first : first + rows]), weight))
            assert np.array_equal(got, whole[first : first + rows]), rows
    # Ordered rows are summed as they are alone.
    got = np.array(ops.linear(mx.array(x), weight, by_rows=70))
    alone = np.concatenate([np.array(ops.linear(mx.array(row[None]), weight)) for row in x[:70]])
    assert np.array_equal(got[:70], alone) and np.array_equal(got[70:], whole[70:])
    for value in (np.nan, np.inf, -np.inf, 3e38):
        changed = x.copy()
        changed[7, 50] = value
        got = np.array(ops.linear(mx.array(changed), weight))
        np.testing.assert_array_equal(np.delete(got, 7, 0), np.delete(whole, 7, 0))
        sums = changed[7].astype(np.float64) @ exact(weight).T
        if np.isnan(value):
            assert np.isnan(got[7]).all()
        else:
            fits = np.abs(sums) <= np.finfo(np.float32).max
            np.testing.assert_array_equal(np.isfinite(got[7]), fits)
            assert (np.sign(got[7]) == np.sign(sums)).all()


@pytest.mark.parametrize("activations", ["float32", "int8"])
@pytest.mark.parametrize("rows", [3, 300])
def test_products_of_one_input_share_its_rounded_rows(rng, activations: str, rows: int) -> None:
    """Each product has the bits that it has of an array that no product has seen."""
    forms = [(4, 64), (4, 64), (8, 32)]
    weights = [quantized(rng, 40, 256, "affine", *form, mx.float32) for form in forms]
    inputs = [rng.standard_normal((rows, 256)).astype(np.float32) for _ in range(2)]

    def product(x: mx.array, which: int) -> mx.array:
        bits, group = forms[which]
        return ops.quantized_linear(
            x, *weights[which], bits=bits, group_size=group, activations=activations, by_rows=True
        )

    a, b = (mx.array(x) * 1 for x in inputs)  # as a layer's inputs, they are not evaluated yet
    order = [(0, 0), (0, 1), (0, 2), (0, 1), (1, 1), (0, 1), (1, 2), (0, 0)]
    got = [product((a, b)[of], which) for of, which in order]
    mx.eval(got)
    for (of, which), array in zip(order, got):
        expected = product(mx.array(inputs[of]), which)
        assert np.array_equal(np.array(array), np.array(expected)), (of, which)
    a += b
    expected = product(mx.array(inputs[0] + inputs[1]), 0)
    assert np.array_equal(np.array(product(a, 0)), np.array(expected))


def test_an_input_that_the_host_has_changed_is_rounded_again(rng) -> None:
    weights = quantized(rng, 40, 256, "affine", 4, 64, mx.float32)

    def product(x: mx.array) -> Any:
        return np.array(ops.quantized_linear(x, *weights, bits=4, group_size=64, by_rows=True))

    first, second = rng.standard_normal((2, 300, 256)).astype(np.float32)
    x = mx.array(first)
    product(x)
    np.array(x, copy=False)[:] = second
    assert np.array_equal(product(x), product(mx.array(second)))


# --- Names and instruction sets -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4", "Int8", "", "bfloat16"])
def test_an_unknown_name_is_refused(rng, name: str) -> None:
    if name in ops.activations():
        pytest.skip("it is known here")
    known = ", ".join(ops.activations())
    arrays = quantized(rng, 9, 256, "affine", 4, 64, mx.bfloat16)
    expected = f"activations must be one of {known} on this processor but got {name}"
    with pytest.raises(ValueError, match=expected):
        ops.quantized_linear(
            mx.ones((1, 256)), *arrays, group_size=64, bits=4, activations=name
        )  # fmt: skip
    with pytest.raises(ValueError, match=expected):
        ops.linear(mx.ones((1, 256)), mx.ones((2, 256)), activations=name)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("simd", ["avx512vnni", "avx512", "avx2", "baseline"])
def test_rounded_products_in_a_process_of(simd: str) -> None:
    run_in_process_of(simd, 4, [__file__], "not in_a_process")


def test_tiles_in_a_process_of_their_own() -> None:
    """The kernels for AMX, also where the processor has none."""
    run_in_process_of("amx_emulated", 4, [__file__], "not in_a_process")
