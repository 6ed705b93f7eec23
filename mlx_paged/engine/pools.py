"""Allocates the pools of an engine."""

from __future__ import annotations

from mlx_paged.engine import memory
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.kv_groups import KVGroups, PoolSizes
from mlx_paged.engine.profile import measure_activations
from mlx_paged.engine.runner import ModelRunner


def allocate_pools(
    runner: ModelRunner, groups: KVGroups, config: EngineConfig, model_limit: int | None
) -> tuple[PoolSizes, int | None]:
    """Gives a runner the pools of all groups, as large as the configuration allows.

    Args:
        model_limit: most tokens of context that the model can do.

    Returns:
        The sizes, and the bytes that the largest step needs where they were measured.
    """

    def allocate(num_blocks: int) -> None:
        sizes = groups.sizes(num_blocks)
        runner.allocate(groups.blocks_by_reach(sizes), sizes.num_state_slots)

    left_over, activations = memory.left_for_pool(
        config, lambda: measure_activations(runner, config)
    )
    wanted = config.num_blocks(
        [spec.bytes_per_token for spec in runner.model.layout.attention],
        model_limit,
        left_over,
        most_blocks=groups.most_blocks,
    )
    exactly = config.num_gpu_blocks_override is not None
    num_blocks = memory.allocate_fitting(allocate, wanted, exactly=exactly)
    return groups.sizes(num_blocks), activations
