"""Evidence that it is Metal what the simulator executes: MLX's own kernels, as MLX ships them for
Apple GPUs, run and give the right numbers. Their source is in the macOS wheel `mlx-metal`."""

from __future__ import annotations

import functools
import importlib.metadata
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from . import Buffer, SimFault, SimLibrary, missing
from .toolchain import CACHE, make_cache

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

# MLX's utils.h gives bfloat its functions by way of internals of Apple's compiler.
SAMPLES = Path(__file__).parent / "samples"
KERNELS = "mlx/backend/metal/kernels"
PRELUDE = f'#include "apple_internals.h"\n#include "{KERNELS}/utils.h"\n'


@functools.cache
def _wheel() -> Path | str:
    """The headers of MLX's Metal wheel, or why they are not there."""
    version = importlib.metadata.version("mlx")
    target = CACHE / f"mlx-metal-{version}"
    if not target.exists():
        make_cache()
        wheels = CACHE / "wheels"
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(wheels),
        ]
        command += [
            "--platform",
            "macosx_15_0_arm64",
            "--only-binary",
            ":all:",
            f"mlx-metal=={version}",
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        found = list(wheels.glob(f"mlx_metal-{version}-*.whl"))
        if not found:
            return f"mlx-metal {version} could not be downloaded: {run.stderr.strip()[-200:]}"
        with zipfile.ZipFile(found[0]) as wheel:
            names = [n for n in wheel.namelist() if "/backend/metal/kernels/" in n]
            wheel.extractall(target, names)
        found[0].unlink()
    return target / "mlx/include"


def mlx_library(*headers: str, instances: str) -> SimLibrary:
    """Kernels of MLX's headers, included in this order after `utils.h`."""
    include = _wheel()
    if isinstance(include, str):
        pytest.skip(include)
    lines = [f'#include "{KERNELS}/{header}"\n' for header in headers]
    return SimLibrary(
        source=f"{PRELUDE}{''.join(lines)}{instances}", include_dirs=[include, SAMPLES]
    )


FLAGS = {"query_transposed": 21, "do_causal": 22, "bool_mask": 23, "float_mask": 24}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_sdpa_vector(rng, dtype) -> None:
    """Decode with grouped heads: 1024 threads, SIMD sums, threadgroup memory, barriers."""
    name = {np.float32: "float", np.float16: "half"}[dtype]
    instance = f'instantiate_kernel("sdpa", sdpa_vector, {name}, 64)'
    library = mlx_library("sdpa_vector.h", instances=instance)
    heads, kv_heads, tokens, dim = 4, 2, 133, 64
    q = rng.standard_normal((heads, dim)).astype(dtype)
    k, v = rng.standard_normal((2, kv_heads, tokens, dim)).astype(dtype)
    out = np.empty((heads, dim), dtype)
    strides = {
        6: np.uint64(tokens * dim),
        7: np.uint64(dim),
        8: np.uint64(tokens * dim),
        9: np.uint64(dim),
    }
    report = library.launch(
        "sdpa",
        {0: q, 1: Buffer(k, label="keys"), 2: v, 3: Buffer(out, "write", "out")},
        grid=heads,
        threads=1024,
        constants={4: heads // kv_heads, 5: tokens, **strides, 10: dim**-0.5},
        function_constants={20: False, 25: False, 26: 0, **dict.fromkeys(FLAGS.values(), False)},
    )
    k, v = (np.repeat(a.astype(np.float64), heads // kv_heads, axis=0) for a in (k, v))
    scores = np.einsum("hd,hnd->hn", q.astype(np.float64), k) * dim**-0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    expected = np.einsum("hn,hnd->hd", weights / weights.sum(axis=1, keepdims=True), v)
    assert np.abs(out - expected).max() < (1e-5 if dtype is np.float32 else 1e-3)
    # Each query head reads its keys once; heads of a group do not share the loads.
    assert report.buffers[1].bytes_read == heads * tokens * dim * out.itemsize
    assert report.buffers[1].unique_bytes_read == kv_heads * tokens * dim * out.itemsize
    assert report.threadgroup_bytes == 4 * (32 * 32 + 32 + 32)


SOFTMAX = 'instantiate_kernel("softmax", softmax_single_row, half, float, 4)'


@pytest.mark.parametrize("columns", [32, 100, 512])
def test_softmax(rng, columns) -> None:
    library = mlx_library("softmax.h", instances=SOFTMAX)
    x = rng.standard_normal((3, columns)).astype(np.float16)
    out = np.empty_like(x)
    threads = -(-columns // 128) * 32
    library.launch("softmax", {0: x, 1: Buffer(out, "write")}, 3, threads, {2: columns})
    expected = np.exp(x.astype(np.float64))
    expected /= expected.sum(axis=1, keepdims=True)
    assert np.abs(out - expected).max() < 1e-3


def test_softmax_that_was_told_more_columns_than_there_are(rng) -> None:
    library = mlx_library("softmax.h", instances=SOFTMAX)
    x = np.zeros(100, np.float16)
    with pytest.raises(SimFault, match=r"out of bounds: read .*softmax\.h"):
        library.launch("softmax", {0: x, 1: Buffer(np.empty_like(x), "write")}, 1, 32, {2: 101})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("causal", [False, True])
def test_steel_attention(rng, causal) -> None:
    """Tiled prefill on simdgroup_matrix, some 2,000 lines of templates, with ragged tiles."""
    name = "attention<half, 32, 32, 64, 64, 4, 1, half, float>"
    library = mlx_library(
        "steel/attn/attn.h",
        "steel/attn/kernels/steel_attention.h",
        instances=f'template [[host_name("attn")]] [[kernel]] decltype({name}) {name};',
    )
    heads, kv_heads, rows, tokens, dim = 4, 2, 45, 70, 64
    q = rng.standard_normal((heads, rows, dim)).astype(np.float16)
    k, v = rng.standard_normal((2, kv_heads, tokens, dim)).astype(np.float16)
    out = np.empty_like(q)
    ints = [1, heads, dim, rows, tokens, heads // kv_heads]
    tiles = [-(-rows // 32), -(-tokens // 32), rows // 32, tokens // 32, rows % 32, tokens % 32]
    strides = [
        (n * heads_ * dim, n * dim, dim) for heads_, n in ((heads, rows), (kv_heads, tokens))
    ]
    params = struct.pack("6if7i12q", *ints, dim**-0.5, *tiles, tokens - rows,
                         *strides[0], *strides[1], *strides[1], *strides[0])  # fmt: skip
    flags = {"align_Q": False, "align_K": False, "has_mask": False, "do_causal": causal}
    report = library.launch(
        "attn",
        {0: q, 1: k, 2: v, 3: Buffer(out, "write")},
        grid=(tiles[0], heads, 1),
        threads=(32, 4, 1),
        constants={4: params},
        function_constants={**flags, "has_sinks": False, "save_lse": False},
    )
    k, v = (np.repeat(a.astype(np.float64), heads // kv_heads, axis=0) for a in (k, v))
    scores = np.einsum("hrd,hnd->hrn", q.astype(np.float64), k) * dim**-0.5
    if causal:
        future = np.arange(tokens) > np.arange(rows)[:, None] + tokens - rows
        scores = np.where(future, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    expected = np.einsum("hrn,hnd->hrd", weights / weights.sum(axis=2, keepdims=True), v)
    assert np.abs(out - expected).max() < 2e-3
    assert report.matrix_ops > 1000


REDUCE = ("atomic.h", "reduction/ops.h", "reduce.h")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "dtype", "op", "expected"),
    [
        ("float", np.float32, "Sum", np.sum),
        ("half", np.float16, "Max", np.max),
        ("int64_t", np.int64, "Prod", np.prod),  # two words a lane in the shuffles
    ],
)
def test_reduce_rows(rng, name, dtype, op, expected) -> None:
    kernel = f"row_reduce_simple, {name}, {name}, {op}<{name}>, int, 4, 4"
    library = mlx_library(*REDUCE, instances=f'instantiate_kernel("rows", {kernel})')
    rows, columns = 8, 333
    x = rng.integers(1, 3, (rows, columns)) if dtype is np.int64 else rng.random((rows, columns))
    x = x.astype(dtype)
    x[:, 40:] = 1 if op == "Prod" else x[:, 40:]
    out = np.zeros(rows, dtype)
    library.launch(
        "rows",
        {0: x, 1: Buffer(out, "write")},
        grid=(1, 2, 1),  # four rows a threadgroup
        threads=(96, 1, 1),
        constants={2: np.uint64(columns), 3: np.int64(rows)},
    )
    assert np.allclose(out, expected(x.astype(np.float64), axis=1), rtol=1e-3)


def test_reduce_all(rng) -> None:
    instance = 'instantiate_kernel("all", all_reduce, bfloat16_t, float, Sum<float>)'
    library = mlx_library(*REDUCE, instances=instance)
    x = rng.integers(-4, 5, 5000).astype(np.float32)  # whole numbers: bfloat has them all
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    out = np.zeros(1, np.float32)
    library.launch(
        "all",
        {0: bits, 1: Buffer(out, "write")},
        grid=1,
        threads=256,
        constants={2: np.uint64(x.size), 3: np.uint64(x.size)},
    )
    assert out[0] == x.sum()


def test_reduce_columns(rng) -> None:
    kernel = "col_reduce_looped, float, float, Min<float>, int, 1, 32, 32"
    library = mlx_library(*REDUCE, instances=f'instantiate_kernel("columns", {kernel})')
    rows, columns = 77, 45
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    out = np.zeros(columns, np.float32)
    one = np.array([1], np.int32)
    library.launch(
        "columns",
        {
            0: x,
            1: Buffer(out, "write"),
            4: one,
            5: np.array([0], np.int64),
            7: np.array([rows], np.int32),
            8: np.array([columns], np.int64),
        },
        grid=(-(-columns // 32), 1, 1),
        threads=256,
        constants={
            2: np.uint64(rows),
            3: np.int64(columns),
            6: 1,
            9: 1,
            10: np.uint64(1),
            11: np.int64(0),
        },
    )
    assert np.array_equal(out, x.min(axis=0))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("in_size", [205, 128])
def test_gemv(rng, in_size) -> None:
    """A matrix and a vector; with 205 elements the last lanes have less."""
    instance = 'instantiate_kernel("gemv", gemv, half, 4, 1, 1, 32, 4, 4, 0, 0)'
    library = mlx_library("gemv.h", instances=instance)
    out_size = 32
    matrix = rng.standard_normal((out_size, in_size)).astype(np.float16)
    vector = rng.standard_normal(in_size).astype(np.float16)
    out = np.zeros(out_size, np.float16)
    zero = np.zeros(1, np.int64)
    report = library.launch(
        "gemv",
        {
            0: matrix,
            1: vector,
            2: np.zeros(1, np.float16),  # the bias, which this instance does not read
            3: Buffer(out, "write"),
            10: np.ones(1, np.int32),
            11: zero,
            12: zero,
            13: zero,
        },
        grid=(out_size // 16, 1, 1),
        threads=(32, 1, 4),
        constants={4: in_size, 5: out_size, 6: in_size, 7: 1.0, 8: 0.0, 9: 1, 14: 1},
    )
    expected = matrix.astype(np.float64) @ vector.astype(np.float64)
    assert np.abs(out - expected).max() < 0.05
    assert report.buffers[2].bytes_read == 0


def quantized(x: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """MLX's own affine quantization of rows, on its CPU backend."""
    return tuple(map(np.array, mx.quantize(mx.array(x), group_size=group, bits=bits)))


QUANTIZED = ("quantized_utils.h", "steel/gemm/gemm.h", "quantized.h")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_products(rng, bits) -> None:
    """One row (`qmv_fast`) and a ragged tile of rows (`qmm_t`) with quantized weights."""
    library = mlx_library(
        *QUANTIZED,
        instances=f'instantiate_kernel("vector", affine_qmv_fast, half, 64, {bits}, false)\n'
        f'instantiate_kernel("matrix", affine_qmm_t, half, 64, {bits}, true, false)\n',
    )
    rows, inputs, outputs = 21, 512, 32
    x = rng.standard_normal((rows, inputs)).astype(np.float16)
    packed, scales, biases = quantized(
        rng.standard_normal((outputs, inputs)).astype(np.float16), bits, 64
    )
    weights = mx.dequantize(
        mx.array(packed), mx.array(scales), mx.array(biases), group_size=64, bits=bits
    )
    expected = x.astype(np.float64) @ np.array(weights).astype(np.float64).T
    shared = {0: packed, 1: scales, 2: biases, 3: x}
    unused = [np.zeros(2, dtype) for dtype in (np.int32, np.int64)]

    one = np.zeros(outputs, np.float16)
    places = {8: 0, 9: 1, 11: 0, 12: 1, 13: 1, 14: 1}
    library.launch(
        "vector",
        {**shared, 4: Buffer(one, "write"), **{i: unused[kind] for i, kind in places.items()}},
        grid=(1, outputs // 8, 1),
        threads=(32, 2, 1),
        constants={5: inputs, 6: outputs, 7: 0, 10: 0},
    )
    assert np.abs(one - expected[0]).max() < 0.1

    out = np.zeros((rows, outputs), np.float16)
    places = {9: 0, 10: 1, 12: 0, 13: 1, 14: 1, 15: 1}
    report = library.launch(
        "matrix",
        {**shared, 4: Buffer(out, "write"), **{i: unused[kind] for i, kind in places.items()}},
        grid=(outputs // 32, 1, 1),
        threads=(32, 2, 2),
        constants={5: inputs, 6: outputs, 7: rows, 8: 0, 11: 0},
    )
    assert np.abs(out - expected).max() < 0.1
    assert report.matrix_ops > 0


def test_dequantize(rng) -> None:
    instance = 'instantiate_kernel("dequantize", affine_dequantize, float, 64, 3)'
    library = mlx_library(*QUANTIZED, instances=instance)
    packed, scales, biases = quantized(rng.standard_normal((2, 64)).astype(np.float32), 3, 64)
    expected = mx.dequantize(
        mx.array(packed), mx.array(scales), mx.array(biases), group_size=64, bits=3
    )
    out = np.zeros((2, 64), np.float32)
    library.launch(
        "dequantize",
        {0: packed.view(np.uint8), 1: scales, 2: biases, 3: Buffer(out, "write")},
        grid=1,
        threads=16,  # eight values a thread
    )
    assert np.allclose(out, np.array(expected), atol=1e-6)


def gemm(rng, rows: int, columns: int, inner: int) -> tuple[np.ndarray, np.ndarray]:
    """a @ b.T + c of small whole numbers, which bfloat has, and what it should be."""
    kernel = "gemm, bfloat16_t, 32, 32, 16, 2, 2, false, true, float"
    library = mlx_library(
        "steel/gemm/gemm.h",
        "steel/gemm/kernels/steel_gemm_fused.h",
        instances=f'instantiate_kernel("gemm", {kernel})',
    )
    shapes = ((rows, inner), (columns, inner), (rows, columns))
    a, b, c = (rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes)
    inputs = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b, c)]
    out = np.zeros((rows, columns), np.uint16)
    tiles = [-(-columns // 32), -(-rows // 32)]
    params = struct.pack("8i3q3i4x", rows, columns, inner, inner, inner, columns,
                         *tiles, 0, 0, 0, 0, inner // 16, 1)  # fmt: skip
    flags = ["has_batch", "do_axpby", "align_M", "align_N", "align_K"]
    library.launch(
        "gemm",
        {**dict(enumerate(inputs)), 3: Buffer(out, "write")},
        grid=(*tiles, 1),
        threads=(32, 2, 2),
        constants={4: params, 5: struct.pack("iiqff", columns, 1, 0, 1.0, 1.0)},
        function_constants={**dict.fromkeys(flags, False), "use_out_source": True},
    )
    return (out.astype(np.uint32) << 16).view(np.float32), a @ b.T + c


def test_gemm(rng) -> None:
    """Tiles of `simdgroup_matrix`, with ragged edges."""
    out, expected = gemm(rng, rows=64, columns=40, inner=50)
    assert np.array_equal(out, expected)


def test_gemm_that_reads_past_its_addend(rng) -> None:
    """`apply_epilogue_safe` of this version looks at its tile's columns only: the rows of a ragged
    tile are read from behind c. (What they give is not stored.)"""
    with pytest.raises(SimFault, match=r"out of bounds: read of .*mma\.h"):
        gemm(rng, rows=37, columns=40, inner=50)


def test_argsort(rng) -> None:
    kernel = "block_sort, bfloat16_t, uint, true, 32, 4"
    library = mlx_library("sort.h", instances=f'instantiate_kernel("sort", {kernel})')
    x = rng.permutation(100).astype(np.float32)
    out = np.zeros(100, np.uint32)
    library.launch(
        "sort",
        {0: (x.view(np.uint32) >> 16).astype(np.uint16), 1: Buffer(out, "write")},
        grid=1,
        threads=32,
        constants={2: 100, 3: 1, 4: 1, 5: 100, 6: 100},
    )
    assert np.array_equal(out, np.argsort(x))


def test_scan(rng) -> None:
    kernel = "contiguous_scan, int, int64_t, CumSum<int64_t>, 2, true, false"
    library = mlx_library("scan.h", instances=f'instantiate_kernel("scan", {kernel})')
    x = rng.integers(-9, 9, (2, 150)).astype(np.int32)
    out = np.zeros((2, 150), np.int64)
    library.launch(
        "scan",
        {0: x, 1: Buffer(out, "write")},
        grid=(1, 2, 1),
        threads=(1024, 1, 1),
        constants={2: np.uint64(150)},
    )
    assert np.array_equal(out, x.cumsum(axis=1))


# One kernel of each header besides, compiled.
HEADERS = {
    "arange": (("arange.h",), "arange, bfloat16_t"),
    "binary": (("binary_ops.h", "binary.h"), "binary_vv, half, half, Remainder, 4"),
    "copy": (("copy.h",), "copy_g, complex64_t, complex64_t, 4, int"),
    "fp_quantized": (
        ("quantized_utils.h", "steel/gemm/gemm.h", "fp_quantized.h"),
        "fp_qmv_fast, bfloat16_t, 32, 4, false",
    ),
    "gemv_masked": (("gemv_masked.h",), "gemv_masked, half, bool, bool, 1, 1, 4, 8, 4, 4, 0"),
    "logsumexp": (("logsumexp.h",), "logsumexp, bfloat16_t, float"),
    "ternary": (("ternary_ops.h", "ternary.h"), "ternary_v, half, Select, false, false, 4"),
    "unary": (("unary_ops.h", "unary.h"), "unary_v, complex64_t, complex64_t, Log10, 4"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", HEADERS)
def test_other_headers_compile(name) -> None:
    headers, kernel = HEADERS[name]
    mlx_library(*headers, instances=f'instantiate_kernel("k", {kernel})').compile()
