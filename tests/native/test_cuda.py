"""Tests of CUDA only: transfers through pinned memory, linear layers of a few rows."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import ops

pytestmark = pytest.mark.skipif(not ops.has_cuda(), reason="needs an NVIDIA GPU as the device")


def test_uploaded_arrays_are_the_hosts() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):  # staging buffers are used again
        host = [rng.integers(-9, 9, (int(n), 3)).astype(np.int32) for n in rng.integers(0, 2000, 5)]
        arrays = ops.upload(*host, np.arange(7, dtype=np.float32), np.arange(3, dtype=np.uint32))
        sums = [a + 1 for a in arrays]
        for a in host:
            a += 100  # the numbers were taken already
        mx.async_eval(*sums)
        for a, s in zip(host, sums):
            assert s.shape == a.shape
            assert (np.array(s) == a - 99).all()
        assert np.array(sums[-2]).tolist() == list(range(1, 8))
        assert sums[-1].dtype == mx.uint32


def test_host_reads_what_the_device_wrote() -> None:
    for n in (0, 1, 3, 257):
        x = mx.arange(n, dtype=mx.int32)
        outs = [ops.to_host(x * i) for i in range(20)]
        mx.async_eval(*outs)
        for i, out in enumerate(outs):
            assert np.array(out).tolist() == [j * i for j in range(n)]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 1, 16), (7, 3, 64), (600, 24, 128)])
def test_rope_of_rows(dtype: mx.Dtype, view: bool, rows: int, heads: int, dim: int) -> None:
    rng = np.random.default_rng(rows)
    x = mx.array(rng.standard_normal((rows, heads, 1, dim + 8 * view))).astype(dtype)
    x = x[..., 8:] if view else x
    exact = np.array(x.astype(mx.float32), np.float64)
    positions = rng.integers(0, 5000, rows).astype(np.int32)
    inv_freqs = (10000.0 ** (-np.arange(dim // 2) / (dim // 2))).astype(np.float32)
    rotations = ops.rope_rotations(mx.array(positions), mx.array(inv_freqs), scale=0.5)
    assert ops.serves_rope(x, rotations)
    angles = (positions.astype(np.float32) * np.float32(0.5))[:, None] * inv_freqs
    np.testing.assert_allclose(np.array(rotations[:, 0]), np.cos(np.float64(angles)), atol=1e-6)
    cos, sin = (f(np.float64(angles))[:, None, None] for f in (np.cos, np.sin))
    low, high = exact[..., : dim // 2], exact[..., dim // 2 :]
    expected = np.concatenate([low * cos - high * sin, low * sin + high * cos], axis=-1)
    twice = x + x
    out = np.array(ops.rope(x, rotations).astype(mx.float32))
    unit = 2.0**-10 if dtype == mx.float16 else 2.0**-7
    np.testing.assert_allclose(out, expected, rtol=unit, atol=unit)
    np.testing.assert_array_equal(np.array(twice.astype(mx.float32)), 2 * exact)  # x is as it was
    donated = np.array(ops.rope(x * 1, rotations).astype(mx.float32))  # in its input's place
    np.testing.assert_array_equal(donated, out)


def test_ropes_that_no_kernel_serves_are_named() -> None:
    rotations = ops.rope_rotations(mx.arange(3), mx.ones(8), scale=1.0)
    halves = mx.ones((3, 2, 1, 16), mx.bfloat16)
    assert ops.serves_rope(halves, rotations)
    assert not ops.serves_rope(halves, rotations, traditional=True)
    for x in (mx.ones((3, 2, 1, 16)), mx.ones((3, 2, 1, 24), mx.bfloat16)):
        assert not ops.serves_rope(x, rotations)
        with pytest.raises(RuntimeError, match="must run on the CPU"):
            mx.eval(ops.rope(x, rotations))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("shape", [(8,), (3, 1, 960), (600, 8192), (2, 3, 16), (0, 16)])
def test_silu_mul(dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    gate, x = (mx.array(rng.standard_normal(shape)).astype(dtype) for _ in range(2))
    assert ops.serves_silu_mul(gate)
    g, v = (np.array(a.astype(mx.float32), np.float64) for a in (gate, x))
    unit = 2.0**-10 if dtype == mx.float16 else 2.0**-7
    out = np.array(ops.silu_mul(gate, x).astype(mx.float32))
    np.testing.assert_allclose(out, g / (1 + np.exp(-g)) * v, rtol=2 * unit, atol=unit / 100)
    donated = np.array(ops.silu_mul(gate * 1, x).astype(mx.float32))
    np.testing.assert_array_equal(donated, out)
    assert not ops.serves_silu_mul(mx.ones((2, 3), dtype)) and not ops.serves_silu_mul(mx.ones(8))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65])
@pytest.mark.parametrize(
    ("n", "k"), [(16, 32), (48, 96), (144, 544), (1024, 3072), (3072, 8192), (40, 64)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype: mx.Dtype, rows: int, n: int, k: int, bias: bool) -> None:
    rng = np.random.default_rng(rows)
    x, w, b = (
        mx.array(rng.standard_normal(shape)).astype(dtype) for shape in ((rows, k), (n, k), (n,))
    )
    mx.eval(x, w, b)
    product = (
        np.array(x.astype(mx.float32), np.float64) @ np.array(w.astype(mx.float32), np.float64).T
    )
    exact = product + np.array(b.astype(mx.float32), np.float64) * bias
    out = ops.linear(x[:, None], w, b if bias else None)
    assert out.shape == (rows, 1, n)
    assert out.dtype == dtype
    # Two roundings, of the product and of the sum, and the order of the sums.
    unit = 2.0**-10 if dtype == mx.float16 else 2.0**-7
    bound = unit * (np.abs(product) + np.abs(exact) + 0.05 * np.sqrt(k))
    assert (np.abs(np.array(out[:, 0].astype(mx.float32)) - exact) <= bound).all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(48, 96), (1024, 3072), (144, 8224), (8192, 512)])
def test_a_row_of_a_linear_layer_has_the_same_bits_in_any_company(dtype, n: int, k: int) -> None:
    x, w = mx.random.normal((64, k)).astype(dtype), mx.random.normal((n, k)).astype(dtype)
    mx.eval(x, w)
    alone = [np.array(ops.linear(x[i : i + 1], w).view(mx.uint16))[0] for i in range(64)]
    for rows in (2, 8, 9, 16, 17, 32, 33, 50, 64):
        together = np.array(ops.linear(x[:rows], w).view(mx.uint16))
        assert (together == alone[: len(together)]).all()


def test_other_kernels_follow_those_of_clusters() -> None:
    """CUDA updates graphs of equal shape in place, but not how their blocks form clusters."""
    x, w, y = (mx.random.normal(s).astype(mx.float16) for s in ((40, 1088), (16, 1088), (40, 1088)))
    few = x[:3] + 0
    mx.eval(x, w, y, few)
    expected = np.array(x.astype(mx.float32)) @ np.array(w.astype(mx.float32)).T
    total = np.array(x) + np.array(y)
    for _ in range(3):
        assert np.abs(np.array(ops.linear(x, w)) - expected).max() < 0.5
        assert np.abs(np.array(ops.linear(few, w)) - expected[:3]).max() < 0.5
        assert (np.array(x + y) == total).all()
