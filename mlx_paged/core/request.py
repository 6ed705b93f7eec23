"""Requests and their sequences: few numbers are stored, the rest is derived.

A `Request` is what a caller submits. It has `n` `Sequence`s, one per answer, with a status that
the scheduler changes::

                    admit                          finish
      WAITING -----------------> RUNNING -----------------------> FINISHED
         ^                          |                                ^
         +--------------------------+                                |
         |        preempt                                            |
         +-----------------------------------------------------------+
                       abort, timeout, or a last token still in flight

The tokens of a running sequence (every number counts from the start of the prompt)::

      [0, num_computed)              in the blocks, committed: full blocks are in the prefix tree
      [num_computed, num_scheduled)  being written by a step in flight
      [num_scheduled, num_tokens)    known, not scheduled yet (the rest of a prompt)
      [num_tokens, + num_drafts)     guesses; those that a step finds wrong are taken back

A step moves `num_scheduled` toward `num_tokens` plus drafts, whether these are a prompt's or an
answer's tokens. Where nothing known is left, the token that the step in flight samples is next.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from numbers import Integral, Real
from typing import Any

from mlx_paged.core.encoder_cache import HeldFeatures
from mlx_paged.core.kv.groups import BlockTables
from mlx_paged.core.kv.tree import TOKEN_TYPE, PrefixQuery
from mlx_paged.core.media import MediaSpan, PromptMedia, TreeTokens
from mlx_paged.errors import InvalidParameterError


class FinishReason(StrEnum):
    """Why a sequence ended; the values are those of the OpenAI API where it has one."""

    STOP = "stop"  # end-of-text token, stop token or stop string
    LENGTH = "length"  # max_tokens, or no room for a longer sequence
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


class SequenceStatus(Enum):
    """True if a sequence waits, runs or has finished."""

    WAITING = "waiting"  # holds no block; preempted sequences wait too
    RUNNING = "running"  # holds the blocks of all its known tokens
    FINISHED = "finished"


@dataclass(frozen=True)
class StopPolicy:
    """When a token ends its sequence. Stop strings are left to the detokenizer.

    Attributes:
        max_tokens: Most tokens to generate; None means as many as the model and the pool allow.
        eos_token_ids: Tokens that end a text in this model.
        stop_token_ids: Tokens that end it for this request; they count even where `ignore_eos` is
            set.
        min_tokens: No token ends the sequence before this many were generated.
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
        """Judges the newest token.

        Args:
            token: The token just generated.
            num_output_tokens: Tokens generated so far, this one included.
            limit: Most tokens this sequence may generate (`max_tokens` where it is set).
        """
        if num_output_tokens >= self.min_tokens and token in self.end_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output_tokens >= limit else None


@dataclass(eq=False)
class Request:
    """A caller's request. It does not change once the scheduler has taken it.

    Attributes:
        request_id: Unique among unfinished requests.
        prompt_token_ids: At least one token. They become an array as the prefix tree has it
            (`TOKEN_TYPE`); one that is given is kept.
        stop: When its sequences end.
        n: Sequences to generate; they share the prompt's blocks.
        priority: Lower is served first under the priority policy; ignored under FCFS.
        background: Under either policy, served only with what the others leave: they are scheduled
            first, take its place where there is none, and do not see it in the waiting queue.
        timeout: Seconds from `Scheduler.add` until the request is ended with
            `FinishReason.TIMEOUT`.
        cache_salt: Requests share cached blocks only with requests of the same salt.
        read_prefix_cache: False computes every prompt token again (for prompt log-probabilities,
            which need the logits of all of them); its blocks are still shared with later requests.
        media: The media items of the prompt, in order.
        state: What the engine keeps of the request (`engine.output_processor.RequestState`). The
            engine sets and reads it, not the state half.
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
    state: Any = None

    # Set by `Scheduler.add`.
    arrival: int = field(default=-1, init=False)
    deadline: float | None = field(default=None, init=False)
    max_output_tokens: int = field(default=0, init=False)
    sequences: list[Sequence] = field(default_factory=list, init=False, repr=False)
    num_unfinished: int = field(default=0, init=False)  # of them
    # The one of them that the others fork (`Scheduler._prompt_source`).
    prompt_source: Sequence | None = field(default=None, init=False, repr=False)

    # For prompts with media: the items, and the tokens under which the prefix tree knows them.
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

    @property
    def is_finished(self) -> bool:
        return bool(self.sequences) and self.num_unfinished == 0


def _token_array(token_ids: SequenceOf[int]) -> array[int]:
    """The tokens of a prompt as the prefix tree compares them; such an array itself."""
    if not isinstance(token_ids, array) or token_ids.typecode != TOKEN_TYPE:
        token_ids = tuple(token_ids)
    if not token_ids:
        raise InvalidParameterError("prompt_token_ids", "at least one token", ())
    if isinstance(token_ids, array):
        return token_ids
    try:
        # (Faster than checking each.)
        return array(TOKEN_TYPE, token_ids)
    except OverflowError:
        wrong = next(t for t in token_ids if not 0 <= t < 1 << 32)
        expected = "token ids >= 0" if wrong < 0 else "token ids below 2**32"
        raise InvalidParameterError("prompt_token_ids", expected, wrong) from None


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _as_float(value: object) -> float:
    """A number as a float; NaN where it is none, or too large for one."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


StopChecker = Callable[["Sequence", int, FinishReason | None], FinishReason | None]


class Sequence:
    """One answer of a request: its tokens, how far they have come, and all that it holds.

    Attributes:
        seq_id: Unique in the scheduler's life.
        request: What it belongs to.
        index: Which of the request's `n` sequences it is.
        order: ((background, class), arrival, index): smaller is served first, preempted last.
        tokens: Prompt and generated tokens; only ever appended to.
        status: Whether it waits, runs or has finished.
        finish_reason: Why it ended; None while it continues.
        num_scheduled_tokens: Positions that launched steps have written or will write.
        max_num_tokens: Most tokens that prompt and answer will have.
        end_token_ids: Tokens that may end it (`StopPolicy.reason_to_stop` decides).
        tables: Its block tables and state slots; None while it waits.
        query: Its search in the prefix cache, while it waits.
        waits_for: Tables of the running sequence that computes what this one needs next, and the
            computed tokens with which that will be done; None where it does not wait for any
            (`WaitingQueue`).
        blocked_at: `KVManager.num_freed` when there was no room for it; -1: not tried yet.
        sampler, prompt_report, answer, media: How its tokens are chosen, what is to be reported of
            its prompt, where its tokens go, and what the device half needs of its media. The engine
            sets and reads them, not the state half.
        draft_token_ids: Guesses of the tokens after the newest one, for its next step to verify.
        stop_checker: Judges each token by what only the engine knows: stop strings and grammars. It
            takes the sequence, the token it has just gained and why that ends it (None: it does
            not), and returns why it ends. None: nothing else ends it.
        sampled_index: Entry of its newest token among those that its last step samples.
        last_step: Last step it was part of (0: none).
        num_cached_tokens: Tokens its first admission found in the cache.
        first_admission: When that was, in seconds of a monotonic clock.
        num_preemptions: Times it lost its blocks.
        tree_tokens: Its tokens as the prefix tree is given them; `tokens` where it has no media.
        begun: Features of the media item that it is in the middle of, which it pins.
    """

    __slots__ = (
        "answer",
        "begun",
        "blocked_at",
        "draft_token_ids",
        "end_token_ids",
        "finish_reason",
        "first_admission",
        "index",
        "last_step",
        "max_num_tokens",
        "media",
        "num_cached_tokens",
        "num_preemptions",
        "num_scheduled_tokens",
        "order",
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
        self.begun: HeldFeatures | None = None
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
        """Makes it a waiting sequence of another scheduler; it keeps its tokens."""
        self.seq_id = seq_id
        self.status, self.finish_reason = SequenceStatus.WAITING, None
        self.num_scheduled_tokens = self.last_step = 0
        self.blocked_at = self.sampled_index = -1
        self.begun = None
        self.draft_token_ids = ()
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
