"""StepBatch and StepResult: one step of the engine as data, on its way to the device and back.

Both are plain columns that can be pickled. Neither names a `Sequence` or a `Request`, so an
executor may run in another process. `Scheduler.schedule` fills the columns that follow from its
plan; the engine adds sampling, reports and media (`engine.step_columns`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from mlx_paged.core.encoder_cache import ScheduledMedia
from mlx_paged.core.kv.specs import BlockCopy, StateMove, StepTable
from mlx_paged.core.kv.tree import TOKEN_TYPE

_token_column = partial(array, TOKEN_TYPE)
_int64_column = partial(array, "q")
_int32_column = partial(array, "i")


@dataclass(slots=True)
class StepBatch:
    """All that the device half needs to run one step.

    Sequence `i` of the step computes positions ``[starts[i], starts[i] + query_lens[i])``.
    Everything before them is in its blocks. ``tables[i][group].blocks[p // block_size]`` holds
    position `p`; a table covers at least the positions of the step and may cover more.

    Attributes:
        step: Number of the step; increases by one with every step.
        seq_ids: ``[num_seqs]``, decodes first, then prompts; unique in the scheduler's life.
        token_ids: ``[num_tokens]``, those of all sequences one after another. A token that the
            step before is still sampling is 0 here, and the only one of its sequence.
        starts: ``[num_seqs]`` int64: first position of each sequence in the step.
        query_lens: ``[num_seqs]`` int64: how many tokens of each the step computes.
        samples: ``[num_seqs]``: whether a token is chosen after the last one: true when no known
            token is left to compute.
        is_decode: Whether every sequence computes one token and samples the next.
        input_from: ``[num_seqs]`` int32: entry of the tokens sampled by the step before that is the
            input; -1: the input is known.
        num_drafts: ``[num_seqs]`` int32: how many of the tokens, the last ones, are guesses to be
            verified.
        adapter_ids: ``[num_seqs]`` int32: the adapter of each sequence; 0: the model itself.
        tables: ``[num_seqs]``: block tables in each attention group, full attention first.
        slots: ``[num_seqs]``: state slots; empty where the model has no recurrent layers.
        block_copies: For each attention group; executed in order before anything else of the
            step. No block is both a source and a destination.
        media: Features that the step makes and gives up; None where it computes no media item.
        sampling: Settings of the sequences that sample, in their order
            (`engine.sampling.sampler.SamplingMetadata`).
        prompt_targets: (index of a sequence, prompt tokens whose log-probabilities are wanted).
        media_inputs: ``[num_seqs]``: what the towers and the rows need of each sequence's media
            (`engine.media.step_media.SequenceMedia`); empty where no sequence has any.
    """

    step: int = 0
    seq_ids: list[int] = field(default_factory=list)
    token_ids: array[int] = field(default_factory=_token_column)
    starts: array[int] = field(default_factory=_int64_column)
    query_lens: array[int] = field(default_factory=_int64_column)
    samples: list[bool] = field(default_factory=list)
    is_decode: bool = False
    input_from: array[int] = field(default_factory=_int32_column)
    num_drafts: array[int] = field(default_factory=_int32_column)
    adapter_ids: array[int] = field(default_factory=_int32_column)
    tables: list[tuple[StepTable, ...]] = field(default_factory=list)
    slots: list[StateMove] = field(default_factory=list)
    block_copies: tuple[tuple[BlockCopy, ...], ...] = ()
    media: ScheduledMedia | None = None
    sampling: Any = None
    prompt_targets: list[tuple[int, Any]] = field(default_factory=list)
    media_inputs: list[Any] = field(default_factory=list)

    @property
    def num_seqs(self) -> int:
        """Sequences of the step."""
        return len(self.seq_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step."""
        return len(self.token_ids)

    def begins(self) -> list[int]:
        """``[num_seqs]``: entry of `token_ids` where each sequence begins."""
        begins, at = [], 0
        for length in self.query_lens:
            begins.append(at)
            at += length
        return begins


class PromptLogprobs(NamedTuple):
    """Log-probabilities of prompt tokens that a step found.

    Attributes:
        place: Index of the sequence in the batch.
        start: First position that the step computed; the first entry is that of the token after it.
        positions: In order (`engine.sampling.logprobs.PositionLogprobs`).
    """

    place: int
    start: int
    positions: Sequence[Any]


class PooledStates(NamedTuple):
    """Hidden states of a part of a prompt, pooled: of positions ``[start, end)``.

    Attributes:
        place: Index of the sequence in the batch.
        states: ``[hidden_size]`` float32.
    """

    place: int
    start: int
    end: int
    states: Any


@dataclass(slots=True)
class StepResult:
    """The results of a step; `place` is the index of a sequence in its `StepBatch`.

    Attributes:
        token_ids: For each sequence the tokens that it gained: none where it does not sample or
            failed, else one, and one more for every draft that was right.
        failures: (place, why there is no token, or the item that the tower rejects). These
            sequences cannot continue.
        logprobs: (place, log-probabilities of each of its tokens), where they were asked for.
        prompt_logprobs: Those of prompt tokens, likewise.
        pooled: Pooled hidden states.
        feature_sizes: (key, bytes) of media features that were made since the last result.
        is_poisoned: NaNs or infinities were found, so the prefix cache cannot be trusted.
    """

    token_ids: list[list[int]] = field(default_factory=list)
    failures: list[tuple[int, Any]] = field(default_factory=list)
    logprobs: list[tuple[int, list[Any]]] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    pooled: list[PooledStates] = field(default_factory=list)
    feature_sizes: list[tuple[bytes, int]] = field(default_factory=list)
    is_poisoned: bool = False
