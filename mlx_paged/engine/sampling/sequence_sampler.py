"""SequenceSampler: turns a request's parameters into the sampling settings of each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np

from mlx_paged.engine.grammar import StructuredOutputs
from mlx_paged.engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from mlx_paged.engine.grammar.matcher import GrammarMatcher, GrammarRules, Words, without
from mlx_paged.engine.sampling.logits_processors import (
    ALWAYS,
    Additions,
    LogitEdits,
    Penalties,
    TokenHistory,
    packed,
)
from mlx_paged.engine.sampling.masks import Mask, MaskKey
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidParameterError
from mlx_paged.parsing.reasoning import Reasoning, ReasoningFormat

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

#: A callback for the tokens that may follow, such as a grammar. It is called before each token with
#: the answer's index and its tokens so far, and returns ``[vocab_size]`` booleans, the same packed
#: 32 to an (u)int32, lowest bit first, or None for all tokens. It is called once more after a token
#: that ends the answer (the result is discarded), and maybe again after a failed step.
TokenMask = Callable[[int, Sequence[int]], Mask | None]


_ALL = 1 << 30  # as a top_k: no vocabulary is as large


class SamplingRow(NamedTuple):
    """The sampler's settings of one row.

    Randomness is counter-based and depends only on `seed` and `position`, so a row's tokens do not
    depend on its batch or on how its prompt was cut into chunks.
    """

    temperature: float  # 0: greedy
    seed: int  # any integer; its low 64 bits count
    position: int  # of the token to be chosen
    top_k: int = 0  # below 1: all
    top_p: float = 1.0
    min_p: float = 0.0
    edits: LogitEdits | None = None
    logprobs: int | None = None  # alternatives to report besides the chosen token
    logprob_token_ids: tuple[int, ...] = ()  # tokens to report in place of the likeliest


class RequestSampling:
    """A request's parameters, resolved for the model's tokens. All its answers share it.

    Args:
        prompt: The request's prompt.
        seed: Seed of the first answer; the others count up from it.
        tokenizer: The model's tokenizer.
        vocab_size: The model's vocabulary size; token ids are below it.
        token_mask: See `TokenMask`. The host waits for an answer's newest token before it calls
            this, while the device runs the forward pass.
        compiler: Compiles the grammar of `structured_outputs`; this waits for it.
        grammar: That grammar, if it was compiled before.
        reasoning: The model's reasoning format; None if it has none.

    Raises:
        InvalidParameterError: A token that the model does not have, a grammar that cannot be
            enforced, or parameters that leave no first token.

    Attributes:
        grammar: The grammar of the answers; None if there is none.
        prediction: The tokens of `params.prediction` that the model has; empty without one.
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
        compiler: GrammarCompiler | None = None,
        grammar: CompiledGrammar | None = None,
        reasoning: ReasoningFormat | None = None,
    ) -> None:
        self.params = params
        self.prompt = prompt
        self.seed = seed
        self.token_mask = token_mask
        bias = dict(params.logit_bias or {})
        _require_known("logit_bias", bias, vocab_size)
        _require_known("logprob_token_ids", params.logprob_token_ids or (), vocab_size)
        self.allowed: Mask | None = None
        if params.allowed_token_ids is not None:
            _require_known("allowed_token_ids", params.allowed_token_ids, vocab_size)
            allowed = np.zeros(vocab_size, np.bool_)
            allowed[list(params.allowed_token_ids)] = True
            self.allowed = packed(allowed, vocab_size)

        spellings = [w for text in params.bad_words or () for w in _spellings(text, tokenizer)]
        # Bad words with a token that the model does not have are never generated anyway.
        bad_words = [word for word in spellings if max(word) < vocab_size]
        bans = {word[0] for word in bad_words if len(word) == 1}
        self.long_bad_words = _LongBadWords([word for word in bad_words if len(word) > 1])
        ends = {*(params.stop_token_ids or ()), *tokenizer.eos_token_ids}
        # So are end tokens below 0; -1 would stand for the last token of the vocabulary.
        early_bans = bans | {token for token in ends if 0 <= token < vocab_size}
        self.additions = _additions(bias, bans)
        self.early_additions = _additions(bias, early_bans) if params.min_tokens else None
        first_bans = early_bans if params.min_tokens else bans
        _require_a_token(params, bans, first_bans, vocab_size)
        self.grammar = grammar
        self.rules = self._rules(compiler, reasoning)
        # Tokens that may follow if the rules make a mask, which then includes the bans.
        self.biases = _additions(bias, set())
        self.permitted = self._permitted(bans, vocab_size)
        self.early_permitted = self._permitted(early_bans, vocab_size)
        self.narrows = bool(first_bans or self.long_bad_words or self.allowed is not None)
        if self.grammar is not None and self.rules is not None:
            self._require_a_token_of_the_grammar(self.grammar, self.rules, first_bans)
        self.prediction: tuple[int, ...] = ()
        if params.prediction:
            ids = tokenizer.encode(params.prediction, add_special_tokens=False)
            self.prediction = tuple(takewhile(lambda token: token < vocab_size, ids))
        self.has_edits = bool(
            self.additions
            or self.early_additions
            or self.long_bad_words
            or self.allowed is not None
            or token_mask
            or self.rules
            or params.penalizes
        )

    def _rules(
        self, compiler: GrammarCompiler | None, reasoning: ReasoningFormat | None
    ) -> GrammarRules | None:
        """Returns the grammar that its answers must follow; None means free text."""
        params = self.params
        wanted, budget = params.structured_outputs, params.thinking_token_budget
        if wanted is None and budget is None:
            return None
        if compiler is None:
            raise InvalidParameterError("structured_outputs", "None: there is no compiler", wanted)
        if budget is not None and reasoning is None:
            expected = "None: the model has no reasoning format (see reasoning_parser)"
            raise InvalidParameterError("thinking_token_budget", expected, budget)
        if wanted is not None:
            assert isinstance(wanted, StructuredOutputs)
            self.grammar = self.grammar or compiler.compile(wanted)
            if wanted.enable_in_reasoning:
                if budget is not None:
                    expected = "None where the grammar holds in the reasoning"
                    raise InvalidParameterError("thinking_token_budget", expected, budget)
                reasoning = None
        return GrammarRules(
            self.grammar,
            reasoning=None if reasoning is None else reasoning.tokens,
            begins=Reasoning.OVER if reasoning is None else reasoning.begins(self.prompt),
            budget=budget,
            eos_token_ids=compiler.eos_token_ids,
            stop_token_ids=params.stop_token_ids or (),
            min_tokens=params.min_tokens,
            ignore_eos=params.ignore_eos,
            num_words=compiler.num_words,
        )

    def _permitted(self, bans: set[int], vocab_size: int) -> Words:
        permitted = np.ones(vocab_size, np.bool_)
        permitted[list(bans)] = False
        words = packed(permitted, vocab_size)
        return words if self.allowed is None else words & packed(self.allowed, vocab_size)

    def _require_a_token_of_the_grammar(
        self, grammar: CompiledGrammar, rules: GrammarRules, bans: set[int]
    ) -> None:
        """Refuses a grammar if other parameters forbid all of its first tokens."""
        bits = np.unpackbits(grammar.first_mask.view(np.uint8), bitorder="little")
        permitted = bits.astype(np.bool_)
        permitted[list(bans)] = False
        if self.params.allowed_token_ids is not None:
            among = np.zeros_like(permitted)
            among[list(self.params.allowed_token_ids)] = True
            permitted &= among
        if permitted.any() or rules.begins is not Reasoning.OVER:
            return
        given = ("allowed_token_ids", "bad_words", "min_tokens")
        field = next(name for name in given if getattr(self.params, name))
        others = " (beside allowed_token_ids, bad_words and min_tokens, where they are given)"
        expected = f"such that the grammar of the answer may begin{others}"
        raise InvalidParameterError(field, expected, getattr(self.params, field))


class _LongBadWords:
    """Bad words of several tokens, indexed by the token before the banned one.

    Comparing each answer with hundreds of words of hundreds of tokens took longer than a step.
    """

    def __init__(self, words: list[list[int]]) -> None:
        # Index: the last known token (None: any). Values: the tokens before it, the token to ban,
        # and the token in flight after which the ban applies.
        self._known: dict[int | None, list[tuple[list[int], int, int]]] = {}
        self._in_flight: dict[int | None, list[tuple[list[int], int, int]]] = {}
        for *begin, last in words:
            self._known.setdefault(begin[-1], []).append((begin, last, ALWAYS))
            *begin, after = begin
            key = begin[-1] if begin else None
            self._in_flight.setdefault(key, []).append((begin, last, after))

        self.longest = max(map(len, words), default=0)

    def __bool__(self) -> bool:
        return bool(self._known)

    def possible(self, generated: list[int], *, in_flight: bool) -> list[tuple[int, int]]:
        """Returns the last token of each word whose other tokens are the end of an answer.

        Args:
            generated: The answer's tokens, or as many of the last ones as the longest word has.
            in_flight: True if one more token than `generated` exists but is unknown.

        Returns:
            (token, the token in flight after which the ban applies, or `ALWAYS`).
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


class _Generated(Sequence[int]):
    """The tokens of an answer at one moment, without a copy: a list that only grows, and a length.

    Args:
        tokens: The list.
        newest: The tokens after it.
    """

    __slots__ = ("_length", "_newest", "_tokens")

    def __init__(self, tokens: list[int], newest: tuple[int, ...]) -> None:
        self._tokens = tokens
        self._newest = newest
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length + len(self._newest)

    def __iter__(self) -> Iterator[int]:
        return chain(islice(self._tokens, self._length), self._newest)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            found = self._tokens[start : min(stop, self._length) : step] if step > 0 else None
            if found is not None and stop <= self._length:
                return found
            return list(self)[index]
        at = range(len(self))[index]
        return self._tokens[at] if at < self._length else self._newest[at - self._length]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


class SequenceSampler:
    """Chooses the next token of one answer.

    Attributes:
        row: The settings that do not change from token to token.
        has_edits: True if `edits` must be called before each token.
        has_grammar: True if the answer follows a grammar.
        narrows: True if other parameters forbid tokens that a grammar may allow.
    """

    def __init__(self, sampling: RequestSampling, index: int) -> None:
        params = sampling.params
        self.narrows = sampling.narrows
        self.has_edits = sampling.has_edits
        self.has_grammar = sampling.grammar is not None
        self.row = SamplingRow(
            params.temperature,
            sampling.seed + index,
            0,
            min(params.top_k, _ALL),
            params.top_p,
            params.min_p,
            None,
            params.logprobs,
            tuple(params.logprob_token_ids or ()),
        )
        self._sampling = sampling
        self._index = index
        self._history: TokenHistory | None = None
        self._generated: list[int] = []  # for a token mask
        self._matcher = (
            None if sampling.rules is None else GrammarMatcher(sampling.rules, len(sampling.prompt))
        )

    def start_over(self) -> None:
        """Forgets its state of the tokens so far, because an exception may have interrupted it."""
        self._history = None
        self._generated = []
        if self._matcher is not None:
            self._matcher.start_over()

    def is_complete(self, tokens: Sequence[int]) -> bool:
        """True if an answer that follows a grammar has ended by it.

        Args:
            tokens: Prompt and answer.
        """
        assert self._matcher is not None
        self._matcher.follow(tokens)
        return self._matcher.is_complete

    @property
    def failure(self) -> str | None:
        """Why an answer cannot follow its grammar any more; None while it can."""
        return None if self._matcher is None else self._matcher.failed

    def edits(self, tokens: Sequence[int], key: MaskKey) -> LogitEdits | None:
        """Returns the changes to the logits of the token at `key.position`, or None.

        Args:
            tokens: Known tokens of prompt and answer. With the key's drafts, they are all of
                `[0, position)`, or all but the last if that is in flight.
            key: The name of the token's masks.
        """
        sampling, position, drafts = self._sampling, key.position, key.drafts
        has_grammar = self._may_limit(tokens, position, drafts)
        allowed = sampling.allowed
        if has_grammar:
            additions, allowed = sampling.biases, None
        else:
            is_early = position - len(sampling.prompt) < sampling.params.min_tokens
            additions = sampling.early_additions if is_early else sampling.additions
            if sampling.long_bad_words:
                additions = self._with_long_bad_words(additions, tokens, key)
        has_mask = sampling.token_mask is not None
        penalties = self._penalties(tokens, drafts) if sampling.params.penalizes else None
        if additions is None and penalties is None and not has_mask and not has_grammar:
            return None if allowed is None else LogitEdits(allowed=allowed)
        return LogitEdits(
            additions,
            penalties,
            allowed,
            mask=key if has_mask else None,
            grammar=key if has_grammar else None,
        )

    def _may_limit(self, tokens: Sequence[int], position: int, drafts: tuple[int, ...]) -> bool:
        """True if the token at `position` needs the mask of a grammar."""
        if self._matcher is None or self.has_grammar:
            return self.has_grammar
        if drafts:
            return True  # The mask decides, once the matcher has followed them.
        # With a reasoning budget, the newest token usually does not matter.
        self._matcher.follow(tokens)
        return self._matcher.may_limit(position - len(tokens))

    # Masks. (`newest` are the tokens after `tokens`: drafts, or the one that was in flight when the
    # step was built.)

    def follow(self, tokens: Sequence[int], newest: tuple[int, ...]) -> GrammarMatcher:
        """Returns the grammar's state after these tokens."""
        assert self._matcher is not None
        self._matcher.follow(tokens, newest)
        return self._matcher

    def narrow(
        self, mask: Words, tokens: Sequence[int], newest: tuple[int, ...], position: int
    ) -> None:
        """Removes tokens that other parameters forbid from a grammar's mask.

        If nothing would be left, the grammar wins, because a valid answer must go on.
        """
        sampling, start = self._sampling, len(self._sampling.prompt)
        is_early = position - start < sampling.params.min_tokens
        permitted = sampling.early_permitted if is_early else sampling.permitted
        words = sampling.long_bad_words
        if words:
            generated = list(tokens[max(start, len(tokens) - words.longest) :])
            generated += newest
            banned = [token for token, _ in words.possible(generated, in_flight=False)]
            permitted = without(permitted, banned)
        size = min(len(mask), len(permitted))
        narrowed = mask[:size] & permitted[:size]
        if narrowed.any():
            mask[:size] = narrowed
            mask[size:] = 0

    @property
    def prediction(self) -> tuple[int, ...]:
        """The tokens that the caller expects as the answer; empty if there are none."""
        return self._sampling.prediction

    @property
    def takes_drafts(self) -> bool:
        """False if its tokens cannot be verified several at once.

        A caller's token mask may count its calls, and would see drafts that are rejected.
        """
        return self._sampling.token_mask is None

    def forced(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens that must follow these by the grammar; empty if there is a choice."""
        if self._matcher is None:
            return ()
        self._matcher.follow(tokens)
        return self._matcher.forced()

    def legal(self, tokens: Sequence[int], drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Cuts drafts at the first that the grammar does not allow after these tokens."""
        if self._matcher is None or not self.has_grammar:
            return drafts
        self._matcher.follow(tokens)
        return drafts[: self._matcher.num_legal(drafts)]

    def token_mask(self, tokens: Sequence[int], newest: tuple[int, ...]) -> Mask | None:
        """Returns the caller's mask; None means that all tokens may follow."""
        ask, generated = self._sampling.token_mask, self._generated
        assert ask is not None
        generated.extend(tokens[len(self._sampling.prompt) + len(generated) :])
        return ask(self._index, _Generated(generated, newest))

    def _penalties(self, tokens: Sequence[int], drafts: tuple[int, ...]) -> Penalties:
        params, prompt = self._sampling.params, self._sampling.prompt
        if self._history is None:
            # Only the repetition penalty looks at the prompt.
            self._history = TokenHistory(prompt if params.repetition_penalty != 1 else ())
        self._history.update(tokens, len(prompt))
        return Penalties(
            *self._history.with_drafts(drafts),
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )

    def _with_long_bad_words(
        self, additions: Additions | None, tokens: Sequence[int], key: MaskKey
    ) -> Additions | None:
        """Adds the last token of each word whose other tokens are the end of the answer."""
        words = self._sampling.long_bad_words
        start = max(len(self._sampling.prompt), len(tokens) - words.longest)
        generated = [*tokens[start:], *key.drafts]
        in_flight = len(tokens) + len(key.drafts) < key.position
        found = words.possible(generated, in_flight=in_flight)
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
    """Returns a text's tokens alone and, if they differ, after a space."""
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
    """Refuses parameters that leave no token, or no first token.

    Args:
        bans: Tokens that are never generated.
        first_bans: Those, plus tokens that are not generated first.
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
