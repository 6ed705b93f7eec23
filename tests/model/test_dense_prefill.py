"""Long prefill chunks by dense attention compute what the paged kernels compute.

It runs with CUDA only. What it computes does not depend on that, so here it runs anywhere.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import ops
from mlx_paged.model import dense_prefill
from mlx_paged.model.plan import build_plan

BLOCK, HEADS, KV_HEADS, DIM = 16, 4, 2, 64


@pytest.fixture(autouse=True)
def _as_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "has_cuda", lambda: True)


def tables_of(context_lens: list[int]) -> list[list[int]]:
    tables, first = [], 1
    for context in context_lens:
        count = -(-context // BLOCK)
        tables.append(list(range(first, first + count)))
        first += count
    return tables


@pytest.mark.parametrize(
    ("context_lens", "query_lens"),
    [
        ([512], [512]),
        ([1000], [600]),  # begins and ends between aligned positions
        ([70, 900, 33], [1, 700, 1]),  # decodes on both sides
        ([40, 41, 1600, 600, 300], [1, 1, 520, 600, 90]),  # a short chunk stays with the decodes
    ],
)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_equals_paged_attention(
    context_lens: list[int], query_lens: list[int], dtype: mx.Dtype
) -> None:
    rng = np.random.default_rng(0)
    tables = tables_of(context_lens)
    shape = (1 + tables[-1][-1], BLOCK, KV_HEADS, DIM)
    keys, values = (mx.array(rng.standard_normal(shape)).astype(dtype) for _ in range(2))
    queries = mx.array(rng.standard_normal((sum(query_lens), HEADS, DIM))).astype(dtype)
    mx.eval(keys, values, queries)
    lens, rows = np.array(context_lens), np.array(query_lens)
    plan = build_plan(tables, lens, rows, block_size=BLOCK)
    expected = ops.paged_attention(queries, keys, values, plan, scale=DIM**-0.5)
    prefill = dense_prefill.plan_dense_prefill(tables, lens, rows, block_size=BLOCK)
    assert prefill is not None
    assert len(prefill.chunks) == (rows >= dense_prefill.LEAST_ROWS).sum()
    actual = prefill.attend(queries, keys, values, DIM**-0.5)
    assert actual.shape == expected.shape
    error = mx.abs(actual.astype(mx.float32) - expected.astype(mx.float32)).max().item()
    assert error < (4e-3 if dtype == mx.float16 else 3e-2)


def test_short_rows_are_not_touched() -> None:
    lens, rows = np.array([100, 600]), np.array([100, 1])
    assert (
        dense_prefill.plan_dense_prefill(tables_of([100, 600]), lens, rows, block_size=BLOCK)
        is None
    )
