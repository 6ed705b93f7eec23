"""Checks that mutants of metal/tensor_*.h must fail.

Contexts end inside blocks and tiles; slots that must not be read hold NaN; cooperative tensors have
another layout than MLX assumes.
"""

from __future__ import annotations

from dataclasses import replace

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
from sim import SimLibrary
from sim.checks import check

from mlx_paged import ops
from support import separate_products
from support.quantized import FORMATS, quantized
from support.reference import PagedBatch, alibi_slopes, assert_close, make_batch, spans_of, to_numpy
from support.separate_products import DENSE, Form, Layer, kernel_of, multiply, normal
from support.simulated import launches, simulated_tensor_units
from support.simulated import tensor_library as library_of  # noqa: F401  for `sim.checks`

mx.set_default_device(mx.cpu)


def batch_of(rows: list[int], heads: int, window: int | None = None, **shape) -> PagedBatch:
    shape = {"key_dim": 64, "dtype": mx.float16, **shape}
    lens = [150, 33][: len(rows)]
    rng = np.random.default_rng(0)
    return make_batch(rng, lens, rows, num_q_heads=heads, window=window, **shape)


def attend(library: SimLibrary, batch: PagedBatch, limits=None, **options) -> mx.array:
    pools = (batch.key_pool, batch.value_pool)
    with simulated_tensor_units(library):
        plan = batch.plan(**(limits or {}))
        out = ops.paged_attention(batch.queries, *pools, plan, scale=0.125, **options)
        mx.eval(out)
    return out


def compare(library: SimLibrary, batch: PagedBatch, limits=None, **options) -> None:
    out = attend(library, batch, limits, **options)
    ran = {launch["kernel"] for launch in launches()}
    assert all(name.startswith(("tensor_prefill_", "paged_merge_")) for name in ran), ran
    assert_close(out, batch.expected(scale=0.125, **options))


def sinks_for(batch: PagedBatch) -> mx.array:
    return mx.array(np.linspace(-2, 3, batch.queries.shape[1]).astype(np.float32))


@check
def prefill(library: SimLibrary) -> None:
    """Tiles of 64 queries, the last ones partly filled."""
    compare(library, batch_of([27, 9], 6, window=20), window=20)


@check
def prefill_options(library: SimLibrary) -> None:
    batch = batch_of([27, 9], 6)
    compare(library, batch, sinks=sinks_for(batch), softcap=1.5)


@check
def prefill_splits(library: SimLibrary) -> None:
    batch = batch_of([27, 9], 6, window=60)  # so that tiles and blocks begin at different tokens
    compare(library, batch, {"split_tokens": 40}, sinks=sinks_for(batch), window=60)


@check
def prefill_of_32_rows(library: SimLibrary) -> None:
    """Two SIMD-groups, and a head dim that is not a power of two."""
    compare(library, batch_of([12], 2, key_dim=80, dtype=mx.bfloat16))


@check
def prefill_variants(library: SimLibrary) -> None:
    """Bounds and ALiBi."""
    bounds = spans_of([150, 33], [27, 9], [[(124, 148)], [(5, 31)]])
    batch = batch_of([27, 9], 6, bounds=bounds)
    compare(library, batch, alibi_slopes=alibi_slopes(6), sinks=sinks_for(batch))


@check
def prefill_of_quantized_pools(library: SimLibrary) -> None:
    for name in FORMATS:
        plain = batch_of([20], 4)
        batch = quantized(plain, name)
        with simulated_tensor_units(library):
            out = batch.attend(plain.plan(), scale=0.125)
            mx.eval(out)
        assert_close(out, batch.expected(scale=0.125))


@check
def nan_stays_in_its_row(library: SimLibrary) -> None:
    batch = batch_of([12], 2)
    clean = to_numpy(attend(library, batch))
    poisoned = mx.array(batch.queries)
    poisoned[3, 1, 5] = float("nan")
    out = to_numpy(attend(library, replace(batch, queries=poisoned)))
    assert np.isnan(out[3, 1]).all()
    out[3, 1] = clean[3, 1]
    np.testing.assert_array_equal(out, clean)


@check
def mixed_step(library: SimLibrary) -> None:
    """Each kernel serves its own rows."""
    rng = np.random.default_rng(0)
    batch = make_batch(rng, [40, 90, 40], [1, 32, 5], num_q_heads=6, key_dim=64, dtype=mx.float16)
    out = attend(library, batch, {"rows_per_item": 32})
    kernels = [launch["kernel"].partition("_float16")[0] for launch in launches()]
    assert kernels == ["paged_decode", "paged_decode_matrix", "tensor_prefill"]
    assert_close(out, batch.expected(scale=0.125))


# --- Products of many rows ------------------------------------------------------------------------


def product(
    library: SimLibrary,
    form: Form,
    tile: int,
    shape: tuple[int, int, int],
    dtype: mx.Dtype = mx.float16,
    *,
    bias: bool = True,
) -> None:
    """Rows, columns and depth of `shape` end within tiles. No memory is behind an array's end."""
    rows, n, k = shape
    rng = np.random.default_rng(0)
    layer = Layer(rng, form, dtype, n, k, bias=bias)
    x = normal(rng, rows, k, dtype=dtype) / 16
    mx.eval(x)
    out = multiply(layer, x, tile, library)
    [launch] = launches()
    assert launch["kernel"] == kernel_of(dtype, form, tile)
    separate_products.assert_close(out, layer.expected(x, rounds_weight=True))


@check
def tensor_products_of_dense_weights(library: SimLibrary) -> None:
    product(library, DENSE, 32, (41, 72, 152))
    product(library, DENSE, 32, (17, 8, 40))  # less than a tile's depth, whose rest is not read


@check
def tensor_products_of_quantized_weights(library: SimLibrary) -> None:
    """Four units have a scale, and the depth is one of a unit more than a tile."""
    product(library, Form("affine", 4, 128), 64, (70, 72, 256), mx.bfloat16)
    product(library, Form("affine", 3, 32), 32, (33, 66, 96), bias=False)


@check
def tensor_products_of_float_codes(library: SimLibrary) -> None:
    product(library, Form("mxfp4", 4, 32), 32, (17, 8, 96))
    product(library, Form("nvfp4", 4, 16), 32, (17, 8, 96))


@check
def tensor_products_of_128_rows(library: SimLibrary) -> None:
    product(library, Form("affine", 8, 32), 128, (130, 8, 32), mx.bfloat16)


@check
def biases_follow_the_rounding(library: SimLibrary) -> None:
    """A sum has its dtype before the bias is added, as in MLX's two operations."""
    rng = np.random.default_rng(0)
    layer = Layer(rng, DENSE, mx.bfloat16, 64, 64, bias=True)
    x = normal(rng, 32, 64, dtype=mx.bfloat16)
    out = multiply(layer, x, 32, library)
    bias, layer.bias = layer.bias, None
    assert bias is not None
    separate = multiply(layer, x, 32, library) + bias
    np.testing.assert_array_equal(to_numpy(out), to_numpy(separate))


@check
def nan_stays_in_its_row_of_a_product(library: SimLibrary) -> None:
    """Also that of the last row, which tiles repeat."""
    rng = np.random.default_rng(0)
    layer = Layer(rng, DENSE, mx.float16, 8, 64, bias=False)
    x = normal(rng, 40, 64, dtype=mx.float16)
    clean = to_numpy(multiply(layer, x, 32, library))
    x[39, 3] = float("nan")
    out = to_numpy(multiply(layer, x, 32, library))
    assert np.isnan(out[39]).all()
    np.testing.assert_array_equal(out[:39], clean[:39])
