"""Runs the steps that the scheduler plans, on the device. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged.attention import seam
from mlx_paged.attention.cache import LayerSpec, PagedLayerCache, Step, StepContext, copy_blocks
from mlx_paged.attention.plan import build_plan
from mlx_paged.engine.sampler import SamplingRow, sample
from mlx_paged.models.output_rows import select_output_rows
from mlx_paged.scheduling import Batch, ScheduledSequence


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device is working on, and where its tokens will be."""

    batch: Batch
    tokens: mx.array  # [num_samples] int32
    written: (
        mx.array
    )  # the last pool it writes: a step without samples has nothing else to wait for
    sample_index: dict[int, int]  # seq_id -> entry of `tokens`


class ModelRunner:
    """A model, its KV pools, and the one way to run a step.

    Args:
        model: an mlx-lm model of a proven family. Its output projection is changed in place, so a
            model belongs to one runner.
        specs: one for each layer (`models.families.layer_specs`).
    """

    def __init__(
        self, model: nn.Module, specs: list[LayerSpec], *, num_blocks: int, block_size: int
    ) -> None:
        seam.install()
        self._model = model
        self._block_size = block_size
        self._context = StepContext()
        self._caches = [
            PagedLayerCache(self._context, spec, num_blocks=num_blocks, block_size=block_size)
            for spec in specs
        ]
        select_output_rows(model, self._context)

    def launch(
        self,
        batch: Batch,
        sampling_row: Callable[[ScheduledSequence], SamplingRow],
        previous: LaunchedStep | None,
    ) -> LaunchedStep:
        """Builds a step and sets the device to work on it; returns at once.

        Args:
            sampling_row: how to choose the token of a sequence that is sampled in this step.
            previous: the step before, if its tokens have not been read yet.
        """
        if batch.block_copies:
            copy_blocks(self._caches, mx.array(np.array(batch.block_copies, dtype=np.int32)))
        sampled = [s for s in batch.sequences if s.samples]
        logits = self._forward(batch, previous)
        if sampled:
            tokens = sample(logits, [sampling_row(s) for s in sampled])
        else:
            # Nothing to choose: the step's work is what it wrote to the pools.
            tokens = mx.zeros((0,), dtype=mx.int32)
        pools = [pool for c in self._caches for pool in (c.key_pool, c.value_pool)]
        mx.async_eval(tokens, *pools)  # type: ignore[no-untyped-call]
        return LaunchedStep(batch, tokens, pools[-1], {s.seq_id: i for i, s in enumerate(sampled)})

    @staticmethod
    def read(launched: LaunchedStep) -> dict[int, int]:
        """Waits for a step and returns the token of each sequence that was sampled, by seq_id."""
        mx.eval(launched.tokens, launched.written)
        tokens = np.array(launched.tokens)
        return {seq_id: int(tokens[i]) for seq_id, i in launched.sample_index.items()}

    @staticmethod
    def rest() -> None:
        """Waits until the device has nothing left to do."""
        mx.synchronize()

    def _forward(self, batch: Batch, previous: LaunchedStep | None) -> mx.array:
        """``[num_samples, vocab_size]`` logits of the rows that are sampled from."""
        sequences = batch.sequences
        num_rows = [s.num_tokens for s in sequences]
        plan = build_plan(
            [s.block_table for s in sequences],
            [s.context_len for s in sequences],
            num_rows,
            block_size=self._block_size,
        )
        last_rows = np.cumsum(num_rows) - 1
        wanted = last_rows[[s.samples for s in sequences]]
        self._context.enter(Step(plan, mx.array(wanted.astype(np.int32))))
        try:
            logits = self._model(_input_tokens(batch, previous)[:, None], cache=self._caches)
        finally:
            self._context.leave()
        return logits.squeeze(1)


def _input_tokens(batch: Batch, previous: LaunchedStep | None) -> mx.array:
    """``[num_rows]`` int32. Tokens that the step before is still sampling never visit the host."""
    known = np.array([t for s in batch.sequences for t in s.token_ids], dtype=np.int32)
    if not any(s.awaits_token for s in batch.sequences):
        return mx.array(known)
    assert previous is not None, "a row awaits a token but no step is in flight"
    source = np.full(len(known), -1, dtype=np.int32)
    row = 0
    for s in batch.sequences:
        if s.awaits_token:
            source[row] = previous.sample_index[s.seq_id]
        row += s.num_tokens
    index = mx.array(source)
    return mx.where(index < 0, mx.array(known), previous.tokens[mx.maximum(index, 0)])
