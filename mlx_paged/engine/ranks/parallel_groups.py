"""ParallelGroups: the process groups of one rank, for tensor and for pipeline parallelism.

Ranks are numbered as in vLLM: those that share the layers of a stage are adjacent.

    tensor_parallel_size 2, pipeline_parallel_size 2

    stage 0    rank 0   rank 1    `tensor`: share every layer of the stage
    stage 1    rank 2   rank 3
               `pipeline`: hand hidden states on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.engine.ranks.launch import Wait, split, wait_here
from mlx_paged.engine.ranks.peers import connect_peers
from mlx_paged.model.pipeline import divide_layers
from mlx_paged.model.sharding import shard


class ParallelGroups(NamedTuple):
    """The groups of this rank.

    Attributes:
        world: All ranks.
        tensor: Ranks that share this rank's layers; None if it holds whole layers.
        pipeline: One rank per stage, in layer order; None with a single stage.
    """

    world: mx.distributed.Group
    tensor: mx.distributed.Group | None
    pipeline: mx.distributed.Group | None

    @classmethod
    def of(
        cls,
        world: mx.distributed.Group,
        tensor_parallel_size: int,
        hosts: Sequence[str],
        wait: Wait = wait_here,
    ) -> ParallelGroups:
        """Connects the groups. Every rank must call it.

        Args:
            hosts, wait: See `launch.split`.

        Raises:
            InvalidParameterError: MLX's back end cannot split a group.
        """
        if tensor_parallel_size == 1:
            return cls(world, None, world)
        tensor, pipeline = world, None
        if tensor_parallel_size != world.size():
            stage, part = divmod(world.rank(), tensor_parallel_size)
            tensor = split(world, stage, hosts, wait)
            pipeline = split(world, part, hosts, wait)
        connect_peers(tensor)
        return cls(world, tensor, pipeline)

    def divide(self, model: nn.Module, config: Mapping[str, Any]) -> None:
        """Reduces a model to this rank's part of the weights, without evaluating them.

        Raises:
            UnsupportedModelError: See `shard` and `divide_layers`.
        """
        if self.tensor is not None:
            shard(model, config, self.tensor)
        if self.pipeline is not None:
            divide_layers(model, config, self.pipeline)
