"""Tensors and matmul2d of Metal 4. MLX's own kernels for tensor units run unchanged, in the layout
of cooperative tensors that they assume, and only in that."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from . import Buffer, SimCompileError, SimFault, SimLibrary, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

SAMPLES = Path(__file__).parent / "samples"
TENSORS = Path(__file__).parent / "tensor_samples" / "tensors.metal"
METAL_4 = {"__METAL_VERSION__": "400", "__HAVE_TENSOR__": "1"}
KERNELS = "mlx/backend/metal/kernels"


# --- The operations -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[0, 1], ids=["MLX's layout", "another layout"])
def tensors(request) -> SimLibrary:
    library = SimLibrary([TENSORS], defines=METAL_4, tensor_layout=request.param)
    library.compile()
    return library


def halves(rng, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float16)


def wide(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float64)


@pytest.mark.parametrize("shape", [(64, 32, 16), (50, 45, 20)])
def test_tensors_in_memory(rng, tensors, shape) -> None:
    """The second shape ends within tiles and within sixteen elements of the sums."""
    m, n, k = shape
    a, b, c = halves(rng, m, k), halves(rng, n, k), np.zeros((m, n), np.float32)
    buffers = {0: Buffer(a, "readwrite"), 1: Buffer(b, "readwrite"), 2: Buffer(c, "write")}
    grid = (-(-n // 32), -(-m // 32))
    constants = {3: struct.pack("3i", *shape)}
    report = tensors.launch("from_device", buffers, grid, 128, constants)
    np.testing.assert_allclose(c, wide(a) @ wide(b).T, atol=1e-4)
    # A SIMD-group has a block of 16 x 16 of each tile: it reads what that needs, once.
    assert report.buffers[0].bytes_read == 2 * a.nbytes * grid[0]
    assert report.buffers[1].bytes_read == 2 * b.nbytes * grid[1]
    assert report.buffers[2].bytes_written == c.nbytes
    assert report.matrix_ops == 4 * grid[0] * grid[1] * -(-k // 16)


def test_tensors_held_by_lanes(rng, tensors) -> None:
    a, b, c = halves(rng, 16, 32), halves(rng, 16, 32), np.zeros((32, 32), np.float32)
    tensors.launch("held_by_lanes", {0: a, 1: b, 2: Buffer(c, "write")}, 1, 32)
    places = 100 * np.arange(32)[:, None] + np.arange(32)
    np.testing.assert_allclose(c, 2 * wide(a).T @ wide(b) + places, atol=1e-3)


def integers(rng, library: SimLibrary, lanes: int) -> None:
    a = rng.integers(-128, 128, (16, 32)).astype(np.int8)
    b = rng.integers(-128, 128, (32, 32)).astype(np.int8)
    c = np.zeros((16, 32), np.int32)
    buffers = {0: Buffer(a, "readwrite"), 1: Buffer(b, "readwrite"), 2: Buffer(c, "write")}
    library.launch("integers", buffers, 1, 32, {3: lanes})
    np.testing.assert_array_equal(c, a.astype(np.int32) @ b.astype(np.int32))


def test_products_of_whole_numbers(rng, tensors) -> None:
    integers(rng, tensors, lanes=32)


def test_every_lane_of_the_scope_takes_part(rng, tensors) -> None:
    with pytest.raises(SimFault, match="divergence"):
        integers(rng, tensors, lanes=16)


def test_a_tensor_is_no_wider_than_its_buffer(rng, tensors) -> None:
    a, b, c = halves(rng, 32, 16), halves(rng, 32, 16), np.zeros((32, 32), np.float32)
    buffers = {0: Buffer(a[:31], "readwrite"), 1: Buffer(b, "readwrite"), 2: Buffer(c, "write")}
    with pytest.raises(SimFault, match="out of bounds"):
        tensors.launch("from_device", buffers, 1, 128, {3: struct.pack("3i", 32, 32, 16)})


def test_metal_before_version_4_has_no_tensors() -> None:
    with pytest.raises(SimCompileError, match=r"tensor|mpp"):
        SimLibrary([TENSORS]).compile()


# --- MLX's kernels --------------------------------------------------------------------------------


def mlx_library(*headers: str, instance: str, tensor_layout: int = 0) -> SimLibrary:
    """Kernels of the headers that the installed MLX brings."""
    spec = importlib.util.find_spec("mlx")
    assert spec and spec.submodule_search_locations
    include = Path(next(iter(spec.submodule_search_locations))) / "include"
    absent = [header for header in headers if not (include / KERNELS / header).exists()]
    if absent:
        pytest.skip(f"the installed MLX has no {absent[0]}")
    lines = "".join(f'#include "{KERNELS}/{header}"\n' for header in ("utils.h", *headers))
    return SimLibrary(
        source=f'#include "apple_internals.h"\n{lines}{instance}',
        include_dirs=[include, SAMPLES],
        defines=METAL_4,
        tensor_layout=tensor_layout,
    )


FRAGMENTS = """
using namespace mlx::steel;
kernel void product(
    device const half* a [[buffer(0)]], device const half* b [[buffer(1)]],
    device float* c [[buffer(2)]]) {
  NAXTile<half, 1, 2> left;
  NAXTile<half, 2, 2> right;
  NAXTile<float, 1, 2> out;
  out.clear();
  left.load(a, 32);
  right.load(b, 32);
  tile_matmad_nax(
      out, left, metal::bool_constant<false>{}, right, metal::bool_constant<true>{});
  out.store(c, 32);
}
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tensor_layout", [0, 1])
def test_mlx_assumes_a_layout(rng, tensor_layout) -> None:
    """The layout is the implementation's choice, but MLX fills and reads elements by number."""
    library = mlx_library("steel/gemm/nax.h", instance=FRAGMENTS, tensor_layout=tensor_layout)
    a, b, c = halves(rng, 16, 32), halves(rng, 32, 32), np.zeros((16, 32), np.float32)
    library.launch("product", {0: a, 1: b, 2: Buffer(c, "write")}, 1, 32)
    is_right = np.abs(c - wide(a) @ wide(b).T).max() < 1e-4
    assert is_right == (tensor_layout == 0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("shape", "tile", "is_aligned"),
    [
        # Tiles of one SIMD-group, the last ones partly outside: `gemm_loop` meets its barriers in
        # another instantiation there, which the simulator reports where SIMD-groups differ in it.
        ((50, 70, 72), (32, 32, 64, 1, 1), False),
        # Four SIMD-groups, as MLX launches it for long prompts.
        ((64, 128, 256), (64, 64, 128, 2, 2), True),
    ],
    ids=["edges", "four SIMD-groups"],
)
def test_mlx_gemm(rng, shape, tile, is_aligned) -> None:
    rows, columns, depth, *groups = tile
    library = mlx_library(
        "steel/gemm/gemm_nax.h",
        "steel/gemm/kernels/steel_gemm_fused_nax.h",
        instance=f'instantiate_kernel("gemm", gemm, half, {rows}, {columns}, {depth}, '
        f"{groups[0]}, {groups[1]}, false, true, float)",
    )
    m, n, k = shape
    a, b, out = halves(rng, m, k), halves(rng, n, k), np.zeros((m, n), np.float16)
    tiles = (-(-n // columns), -(-m // rows))
    params = struct.pack("8i3q3i4x", m, n, k, k, k, n, *tiles, 0, 0, 0, 0, k // depth, 1)
    flags = ("has_batch", "use_out_source", "do_axpby")
    report = library.launch(
        "gemm",
        {0: a, 1: b, 3: Buffer(out, "write")},
        grid=(*tiles, 1),
        threads=(32, *groups),
        constants={4: params},
        function_constants={
            **dict.fromkeys(flags, False),
            **dict.fromkeys(("align_M", "align_N", "align_K"), is_aligned),
        },
    )
    np.testing.assert_allclose(out, wide(a) @ wide(b).T, atol=0.06)
    # Products of 16 x 16 x 16 of whole tiles, in steps of 32 elements.
    blocks = tiles[0] * tiles[1] * rows * columns // 256
    assert report.matrix_ops == blocks * -(-k // 32) * 2


def test_mlx_quantized_product(rng) -> None:
    """`qmm` dequantizes its weight into threadgroup memory; the last tile of columns is partly
    outside."""
    name = "affine_qmm_t_nax<half, 32, 4, false, false, 64, 64, 64, 2, 2>"
    library = mlx_library(
        "steel/utils.h",
        "quantized_utils.h",
        "steel/gemm/nax.h",
        "quantized_nax.h",
        instance=f'template [[host_name("qmm")]] [[kernel]] decltype({name}) {name};',
    )
    m, n, k = 64, 96, 128
    weight = mx.array(halves(rng, n, k))
    codes, scales, biases = mx.quantize(weight, 32, 4)
    exact = wide(np.array(mx.dequantize(codes, scales, biases, 32, 4).astype(mx.float32)))
    x, out = halves(rng, m, k), np.zeros((m, n), np.float16)
    report = library.launch(
        "qmm",
        {0: np.array(codes), 1: np.array(scales), 2: np.array(biases), 3: x,
         4: Buffer(out, "write")},
        grid=(2, 1, 1),
        threads=(32, 2, 2),
        constants={
            **dict.fromkeys((8, 9, 11, 12), bytes(4)),  # no batch
            **dict.fromkeys((10, 13, 14, 15), bytes(8)),
            **{5 + i: struct.pack("i", size) for i, size in enumerate((k, n, m))},
        },
    )  # fmt: skip
    np.testing.assert_allclose(out, wide(x) @ exact.T, atol=0.06)
    assert report.matrix_ops == 2 * 16 * k // 16


def test_mlx_attention(rng) -> None:
    """Q K^T and P V through fragments, with ragged tiles and a causal mask."""
    name = "attention_nax<half, 64, 32, 64, 64, 4, 1, half, float>"
    library = mlx_library(
        "steel/attn/nax.h",
        "steel/attn/kernels/steel_attention_nax.h",
        instance=f'template [[host_name("attention")]] [[kernel]] decltype({name}) {name};',
    )
    heads, kv_heads, rows, tokens, dim = 2, 1, 45, 70, 64
    q, out = halves(rng, heads, rows, dim), np.zeros((heads, rows, dim), np.float16)
    k, v = halves(rng, 2, kv_heads, tokens, dim)
    ints = [1, heads, dim, rows, tokens, heads // kv_heads]
    tiles = [1, 3, rows // 64, tokens // 32, rows % 64, tokens % 32]
    strides = [(count * n * dim, n * dim, dim) for count, n in ((heads, rows), (kv_heads, tokens))]
    params = struct.pack("6if7i12q", *ints, dim**-0.5, *tiles, tokens - rows,
                         *strides[0], *strides[1], *strides[1], *strides[0])  # fmt: skip
    flags = ("align_Q", "align_K", "has_mask", "has_sinks", "save_lse")
    report = library.launch(
        "attention",
        {0: q, 1: k, 2: v, 3: Buffer(out, "write")},
        grid=(1, heads, 1),
        threads=(32, 4, 1),
        constants={4: params},
        function_constants={**dict.fromkeys(flags, False), "do_causal": True},
    )
    scores = np.einsum("hrd,nd->hrn", wide(q), wide(k[0])) * dim**-0.5
    future = np.arange(tokens) > np.arange(rows)[:, None] + tokens - rows
    weights = np.exp(np.where(future, -np.inf, scores))
    expected = weights / weights.sum(axis=2, keepdims=True) @ wide(v[0])
    assert np.abs(out - expected).max() < 2e-3
    assert report.matrix_ops == heads * 4 * 3 * 2 * 2 * 4
