"""Tests paged caches with keys, values and queries of any form that model code passes."""

from __future__ import annotations

from contextlib import ExitStack

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.model.caches import KVPools, LatentLayerCache, PagedLayerCache, Step, StepContext
from mlx_paged.model.gathered import GatheredGroup, GatheredLayerCache
from mlx_paged.model.layout import FULL, LayerSpec
from mlx_paged.model.plan import StepInputs, build_plan

HALVES = [mx.float16, mx.bfloat16]


def heads(num_heads: int, dim: int, seed: int) -> mx.array:
    """``[3, num_heads, 1, dim]`` in float32: three rows of one sequence."""
    return mx.random.normal((3, num_heads, 1, dim), key=mx.random.key(seed))


@pytest.fixture
def context() -> StepContext:
    """A step of three rows of one sequence, in block 2."""
    context = StepContext()
    plan = build_plan([[2]], [3], [3], block_size=8)
    context.enter(Step(plan, mx.array([2], dtype=mx.int32)))
    return context


def stored(pool: mx.array, dim: int) -> np.ndarray:
    """``[3, heads, dim]``: the three tokens in block 2."""
    return np.array(pool[2, :3, :, :dim].astype(mx.float32))


def expected(x: mx.array, dtype: mx.Dtype) -> np.ndarray:
    return np.array(x.squeeze(2).astype(dtype).astype(mx.float32))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_pool_keeps_its_dtype_whatever_is_written(context: StepContext, dtype: mx.Dtype) -> None:
    """Some layers upcast keys or values, others do not."""
    spec = LayerSpec(num_kv_heads=2, key_dim=12, value_dim=8, dtype=dtype)
    keys, values = heads(2, 12, 1), heads(2, 8, 2)
    for k, v in [(keys, values), (keys.astype(dtype), values), (keys, values.astype(dtype))]:
        cache = PagedLayerCache(context, spec, num_blocks=4, block_size=8)
        cache.update_and_fetch(k, v)
        assert cache.key_pool.dtype == cache.value_pool.dtype == dtype
        assert np.array_equal(stored(cache.key_pool, 12), expected(keys, dtype))
        assert np.array_equal(stored(cache.value_pool, 8), expected(values, dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_attention_answers_in_the_dtype_of_the_queries(
    context: StepContext, dtype: mx.Dtype
) -> None:
    spec = LayerSpec(num_kv_heads=2, key_dim=16, value_dim=16, dtype=dtype)
    cache = PagedLayerCache(context, spec, num_blocks=4, block_size=8)
    keys, values, queries = heads(2, 16, 1), heads(2, 16, 2), heads(4, 16, 3)
    cache.update_and_fetch(keys, values)
    got = cache.attend(queries, scale=0.25, sinks=None)
    low = cache.attend(queries.astype(dtype), scale=0.25, sinks=None)
    assert got.dtype == mx.float32 and low.dtype == dtype
    assert np.array_equal(np.array(got), np.array(low.astype(mx.float32)))
    latent_spec = LayerSpec(num_kv_heads=1, key_dim=24, value_dim=16, dtype=dtype, latent=True)
    latents = LatentLayerCache(context, latent_spec, num_blocks=4, block_size=8)
    k, v = latents.update_and_fetch(heads(1, 16, 1), heads(1, 8, 2))
    scores = heads(4, 8, 3) @ v.swapaxes(-1, -2)
    assert latents.key_pool.dtype == dtype
    assert k.cache.attend(queries, scale=0.25, sinks=None, scores=scores).dtype == mx.float32


@pytest.mark.parametrize("dtype", HALVES)
def test_gathered_keys_are_those_of_the_pool(context: StepContext, dtype: mx.Dtype) -> None:
    spec = LayerSpec(num_kv_heads=2, key_dim=12, value_dim=8, dtype=dtype)
    cache = GatheredLayerCache(context, spec, num_blocks=4, block_size=8)
    assert isinstance(cache, KVPools)
    three = np.array([3])
    inputs = StepInputs(three, three, [[2]], np.array([2]))
    group = GatheredGroup.of(inputs, np.array([0]), [FULL], block_size=8, uniform=False)
    keys, values = (x.transpose(2, 1, 0, 3) for x in (heads(2, 12, 1), heads(2, 8, 2)))
    with ExitStack() as stack:
        stack.enter_context(cache.grouped(group))
        with pytest.raises(RuntimeError, match="read before it wrote"):
            cache.keys_and_values()
        got = cache.update_and_fetch(keys, values)
        assert cache.keys_and_values() == got
        for x, given in zip(got, (keys, values)):
            assert x.dtype == dtype and mx.array_equal(x, given.astype(dtype))
    # Nothing of a group is left behind for the next one.
    with cache.grouped(group), pytest.raises(RuntimeError, match="read before it wrote"):
        cache.keys_and_values()
