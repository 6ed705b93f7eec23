"""Requests and their sequences. They store few numbers and derive the rest.

A caller submits a `Request`. It has `n` `Sequence`s, one per completion; the scheduler changes
their status::

                    admit                          finish
      WAITING -----------------> RUNNING -----------------------> FINISHED
         ^                          |                                ^
         +--------------------------+                                |
         |        preempt                                            |
         +-----------------------------------------------------------+
                       abort, timeout, or a last token still in flight

Tokens of a running sequence, counted from the start of the prompt::

      [0, num_computed)              in the blocks, committed: full blocks are in the prefix tree
      [num_computed, num_scheduled)  being written by a step in flight
      [num_scheduled, num_tokens)    known, not scheduled yet: the rest of a prompt
      [num_tokens, + num_drafts)     drafts; rejected ones are rolled back

A step moves `num_scheduled` toward `num_tokens` plus drafts, in the prompt and in the output alike.
Once no known token is left, the next input is the token that the step in flight samples.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from numbers import Integral, Real
from typing import Any

from mlx_paged.core.encoder_cache import HeldFeatures
from mlx_paged.core.kv.misses import CacheMiss
from mlx_paged.core.kv.tables import BlockTables
from mlx_paged.core.kv.tree import TOKEN_TYPE, PrefixQuery
from mlx_paged.core.media import MediaSpan, PromptMedia, TreeTokens
from mlx_paged.errors import InvalidParameterError


class FinishReason(StrEnum):
    """Why a sequence ended. Uses the OpenAI API's value where one exists."""

    STOP = "stop"  # end-of-text token, stop token or stop string
    LENGTH = "length"  # max_tokens, or no room for a longer sequence
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


class SequenceStatus(Enum):
    """Lifecycle state of a sequence."""

    WAITING = "waiting"  # holds no block; includes preempted sequences
    RUNNING = "running"  # holds the blocks of all its known tokens
    FINISHED = "finished"


@dataclass(frozen=True)
class StopPolicy:
    """Decides when a token ends its sequence. The detokenizer handles stop strings.

    Attributes:
        max_tokens: Maximum tokens to generate; None means as many as the model and the pool allow.
        eos_token_ids: The model's end-of-text tokens.
        stop_token_ids: The request's own stop tokens; they apply even with `ignore_eos`.
        min_tokens: Minimum tokens to generate before a token may end the sequence.
        ignore_eos: Generate past end-of-text tokens.
    """

    max_tokens: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidParameterError("max_tokens", "at least 1", self.max_tokens)
        if self.min_tokens < 0:
            raise InvalidParameterError("min_tokens", "at least 0", self.min_tokens)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError(
                "min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens
            )

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence once it has `min_tokens`."""
        ignored = frozenset() if self.ignore_eos else self.eos_token_ids
        return self.stop_token_ids | ignored

    def reason_to_stop(self, token: int, num_output_tokens: int, limit: int) -> FinishReason | None:
        """Returns why the newest token ends the sequence, or None.

        Args:
            token: The token just generated.
            num_output_tokens: Tokens generated so far, including this one.
            limit: Maximum tokens to generate; equals `max_tokens` if set.
        """
        if num_output_tokens >= self.min_tokens and token in self.end_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output_tokens >= limit else None


@dataclass(eq=False)
class Request:
    """A caller's request. The caller must not change it after `Scheduler.add`.

    Attributes:
        request_id: Unique among unfinished requests.
        prompt_token_ids: At least one token. Converted to an array of `TOKEN_TYPE`; an array of
            that type is used as is.
        stop: When its sequences end.
        n: Sequences to generate; they share the prompt's blocks.
        priority: Lower is served first under the priority policy; ignored under FCFS.
        background: Under either policy, the request gets only what other requests leave: they are
            scheduled first, may preempt it, and do not count it in the waiting queue.
        timeout: Seconds from `Scheduler.add` until the request ends with `FinishReason.TIMEOUT`.
        cache_salt: Requests share cached blocks only with requests of the same salt.
        read_prefix_cache: False recomputes every prompt token. Prompt log-probabilities need this,
            because they need all logits. Later requests can still reuse the blocks.
        media: The media items of the prompt, in order.
        boundaries: Prompt positions at which a chunk must end, ascending. The prefix cache is
            searched up to the first one, and again up to the next one whenever one is reached.
        parent: Tables that hold the first `num_parent_tokens` tokens of the prompt, all committed.
            They must stay open until the request is admitted. None if there are none.
        num_parent_tokens: See `parent`.
        adapter: LoRA adapter; requests with equal adapters share a device slot. None means the base
            model. The caller makes it part of `cache_salt`.
        state: The engine's record of the request, `engine.output_processor.RequestState`; not used
            by the state half.
    """

    request_id: str
    prompt_token_ids: SequenceOf[int]
    stop: StopPolicy = field(default_factory=StopPolicy)
    n: int = 1
    priority: int = 0
    background: bool = False
    timeout: float | None = None
    cache_salt: str | None = None
    read_prefix_cache: bool = True
    media: SequenceOf[MediaSpan] = ()
    boundaries: SequenceOf[int] = ()
    parent: BlockTables | None = None
    num_parent_tokens: int = 0
    adapter: Hashable | None = None
    state: Any = None

    # Set by `Scheduler.add`.
    arrival: int = field(default=-1, init=False)
    deadline: float | None = field(default=None, init=False)
    max_output_tokens: int = field(default=0, init=False)
    sequences: list[Sequence] = field(default_factory=list, init=False, repr=False)
    num_unfinished: int = field(default=0, init=False)  # sequences
    # Explains a prefix cache miss, once admitted; None if it hit, or if the reason is unknown.
    cache_miss: CacheMiss | None = field(default=None, init=False, repr=False)
    # Why a prefill engine did not send the requested blocks; None if it did.
    transfer_failure: str | None = field(default=None, init=False, repr=False)
    # The sequence that its siblings fork (`PrefixSharing.fork_source`).
    prompt_source: Sequence | None = field(default=None, init=False, repr=False)

    # For prompts with media: the items, and the tokens for the prefix tree.
    prompt_media: PromptMedia | None = field(default=None, init=False, repr=False)
    tree_prompt: array[int] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.prompt_token_ids = _token_array(self.prompt_token_ids)
        self._check("request_id", isinstance(self.request_id, str), "a string")
        self._check("n", _is_integer(self.n), "an integer")
        self._check("n", self.n >= 1, "at least 1")
        self._check("priority", _is_integer(self.priority), "an integer")
        self._check("background", isinstance(self.background, bool), "a bool")
        if self.timeout is not None:
            seconds = _as_float(self.timeout)
            self._check("timeout", seconds >= 0, "at least 0 seconds, or None")
            self.timeout = seconds
        if self.cache_salt is not None:
            ok = isinstance(self.cache_salt, str) and self.cache_salt != ""
            self._check("cache_salt", ok, "None or a string that is not empty")
        self.n, self.priority = int(self.n), int(self.priority)
        self.media = tuple(self.media)
        if self.media:
            self.prompt_media = PromptMedia(self.media, len(self.prompt_token_ids), self.cache_salt)

    def _check(self, field: str, ok: bool, expected: str) -> None:
        if not ok:
            raise InvalidParameterError(field, expected, getattr(self, field))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    def next_boundary(self, position: int) -> int | None:
        """Returns the first boundary past a position, or None."""
        index = bisect_right(self.boundaries, position)
        return self.boundaries[index] if index < len(self.boundaries) else None

    @property
    def is_finished(self) -> bool:
        return bool(self.sequences) and self.num_unfinished == 0

    def release(self) -> None:
        """Drops its finished sequences, which refer to it.

        Otherwise their tokens stay in memory until the garbage collector visits everything.
        """
        self.sequences, self.prompt_source = [], None


def _token_array(token_ids: SequenceOf[int]) -> array[int]:
    """Returns a prompt's tokens as an array of `TOKEN_TYPE`; such an array is returned as is."""
    if not isinstance(token_ids, array) or token_ids.typecode != TOKEN_TYPE:
        token_ids = tuple(token_ids)
    if not token_ids:
        raise InvalidParameterError("prompt_token_ids", "at least one token", ())
    if isinstance(token_ids, array):
        return token_ids
    try:
        # array() checks the range faster than a loop would.
        return array(TOKEN_TYPE, token_ids)
    except OverflowError:
        wrong = next(t for t in token_ids if not 0 <= t < 1 << 32)
        expected = "token ids >= 0" if wrong < 0 else "token ids below 2**32"
        raise InvalidParameterError("prompt_token_ids", expected, wrong) from None


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _as_float(value: object) -> float:
    """Converts a number to float; returns NaN if it is not a number or too large."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


StopChecker = Callable[["Sequence", int, FinishReason | None], FinishReason | None]


class Sequence:
    """One completion of a request: its tokens, its progress and the resources it holds.

    Attributes:
        seq_id: Unique per scheduler.
        request: The request it belongs to.
        index: Index among the request's `n` sequences.
        order: ((background, class), arrival, index); smaller is served first and preempted last.
        tokens: Prompt and generated tokens; append-only.
        status: Waiting, running or finished.
        finish_reason: Why it ended; None until then.
        num_scheduled_tokens: Positions that launched steps have written or will write.
        max_num_tokens: Maximum tokens of prompt plus output.
        end_token_ids: Tokens that may end it; `StopPolicy.reason_to_stop` decides.
        tables: Its block tables and state slots; None while waiting.
        query: Its prefix cache search, while waiting.
        waits_for: (tables, num_tokens): parked until the running sequence with these tables has
            computed `num_tokens` tokens; None if not parked. See `WaitingQueue`.
        blocked_at: `KVManager.num_freed` when it last found no room; -1 if never.
        sampler, prompt_report, answer, media, drafts: Engine state for sampling, prompt
            log-probabilities, output, media and speculation; not used by the state half.
        draft_token_ids: Drafts after the newest token, for its next step to verify.
        stop_checker: Checks stop strings and grammars for the engine. Called with the sequence, the
            new token and the finish reason so far or None; returns the finish reason or None. None
            if there is nothing to check.
        sampled_index: Index of its newest token among the tokens sampled by its last step.
        last_step: Last step it was part of; 0 if none.
        num_cached_tokens: Tokens that its first admission found in the cache.
        first_admission: Time of that admission, in seconds of a monotonic clock.
        num_preemptions: Number of times it lost its blocks.
        tree_tokens: Its tokens with media ids, for the prefix tree; `tokens` if it has no media.
        pinned_features: Features of the media item that it is in the middle of, or None.
        adapter_slot: Slot of its adapter while it runs; 0 for the base model.
        is_held: True while it waits for a slot; see `WaitingQueue`.
    """

    __slots__ = (
        "adapter_slot",
        "answer",
        "blocked_at",
        "draft_token_ids",
        "drafts",
        "end_token_ids",
        "finish_reason",
        "first_admission",
        "index",
        "is_held",
        "last_step",
        "max_num_tokens",
        "media",
        "num_cached_tokens",
        "num_preemptions",
        "num_scheduled_tokens",
        "order",
        "pinned_features",
        "prompt_report",
        "query",
        "request",
        "sampled_index",
        "sampler",
        "seq_id",
        "status",
        "stop_checker",
        "tables",
        "tokens",
        "tree_tokens",
        "waits_for",
    )

    def __init__(
        self, seq_id: int, request: Request, index: int, order: tuple[tuple[bool, int], int, int]
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self.order = order
        self.tokens = _token_array(request.prompt_token_ids)[:]
        self.tree_tokens: SequenceOf[int] = self.tokens
        if request.tree_prompt is not None:
            self.tree_tokens = TreeTokens(request.tree_prompt, self.tokens)
        self.pinned_features: HeldFeatures | None = None
        self.adapter_slot = 0
        self.is_held = False
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_scheduled_tokens = 0
        self.max_num_tokens = request.num_prompt_tokens + request.max_output_tokens
        self.end_token_ids = request.stop.end_token_ids
        self.tables: BlockTables | None = None
        self.query: PrefixQuery | None = None
        self.waits_for: tuple[BlockTables, int] | None = None
        self.blocked_at = -1
        self.sampler: Any = None
        self.prompt_report: Any = None
        self.answer: Any = None
        self.media: Any = None
        self.drafts: Any = None
        self.stop_checker: StopChecker | None = None
        self.draft_token_ids: SequenceOf[int] = ()
        self.sampled_index = -1
        self.last_step = 0
        self.num_cached_tokens: int | None = None
        self.first_admission: float | None = None
        self.num_preemptions = 0

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.request.request_id!r}[{self.index}], "
            f"{self.status.value}, tokens={len(self.tokens)}, "
            f"scheduled={self.num_scheduled_tokens}, computed={self.num_computed_tokens})"
        )

    def start_over(self, seq_id: int) -> None:
        """Resets it to a waiting sequence of a new scheduler; keeps its tokens."""
        self.seq_id = seq_id
        self.status, self.finish_reason = SequenceStatus.WAITING, None
        self.num_scheduled_tokens = self.last_step = 0
        self.blocked_at = self.sampled_index = -1
        self.pinned_features = self.drafts = None
        self.draft_token_ids = ()
        self.adapter_slot, self.is_held = 0, False
        if self.request.tree_prompt is not None:
            self.tree_tokens = TreeTokens(self.request.tree_prompt, self.tokens)

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def is_running(self) -> bool:
        return self.status is SequenceStatus.RUNNING

    @property
    def num_computed_tokens(self) -> int:
        """Committed positions in its blocks."""
        return 0 if self.tables is None else self.tables.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.request.num_prompt_tokens
