"""PagedModel.resize: pools of another size keep their contents, also after `reset`."""

from __future__ import annotations

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from support.models import StepDriver, tiny_config, tiny_model

NUM_BLOCKS = 64
WINDOWS = tiny_config(
    "llama", layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=16
)


def driver_of(config: dict[str, object]) -> StepDriver:
    return StepDriver(tiny_model(config), "llama", block_size=8, num_blocks=NUM_BLOCKS)


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS + 9, NUM_BLOCKS, NUM_BLOCKS - 1])
def test_a_reset_restores_the_resized_pools(num_blocks: int) -> None:
    driver, expected = (driver_of(tiny_config("llama")) for _ in range(2))
    prompt, following = {"a": [5, 6, 7]}, {"a": [8]}
    for each in (driver, expected):
        each.step(prompt)
    model = driver.runner.model
    [group_spec] = model.layout.group_specs
    before = [pool[: NUM_BLOCKS - 1] for pool in model.pools()]
    model.resize(num_blocks, group_spec)
    model.reset()
    assert {len(pool) for pool in model.pools()} == {num_blocks}
    for old, new in zip(before, model.pools(), strict=True):
        np.testing.assert_array_equal(np.array(old), np.array(new[: NUM_BLOCKS - 1]))
    np.testing.assert_array_equal(driver.step(following)["a"], expected.step(following)["a"])


def test_a_reset_restores_each_group_with_its_own_size() -> None:
    model = driver_of(WINDOWS).runner.model
    sizes = {group_spec: 10 + 7 * i for i, group_spec in enumerate(model.layout.group_specs)}
    assert len(sizes) == 2
    for group_spec, num_blocks in sizes.items():
        model.resize(num_blocks, group_spec)
    model.reset()
    for cache in model.attention_caches:
        expected = sizes[cache.spec.group_spec]
        assert len(cache.key_pool) == len(cache.value_pool) == expected


def test_the_old_pools_are_freed() -> None:
    model = driver_of(tiny_config("llama")).runner.model
    [group_spec] = model.layout.group_specs
    model.allocate(100 * NUM_BLOCKS)
    bytes_of_block = sum(pool.nbytes for pool in model.pools()) // (100 * NUM_BLOCKS)
    large = mx.get_active_memory()
    model.resize(NUM_BLOCKS, group_spec)
    assert large - mx.get_active_memory() > 98 * NUM_BLOCKS * bytes_of_block
