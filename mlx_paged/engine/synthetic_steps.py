"""Steps of made-up sequences, to warm up an engine and to measure memory and time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from mlx_paged.core import StepBatch, StepTable
from mlx_paged.core.kv.tree import TOKEN_TYPE
from mlx_paged.engine.sampling.sampler import SamplingMetadata
from mlx_paged.engine.sampling.sequence_sampler import SamplingRow


def synthetic_step(
    query_lens: Sequence[int],
    starts: Sequence[int],
    tables: list[tuple[StepTable, ...]],
    sampling: Sequence[SamplingRow],
    **columns: Any,
) -> StepBatch:
    """Returns a step in which every sequence samples; its ids belong to no request.

    Args:
        query_lens: ``[num_seqs]`` tokens that each sequence computes.
        starts: ``[num_seqs]`` first position of each.
        tables: ``[num_seqs]`` block tables for each attention group.
        sampling: One for each token that the step samples.
        columns: Other columns of `StepBatch`. By default, all tokens are 0 and known, and there are
            no drafts, adapters and states.
    """
    num_seqs = len(query_lens)
    defaults: dict[str, Any] = {
        "token_ids": array(TOKEN_TYPE, [0]) * sum(query_lens),
        "input_from": array("i", [-1]) * num_seqs,
        "num_drafts": array("i", [0]) * num_seqs,
        "adapter_ids": array("i", [0]) * num_seqs,
    }
    return StepBatch(
        seq_ids=[-1 - i for i in range(num_seqs)],
        starts=array("q", starts),
        query_lens=array("q", query_lens),
        samples=[True] * num_seqs,
        is_decode=max(query_lens) == 1,
        tables=tables,
        block_copies=((),) * len(tables[0]),
        sampling=SamplingMetadata.of(sampling),
        **(defaults | columns),
    )
