"""From a request's parameters to the sampler's rows, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.engine.sampling.history import TokenHistory
from mlx_paged.engine.sampling.rows import (
    ALWAYS,
    Additions,
    Edits,
    Mask,
    Penalties,
    SamplingRow,
)
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidParameterError

#: What may follow, for a grammar or the like: called before each token with the answer's index and
#: its tokens so far; returns ``[vocab_size]`` booleans, or the same packed 32 to an (u)int32,
#: lowest bit first; None: anything may. It is asked once more after a token that ends the answer
#: (what it says then is discarded), and may be asked again after a failed step.
TokenMask = Callable[[int, Sequence[int]], Mask | None]


class RequestSampler:
    """Tells the sampler, for each answer of a request, how to choose its next token.

    Args:
        prompt: the request's prompt.
        seed: of its first answer; the others count up from it.
        tokenizer: what the parameters mean in tokens depends on it.
        vocab_size: the model's; token ids are below it.
        token_mask: see `TokenMask`. The host waits for an answer's newest token before it asks, and
            the device goes on with the forward meanwhile.

    Raises:
        InvalidParameterError: a token that the model does not have.
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
        self._params = params
        self._prompt = prompt
        self._seed = seed
        self._token_mask = token_mask
        bias = dict(params.logit_bias or {})
        _require_known("logit_bias", bias, vocab_size)
        self._allowed: Mask | None = None
        if params.allowed_token_ids is not None:
            _require_known("allowed_token_ids", params.allowed_token_ids, vocab_size)
            self._allowed = np.zeros(vocab_size, np.bool_)
            self._allowed[list(params.allowed_token_ids)] = True

        bad_words = [w for text in params.bad_words or () for w in _spellings(text, tokenizer)]
        bans = {word[0] for word in bad_words if len(word) == 1}
        self._long_bad_words = [word for word in bad_words if len(word) > 1]
        ends = {*(params.stop_token_ids or ()), *tokenizer.eos_token_ids}
        # (A stop token that the model does not have never comes, and is nothing to ban.)
        early_bans = bans | {token for token in ends if token < vocab_size}
        self._additions = _additions(bias, bans)
        self._early_additions = _additions(bias, early_bans) if params.min_tokens else None

        self._histories: dict[int, TokenHistory] = {}
        self._has_edits = bool(
            self._additions
            or self._early_additions
            or self._long_bad_words
            or self._allowed is not None
            or token_mask
            or params.penalizes
        )

    def row(self, index: int, tokens: list[int], position: int) -> SamplingRow:
        """How to choose the token at `position` of an answer.

        Args:
            index: the answer.
            tokens: prompt and answer as far as known: all of `[0, position)`, or all but the last
                if that is in flight.
        """
        params = self._params
        edits = self._edits(index, tokens, position) if self._has_edits else None
        return SamplingRow(
            params.temperature,
            self._seed + index,
            position,
            params.top_k,
            params.top_p,
            params.min_p,
            edits,
            params.logprobs,
        )

    def _edits(self, index: int, tokens: list[int], position: int) -> Edits:
        start = len(self._prompt)
        is_early = position - start < self._params.min_tokens
        additions = self._early_additions if is_early else self._additions
        if self._long_bad_words:
            additions = self._with_long_bad_words(additions, tokens[start:], position)
        mask = None
        if self._token_mask is not None:
            ask, generated = self._token_mask, tokens[start:]

            def mask(newest: int | None) -> Mask | None:
                return ask(index, generated if newest is None else [*generated, newest])

        penalties = self._penalties(index, tokens) if self._params.penalizes else None
        return Edits(additions, penalties, self._allowed, mask)

    def _penalties(self, index: int, tokens: list[int]) -> Penalties:
        params = self._params
        history = self._histories.get(index)
        if history is None:
            # Only the repetition penalty looks at the prompt.
            seen = self._prompt if params.repetition_penalty != 1 else ()
            history = self._histories[index] = TokenHistory(seen)
        history.update(tokens, len(self._prompt))
        return Penalties(
            history.ids,
            history.counts,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )

    def _with_long_bad_words(
        self, additions: Additions | None, generated: list[int], position: int
    ) -> Additions | None:
        """Adds the last tokens of words of which the answer's end has all the others."""
        in_flight = len(self._prompt) + len(generated) < position
        found = []
        for *begin, last in self._long_bad_words:
            after = begin.pop() if in_flight else ALWAYS
            if not begin or generated[-len(begin) :] == begin:
                found.append((last, after))
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
    # A spaced spelling that only puts a token before the bare one says nothing new.
    is_new = spaced[-len(alone) :] != alone
    return [spelling for spelling in ([alone, spaced] if is_new else [alone]) if spelling]


def _require_known(field: str, ids: dict[int, float] | Sequence[int], vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        raise InvalidParameterError(field, f"token ids below {vocab_size}", max(ids))
