"""Quantized pools on the simulated GPU: attention against the oracle on what codes stand for.

(`support/metal_checks.py` has writing and gathering.)
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support.quantized import (
    FORMATS,
    QuantizedBatch,
    quantized,
)
from support.reference import alibi_slopes, assert_close, make_batch, spans_of
from support.simulated import launches, needs_simulator, simulated

from mlx_paged import ops

pytestmark = needs_simulator

NAMES = tuple(FORMATS)
TOLERANCE = {mx.float32: 5e-5, mx.float16: 5e-3, mx.bfloat16: 2e-2}


def int32(values: object) -> mx.array:
    return mx.array(np.array(values, np.int32))


def attend(
    batch: QuantizedBatch, plan: ops.AttentionPlan | None = None, **options: object
) -> mx.array:
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


DTYPES = {"decode": mx.bfloat16, "decode_matrix": mx.float32, "prefill": mx.bfloat16}
# A key and a value head dim for each kind, whose kernels are few.
DIMS = {"decode": (192, 128), "decode_matrix": (128, 128), "prefill": (128, 128)}


@pytest.mark.one_in(16)
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("name", NAMES)
def test_attention(rng, name, kind) -> None:
    query_lens, (q_heads, kv_heads) = KINDS[kind]
    dtype = DTYPES[kind]
    batch = quantized(
        make_batch(
            rng, [70, 50], query_lens, num_q_heads=q_heads, num_kv_heads=kv_heads,
            key_dim=DIMS[kind][0], value_dim=DIMS[kind][1], dtype=dtype,
        ),
        name,
    )  # fmt: skip
    assert_close(attend(batch, scale=0.1), batch.expected(scale=0.1), TOLERANCE[dtype])
    kernels = [launch["kernel"] for launch in launches()]
    assert any(f"paged_{kind}_" in kernel for kernel in kernels)
    assert ("rotate_queries" in kernels[0]) == (name != "fp8")


@pytest.mark.parametrize("kind", list(KINDS))
def test_windows_sinks_caps_bounds_and_splits(rng, kind) -> None:
    query_lens, (q_heads, kv_heads) = KINDS[kind]
    bounds = None
    if kind == "prefill":
        bounds = spans_of([70, 50], query_lens, [[(35, 45)], []])
    batch = quantized(
        make_batch(
            rng, [70, 50], query_lens, num_q_heads=q_heads, num_kv_heads=kv_heads, key_dim=64,
            window=20, bounds=bounds,
        ),
        "int8",
    )  # fmt: skip
    options = {"scale": 0.1, "window": 20, "softcap": 3.0, "sinks": mx.arange(q_heads) * 0.3}
    options["alibi_slopes"] = alibi_slopes(q_heads)
    out = attend(batch, batch.plain.plan(split_tokens=16), **options)
    assert_close(out, batch.expected(**options), TOLERANCE[mx.float32])
