"""PipelinedModel: the stages of a pipeline in one process, each with a copy of the model.

Ranks meet in collectives. Here, the stage that needs another one's hidden states builds that one's
forward in the middle of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx

from mlx_paged.model.caches import KVPools
from mlx_paged.model.layout import CacheLayout
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.pipeline import Stage, divide_layers
from mlx_paged.model.plan import StepInputs
from mlx_paged.model.wrap import build_paged_model
from support.parity import family_model


class OneOf:
    """Stands for a group whose other ranks do not exist."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class PipelinedModel:
    """Does what `support.parity.Driver` asks of a `PagedModel`."""

    def __init__(self, config: Mapping[str, Any], size: int, *, block_size: int) -> None:
        self.block_size = block_size
        self._step: tuple[mx.array, StepInputs] | None = None
        self.stages = [self._stage(config, size, rank) for rank in range(size)]
        self._values: dict[int, mx.array] = {}  # the hidden states that each stage gives

    def _stage(self, config: Mapping[str, Any], size: int, rank: int) -> PagedModel:
        model = family_model(config)
        divide_layers(model, config, OneOf(size, rank))  # type: ignore[arg-type]
        stage = Stage.of(model)
        assert stage is not None
        stage.exchange = partial(self._exchange, rank)  # type: ignore[method-assign]
        paged = build_paged_model(model, config, block_size=self.block_size)
        paged.repeats_steps = False  # A graph must not keep another stage's arrays.
        return paged

    def _exchange(self, rank: int, x: mx.array, owner: int) -> mx.array:
        if self._step is None:
            return x  # A stage tries a step that nothing evaluates.
        if owner == rank:
            self._values[owner] = x
        elif owner not in self._values:
            self.stages[owner].forward(*self._step)
        return self._values[owner]

    def forward(self, tokens: mx.array, inputs: StepInputs) -> mx.array:
        self._values.clear()
        self._step = tokens, inputs
        return self.stages[0].forward(tokens, inputs)

    @property
    def layout(self) -> CacheLayout:
        return self.stages[0].layout

    @property
    def attention_caches(self) -> Sequence[KVPools]:
        return list(chain.from_iterable(stage.attention_caches for stage in self.stages))

    def allocate(self, num_blocks: int, num_state_slots: int) -> None:
        for stage in self.stages:
            stage.allocate(num_blocks, num_state_slots)

    def copy_blocks(self, block_pairs: mx.array) -> None:
        for stage in self.stages:
            stage.copy_blocks(block_pairs)

    def pools(self) -> list[mx.array]:
        return list(chain.from_iterable(stage.pools() for stage in self.stages))
