"""Linear layers outside of whole steps on the simulated GPU: few rows, and many on tensor units."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from sim import SimLibrary
from support.platforms import platform_with
from support.reference import bits
from support.separate_products import (
    DENSE,
    FORMS,
    Form,
    Layer,
    assert_close,
    kernel_of,
    multiply,
    normal,
)
from support.simulated import (
    METAL_4,
    launches,
    needs_simulator,
    sim_ext,
    simulated,
    simulated_tensor_units,
    tensor_library,
)

from mlx_paged import executables, kernels, ops
from mlx_paged.kernels import MAX_ROWS, AllowedProduct
from mlx_paged.model import patches

pytestmark = needs_simulator
DTYPES = [mx.float16, mx.bfloat16]
AFFINE = Form("affine", 4, 32)


def forget_launches() -> None:
    sim_ext.simulated_launches()


# --- Results --------------------------------------------------------------------------------------


@pytest.mark.one_in(60)
@pytest.mark.parametrize("tile", [128, 64, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_many_rows_on_tensor_units(rng, form: Form, dtype, tile: int) -> None:
    """Against float64. The last tiles of rows and of columns are partly filled, and k ends within a
    tile's depth if the format allows that. Each tile of rows reads the weight once."""
    layer = Layer(rng, form, dtype, 72, 352 if form.group < 64 else 384, bias=True)
    # Smaller, as sums of mxfp8 could exceed float16.
    x = normal(rng, tile + 9, layer.exact.shape[1], dtype=dtype) / 16
    mx.eval(x)
    forget_launches()
    out = multiply(layer, x, tile)
    assert_close(out, layer.expected(x, rounds_weight=True))
    [launch] = launches()
    assert launch["kernel"] == kernel_of(dtype, form, tile)
    # Rows past the last are read as the last again.
    weight_bytes = sum(a.nbytes for a in layer.arrays[:1])
    assert launch["traffic"][1][0] == 2 * weight_bytes * 128 // 72


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", [DENSE, AFFINE, Form("mxfp4", 4, 32)], ids=str)
def test_few_rows_have_the_bits_of_whole_steps(rng, form: Form) -> None:
    layer = Layer(rng, form, mx.bfloat16, 43, 320, bias=True)
    x = normal(rng, 16, 320, dtype=mx.bfloat16)
    with simulated():
        [unknown] = executables.placeholders([x])
        product = layer(unknown)
        if form != DENSE:
            weight, scales, *biases = layer.arrays
            product = ops.quantized_linear(
                unknown, weight, scales, *(biases or [None]), layer.bias, group_size=form.group,
                bits=form.bits, mode=form.mode, for_program=True,
            )  # fmt: skip
        [whole] = executables.GpuExecutable([unknown], [product])([x])
        mx.eval(whole)
    for rows, tile in ((16, 16), (3, 4), (1, 1)):
        forget_launches()
        out = multiply(layer, x[:rows], tile)
        assert [launch["kernel"] for launch in launches()] == [kernel_of(mx.bfloat16, form, tile)]
        np.testing.assert_array_equal(bits(out), bits(whole[:rows]))
    assert_close(out, layer.expected(x[:1], rounds_weight=False))


def test_results_depend_neither_on_the_layout_nor_on_other_rows(rng) -> None:
    layer = Layer(rng, AFFINE, mx.float16, 64, 96, bias=False)
    x = normal(rng, 40, 96, dtype=mx.float16)
    whole = bits(multiply(layer, x, 32))
    other = multiply(layer, x, 32, tensor_library(tensor_layout=0))
    np.testing.assert_array_equal(bits(other), whole)
    np.testing.assert_array_equal(bits(multiply(layer, x[7:30], 32)), whole[7:30])


def test_rows_that_are_not_dense(rng) -> None:
    layer = Layer(rng, AFFINE, mx.float16, 40, 64, bias=False)
    x = normal(rng, 64, 20, dtype=mx.float16).T
    assert_close(multiply(layer, x, 32), layer.expected(x, rounds_weight=True))


def test_any_shape_of_rows(rng) -> None:
    """As steps have it: one row per token, or sequences of rows."""
    layer = Layer(rng, DENSE, mx.float16, 24, 64, bias=True)
    x = normal(rng, 20, 64, dtype=mx.float16)
    flat = bits(multiply(layer, x, 32))
    for shape in ((20, 1, 64), (2, 10, 64), (1, 4, 5, 64)):
        out = multiply(layer, x.reshape(shape), 32)
        assert out.shape == (*shape[:-1], 24)
        np.testing.assert_array_equal(bits(out).reshape(20, 24), flat)


# --- Which kernel runs ----------------------------------------------------------------------------


def ran(layer: Layer, rows: int, *allowed: AllowedProduct) -> list[str]:
    x = mx.ones((rows, layer.exact.shape[1]), layer.dtype)
    kernels.allow_products(allowed)
    forget_launches()
    mx.eval(layer(x))
    return [launch["kernel"] for launch in launches()]


@pytest.fixture
def on_tensor_units():
    with simulated_tensor_units():
        yield
        kernels.allow_products(())
        kernels.reject_kernels(())


@pytest.mark.usefixtures("on_tensor_units")
def test_a_kernel_serves_the_rows_it_is_allowed_for(rng) -> None:
    layer = Layer(rng, AFFINE, mx.float16, 24, 64, bias=False)
    small, large = (kernel_of(mx.float16, AFFINE, tile) for tile in (32, 64))
    allowed = [AllowedProduct(small, 17, 20), AllowedProduct(large, 22, MAX_ROWS)]
    assert ran(layer, 20) == []
    assert ran(layer, 20, *allowed) == [small]
    assert ran(layer, 21, *allowed) == []
    assert ran(layer, 22, *allowed) == [large]
    assert ran(layer, 16, AllowedProduct(large, 1, MAX_ROWS)) == []
    kernels.reject_kernels([large])
    assert ran(layer, 22, *allowed) == []


@pytest.mark.usefixtures("on_tensor_units")
def test_what_the_kernels_cannot_read_is_mlxs(rng) -> None:
    layer = Layer(rng, DENSE, mx.float16, 24, 60, bias=False)  # 120 bytes a row
    assert ran(layer, 20, AllowedProduct(kernel_of(mx.float16, DENSE, 32), 1, MAX_ROWS)) == []
    layer = Layer(rng, DENSE, mx.float16, 24, 64, bias=False)
    layer.arrays = [layer.arrays[0].T.reshape(24, 64).T.reshape(64, 24).T]
    assert ran(layer, 20, AllowedProduct(kernel_of(mx.float16, DENSE, 32), 1, MAX_ROWS)) == []


def test_candidates() -> None:
    def tiles(dtype: str, rows: int) -> list[str]:
        names = kernels.product_kernels(dtype, "affine", 4, rows)
        return [name.rpartition("_")[2] for name in names]

    with simulated():
        assert [tiles("float16", rows) for rows in (1, 4, 16, 17)] == [["m1"], ["m4"], ["m16"], []]
    with simulated_tensor_units():
        assert tiles("bfloat16", 17) == tiles("float16", 5000) == ["m128", "m64", "m32"]
        assert tiles("float32", 1) == tiles("float32", 17) == []
        assert kernels.product_kernels("float16", "", 0, 1) == ["product_rows_float16_m1"]


@pytest.mark.parametrize("step_rows", [0, 16])
def test_models_that_do_not_run_as_whole_steps_have_them_too(monkeypatch, step_rows) -> None:
    layer, called = nn.QuantizedLinear(64, 32, bias=False, group_size=32, bits=4), []
    dense = nn.Linear(64, 32, bias=False)
    monkeypatch.setattr(patches, "is_cpu_default", lambda: False)
    monkeypatch.setattr(ops, "quantized_linear", lambda *args, **options: called.append(options))
    monkeypatch.setattr(ops, "linear", lambda *args, **options: called.append({}))
    platform = platform_with(
        on_cpu=False, max_gpu_step_rows=step_rows, native_dtypes=(mx.float16, mx.bfloat16)
    )
    x = mx.zeros((1, 64), mx.float16)
    with patches.native_ops(mx.zeros(1, mx.int32), platform=platform):
        assert patches._building.rotations is None
        patches.quantized_linear(layer, x)
        patches.linear(dense, x)
    assert [options.get("for_program") for options in called] == [False, None]


# --- What a GPU needs -----------------------------------------------------------------------------


def test_threadgroup_memory_is_at_most_32_kb(rng) -> None:
    layer = Layer(rng, DENSE, mx.float16, 24, 64, bias=False)
    sizes = {}
    for tile in (32, 64, 128):
        multiply(layer, normal(rng, 17, 64, dtype=mx.float16), tile)
        [launch] = launches()
        sizes[tile] = launch["threadgroup_memory"]
        assert launch["threadgroup"] == (256 if tile == 128 else 128, 1, 1)
    assert sizes[32] <= 16 * 1024 and sizes[128] <= 32 * 1024


def test_their_pipelines_are_foreseen() -> None:
    """So that no request waits for the compiler."""
    name = kernel_of(mx.float16, AFFINE, 64)
    with simulated_tensor_units():
        sim_ext.forget_attention_layers()
        assert name not in {kernel for kernel, _ in sim_ext.pipelines_to_come()}
        kernels.allow_products([AllowedProduct(name, 17, 32), AllowedProduct(name, 33, 128)])
        found = sim_ext.pipelines_to_come()
        kernels.allow_products(())
    assert [kernel for kernel, _ in found].count(name) == 1


def test_the_source_for_mlx_compiles_alone() -> None:
    name = kernel_of(mx.bfloat16, AFFINE, 128)
    assert SimLibrary(source=sim_ext.kernel_source(name), defines=METAL_4).kernels == [name]
