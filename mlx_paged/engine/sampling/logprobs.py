"""Log-probabilities of generated and of prompt tokens, and of the likeliest alternatives.

They are the model's own: the log-softmax of its logits, before any edit, temperature or filter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged import ops
from mlx_paged.engine.detokenizer import TokenBytes
from mlx_paged.engine.outputs import PositionReport, ReportParts
from mlx_paged.engine.sampling_params import MAX_LOGPROBS


class ListedLogprobs(NamedTuple):
    """Tokens that a request has listed, at one position."""

    token_ids: Sequence[int]
    logprobs: np.ndarray  # [len(token_ids)] float32
    ranks: np.ndarray  # [len(token_ids)] int32


class PositionLogprobs(NamedTuple):
    """One position, read."""

    token_id: int
    logprob: float
    rank: int  # 1: no token is likelier
    # Up to MAX_LOGPROBS ids and log-probabilities, most likely first; None if not requested.
    likeliest: tuple[np.ndarray, np.ndarray] | None  # [k] int32, [k] float32
    listed: ListedLogprobs | None = None


@dataclass(frozen=True)
class LogprobArrays:
    """Log-probabilities of a step's positions, while the device computes them."""

    tokens: mx.array  # [n] int32
    logprobs: mx.array  # [n] float32
    ranks: mx.array  # [n] int32
    top_tokens: mx.array | None  # [n, MAX_LOGPROBS] int32, in no order
    top_logprobs: mx.array | None  # [n, MAX_LOGPROBS] float32
    listed: Sequence[Sequence[int]] = ()  # n lists, or none at all
    listed_logprobs: mx.array | None = None  # [n, longest list] float32
    listed_ranks: mx.array | None = None  # [n, longest list] int32

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays, to be evaluated with the step."""
        every = (
            self.tokens, self.logprobs, self.ranks, self.top_tokens, self.top_logprobs,
            self.listed_logprobs, self.listed_ranks,
        )  # fmt: skip
        return [array for array in every if array is not None]

    def read(self) -> list[PositionLogprobs]:
        """Returns the positions, in order."""
        tokens, logprobs, ranks = (
            np.array(array).tolist() for array in (self.tokens, self.logprobs, self.ranks)
        )
        tops: Iterable[tuple[np.ndarray, np.ndarray] | None] = [None] * len(tokens)
        if self.top_tokens is not None and self.top_logprobs is not None:
            ids, values = np.array(self.top_tokens), np.array(self.top_logprobs)
            order = np.lexsort((ids, -values), axis=-1)  # Ties are ordered by id.
            ids, values = (np.take_along_axis(a, order, axis=-1) for a in (ids, values))
            tops = zip(ids, values)
        columns = zip(tokens, logprobs, ranks, tops, self._read_listed())
        return [PositionLogprobs(*position) for position in columns]

    def _read_listed(self) -> Iterable[ListedLogprobs | None]:
        if self.listed_logprobs is None or self.listed_ranks is None:
            return [None] * len(self.tokens)
        logprobs, ranks = np.array(self.listed_logprobs), np.array(self.listed_ranks)
        return [
            ListedLogprobs(ids, logprobs[i, : len(ids)].copy(), ranks[i, : len(ids)].copy())
            if ids
            else None
            for i, ids in enumerate(self.listed)
        ]


def logprobs_of(
    logits: mx.array,
    tokens: mx.array,
    *,
    likeliest: bool,
    listed: Sequence[Sequence[int]] = (),
) -> LogprobArrays:
    """Returns the log-probabilities of one token in each row.

    Args:
        logits: ``[n, vocab_size]``, unedited.
        tokens: ``[n]`` int32.
        likeliest: Also find the `MAX_LOGPROBS` most likely tokens of each row. The number is fixed
            so that ties do not depend on the requests of other rows.
        listed: n lists of further tokens to report; empty if no row has any.
    """
    logits = logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1)
    chosen = ops.take_rows(logits, tokens[:, None])
    ranks = (logits > chosen).sum(axis=-1).astype(mx.int32) + 1
    top_tokens = top_logprobs = None
    if likeliest:
        vocab_size = logits.shape[1]
        count = min(MAX_LOGPROBS, vocab_size)
        top_tokens = mx.argpartition(logits, vocab_size - count, axis=-1)[:, -count:]
        top_logprobs = ops.take_rows(logits, top_tokens) - total[:, None]
        top_tokens = top_tokens.astype(mx.int32)
    found = tokens, chosen.squeeze(1) - total, ranks, top_tokens, top_logprobs
    if not any(listed):
        return LogprobArrays(*found)
    ids = np.zeros((len(listed), max(map(len, listed))), np.int32)
    for row, token_ids in zip(ids, listed):
        row[: len(token_ids)] = token_ids
    values = ops.take_rows(logits, ops.upload(ids)[0])
    # One gather for a whole list would copy the logits for each of its tokens.
    above = [(logits > values[:, i : i + 1]).sum(axis=-1) for i in range(ids.shape[1])]
    listed_ranks = mx.stack(above, axis=1).astype(mx.int32) + 1
    return LogprobArrays(*found, listed, values - total[:, None], listed_ranks)


class LogprobReport:
    """Makes reports of positions, which have the tokens' texts.

    Args:
        tokenizer: The model's tokenizer.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._text = lru_cache(maxsize=1 << 16)(lambda token: str(tokenizer.decode([token])))
        self._bytes_of = TokenBytes(tokenizer)

    def text(self, token_ids: Sequence[int]) -> str:
        """Returns the texts of tokens, each decoded alone; those of media are left out."""
        return "".join(self._text(token) for token in token_ids if token < 1 << 31)

    def __call__(self, position: PositionLogprobs, num_likeliest: int) -> PositionReport:
        """Returns the report on a token, with the listed or the most likely other tokens.

        Raises:
            Exception: The tokenizer cannot decode one of them.
        """
        token, logprob, rank, likeliest, listed = position
        self._text(token)
        if listed is not None:
            likeliest = np.array(listed.token_ids, np.int32), listed.logprobs
            for other in listed.token_ids:
                self._text(other)
        elif likeliest is not None:
            # Copies, because views would keep the whole batch's rows as long as the answer lives.
            ids, logprobs = (array[:num_likeliest].copy() for array in likeliest)
            likeliest = ids, logprobs
            for other in ids.tolist():
                self._text(other)
        ranks = None if listed is None else listed.ranks
        return self.of_parts(ReportParts(token, logprob, rank, likeliest, ranks))

    def of_parts(self, parts: ReportParts) -> PositionReport:
        """Returns the report that has these parts."""
        token, logprob, rank, likeliest, ranks = parts
        return PositionReport(token, logprob, rank, likeliest, self._text, self._bytes_of, ranks)


@dataclass(frozen=True)
class PromptTargets:
    """Prompt tokens whose log-probabilities a step must find.

    Attributes:
        token_ids: The tokens that follow the sequence's first rows in the step, in order.
        likeliest: True if the most likely tokens are requested, too.
    """

    token_ids: Sequence[int]
    likeliest: bool

    def between(self, begin: int, end: int) -> PromptTargets | None:
        """Returns those that follow rows ``[begin, end)`` of the sequence, or None."""
        token_ids = self.token_ids[begin:end]
        return PromptTargets(token_ids, self.likeliest) if token_ids else None


class PromptReport:
    """Collects the reports on prompt tokens. All answers of a request share one.

    Args:
        prompt: The request's prompt.
        num_likeliest: Alternatives to report for each position.
        report: Adds the tokens' texts.
    """

    def __init__(self, prompt: Sequence[int], num_likeliest: int, report: LogprobReport) -> None:
        self._prompt = prompt
        self._num_likeliest = num_likeliest
        self._report = report
        # One for each token so far; none for the first.
        self.positions: list[PositionReport | None] = [None]

    def targets(self, start: int, end: int) -> PromptTargets | None:
        """Returns the log-probabilities to compute for positions `[start, end)` of an answer."""
        end = min(end, len(self._prompt) - 1)
        if start >= end or end < len(self.positions):
            return None  # past the prompt, or recomputed after a preemption
        return PromptTargets(self._prompt[start + 1 : end + 1], bool(self._num_likeliest))

    def record(self, start: int, found: Sequence[PositionLogprobs]) -> None:
        """Adds the results of a step whose first position was `start`."""
        for index, position in enumerate(found, start + 1):
            if index == len(self.positions):  # Earlier positions are known already.
                self.positions.append(self._report(position, self._num_likeliest))
