"""The primitives on this machine's own GPU, against the float64 oracle. Runs where there is one and
this build of mlx_paged has kernels for it."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from support import reference
from support.reference import DTYPES, alibi_slopes, assert_close, bits, make_batch

from mlx_paged import ops
from mlx_paged.extension import build_info

BACKENDS = {"metal", "cuda"} & set(build_info()["backends"].split())
pytestmark = pytest.mark.skipif(
    not BACKENDS or not mx.is_available(mx.gpu), reason="this build has no GPU kernels"
)
HEAD_DIMS = [(d, d) for d in (32, 64, 80, 96, 112, 128, 192, 256, 512)] + [(192, 128), (576, 512)]


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    mx.set_default_device(mx.gpu)
    yield
    mx.set_default_device(mx.cpu)


def check(batch, limits=None, **options) -> None:
    options.setdefault("scale", 0.125)
    plan = batch.plan(**(limits or {}))
    out = ops.paged_attention(batch.queries, batch.key_pool, batch.value_pool, plan, **options)
    assert_close(out, batch.expected(**options))


@pytest.mark.parametrize(("key_dim", "value_dim"), HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 16])
def test_decode(rng, dtype, key_dim, value_dim, group) -> None:
    shape = {"num_q_heads": 2 * group, "key_dim": key_dim, "value_dim": value_dim}
    batch = make_batch(rng, [700, 17, 1], [1, 1, 1], dtype=dtype, **shape)
    check(batch, scale=float(np.float32(key_dim**-0.5)))
    check(batch, {"split_tokens": 64}, scale=float(np.float32(key_dim**-0.5)))


@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 40])
def test_groups_and_rows(rng, group, rows) -> None:
    shape = {"num_q_heads": 2 * group, "key_dim": 64, "dtype": mx.bfloat16}
    batch = make_batch(rng, [150, 60], [rows, 1], window=50, **shape)
    sinks = mx.array(np.linspace(-3, 9, 2 * group).astype(np.float32))
    check(batch, window=50)
    check(batch, {"split_tokens": 32}, window=50, softcap=2.0, sinks=sinks)
    options = {"sinks": sinks, "alibi_slopes": alibi_slopes(2 * group)}
    check(batch, {"split_tokens": 32}, window=50, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_movement(rng, dtype) -> None:
    words = rng.integers(0, 2**16, (2, 6, 16, 2, 32 * dtype.size), dtype=np.uint16)
    keys, values = mx.array(words).view(dtype)
    rows = keys[:1].reshape(16, 2, -1)[:3]
    slots, pairs = [40, -1, 3], [(1, 4), (1, 2), (5, 0)]
    expected = [
        reference.copy_blocks(reference.write_kv(bits(p), bits(rows), slots), pairs)
        for p in (keys, values)
    ]
    written = ops.write_kv(keys, values, rows, rows, mx.array(slots, mx.int32))
    copied = ops.copy_blocks(written, mx.array(pairs, mx.int32))
    for out, want in zip(copied, expected):
        np.testing.assert_array_equal(bits(out), want)
    tables = [[3, 1], [2, 0]]
    dense = ops.gather_kv(*copied, mx.array(tables), mx.array([20, 5]), 25)
    for out, pool in zip(dense, expected):
        np.testing.assert_array_equal(bits(out), reference.gather_kv(pool, tables, [20, 5], 25))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [33, 32_000, 50_257, 151_936])
def test_token_bitmask(rng, dtype, vocab_size) -> None:
    logits = mx.array(rng.standard_normal((40, vocab_size)).astype(np.float32)).astype(dtype)
    words = rng.integers(-(2**31), 2**31, (30, -(-vocab_size // 32))).astype(np.int32)
    rows = rng.permutation(40)[:30].astype(np.int32)
    want = np.array(logits.astype(mx.float32))
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    want[rows] = np.where(allowed == 1, want[rows], -np.inf)
    copied = ops.apply_token_bitmask(logits, mx.array(words), mx.array(rows))
    np.testing.assert_array_equal(np.array(copied.astype(mx.float32)), want)
    in_place = ops.apply_token_bitmask(logits + 0, mx.array(words), mx.array(rows))
    np.testing.assert_array_equal(np.array(in_place.astype(mx.float32)), want)


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
def test_arrays_that_are_not_dense(rng, layout) -> None:
    batch = make_batch(rng, [70, 20], [1, 1], key_dim=64)
    pools = (batch.key_pool, batch.value_pool)
    queries = reference.noncontiguous(batch.queries)[layout]
    out = ops.paged_attention(queries, *pools, batch.plan(), scale=0.125)
    assert_close(out, batch.expected(scale=0.125))
