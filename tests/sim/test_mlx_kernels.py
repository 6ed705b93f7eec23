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

import numpy as np
import pytest

from . import Buffer, SimFault, SimLibrary, missing
from .toolchain import CACHE, make_cache

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

# What MLX's utils.h defines of it; that header needs compiler internals of Apple's for bfloat.
PRELUDE = """#include <metal_stdlib>
using namespace metal;
template <typename U> struct Limits {
  static constexpr constant U min = -metal::numeric_limits<U>::infinity();
  static constexpr constant U finite_min = metal::numeric_limits<U>::lowest();
};
template <typename T, typename U> inline T ceildiv(T n, U m) { return (n + m - 1) / m; }
#include "mlx/backend/metal/kernels/defines.h"
"""


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


def mlx_library(header: str, *instances: str, before: str = "") -> SimLibrary:
    include = _wheel()
    if isinstance(include, str):
        pytest.skip(include)
    source = f'{PRELUDE}{before}#include "mlx/backend/metal/kernels/{header}"\n' + "\n".join(
        instances
    )
    return SimLibrary(source=source, include_dirs=[include])


FLAGS = {"query_transposed": 21, "do_causal": 22, "bool_mask": 23, "float_mask": 24}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_sdpa_vector(rng, dtype) -> None:
    """Decode with grouped heads: 1024 threads, SIMD sums, threadgroup memory, barriers."""
    name = {np.float32: "float", np.float16: "half"}[dtype]
    library = mlx_library("sdpa_vector.h", f'instantiate_kernel("sdpa", sdpa_vector, {name}, 64)')
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


@pytest.mark.parametrize("columns", [32, 100, 512])
def test_softmax(rng, columns) -> None:
    instance = 'instantiate_kernel("softmax", softmax_single_row, half, float, 4)'
    library = mlx_library("softmax.h", instance)
    x = rng.standard_normal((3, columns)).astype(np.float16)
    out = np.empty_like(x)
    threads = -(-columns // 128) * 32
    library.launch("softmax", {0: x, 1: Buffer(out, "write")}, 3, threads, {2: columns})
    expected = np.exp(x.astype(np.float64))
    expected /= expected.sum(axis=1, keepdims=True)
    assert np.abs(out - expected).max() < 1e-3


def test_softmax_that_was_told_more_columns_than_there_are(rng) -> None:
    library = mlx_library(
        "softmax.h", 'instantiate_kernel("softmax", softmax_single_row, half, float, 4)'
    )
    x = np.zeros(100, np.float16)
    with pytest.raises(SimFault, match=r"out of bounds: read .*softmax\.h"):
        library.launch("softmax", {0: x, 1: Buffer(np.empty_like(x), "write")}, 1, 32, {2: 101})


@pytest.mark.parametrize("causal", [False, True])
def test_steel_attention(rng, causal) -> None:
    """Tiled prefill on simdgroup_matrix, some 2,000 lines of templates, with ragged tiles."""
    name = "attention<half, 32, 32, 64, 64, 4, 1, half, float>"
    library = mlx_library(
        "steel/attn/kernels/steel_attention.h",
        f'template [[host_name("attn")]] [[kernel]] decltype({name}) {name};',
        before='#include "mlx/backend/metal/kernels/steel/attn/attn.h"\n',
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
