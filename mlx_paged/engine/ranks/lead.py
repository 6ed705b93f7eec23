"""Runs on rank 0: `LeadRunner` and `RanksExecutor`, which run every step on all ranks.

Whatever rank 0 does to its pools, the others do to theirs in the same order: allocation, adapters,
warm-up and measurement steps, and the steps of requests. Only rank 0 samples tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_paged.core import StepBatch, StepResult
from mlx_paged.engine.executor import InProcessExecutor
from mlx_paged.engine.pooling.runner import PoolingRunner
from mlx_paged.engine.ranks.adapters import adapter_messages, slots_message
from mlx_paged.engine.ranks.life import Followers
from mlx_paged.engine.ranks.media import media_columns
from mlx_paged.engine.ranks.messages import (
    ALL_ROWS,
    ALLOCATE,
    LIMITS,
    RESET,
    Message,
    StepWriter,
)
from mlx_paged.engine.ranks.peers import shared_tokens
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.model.layout import KVCacheGroupSpec
from mlx_paged.model.lora_slots import LowRank
from mlx_paged.model.media import StepMedia
from mlx_paged.model.plan import StepInputs

#: Seconds between checks of an idle engine that its other ranks are alive.
CHECK_SECONDS = 1.0


class Ranks(NamedTuple):
    """The ranks of an engine, on rank 0.

    Attributes:
        followers: The other ranks.
        world: MLX's group of all ranks.
        hosts: See `launch.ring_hosts`.
    """

    followers: Followers
    world: mx.distributed.Group
    hosts: Sequence[str] = ()


class LeadRunner(ModelRunner):
    """A `ModelRunner` on rank 0 whose every action the other ranks repeat.

    Args:
        ranks: All ranks; the others' runners are ready.
        options: See `ModelRunner`.
    """

    def __init__(self, *arguments: Any, ranks: Ranks, **options: Any) -> None:
        self._followers, self._world = ranks.followers, ranks.world
        self._writer = StepWriter()
        super().__init__(*arguments, **options)
        self.share_tokens = self._share
        if self.model.adapter_layers is not None:
            self._followers.send(slots_message(self.model.adapter_layers).encode())
        if not self.model.prunes_last_layer:  # A draft head reads all rows.
            self._followers.send(Message(ALL_ROWS).encode())

    def allocate(
        self, num_blocks: int | Mapping[KVCacheGroupSpec, int], num_state_slots: int = 0
    ) -> None:
        """See `ModelRunner`."""
        counts = [
            num_blocks if isinstance(num_blocks, int) else num_blocks[group_spec]
            for group_spec in self.model.layout.group_specs
        ]
        fields = {"num_state_slots": num_state_slots}
        message = Message(ALLOCATE, fields, {"num_blocks": array("q", counts)})
        self._followers.send(message.encode())
        super().allocate(num_blocks, num_state_slots)

    def share_limits(self, cache_limit: int) -> None:
        """Makes the other ranks run as far ahead of their GPUs as this one.

        Args:
            cache_limit: Bytes of freed buffers that MLX may keep.
        """
        fields = {"parts_ahead": self.model.parts_ahead, "cache_limit": cache_limit}
        self._followers.send(Message(LIMITS, fields).encode())

    def load_adapter(self, slot: int, layers: Mapping[str, LowRank]) -> None:
        """See `ModelRunner`."""
        for message in adapter_messages(slot, layers):
            self._followers.send(message.encode())
        super().load_adapter(slot, layers)

    def _inputs(
        self,
        batch: StepBatch,
        context_lens: np.ndarray,
        num_rows: np.ndarray,
        wanted: np.ndarray,
        media: StepMedia | None = None,
        num_ordered_rows: int = 0,
    ) -> StepInputs:
        """Returns the model's inputs for a step, and sends the step to the other ranks."""
        # Sent here: after the messages of its adapters, and once its media proved usable.
        message = self._writer.message(batch)
        columns = {**message.columns, **media_columns(media)}
        self._followers.send(replace(message, columns=columns).encode())
        return super()._inputs(batch, context_lens, num_rows, wanted, media, num_ordered_rows)

    def reset(self) -> None:
        """See `ModelRunner`."""
        self._followers.send(Message(RESET).encode())
        super().reset()

    def _share(self, tokens: mx.array) -> mx.array:
        """Sends the sampled tokens ``[num_sampled]`` to the other ranks, as inputs of the next
        step."""
        return shared_tokens(tokens, self._world)


class LeadPoolingRunner(LeadRunner, PoolingRunner):
    """A `PoolingRunner` on rank 0 whose every action the other ranks repeat."""


class RanksExecutor(InProcessExecutor):
    """Runs batches on all ranks. A fault on any rank ends them all.

    A failed step is not retried in parts: other ranks may be waiting in its collectives.

    Args:
        runner: A `LeadRunner`.
    """

    def __init__(self, runner: ModelRunner, ranks: Ranks, *, times_prompts: bool = False) -> None:
        super().__init__(runner, times_prompts=times_prompts)
        self._followers = ranks.followers
        self._is_launching = False

    def check(self) -> None:
        """See `Executor`."""
        self._followers.check()

    def launch(self, batch: StepBatch) -> None:
        """See `Executor`.

        Raises:
            EngineDeadError: A rank has ended.
        """
        self.check()
        self._is_launching = True
        with self._followers.operation():
            super().launch(batch)
            self._choose(self._pending[-1])  # The other ranks are waiting for the tokens.
        self._is_launching = False

    def read(self) -> StepResult:
        """See `Executor`.

        Raises:
            EngineDeadError: A rank has ended.
        """
        with self._followers.operation():
            return super().read()

    def reset(self) -> None:
        """See `Executor`.

        Raises:
            EngineDeadError: A rank has ended, or an exception such as Ctrl-C interrupted a launch,
                so the step may be running on only some ranks.
        """
        if self._is_launching:
            raise self._followers.failed(RuntimeError("interrupted while it launched a step"))
        with self._followers.operation():
            super().reset()

    def _record_fault(self, error: Exception, num_rows: int) -> None:
        self.num_faults += 1
        raise self._followers.failed(error) from error
