"""StepBatch and StepResult: the input and output of one engine step, as plain data.

Both consist of picklable columns. Neither refers to a `Sequence` or a `Request`, so an executor may
run in another process. `Scheduler.schedule` fills the columns of its plan; `engine.step_columns`
adds sampling, reports and media.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from mlx_paged.core.encoder_cache import ScheduledMedia
from mlx_paged.core.kv.specs import BlockCopy, StateMove, StepTable
from mlx_paged.core.kv.tree import TOKEN_TYPE

_token_column = partial(array, TOKEN_TYPE)
_int64_column = partial(array, "q")
_int32_column = partial(array, "i")


@dataclass(slots=True)
class StepBatch:
    """All inputs of one step for the device half.

    Sequence `i` computes positions ``[starts[i], starts[i] + query_lens[i])``; its blocks already
    hold everything before that. ``tables[i][group].blocks[p // block_size]`` holds position `p`. A
    table covers at least the positions of the step.

    Attributes:
        step: Step number; increases by one per step.
        seq_ids: ``[num_seqs]``, decodes first, then prompts; unique per scheduler.
        token_ids: ``[num_tokens]``, all sequences concatenated. A token that the previous step is
            still sampling is 0 here, and is the only token of its sequence.
        starts: ``[num_seqs]`` int64: first position computed.
        query_lens: ``[num_seqs]`` int64: number of tokens computed.
        samples: ``[num_seqs]``: True if the step computes the last known token and samples the
            next one.
        is_decode: True if every sequence computes one token and samples the next.
        input_from: ``[num_seqs]`` int32: index of the input token among the tokens sampled by the
            previous step, in which a sequence has one more token for each draft; -1 if the input is
            in `token_ids`.
        num_drafts: ``[num_seqs]`` int32: number of trailing tokens that are drafts to verify. Such
            a sequence samples after its last known token and after each draft.
        drafts_in_flight: `engine.input_tokens.DraftsInFlight`: drafts that the device is still
            computing; they are 0 in `token_ids`. None if all are known.
        adapter_ids: ``[num_seqs]`` int32: slot of each sequence's adapter; 0 for the base model.
        adapters: The adapter in each of these slots (`Request.adapter`). The device half loads it
            if its slot holds another one, so a step that runs again finds its adapters.
        tables: ``[num_seqs]``: block tables for each attention group, full attention first.
        slots: ``[num_seqs]``: state slots; empty if the model has no recurrent layers.
        block_copies: One tuple per attention group, executed in order before the rest of the step.
            No block is both a source and a destination.
        media: Features to evict and encode; None if the step computes no media item.
        sampling: `engine.sampling.sampler.SamplingMetadata` for the sequences that sample, in
            order.
        prompt_targets: (sequence index, prompt tokens that need log-probabilities).
        media_inputs: ``[num_seqs]``: each sequence's `multimodal.step_media.SequenceMedia`; empty
            if no sequence has media.
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
    drafts_in_flight: Any = None
    adapter_ids: array[int] = field(default_factory=_int32_column)
    adapters: dict[int, Any] = field(default_factory=dict)
    tables: list[tuple[StepTable, ...]] = field(default_factory=list)
    slots: list[StateMove] = field(default_factory=list)
    block_copies: tuple[tuple[BlockCopy, ...], ...] = ()
    media: ScheduledMedia | None = None
    sampling: Any = None
    prompt_targets: list[tuple[int, Any]] = field(default_factory=list)
    media_inputs: list[Any] = field(default_factory=list)
    _drafts: list[tuple[int, ...]] | None = field(default=None, init=False, compare=False)

    @property
    def num_seqs(self) -> int:
        """Number of sequences in the step."""
        return len(self.seq_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the step."""
        return len(self.token_ids)

    @property
    def has_drafts(self) -> bool:
        """True if any sequence has drafts to verify."""
        return self.num_drafts.count(0) < len(self.num_drafts)

    def drafts(self) -> list[tuple[int, ...]]:
        """``[num_seqs]``: the drafts of each sequence, in order. Call it on a complete batch."""
        if self._drafts is None:
            ends, token_ids = accumulate(self.query_lens), self.token_ids.tolist()
            self._drafts = [
                tuple(token_ids[end - count : end]) for end, count in zip(ends, self.num_drafts)
            ]
        return self._drafts

    def set_tokens(self, rows: Iterable[int], token_ids: Iterable[int]) -> None:
        """Replaces the tokens of some rows: drafts that were in flight."""
        for row, token in zip(rows, token_ids):
            self.token_ids[row] = token
        self._drafts = None

    def num_samples(self) -> list[int]:
        """``[num_seqs]``: number of tokens sampled for each sequence: none, or one plus one for
        each draft."""
        return [samples * (1 + drafts) for samples, drafts in zip(self.samples, self.num_drafts)]

    def query_starts(self) -> list[int]:
        """``[num_seqs]``: index into `token_ids` of each sequence's first token."""
        return [end - length for end, length in zip(accumulate(self.query_lens), self.query_lens)]


class PromptLogprobs(NamedTuple):
    """Log-probabilities of prompt tokens from one step.

    Attributes:
        seq_index: Index of the sequence in the batch.
        start: First position that the step computed; the first entry is for position `start + 1`.
        positions: `engine.sampling.logprobs.PositionLogprobs`, in order.
    """

    seq_index: int
    start: int
    positions: Sequence[Any]


class PooledStates(NamedTuple):
    """Pooled hidden states of prompt positions ``[start, end)``.

    Attributes:
        seq_index: Index of the sequence in the batch.
        states: ``[hidden_size]`` float32.
    """

    seq_index: int
    start: int
    end: int
    states: Any


class StepTime(NamedTuple):
    """The measured time of a step.

    Attributes:
        seconds: From the launch, on an idle device, to the end.
        is_exact: False if the step may have ended long before the host looked.
    """

    seconds: float
    is_exact: bool


@dataclass(slots=True)
class StepResult:
    """The results of a step. `seq_index` is the index of a sequence in its `StepBatch`.

    Attributes:
        token_ids: New tokens of each sequence: none if it did not sample or failed, otherwise one
            plus one per accepted draft.
        failures: (place, reason). The reason says why there is no token, or names the item that the
            tower rejected. These sequences cannot continue.
        logprobs: (place, log-probabilities of each new token), if requested.
        prompt_logprobs: Log-probabilities of prompt tokens, if requested.
        pooled: Pooled hidden states.
        feature_sizes: (key, bytes) of media features encoded since the last result.
        is_poisoned: True if NaNs or infinities were found; the prefix cache is then unreliable.
        hidden: A device's array ``[num_tokens, width]`` of the hidden states that a drafter reads;
            None if there are none, or if the step did not run as a whole.
        time: The time that a step with prompts took; None if it was not measured or did not run as
            a whole.
        seconds: Time of the step on a busy device: from its launch, or from the end of the previous
            step if that was later, to its end.
    """

    token_ids: list[list[int]] = field(default_factory=list)
    failures: list[tuple[int, Any]] = field(default_factory=list)
    logprobs: list[tuple[int, list[Any]]] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    pooled: list[PooledStates] = field(default_factory=list)
    feature_sizes: list[tuple[bytes, int]] = field(default_factory=list)
    is_poisoned: bool = False
    hidden: Any = None
    time: StepTime | None = None
    seconds: float = 0.0
