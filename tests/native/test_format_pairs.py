"""Every pair of key and value formats, at few rows and many: attention as the oracle has it, or a
refusal by name. (`test_sanitizers.py` runs this file too.)"""

from __future__ import annotations

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from support.quantized import FORMATS, make_quantized
from support.reference import assert_close, make_batch
from support.simulated import needs_simulator, simulated

from mlx_paged import ops

SERVED = {pair: name for name, pair in FORMATS.items()}
PLAIN = (mx.float32, mx.float16, mx.bfloat16)
REFUSED = [
    pair
    for pair in product((*PLAIN, mx.int8, mx.uint32, mx.uint8), repeat=2)
    if pair not in SERVED and not (pair[0] == pair[1] and pair[0] in PLAIN)
]


@pytest.mark.parametrize("rows", [1, 2, 7, 20])
@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_pair_that_is_served(rng, name, heads, rows) -> None:
    # Head dims for which scratch of one format would not hold the other's rows.
    for key_dim, value_dim in ((64, 64), (192, 8)):
        batch = make_quantized(
            rng, [70, 45], [rows, 1], num_q_heads=heads[0], num_kv_heads=heads[1],
            key_dim=key_dim, value_dim=value_dim, name=name,
        )  # fmt: skip
        assert_close(batch.attend(scale=0.1), batch.expected(scale=0.1), 2e-5)


@pytest.mark.one_in(15)
@needs_simulator
@pytest.mark.parametrize("rows", [1, 2, 7, 20])
@pytest.mark.parametrize("name", FORMATS)
def test_a_pair_that_is_served_on_the_simulated_gpu(rng, name, rows) -> None:
    batch = make_quantized(
        rng, [70, 45], [rows, 1], num_q_heads=4, num_kv_heads=2, key_dim=128, value_dim=128,
        dtype=mx.bfloat16, name=name,
    )  # fmt: skip
    with simulated():
        out = batch.attend(scale=0.1)
        mx.eval(out)
    assert_close(out, batch.expected(scale=0.1), 2e-2)


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: f"{pair[0]}-{pair[1]}"[9:])
def test_a_pair_that_no_option_creates_is_refused(rng, pair) -> None:
    batch = make_batch(rng, [20], [1])
    pools = [ops.allocate_pool(4, 16, 2, 32, dtype) for dtype in pair]
    plan = batch.plan()
    rows = mx.zeros((1, 2, 32), pair[0] if pair[0] in PLAIN else mx.float32)
    wanted = "int8 or uint32 beside an int8 key_pool" if pair[0] == mx.int8 else ".* like key_pool"
    calls = {
        "write_kv": lambda: ops.write_kv(*pools, rows, rows, mx.array(np.zeros(1, np.int32))),
        "gather_kv": lambda: ops.gather_kv(
            *pools, plan.block_tables, plan.context_lens, 20, dtype=mx.float32
        ),
        "paged_attention": lambda: ops.paged_attention(
            batch.queries.astype(rows.dtype), *pools, plan, scale=0.1
        ),
    }
    for op, call in calls.items():
        message = rf"\[{op}\] value_pool must be {wanted} but got {str(pair[1]).split('.')[-1]}"
        with pytest.raises(ValueError, match=message):
            call()
