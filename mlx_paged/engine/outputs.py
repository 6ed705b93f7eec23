"""The engine's results: outputs, updates and log-probabilities."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlx_paged.core import CacheMiss, FinishReason
from mlx_paged.engine.faults import reason_of
from mlx_paged.errors import StepError

if TYPE_CHECKING:
    from mlx_paged.engine.detokenizer import IncrementalDetokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token before penalties, temperature and filters.

    Attributes:
        logprob: Natural logarithm of its probability.
        rank: 1 for the most likely token; equally likely tokens may share a rank.
        decoded_token: Its text, decoded alone.
        token_bytes: Its bytes. A token may be only part of a character, whose bytes no text shows.
    """

    logprob: float
    rank: int
    decoded_token: str
    token_bytes: bytes


class ReportParts(NamedTuple):
    """The arguments of a `PositionReport` without the functions, for another process."""

    token_id: int
    logprob: float
    rank: int
    likeliest: tuple[np.ndarray, np.ndarray] | None
    ranks: np.ndarray | None


class PositionReport(Mapping[int, Logprob]):
    """Log-probabilities of one position by token id: the token itself, then the alternatives.

    Entries are created on the reader's thread when they are read. Creating twenty alternatives for
    hundreds of sequences would cost the engine's thread more than the step, and the garbage
    collector would walk them as long as the answer lives.

    Args:
        token_id, logprob, rank: Of the token itself.
        likeliest: Ids and log-probabilities of alternatives, the most likely first. They may
            include the token.
        text: Returns the text of a token, decoded alone.
        bytes_of: Returns the bytes of a token.
        ranks: Ranks of `likeliest`, if the request listed these tokens, in its order.
    """

    __slots__ = ("_bytes_of", "_likeliest", "_ranks", "_text", "logprob", "rank", "token_id")

    def __init__(
        self,
        token_id: int,
        logprob: float,
        rank: int,
        likeliest: tuple[np.ndarray, np.ndarray] | None,
        text: Callable[[int], str],
        bytes_of: Callable[[int], bytes],
        ranks: np.ndarray | None = None,
    ) -> None:
        self.token_id = token_id
        self.logprob = logprob
        self.rank = rank
        self._likeliest = likeliest
        self._text = text
        self._bytes_of = bytes_of
        self._ranks = ranks

    @property
    def parts(self) -> ReportParts:
        """Its data, without the functions."""
        return ReportParts(self.token_id, self.logprob, self.rank, self._likeliest, self._ranks)

    @property
    def listed(self) -> list[int] | None:
        """The tokens that the request listed; None if it listed none."""
        if self._ranks is None or self._likeliest is None:
            return None
        ids: list[int] = self._likeliest[0].tolist()
        return ids

    @property
    def decoded_token(self) -> str:
        """The text of the token itself."""
        return self._text(self.token_id)

    def entries(self) -> Iterator[tuple[int, Logprob]]:
        """The token itself, then the others."""
        token = self.token_id
        yield token, self._entry(token, self.logprob, self.rank)
        for other, logprob, rank in self._others():
            if other != token:
                yield other, self._entry(other, logprob, rank)

    def ranked(self) -> Iterator[tuple[int, float, int, str]]:
        """Yields (token id, log-probability, rank, text) of each entry."""
        token = self.token_id
        yield token, self.logprob, self.rank, self._text(token)
        for other, logprob, rank in self._others():
            if other != token:
                yield other, logprob, rank, self._text(other)

    def _entry(self, token: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, self._text(token), self._bytes_of(token))

    def _others(self) -> Iterable[tuple[int, float, int]]:
        """(token id, log-probability, rank)."""
        if self._likeliest is None:
            return ()
        ids, logprobs = self._likeliest
        ranks = itertools.count(1) if self._ranks is None else self._ranks.tolist()
        return zip(ids.tolist(), logprobs.tolist(), ranks)

    def __getitem__(self, token_id: int) -> Logprob:
        if token_id == self.token_id:
            return self._entry(token_id, self.logprob, self.rank)
        for other, logprob, rank in self._others():
            if other == token_id:
                return self._entry(other, logprob, rank)
        raise KeyError(token_id)

    def __iter__(self) -> Iterator[int]:
        yield self.token_id
        yield from (other for other, _, _ in self._others() if other != self.token_id)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self.entries()))


class DeferredText:
    """Decodes an answer's tokens one by one and in order, as far as a reader has asked.

    Each token's text equals that of `IncrementalDetokenizer` in the step that sampled it, no matter
    when it is read and by how many threads.

    Args:
        request_id: The request's id, for errors.
        stream: A detokenizer without stop strings. This object owns it from now on.
        tokens: Prompt and answer; the engine's thread appends to it.
        start: Index of the first token of the answer.
    """

    def __init__(
        self, request_id: str, stream: IncrementalDetokenizer, tokens: Sequence[int], start: int
    ) -> None:
        self._request_id = request_id
        self._stream = stream
        self._tokens = tokens
        self._start = start
        self._num_text_tokens: int | None = None  # once the answer has ended
        self._parts: list[str] = []  # the text of each token
        self._rest: str | None = None  # what was held back, once the answer has ended
        self._is_decoding = False
        self._lock: Any = threading.RLock()  # Reentrant only so that it knows its owner.

    @property
    def is_read_here(self) -> bool:
        """True if this thread is reading it, so a finalizer on this thread must not."""
        return bool(self._lock._is_owned())

    @property
    def num_text_tokens(self) -> int | None:
        """Tokens of the whole text; None until the answer has ended."""
        return self._num_text_tokens

    def end(self, num_text_tokens: int) -> None:
        """Marks the answer as ended. Later tokens, such as the end token, are not text."""
        self._num_text_tokens = num_text_tokens

    def between(self, begin: int, end: int | None) -> str:
        """Returns text that became certain after `begin` tokens, up to `end` (None: by the answer's
        end).

        Raises:
            StepError: The tokenizer cannot decode a token.
        """
        with self._lock:
            self._decode(end)
            if end is None:
                return "".join(self._parts[begin:]) + (self._rest or "")
            return self._parts[begin] if end == begin + 1 else "".join(self._parts[begin:end])

    def whole(self) -> str:
        """Returns all text so far, including text held back if the answer has ended.

        Raises:
            StepError: The tokenizer cannot decode a token.
        """
        with self._lock:
            self._decode(None)
            return self._stream.text

    @property
    def decoded(self) -> str:
        """The text decoded so far."""
        with self._lock:
            return self._stream.text

    def _decode(self, num_tokens: int | None) -> None:
        """Catches up with the first `num_tokens` tokens; None means all of them, and the end."""
        stop = self._num_text_tokens if num_tokens is None else num_tokens
        if stop is None:
            stop = len(self._tokens) - self._start
        if self._is_decoding:  # an exception (Ctrl-C) came in between
            self._stream.start_over()
            self._parts, self._rest = [], None
        self._is_decoding = True
        try:
            for i in range(self._start + len(self._parts), self._start + stop):
                self._parts.append(self._stream.add(self._tokens[i]))
            if num_tokens is None and self._num_text_tokens is not None and self._rest is None:
                self._rest = self._stream.finish()
        except Exception as error:
            self._is_decoding = False
            raise StepError(self._request_id, reason_of(error)) from error
        self._is_decoding = False


class SequenceUpdate(NamedTuple):  # Twice as fast as a dataclass; every token makes one.
    """The new output of one sequence from one step.

    Attributes:
        request_id: The request.
        index: Index among its `n` answers.
        token_ids: The new tokens; empty if the sequence ended without one.
        pieces: The text that became certain with each token, or its source. One more piece if text
            was held back and no token came.
        finish_reason: Why it ended; None while it continues.
        stop_reason: The stop string or stop token that ended it; None for the model's own end
            token.
        error: What happened, if `finish_reason` is "error".
        reports: Log-probabilities of each token and its alternatives, if requested.
        num_tokens_before: Tokens that the answer had before.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # (a tuple's method has the name)
    token_ids: list[int]
    pieces: list[str] | DeferredText
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: StepError | None = None
    reports: list[PositionReport] | None = None
    num_tokens_before: int = 0

    @property
    def token_id(self) -> int | None:
        """The newest token; None if the sequence ended without one."""
        return self.token_ids[-1] if self.token_ids else None

    @property
    def logprobs(self) -> PositionReport | None:
        """The report on the newest token."""
        return self.reports[-1] if self.reports else None

    @property
    def text(self) -> str:
        """Text that became certain; empty while a character or a stop string is incomplete.

        Unless the request has stop strings, it is decoded here, on the reader's thread.

        Raises:
            StepError: The tokenizer cannot decode a token.
        """
        pieces, begin = self.pieces, self.num_tokens_before
        if isinstance(pieces, list):
            return "".join(pieces)
        end = begin + len(self.token_ids) if self.finish_reason is None else None
        return pieces.between(begin, end)

    def tokens(self) -> Iterator[tuple[int | None, str]]:
        """Yields each token with the text that became certain with it, and (None, text) for text
        without a token.

        Raises:
            StepError: The tokenizer cannot decode a token.
        """
        count = len(self.token_ids)
        if count < 2:
            yield self.token_id, self.text
            return
        for i, token in enumerate(self.token_ids):
            if isinstance(self.pieces, list):
                yield token, self.pieces[i]
                continue
            begin = self.num_tokens_before + i
            ends = i == count - 1 and self.finish_reason is not None
            yield token, self.pieces.between(begin, None if ends else begin + 1)


class _Text:
    """A field that is a string, or a source that is decoded when it is read."""

    def __get__(self, output: object, owner: type) -> str:
        if output is None:
            return ""  # The dataclass reads the default.
        value = vars(output)["_text"]
        return value.whole() if isinstance(value, DeferredText) else value

    def __set__(self, output: object, value: str | DeferredText) -> None:
        vars(output)["_text"] = value


@dataclass
class CompletionOutput:
    """One answer.

    Attributes:
        index: Index among the request's `n` answers.
        text: The answer without its stop string or end token, unless
            `include_stop_str_in_output` is set. It may be decoded on first use (`decode_text`).
        token_ids: All generated tokens, including the end token.
        finish_reason: Why it ended; None while it continues.
        stop_reason: The stop string or stop token that ended it; None for the model's own end
            token.
        error: What happened, if `finish_reason` is "error".
        logprobs: Log-probabilities of each token and its alternatives; None if not requested.
        cumulative_logprob: Sum of the tokens' log-probabilities; None if not requested.
    """

    index: int
    text: _Text = _Text()
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: StepError | None = None
    logprobs: list[PositionReport] | None = None
    cumulative_logprob: float | None = None

    def decode_text(self) -> None:
        """Decodes the text if it has not been read yet.

        Text that cannot be decoded ends there, and is an error of this answer. (An abandoned stream
        may be garbage-collected, and decode its answers, while one of them is read.)
        """
        source = vars(self)["_text"]
        if not isinstance(source, DeferredText) or source.is_read_here:
            return
        try:
            self.text = source.whole()
        except StepError as error:
            self.text = source.decoded
            self.finish_reason, self.error = FinishReason.ERROR, error


@dataclass
class RequestMetrics:
    """Timestamps of a request, in seconds of a monotonic clock."""

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """TTFT in seconds."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass
class RequestOutput:
    """A request and its answers.

    Attributes:
        request_id: The request.
        prompt: The text of the prompt; None for a prompt of token ids.
        prompt_token_ids: The tokens of the prompt.
        outputs: The `n` answers.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        cache_miss: Why no more of the prompt came from the cache, once there is a token; None if
            all full blocks did.
        metrics: Times of arrival, first token and end.
        num_accepted_drafts: Drafts that became tokens of its answers.
        num_rejected_drafts: Drafts that were verified and rejected.
        prompt_logprobs: Like `CompletionOutput.logprobs` for each prompt token; None for the first
            token, which follows nothing. None if not requested.
        relaxed: Paths of schema keywords that are not enforced, such as
            ``structured_outputs.json.properties.a.not`` (see `StructuredOutputs.strict`).
        pooled: Result of a pooled prompt, float32: its embedding ``[dimensions]``, or its score
            ``[1]``; None until it is computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    cache_miss: CacheMiss | None = field(default=None, compare=False)
    num_accepted_drafts: int = field(default=0, compare=False)
    num_rejected_drafts: int = field(default=0, compare=False)
    prompt_logprobs: list[PositionReport | None] | None = None
    relaxed: tuple[str, ...] = ()
    pooled: npt.NDArray[np.float32] | None = field(default=None, compare=False)

    @property
    def finished(self) -> bool:
        """True if all its answers have ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    def decode_text(self) -> None:
        """Makes every text a plain string; see `CompletionOutput.decode_text`."""
        for output in self.outputs:
            output.decode_text()
