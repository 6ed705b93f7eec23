"""From a request's parameters to how each of its tokens is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.engine.sampling.logits_processors import (
    ALWAYS,
    Additions,
    Edits,
    Mask,
    Penalties,
    TokenHistory,
)
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidParameterError

#: Which tokens may follow, e.g. by a grammar: called before each token with the answer's index and
#: its tokens so far; returns ``[vocab_size]`` booleans, or the same packed 32 to an (u)int32,
#: lowest bit first; None: any may. It is called once more after a token that ends the answer (the
#: result is discarded), and may be called again after a failed step.
TokenMask = Callable[[int, Sequence[int]], Mask | None]


_ALL = 1 << 30  # as a top_k: no vocabulary is as large


class SamplingRow(NamedTuple):
    """The sampler's settings of one row.

    Randomness is counter-based: it depends on `seed` and `position` alone, so a row's tokens do not
    depend on who shares its batch, nor on how its prompt was cut into chunks.
    """

    temperature: float  # 0: greedy
    seed: int  # any integer; its low 64 bits count
    position: int  # of the token to be chosen
    top_k: int = 0  # below 1: all
    top_p: float = 1.0
    min_p: float = 0.0
    edits: Edits | None = None
    logprobs: int | None = None  # likeliest tokens to report besides the chosen one


class RequestSampling:
    """A request's parameters in terms of this model's tokens; its answers share it.

    Args:
        prompt: the request's prompt.
        seed: of its first answer; the others count up from it.
        tokenizer: what the parameters mean in tokens depends on it.
        vocab_size: the model's; token ids are below it.
        token_mask: see `TokenMask`. The host waits for an answer's newest token before it calls it;
            the device runs the forward in the meantime.

    Raises:
        InvalidParameterError: a token that the model does not have, or parameters that together
            leave no token to begin with.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        seed: int,
        tokenizer: TokenizerWrapper,
        vocab_size: int,
        token_mask: TokenMask | None = None,
    ) -> None:
        self.params = params
        self.prompt = prompt
        self.seed = seed
        self.token_mask = token_mask
        bias = dict(params.logit_bias or {})
        _require_known("logit_bias", bias, vocab_size)
        self.allowed: Mask | None = None
        if params.allowed_token_ids is not None:
            _require_known("allowed_token_ids", params.allowed_token_ids, vocab_size)
            self.allowed = np.zeros(vocab_size, np.bool_)
            self.allowed[list(params.allowed_token_ids)] = True

        spellings = [w for text in params.bad_words or () for w in _spellings(text, tokenizer)]
        # (What has a token that the model does not have is never generated.)
        bad_words = [word for word in spellings if max(word) < vocab_size]
        bans = {word[0] for word in bad_words if len(word) == 1}
        self.long_bad_words = _LongBadWords([word for word in bad_words if len(word) > 1])
        ends = {*(params.stop_token_ids or ()), *tokenizer.eos_token_ids}
        # (Neither is an end token that is none: a -1 would stand for the last of all tokens.)
        early_bans = bans | {token for token in ends if 0 <= token < vocab_size}
        self.additions = _additions(bias, bans)
        self.early_additions = _additions(bias, early_bans) if params.min_tokens else None
        _require_a_token(params, bans, early_bans if params.min_tokens else bans, vocab_size)
        self.has_edits = bool(
            self.additions
            or self.early_additions
            or self.long_bad_words
            or self.allowed is not None
            or token_mask
            or params.penalizes
        )


class _LongBadWords:
    """Words of several tokens, by the token that must come before what is to be banned.

    To compare each answer with hundreds of words of hundreds of tokens took longer than a step.
    """

    def __init__(self, words: list[list[int]]) -> None:
        # By the last known token (None: any): what comes before, the token to ban, and the token
        # in flight that it must follow.
        self._known: dict[int | None, list[tuple[list[int], int, int]]] = {}
        self._in_flight: dict[int | None, list[tuple[list[int], int, int]]] = {}
        for *begin, last in words:
            self._known.setdefault(begin[-1], []).append((begin, last, ALWAYS))
            *begin, after = begin
            key = begin[-1] if begin else None
            self._in_flight.setdefault(key, []).append((begin, last, after))

    def __bool__(self) -> bool:
        return bool(self._known)

    def possible(self, generated: list[int], *, in_flight: bool) -> list[tuple[int, int]]:
        """The last token of each word whose other tokens are the end of an answer.

        Args:
            in_flight: whether one token more than `generated` is there, but not known yet.

        Returns:
            (token, the token in flight that it must follow or `ALWAYS`).
        """
        words = self._in_flight if in_flight else self._known
        candidates = words.get(None, [])
        if generated:
            candidates = candidates + words.get(generated[-1], [])
        return [
            (last, after)
            for begin, last, after in candidates
            if not begin or generated[-len(begin) :] == begin
        ]


class SequenceSampler:
    """How the next token of one answer is chosen.

    Attributes:
        row: What does not change from token to token.
        has_edits: Whether `edits` must be called before each token.
    """

    def __init__(self, sampling: RequestSampling, index: int) -> None:
        params = sampling.params
        self.has_edits = sampling.has_edits
        self.row = SamplingRow(
            params.temperature,
            sampling.seed + index,
            0,
            min(params.top_k, _ALL),
            params.top_p,
            params.min_p,
            None,
            params.logprobs,
        )
        self._sampling = sampling
        self._index = index
        self._history: TokenHistory | None = None

    def start_over(self) -> None:
        """Forgets what it knows of the tokens so far, as an exception may have come in between."""
        self._history = None

    def edits(self, tokens: Sequence[int], position: int) -> Edits:
        """How to change the logits of the token at `position`.

        Args:
            tokens: prompt and answer as far as known: all of `[0, position)`, or all but the last
                if that is in flight.
        """
        sampling = self._sampling
        start = len(sampling.prompt)
        is_early = position - start < sampling.params.min_tokens
        additions = sampling.early_additions if is_early else sampling.additions
        if sampling.long_bad_words:
            additions = self._with_long_bad_words(additions, list(tokens[start:]), position)
        mask = None
        if sampling.token_mask is not None:
            ask, index, generated = sampling.token_mask, self._index, list(tokens[start:])

            def mask(newest: int | None) -> Mask | None:
                return ask(index, generated if newest is None else [*generated, newest])

        penalties = self._penalties(tokens) if sampling.params.penalizes else None
        return Edits(additions, penalties, sampling.allowed, mask)

    def _penalties(self, tokens: Sequence[int]) -> Penalties:
        params, prompt = self._sampling.params, self._sampling.prompt
        if self._history is None:
            # Only the repetition penalty looks at the prompt.
            self._history = TokenHistory(prompt if params.repetition_penalty != 1 else ())
        self._history.update(tokens, len(prompt))
        return Penalties(
            self._history.ids,
            self._history.counts,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )

    def _with_long_bad_words(
        self, additions: Additions | None, generated: list[int], position: int
    ) -> Additions | None:
        """Adds the last token of each word whose other tokens are the end of the answer."""
        in_flight = len(self._sampling.prompt) + len(generated) < position
        found = self._sampling.long_bad_words.possible(generated, in_flight=in_flight)
        if not found:
            return additions
        ids, after_ids = (np.array(column, dtype=np.int32) for column in zip(*found))
        bans = Additions(ids, np.full(len(ids), -np.inf, np.float32), after_ids)
        if additions is None:
            return bans
        return Additions(*(np.concatenate(pair) for pair in zip(additions, bans)))


def _additions(bias: dict[int, float], bans: set[int]) -> Additions | None:
    if not bias and not bans:
        return None
    ids = np.array([*bias, *sorted(bans)], dtype=np.int32)
    values = np.array([*bias.values(), *[-np.inf] * len(bans)], dtype=np.float32)
    return Additions(ids, values, np.full(len(ids), ALWAYS, np.int32))


def _spellings(text: str, tokenizer: TokenizerWrapper) -> list[list[int]]:
    """A text's tokens where it stands alone and, if they differ, where a space comes before it."""
    bare = text.lstrip() or text
    alone, spaced = (
        list(tokenizer.encode(t, add_special_tokens=False)) for t in (bare, " " + bare)
    )
    # A spaced spelling that only adds a token before the bare one is redundant.
    is_new = spaced[-len(alone) :] != alone
    return [spelling for spelling in ([alone, spaced] if is_new else [alone]) if spelling]


def _require_a_token(
    params: SamplingParams, bans: set[int], first_bans: set[int], vocab_size: int
) -> None:
    """Refuses parameters that leave no token, at all or as the first one.

    Args:
        bans: tokens that are never generated.
        first_bans: these, and those that are not the first one.
    """
    allowed = params.allowed_token_ids
    if allowed is None:
        if len(first_bans) == vocab_size:
            field = "bad_words" if len(bans) == vocab_size else "min_tokens"
            expected = f"such that one of {vocab_size} tokens may be the first"
            raise InvalidParameterError(field, expected, getattr(params, field))
    elif first_bans.issuperset(allowed):
        others = "bad_words do not ban"
        if not bans.issuperset(allowed):
            others += " and min_tokens does not delay"
        raise InvalidParameterError(
            "allowed_token_ids", f"at least one token that {others}", allowed
        )


def _require_known(field: str, ids: dict[int, float] | Sequence[int], vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        raise InvalidParameterError(field, f"token ids below {vocab_size}", max(ids))
