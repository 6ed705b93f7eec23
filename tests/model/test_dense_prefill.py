"""Long prefill chunks by dense attention compute what the paged kernels compute.

It runs with CUDA only. What it computes does not depend on that, so here it runs anywhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import ops
from mlx_paged.model import dense_prefill
from mlx_paged.model.caches import PagedLayerCache, Step, StepContext
from mlx_paged.model.layerwise import LayerwiseSubmit
from mlx_paged.model.layout import LayerSpec
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
        ([40, 600, 30, 50], [0, 600, 0, 1]),  # sequences without rows
        ([700] * 3 + [650, 650], [600] * 3 + [600, 600]),  # several alike
        ([40, 512, 512, 1024, 700], [1, 512, 512, 1024, 600]),  # whole prompts, and one that is not
    ],
)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.one_in(12)
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
    num_long = (rows >= dense_prefill.MIN_ROWS).sum()
    assert sum(chunk.num_sequences for chunk in prefill.chunks) == num_long
    slots = plan.slot_mapping
    own = tuple(pool.reshape(-1, KV_HEADS, DIM)[slots] for pool in (keys, values))
    for rows_at_hand in (None, own):
        actual = prefill.attend(queries, (keys, values), rows_at_hand, DIM**-0.5)
        assert actual.shape == expected.shape
        error = mx.abs(actual.astype(mx.float32) - expected.astype(mx.float32)).max().item()
        assert error < (4e-3 if dtype == mx.float16 else 3e-2)


@pytest.mark.parametrize(
    ("context_lens", "query_lens", "expected"),
    [
        ([512] * 7, [512] * 7, [4, 2, 1]),  # as many as a power of two
        ([512] * 2, [513, 512], [1, 1]),
        ([600, 512, 512], [512] * 3, [1, 2]),
        ([512, 40, 512], [512, 1, 512], [1, 1]),  # not side by side
        ([8192] * 4, [512] * 4, [2, 2]),  # keys for two
        ([9000] * 2, [512] * 2, [1, 1]),
    ],
)
def test_sequences_that_are_alike_are_one_call(
    context_lens: list[int], query_lens: list[int], expected: list[int]
) -> None:
    prefill = dense_prefill.plan_dense_prefill(
        tables_of(context_lens), np.array(context_lens), np.array(query_lens), block_size=BLOCK
    )
    assert prefill is not None
    assert [chunk.num_sequences for chunk in prefill.chunks] == expected
    ends = [chunk.first_row + chunk.num_rows for chunk in prefill.chunks]
    assert ends[-1] == sum(query_lens)


@pytest.mark.parametrize(
    ("context_lens", "query_lens", "expected"),
    [
        ([512, 1024], [512, 1024], [False, False]),
        ([4096, 8192, 8192], [4096, 4096, 8192], [True, True, True]),  # shapes that come again
        ([4352, 5000, 8192], [4096, 4096, 2048], [False, False, False]),
        ([32768, 65536, 65536], [8000, 4000, 5000], [False, False, True]),  # worth preparing
        ([4096, 100], [0, 1], [False, False]),
    ],
)
def test_on_hopper_cudnn_takes_only_shapes_that_pay(
    context_lens: list[int], query_lens: list[int], expected: list[bool]
) -> None:
    choice = dense_prefill.ChunkChoice(on_hopper=True)
    assert choice.of(np.array(context_lens), np.array(query_lens)).tolist() == expected


def test_hopper_s_kernel_takes_the_other_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_hopper(*dims: int, block_size: int = 16) -> bool:
        specs = [
            LayerSpec(
                num_kv_heads=KV_HEADS, key_dim=dim, value_dim=dim, dtype=mx.float16, window=None
            )
            for dim in dims
        ]
        return dense_prefill.choice_for(specs, block_size).on_hopper

    monkeypatch.setattr(ops, "has_wgmma", lambda: False)
    assert not on_hopper(128)
    monkeypatch.setattr(ops, "has_wgmma", lambda: True)
    assert not on_hopper(128, 96), "one is slow"
    assert not on_hopper(128, block_size=8), "of small blocks all are"
    assert on_hopper(128, 64)
    lens, rows = np.array([600, 4096]), np.array([512, 4096])
    prefill = dense_prefill.plan_dense_prefill(
        tables_of([600, 4096]),
        lens,
        rows,
        block_size=BLOCK,
        choice=dense_prefill.ChunkChoice(on_hopper=True),
    )
    assert prefill is not None and prefill.plan is not None
    assert [chunk.first_row for chunk in prefill.chunks] == [512]


def test_short_rows_are_not_touched() -> None:
    lens, rows = np.array([100, 600]), np.array([100, 1])
    assert (
        dense_prefill.plan_dense_prefill(tables_of([100, 600]), lens, rows, block_size=BLOCK)
        is None
    )


@pytest.mark.parametrize(
    ("context_lens", "query_lens", "gathered"),
    [([1024, 1024], [1024, 1024], 0), ([1024], [768], 1), ([1000], [1000], 1)],
    ids=["whole", "cached", "not aligned"],
)
def test_whole_prompts_are_not_gathered(
    monkeypatch, context_lens: list[int], query_lens: list[int], gathered: int
) -> None:
    lens, rows = np.array(context_lens), np.array(query_lens)
    tables = tables_of(context_lens)
    plan = build_plan(tables, lens, rows, block_size=BLOCK)
    prefill = dense_prefill.plan_dense_prefill(tables, lens, rows, block_size=BLOCK)
    calls: list[int] = []
    gather = ops.gather_kv
    monkeypatch.setattr(ops, "gather_kv", lambda *args: calls.append(1) or gather(*args))
    context = StepContext()
    cache = PagedLayerCache(context, SERVED, num_blocks=tables[-1][-1] + 1, block_size=BLOCK)
    shape = (sum(query_lens), KV_HEADS, 1, DIM)
    keys = mx.random.normal(shape, key=mx.random.key(1)).astype(mx.bfloat16)
    queries = mx.random.normal((sum(query_lens), HEADS, 1, DIM), key=mx.random.key(2)).astype(
        mx.bfloat16
    )
    context.enter(Step(plan, mx.array([0], dtype=mx.int32), prefill=prefill))
    cache.update_and_fetch(keys, keys)
    cache.attend(queries, scale=0.1, sinks=None)
    assert len(calls) == gathered
    # Another layer that reads the same pools, and another step, have nothing at hand.
    cache.attend(queries, scale=0.1, sinks=None)
    cache.update_and_fetch(keys, keys)
    context.enter(Step(plan, mx.array([0], dtype=mx.int32), prefill=prefill))
    cache.attend(queries, scale=0.1, sinks=None)
    assert len(calls) == gathered + 2


def test_the_first_layer_s_attention_starts_by_itself(monkeypatch) -> None:
    """The device waits for it; that of others is built while it has layers before them to do."""
    lens = np.array([512])
    tables = tables_of([512])
    plan = build_plan(tables, lens, lens, block_size=BLOCK)
    prefill = dense_prefill.plan_dense_prefill(tables, lens, lens, block_size=BLOCK)
    started: list[tuple[int, ...]] = []
    monkeypatch.setattr(mx, "async_eval", lambda array: started.append(array.shape))
    context = StepContext()
    context.enter(
        Step(plan, mx.array([511]), prefill=prefill, layerwise=LayerwiseSubmit(1, max_parts=4))
    )
    keys = mx.zeros((512, KV_HEADS, 1, DIM), mx.bfloat16)
    for layer in range(3):
        cache = PagedLayerCache(context, SERVED, num_blocks=40, block_size=BLOCK)
        cache.layer = layer
        cache.update_and_fetch(keys, keys)
        cache.attend(mx.zeros((512, HEADS, 1, DIM), mx.bfloat16), scale=0.1, sinks=None)
    pool = (40, BLOCK, KV_HEADS, DIM)
    assert started == [pool, (512, HEADS, DIM), pool, pool]


SERVED = LayerSpec(num_kv_heads=2, key_dim=64, value_dim=64, dtype=mx.bfloat16)


def test_layers_that_mlx_can_compute_are_served() -> None:
    assert dense_prefill.serves(SERVED, {"scale": 1.0, "sinks": None})
    for change in ({"dtype": mx.float16}, {"key_dim": 128, "value_dim": 128}):
        assert dense_prefill.serves(replace(SERVED, **change), {"scale": 1.0})


@pytest.mark.parametrize(
    "change",
    [
        {"window": 8},
        {"dtype": mx.float32},
        {"value_dim": 32},
        {"key_dim": 32},
        {"key_dim": 136, "value_dim": 136},
        {"key_dim": 60, "value_dim": 60},  # (padded in the pools)
        {"key_dim": 72, "latent": True},
    ],
    ids=str,
)
def test_layers_of_another_kind_are_not(change: dict[str, Any]) -> None:
    assert not dense_prefill.serves(replace(SERVED, **change), {"scale": 1.0})


def test_sinks_and_soft_caps_are_not_served() -> None:
    assert not dense_prefill.serves(SERVED, {"scale": 1.0, "sinks": mx.zeros(4)})
    assert not dense_prefill.serves(SERVED, {"scale": 1.0, "softcap": 30.0})


@pytest.mark.parametrize("reach", [{}, {"window": 4}, {"chunk": 16}], ids=str)
def test_only_layers_that_see_everything_take_it(reach: dict[str, int]) -> None:
    """The chunks of a step are planned for these; others have plans of their own."""
    lens = np.array([600])
    table = [list(range(1, 39))]
    plan = build_plan(table, lens, lens, block_size=BLOCK)
    prefill = dense_prefill.plan_dense_prefill(table, lens, lens, block_size=BLOCK)
    assert prefill is not None
    calls: list[int] = []

    class Counted(dense_prefill.DensePrefill):
        def attend(self, *args: Any) -> mx.array:
            calls.append(1)
            return super().attend(*args)

    context = StepContext()
    counted = Counted(prefill.chunks, prefill.others, prefill.plan)
    context.enter(Step(plan, mx.array([599], dtype=mx.int32), prefill=counted))
    spec = replace(SERVED, **reach)
    cache = PagedLayerCache(context, spec, num_blocks=40, block_size=BLOCK)
    keys = mx.random.normal((600, KV_HEADS, 1, DIM), key=mx.random.key(1)).astype(mx.bfloat16)
    cache.update_and_fetch(keys, keys)
    queries = mx.random.normal((600, HEADS, 1, DIM), key=mx.random.key(2)).astype(mx.bfloat16)
    assert cache.attend(queries, scale=0.1, sinks=None).shape == (600, HEADS, 1, DIM)
    assert calls == ([] if reach else [1])
