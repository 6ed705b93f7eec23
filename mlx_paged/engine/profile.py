"""Measures what the largest step needs besides weights and pool."""

from __future__ import annotations

import gc

import mlx.core as mx

from mlx_paged.core import Batch, GroupRows, ScheduledSequence, StateMove, WindowRow
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.engine.sampler import SamplingRow, SamplingRows


def measure_activations(runner: ModelRunner, config: EngineConfig) -> int:
    """Bytes that the largest step needs: all its rows, and as many of them sampled as may be.

    It runs on small pools of its own, which the runner loses again.
    """
    batch = largest_step(config, len(runner.windows), has_states=runner.model.layout.has_states)
    num_blocks = 1 + max(max(row.block_table) for row in batch.sequences)
    blocks = dict.fromkeys(runner.model.layout.reaches, num_blocks)
    runner.allocate(blocks, 1 + len(batch.sequences))
    mx.synchronize()
    gc.collect()  # what it would free during the step is no part of it
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    sampling = SamplingRows.of([SamplingRow(1.0, 0, row.context_len) for row in batch.sequences])
    runner.read(runner.launch(batch, lambda _: sampling, None))
    return max(0, mx.get_peak_memory() - before)


def largest_step(config: EngineConfig, num_windows: int = 0, *, has_states: bool = False) -> Batch:
    """`max_num_batched_tokens` rows of `max_num_seqs` new sequences."""
    num_tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
    rows, first_block = [], 1
    for i in range(config.max_num_seqs):
        begin, end = (num_tokens * k // config.max_num_seqs for k in (i, i + 1))
        num_blocks = -(-(end - begin) // config.block_size)
        table = tuple(range(first_block, first_block + num_blocks))
        first_block += num_blocks
        state = StateMove(0, 1 + i) if has_states else None
        groups = GroupRows((WindowRow(table, 0),) * num_windows, state)
        token_ids = (0,) * (end - begin)
        rows.append(ScheduledSequence(-1 - i, "profile", token_ids, 0, table, 0, True, groups))
    return Batch(0, tuple(rows), ())
