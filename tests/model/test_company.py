"""A row's numbers do not depend on which others are in its step: not one bit of them.

On a GPU the batch decides how large a grid is and which kernels are launched beside each other; how
a row is cut and summed must follow from the row alone.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.models import StepDriver, embedded_twin, random_tokens, tiny_config, tiny_model
from support.reference import DTYPES, ON_GPU, bits, make_batch

from mlx_paged import build_info, ops
from mlx_paged.model.plan import build_plan

# Contexts of one piece and of several: on a GPU a piece has 384 tokens or more.
CONTEXTS = (1, 17, 383, 400, 1000, 2500) if ON_GPU else (1, 17, 300)
NUM_OTHERS = 64 if ON_GPU else 4
STEPS = 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (4, 64), (8, 64), (4, 128), (2, 256), (3, 80)])
def test_attention(rng, dtype, group, dim) -> None:
    lens = [*CONTEXTS, *(int(n) for n in rng.integers(1, 600, NUM_OTHERS))]
    shape = {"num_q_heads": 4 * group, "num_kv_heads": 4, "key_dim": dim, "dtype": dtype}
    batch = make_batch(rng, lens, [1] * len(lens), **shape)
    pools = (batch.key_pool, batch.value_pool)
    together = bits(ops.paged_attention(batch.queries, *pools, batch.plan(), scale=0.125))
    for rows in (*([i] for i in range(len(CONTEXTS))), list(range(len(CONTEXTS)))):
        plan = build_plan(
            [batch.tables[i] for i in rows], [lens[i] for i in rows], [1] * len(rows),
            block_size=batch.key_pool.shape[1],
        )  # fmt: skip
        queries = batch.queries[mx.array(rows, dtype=mx.int32)]
        alone = bits(ops.paged_attention(queries, *pools, plan, scale=0.125))
        np.testing.assert_array_equal(alone, together[rows])


# As many rows as take our own products. A CPU has them in float32 only.
OURS = [("bfloat16", n) for n in (2, 8, 32)] if ON_GPU else [("float32", n) for n in (2, 16)]


@pytest.mark.parametrize(("dtype", "rows"), OURS)
def test_greedy_logits(rng, dtype, rows) -> None:
    if not ON_GPU and not build_info()["simd"].startswith("avx"):
        pytest.skip("the products are another library's here")
    config = tiny_config("llama", tied=False, hidden_size=128, head_dim=64)
    model = tiny_model(config)
    model.set_dtype(getattr(mx, dtype))
    alone, together = decoded(rng, model, rows)
    np.testing.assert_array_equal(alone, together)


@pytest.mark.parametrize("rows", [2, 8, 32])
def test_greedy_tokens_where_products_are_a_librarys(rng, rows) -> None:
    """BLAS and cuBLAS choose how to sum by the number of rows."""
    alone, together = decoded(rng, embedded_twin().model, rows)
    np.testing.assert_array_equal(alone.argmax(-1), together.argmax(-1))
    np.testing.assert_allclose(alone, together, rtol=0, atol=1e-5 * np.abs(alone).max())


def decoded(rng: np.random.Generator, model: nn.Module, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """``[STEPS, vocab_size]`` logits of a sequence, decoded alone and as one of `rows`.

    Both begin with the same keys and values: they are forks of one prompt.
    """
    driver = StepDriver(model, "llama", block_size=16, num_blocks=400)
    prompts = {str(i): random_tokens(rng, int(rng.integers(3, 60))) for i in range(rows - 1)}
    tokens = {
        name: [int(driver.step({name: prompt})[name].argmax())] for name, prompt in prompts.items()
    }
    prompt = random_tokens(rng, 420)
    first = [int(driver.step({"prompt": prompt})["prompt"].argmax())]
    for name in ("alone", "together"):
        driver.fork(name, "prompt", len(prompt))
        tokens[name] = first
    order = [*prompts]
    order.insert(rows // 2, "together")
    found: dict[str, list[np.ndarray]] = {"alone": [], "together": []}
    for _ in range(STEPS):
        for work in (["alone"], order):
            logits = driver.step({name: tokens[name] for name in work})
            tokens |= {name: [int(row.argmax())] for name, row in logits.items()}
            for name in found.keys() & logits.keys():
                found[name].append(logits[name])
    return np.stack(found["alone"]), np.stack(found["together"])
