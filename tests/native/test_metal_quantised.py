"""Quantised pools on the simulated GPU: the CPU's bytes, and attention against the oracle on them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support import reference
from support.quantised import FORMATS, QuantisedBatch, decoded, empty_pools, keys_of, quantised, raw, steps
from support.reference import assert_close, make_batch, spans_of, to_numpy
from support.simulated import launches, needs_simulator, simulated

from mlx_paged import ops

pytestmark = needs_simulator

NAMES = tuple(FORMATS)
TOLERANCE = {mx.float32: 5e-5, mx.float16: 5e-3, mx.bfloat16: 2e-2}


def int32(values: object) -> mx.array:
    return mx.array(np.array(values, np.int32))


@pytest.mark.parametrize("dims", [(64, 128), (80, 112), (24, 40), (192, 256), (512, 576)])
@pytest.mark.parametrize("name", NAMES)
def test_writes_what_the_cpu_writes(rng, name, dims) -> None:
    dtype = {64: mx.float16, 80: mx.bfloat16}.get(dims[0], mx.float32)
    batch = make_batch(rng, [20], [1], num_kv_heads=3, num_q_heads=3, key_dim=dims[0], value_dim=dims[1])
    rows = rng.standard_normal((6, 3, max(dims))) * 10.0 ** rng.uniform(-6, 2, (6, 3, 1))
    rows[2, 0] = 0
    rows[3, 1, 5] = np.nan
    rows[4, 2, 7] = -np.inf
    keys, values = (mx.array(rows[..., :d].astype(np.float32)).astype(dtype) for d in dims)
    slots = int32([3, -1, 17, 31, 0, 20])
    wanted = ops.write_kv(*empty_pools(batch, name), keys, values, slots)
    mx.eval(*wanted)
    with simulated():
        written = ops.write_kv(*empty_pools(batch, name), keys, values, slots)
        mx.eval(*written)
    assert [launch["kernel"] for launch in launches()] == [f"quantise_kv_{str(dtype).split('.')[-1]}"]
    for got, want, dim in zip(written, wanted, dims):
        # A GPU divides less exactly, and sums of a rotation come in another order: a code may round
        # the other way.
        assert (raw(got) != raw(want)).mean() < 2e-3
        held, known = decoded(got, dim), decoded(want, dim)
        np.testing.assert_array_equal(np.isnan(held), np.isnan(known))
        step = 0 if name == "fp8" else np.nan_to_num(steps(want, dim))
        assert (np.nan_to_num(np.abs(held - known)) <= 1.01 * step + 1e-7).all()


@pytest.mark.parametrize("name", NAMES)
def test_gathers_keys_as_they_were(rng, name) -> None:
    batch = quantised(make_batch(rng, [50, 20], [1, 1], key_dim=80, value_dim=64), name)
    plan = batch.plain.plan()
    with simulated():
        dense = ops.gather_kv(
            batch.key_pool, batch.value_pool, plan.block_tables, int32([50, 20]), 55,
            dtype=mx.float32,
        )  # fmt: skip
        mx.eval(*dense)
    for got, pool in zip(dense, (keys_of(batch.key_pool, 80), decoded(batch.value_pool, 64))):
        wanted = reference.gather_kv(pool, batch.plain.tables, [50, 20], 55)
        np.testing.assert_allclose(to_numpy(got), wanted, atol=2e-6)


def attend(batch: QuantisedBatch, plan: ops.AttentionPlan | None = None, **options: object) -> mx.array:
    with simulated():
        out = batch.attend(plan, **options)
        mx.eval(out)
    return out


# Decodes of few queries and of many, drafts, and prefills.
KINDS = {
    "decode": ([1, 1], (4, 2)),
    "decode_matrix": ([1, 3], (12, 2)),
    "prefill": ([40, 11], (4, 2)),
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("name", NAMES)
def test_attention(rng, name, kind, dtype) -> None:
    query_lens, (q_heads, kv_heads) = KINDS[kind]
    batch = quantised(
        make_batch(
            rng, [70, 50], query_lens, num_q_heads=q_heads, num_kv_heads=kv_heads, key_dim=64,
            dtype=dtype,
        ),
        name,
    )  # fmt: skip
    assert_close(attend(batch, scale=0.1), batch.expected(scale=0.1), TOLERANCE[dtype])
    kernels = [launch["kernel"] for launch in launches()]
    assert any(f"paged_{kind}_" in kernel for kernel in kernels)
    assert ("rotate_queries" in kernels[0]) == (name != "fp8")


@pytest.mark.parametrize("dims", [(32, 32), (80, 80), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("kind", list(KINDS))
def test_head_dims(rng, kind, dims) -> None:
    query_lens, (q_heads, kv_heads) = KINDS[kind]
    for name in ("int8_k_int4_v", "int4"):
        batch = quantised(
            make_batch(
                rng, [40, 25], query_lens if kind != "prefill" else [17, 11], num_q_heads=q_heads,
                num_kv_heads=kv_heads, key_dim=dims[0], value_dim=dims[1], dtype=mx.float16,
            ),
            name,
        )  # fmt: skip
        assert_close(attend(batch, scale=0.1), batch.expected(scale=0.1), TOLERANCE[mx.float16])


@pytest.mark.parametrize("kind", list(KINDS))
def test_windows_sinks_caps_bounds_and_splits(rng, kind) -> None:
    query_lens, (q_heads, kv_heads) = KINDS[kind]
    bounds = None
    if kind == "prefill":
        bounds = spans_of([70, 50], query_lens, [[(35, 45)], []])
    batch = quantised(
        make_batch(
            rng, [70, 50], query_lens, num_q_heads=q_heads, num_kv_heads=kv_heads, key_dim=64,
            window=20, bounds=bounds,
        ),
        "int8",
    )  # fmt: skip
    options = {"scale": 0.1, "window": 20, "softcap": 3.0, "sinks": mx.arange(q_heads) * 0.3}
    out = attend(batch, batch.plain.plan(split_tokens=16), **options)
    assert_close(out, batch.expected(**options), TOLERANCE[mx.float32])


@pytest.mark.parametrize(("name", "most"), [("int8", 1.001), ("int8_k_int4_v", 1.001), ("int4", 1.001)])
def test_a_decode_reads_each_byte_once(rng, name, most) -> None:
    batch = quantised(
        make_batch(
            rng, [512], [1], num_q_heads=4, num_kv_heads=4, key_dim=128, dtype=mx.float16,
            block_size=32,
        ),
        name,
    )  # fmt: skip
    attend(batch, scale=0.1)
    [decode] = [launch for launch in launches() if "paged_decode_" in launch["kernel"]]
    for buffer, pool in ((1, batch.key_pool), (2, batch.value_pool)):
        fewest = pool.nbytes * 16 // pool.shape[0]
        assert fewest <= decode["traffic"][buffer][0] <= most * fewest
